"""``draft="self"`` by quantisation: what it costs, how much of it stands, what it brings.

The target is SmolLM2-135M in fp32 in torch. Its weights come from a Q4_1 file, so Q4_1 gives them
back exactly and is better here than it would be for another model.
"""

import argparse
import os
import statistics
from time import perf_counter

# As the command line does: two runtimes take turns, so idle threads should soon sleep.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from embedded import PROMPTS, machine
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specdec import SpeculativeDecoder
from specdec.backends import HFBackend
from specdec.embedded import embedded_gguf
from specdec.request import GenerationResult
from specdec.stats import Stats
from specdec.vocab import encode_prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", nargs="+", default=["q4_0", "q4_1", "q4_k_m", "q8_0"])
    parser.add_argument("--num-draft-tokens", nargs="+", type=int, default=[3, 7])
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()

    target = HFBackend(embedded_gguf(), dtype="float32")
    decoders = {("plain", 0): SpeculativeDecoder(target, keep_caches=0)}
    for kind in options.types:
        draft = target.self_draft(kind)
        for count in options.num_draft_tokens:
            decoders[kind, count] = SpeculativeDecoder(
                target, draft, num_draft_tokens=count, keep_caches=0
            )
    prompts = [
        encode_prompt(target.vocab, [{"role": "user", "content": text}])
        for text in PROMPTS.values()
    ]

    results: dict[tuple[str, int], list[GenerationResult]] = {name: [] for name in decoders}
    seconds: dict[tuple[str, int], list[list[float]]] = {name: [] for name in decoders}
    for decoder in decoders.values():  # first calls allocate and choose kernels
        decoder.generate(prompts[0], max_new_tokens=16)
    for prompt in track(prompts, description="measuring"):
        for samples in seconds.values():
            samples.append([])
        for repeat in range(options.repeats):
            names = list(decoders)
            for name in names[repeat:] + names[:repeat]:
                start = perf_counter()
                result = decoders[name].generate(prompt, max_new_tokens=options.max_new_tokens)
                seconds[name][-1].append(perf_counter() - start)
                results[name].append(result)

    table = Table(
        *("draft", "K", "accept_rate", "accept_length", "draft step, ms", "speed-up", "same ids"),
        title=f"SmolLM2-135M fp32 in torch with itself, {options.max_new_tokens} tokens\n"
        f"{machine()}",
    )
    texts = [result.token_ids for result in results["plain", 0]]
    plain = [statistics.median(samples) for samples in seconds["plain", 0]]
    for (kind, count), mine in seconds.items():
        if kind == "plain":
            continue
        stats = [result.stats for result in results[kind, count]]
        ratios = [p / statistics.median(samples) for p, samples in zip(plain, mine, strict=True)]
        same = texts == [result.token_ids for result in results[kind, count]]
        table.add_row(
            kind,
            str(count),
            f"{total(stats, 'num_correct_drafts') / total(stats, 'num_proposed_drafts'):.3f}",
            f"{1 + total(stats, 'num_correct_drafts') / total(stats, 'verify_ct'):.2f}",
            f"{1e3 * total(stats, 'draft_seconds') / total(stats, 'draft_forward_ct'):.1f}",
            f"{statistics.median(ratios):.2f}x",
            "yes" if same else "no",
        )
    console = Console()
    console.width = max(100, console.width)
    console.print(table)


def total(stats: list[Stats], name: str) -> float:
    return float(sum(getattr(one, name) for one in stats))


if __name__ == "__main__":
    main()
