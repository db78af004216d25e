"""Tokens per second of 1, 2, 4 and 8 sequences at once, plainly and with drafts.

The targets are SmolLM2 in fp32 in torch and as Q8_0 in llama.cpp; its Q4_1 in llama.cpp drafts for
both, as many tokens as ``"auto"`` chooses. A second decoder without a draft shows how far apart the
machine puts two that do the same. All contestants decode all prompts in turn, in one process; what
counts are whole calls, prompts included.
"""

import argparse
import os
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from embedded import machine
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specdec import SpeculativeDecoder
from specdec.backends import HFBackend, LlamaCppBackend
from specdec.embedded import embedded_gguf
from specdec.prompts import shipped_prompts
from specdec.vocab import encode_prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    modes = ("plain", "auto", "plain again")  # so the two are as far from the one

    torch_target = HFBackend(embedded_gguf(), dtype="float32")
    draft = LlamaCppBackend(embedded_gguf())
    with TemporaryDirectory() as folder:
        torch_target.write_quantized(Path(folder) / "q8_0.gguf", "q8_0")
        gguf_target = LlamaCppBackend(Path(folder) / "q8_0.gguf")
    decoders = {
        (name, mode, size): SpeculativeDecoder(
            target, draft if mode == "auto" else None, keep_caches=0
        )
        for name, target in (("torch", torch_target), ("llama.cpp", gguf_target))
        for mode in modes
        for size in options.sizes
    }
    prompts = [
        encode_prompt(torch_target.vocab, [{"role": "user", "content": prompt}])
        for _, prompt in shipped_prompts()[: options.prompts]
        if isinstance(prompt, str)
    ]
    rates: dict[tuple[str, str, int], list[float]] = {key: [] for key in decoders}
    texts: dict[tuple[str, str, int], list[list[int]]] = {}
    proposed = dict.fromkeys(decoders, 0.0)
    pairs = [(name, size) for name in ("torch", "llama.cpp") for size in options.sizes]
    # The first call of each isn't counted: it calibrates, and fills what is allocated once.
    with Progress(console=Console(stderr=True)) as progress:
        for repeat in progress.track(range(-1, options.repeats), description="repeats"):
            for name, size in progress.track(pairs, description="sizes"):
                for mode in modes if repeat % 2 else modes[::-1]:
                    key = (name, mode, size)
                    start = perf_counter()
                    results = decoders[key].generate_batch(
                        prompts if repeat >= 0 else prompts[:size],
                        max_batch=size,
                        max_new_tokens=options.max_new_tokens,
                    )
                    seconds = perf_counter() - start
                    if repeat >= 0:
                        tokens = sum(len(result.token_ids) for result in results)
                        rates[key].append(tokens / seconds)
                        texts[key] = [result.token_ids for result in results]
                        drafts = sum(result.stats.num_proposed_drafts for result in results)
                        proposed[key] = drafts / sum(r.stats.target_forward_ct for r in results)
    table = Table(
        *("target", "at once", "plain", "over 1", "with drafts", "over plain", "least to most"),
        *("plain again, over plain", "drafts a forward", "texts that differ"),
        title=f"tokens per second, medians of {options.repeats} runs; {len(prompts)} prompts, "
        f"{options.max_new_tokens} tokens\n{machine()}",
    )
    for name in ("torch", "llama.cpp"):
        for size in options.sizes:
            plain, auto, again = (rates[name, mode, size] for mode in modes)
            ratios, control = (
                sorted(mine / other for mine, other in zip(each, plain, strict=True))
                for each in (auto, again)
            )
            one = rates[name, "plain", options.sizes[0]]
            differ = sum(
                text != other
                for mode in modes
                for text, other in zip(
                    texts[name, mode, size],
                    texts[name, "plain", options.sizes[0]],
                    strict=True,
                )
            )
            table.add_row(
                *(name, str(size), f"{median(plain):.1f}", f"{median(plain) / median(one):.2f}x"),
                *(f"{median(auto):.1f}", f"{median(ratios):.2f}x"),
                f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
                f"{median(control):.2f}x ({control[0]:.2f} to {control[-1]:.2f})",
                *(
                    f"{proposed[name, 'auto', size]:.1f}",
                    f"{differ} of {len(modes) * len(prompts)}",
                ),
            )
    console = Console()
    console.width = max(110, console.width)
    console.print(table)


if __name__ == "__main__":
    main()
