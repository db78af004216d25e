"""``num_draft_tokens="auto"`` on the embedded default against fixed numbers, and a useless draft.

Every prompt is decoded by each contestant in one process, in rotating order. The useless draft is a
random model of the right vocabulary; "auto" has to notice.
"""

import argparse
import os
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from embedded import machine
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from specdec import SpeculativeDecoder
from specdec.backends import HFBackend, LlamaCppBackend
from specdec.embedded import embedded_gguf
from specdec.prompts import shipped_prompts
from specdec.vocab import encode_prompt
from specdec_hf.export import write_gguf


def useless_draft(target: HFBackend, folder: Path) -> LlamaCppBackend:
    """A random model with the target's vocabulary."""
    config = LlamaConfig(
        vocab_size=target.vocab.size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2048,
    )
    write_gguf(LlamaForCausalLM(config), folder / "useless.gguf")
    return LlamaCppBackend(folder / "useless.gguf", vocab=target.vocab)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", nargs="+", type=int, default=[7, 10, 14])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()

    target, draft = HFBackend(embedded_gguf(), dtype="float32"), LlamaCppBackend(embedded_gguf())
    with TemporaryDirectory() as folder:
        useless = useless_draft(target, Path(folder))
    decoders = {
        "plain": SpeculativeDecoder(target, keep_caches=0),
        **{
            f"K = {length}": SpeculativeDecoder(
                target, draft, num_draft_tokens=length, keep_caches=0
            )
            for length in options.lengths
        },
        "auto": SpeculativeDecoder(target, draft, keep_caches=0),
        "auto, useless draft": SpeculativeDecoder(target, useless, keep_caches=0),
    }
    prompts = [
        encode_prompt(target.vocab, [{"role": "user", "content": prompt}])
        for _, prompt in shipped_prompts()[: options.prompts]
        if isinstance(prompt, str)
    ]
    for decoder in decoders.values():  # first calls allocate, calibrate and choose kernels
        decoder.generate(prompts[0], max_new_tokens=32)
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    names, texts = list(decoders), dict[int, list[int]]()
    for run in track(range(options.repeats * len(prompts)), description="measuring"):
        number = run % len(prompts)
        for name in names[run % len(names) :] + names[: run % len(names)]:
            start = perf_counter()
            result = decoders[name].generate(prompts[number], max_new_tokens=options.max_new_tokens)
            seconds[name].append(perf_counter() - start)
            if texts.setdefault(number, result.token_ids) != result.token_ids:
                raise SystemExit(f"{name} puts out another text for prompt {number}")
    table = Table(
        *("", "s in all", "speed-up, all", "median", "worst"),
        title="SmolLM2-135M fp32 in torch, drafted by its Q4_1 in llama.cpp; "
        f"{len(prompts)} prompts, {options.max_new_tokens} tokens, whole calls\n{machine()}",
    )
    for name, mine in seconds.items():
        ratios = [plain / own for plain, own in zip(seconds["plain"], mine, strict=True)]
        whole = sum(seconds["plain"]) / sum(mine)
        figures = (whole, statistics.median(ratios), min(ratios))
        table.add_row(name, f"{sum(mine):.1f}", *(f"{figure:.2f}x" for figure in figures))
    console = Console()
    console.width = max(100, console.width)
    console.print(table)


if __name__ == "__main__":
    main()
