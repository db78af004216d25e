"""Tokens per second of 1, 2, 4 and 8 sequences at once, plainly and with drafts.

The targets are SmolLM2 in fp32 in torch and as Q8_0 in llama.cpp; its Q4_1 in llama.cpp drafts for
both, as many tokens as ``"auto"`` chooses. A second decoder without a draft shows how far apart the
machine puts two that do the same. The contestants take turns, round by round, since a machine's
speed may change from one second to the next; what counts is the time of all rounds, prompts
included. "Over plain" is over the mean time of the two without a draft.
"""

import argparse
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from embedded import machine
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specdec import GenerationResult, ModelBackend, SpeculativeDecoder
from specdec.backends import HFBackend, LlamaCppBackend
from specdec.embedded import embedded_gguf
from specdec.prompts import shipped_prompts
from specdec.request import Request
from specdec.vocab import encode_prompt

MODES = ("plain", "auto", "plain again")
WARM_UP_TOKENS = 48


def in_turn(
    contestants: Mapping[str, SpeculativeDecoder],
    prompts: Sequence[Sequence[int]],
    size: int,
    max_new_tokens: int,
) -> dict[str, tuple[list[GenerationResult], float]]:
    """What each makes of the prompts, and its seconds. Who is behind has the next round."""
    requests = {
        mode: [decoder._request(prompt, max_new_tokens=max_new_tokens) for prompt in prompts]
        for mode, decoder in contestants.items()
    }
    rounds = {mode: each._rounds(requests[mode], size) for mode, each in contestants.items()}
    seconds = dict.fromkeys(contestants, 0.0)
    turns = dict.fromkeys(contestants, 0)
    while rounds:
        behind = min(rounds, key=lambda mode: (done(requests[mode]), turns[mode]))
        turns[behind] += 1
        start = perf_counter()
        if next(rounds[behind], None) is None:
            del rounds[behind]
        seconds[behind] += perf_counter() - start
    return {
        mode: ([request.result() for request in requests[mode]], seconds[mode])
        for mode in contestants
    }


def done(requests: Sequence[Request]) -> int:
    """How many tokens have been put out."""
    return sum(len(request.output.token_ids) for request in requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3, help="best a multiple of 3")
    options = parser.parse_args()
    torch_target = HFBackend(embedded_gguf(), dtype="float32")
    draft = LlamaCppBackend(embedded_gguf())
    with TemporaryDirectory() as folder:
        torch_target.write_quantized(Path(folder) / "q8_0.gguf", "q8_0")
        # One each: in one memory, the contestants would lie in each other's way.
        gguf_targets = [LlamaCppBackend(Path(folder) / "q8_0.gguf") for _ in MODES]
    targets: dict[str, Sequence[ModelBackend]] = {
        "torch": [torch_target],
        "llama.cpp": gguf_targets,
    }
    # Each with each target in turn, since two of the same may differ in speed.
    decoders = {
        (name, mode, size, number): SpeculativeDecoder(
            target, draft if mode == "auto" else None, keep_caches=0
        )
        for name, each in targets.items()
        for number, target in enumerate(each)
        for mode in MODES
        for size in options.sizes
    }
    prompts = [
        encode_prompt(torch_target.vocab, [{"role": "user", "content": prompt}])
        for _, prompt in shipped_prompts()[: options.prompts]
        if isinstance(prompt, str)
    ]
    rates: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    texts: dict[tuple[str, str, int], list[list[int]]] = {}
    drafts: Counter[tuple[str, int]] = Counter()
    forwards: Counter[tuple[str, int]] = Counter()
    pairs = [(name, size) for name in targets for size in options.sizes]
    # The first calls aren't counted: they calibrate, and fill what is allocated once.
    with Progress(console=Console(stderr=True)) as progress:
        for (_, _, size, _), decoder in progress.track(decoders.items(), description="warming up"):
            decoder.generate_batch(prompts[:size], max_batch=size, max_new_tokens=WARM_UP_TOKENS)
        for repeat in progress.track(range(options.repeats), description="repeats"):
            turn = repeat % len(MODES)
            for name, size in progress.track(pairs, description="sizes"):
                contestants = {
                    mode: decoders[name, mode, size, number % len(targets[name])]
                    for number, mode in enumerate(MODES[turn:] + MODES[:turn])
                }
                played = in_turn(contestants, prompts, size, options.max_new_tokens)
                for mode, (results, seconds) in played.items():
                    tokens = sum(len(result.token_ids) for result in results)
                    rates[name, mode, size].append(tokens / seconds)
                    texts[name, mode, size] = [result.token_ids for result in results]
                    if mode == "auto":
                        for result in results:
                            drafts[name, size] += result.stats.num_proposed_drafts
                            forwards[name, size] += result.stats.target_forward_ct
    table = Table(
        *("target", "at once", "plain", "over 1", "with drafts", "over plain", "least to most"),
        *("plain again, over plain", "drafts a forward", "texts that differ"),
        title=f"tokens per second, medians of {options.repeats} runs; {len(prompts)} prompts, "
        f"{options.max_new_tokens} tokens\n{machine()}",
    )
    for name, size in pairs:
        plain, auto, again = (rates[name, mode, size] for mode in MODES)
        first = name, "plain", options.sizes[0]
        ratios = sorted(
            mine * (1 / one + 1 / other) / 2
            for mine, one, other in zip(auto, plain, again, strict=True)
        )
        control = sorted(other / one for one, other in zip(plain, again, strict=True))
        gain = median(many / one for many, one in zip(plain, rates[first], strict=True))
        differ = sum(
            text != other
            for mode in MODES
            for text, other in zip(texts[name, mode, size], texts[first], strict=True)
        )
        table.add_row(
            *(name, str(size), f"{median(plain):.1f}", f"{gain:.2f}x", f"{median(auto):.1f}"),
            *(f"{median(ratios):.2f}x", f"{ratios[0]:.2f} to {ratios[-1]:.2f}"),
            f"{median(control):.2f}x ({control[0]:.2f} to {control[-1]:.2f})",
            f"{drafts[name, size] / forwards[name, size]:.1f}",
            f"{differ} of {len(MODES) * len(prompts)}",
        )
    console = Console()
    console.width = max(110, console.width)
    console.print(table)


if __name__ == "__main__":
    main()
