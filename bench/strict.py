"""``strict=True`` on SmolLM2's GGUF with default attention, where wide rows differ.

Counts the texts that differ from plain decoding with it and without, and what it costs.
"""

import argparse
import os
from time import perf_counter

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specdec import SpeculativeDecoder
from specdec.backends import LlamaCppBackend
from specdec.embedded import embedded_gguf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    options = parser.parse_args()

    target = LlamaCppBackend(embedded_gguf(), flash_attention=False, n_threads=2)
    draft = LlamaCppBackend(embedded_gguf())
    decoders = {
        "plain": SpeculativeDecoder(target, keep_caches=0),
        **{
            name: SpeculativeDecoder(
                target,
                draft,
                num_draft_tokens=options.num_draft_tokens,
                strict=name == "strict",
                keep_caches=0,
            )
            for name in ("usual", "strict")
        },
    }
    prompts = np.random.default_rng(1).integers(3, 40_000, (options.prompts, 12)).tolist()
    seconds, texts = dict.fromkeys(decoders, 0.0), {name: list[list[int]]() for name in decoders}
    close = 0
    for prompt in track(prompts, description="decoding"):
        for name, decoder in decoders.items():
            start = perf_counter()
            result = decoder.generate(prompt, max_new_tokens=options.max_new_tokens)
            seconds[name] += perf_counter() - start
            texts[name].append(result.token_ids)
            close += result.stats.strict_ct
    table = Table("decoding", "texts that differ from plain", "time over plain")
    for name in ("usual", "strict"):
        pairs = zip(texts[name], texts["plain"], strict=True)
        parted = sum(mine != plain for mine, plain in pairs)
        table.add_row(
            name, f"{parted} of {len(prompts)}", f"{seconds[name] / seconds['plain']:.2f}"
        )
    console = Console()
    console.print(table)
    console.print(f"{close} of {sum(map(len, texts['strict']))} tokens were decided again")


if __name__ == "__main__":
    main()
