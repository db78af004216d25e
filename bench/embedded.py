"""Plain and speculative decoding of the embedded default, and transformers' own, in turn.

Every prompt is decoded by each contestant in one process, in rotating order, so that a slow moment
of the machine hits all of them. Prints medians and ratios; ``--json FILE`` keeps every run and
``--plot FILE`` draws them.
"""

import argparse
import json
import os
import platform
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

# As the command line does: two runtimes take turns, so idle threads should soon sleep.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specdec import SpeculativeDecoder
from specdec.backends import HFBackend, LlamaCppBackend
from specdec.embedded import embedded_gguf
from specdec.vocab import encode_prompt

PROMPTS = {
    "question": "What is the difference between weather and climate?",
    "story": "Write a long story about a clockmaker in a small village by the sea.",
    "code": "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "list": "List ten things to pack for a week of hiking in the mountains.",
    "summary": "Summarise: The steam engine changed how people worked and lived. Factories grew, "
    "cities grew around them, and railways joined the cities. Within a century the world's output "
    "had multiplied, and so had the smoke over its towns.",
    "extraction": "Extract all names and dates as JSON: Ada Lovelace was born on 10 December 1815 "
    "in London. Charles Babbage was born on 26 December 1791 in the same city.",
}


CONTESTANTS = ("transformers", "plain", "speculative")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-draft-tokens", type=int, default=7)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every run to this file")
    parser.add_argument("--plot", type=Path, help="draw the medians into this PNG")
    options = parser.parse_args()

    path = embedded_gguf()
    target, draft = HFBackend(path, dtype="float32"), LlamaCppBackend(path)
    plain = SpeculativeDecoder(target, keep_caches=0)
    speculative = SpeculativeDecoder(
        target, draft, num_draft_tokens=options.num_draft_tokens, keep_caches=0
    )

    def by_transformers(ids: list[int]) -> tuple[list[int], float | None]:
        row = torch.tensor([ids])
        out = target.model.generate(
            row,
            attention_mask=torch.ones_like(row),
            max_new_tokens=options.max_new_tokens,
            do_sample=False,
            pad_token_id=2,
        )
        return out[0, len(ids) :].tolist(), None

    def by_specdec(decoder: SpeculativeDecoder, ids: list[int]) -> tuple[list[int], float | None]:
        result = decoder.generate(ids, max_new_tokens=options.max_new_tokens)
        return result.token_ids, result.stats.accept_length

    contestants = {
        "transformers": by_transformers,
        "plain": lambda ids: by_specdec(plain, ids),
        "speculative": lambda ids: by_specdec(speculative, ids),
    }
    prompts = {
        kind: encode_prompt(target.vocab, [{"role": "user", "content": text}])
        for kind, text in PROMPTS.items()
    }
    runs = measure(contestants, prompts, options.repeats)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "runs": runs}, indent=1))
    if options.plot:
        plot(runs, options)
    console = Console()
    console.width = max(100, console.width)
    console.print(table(runs, options))


def measure(contestants: Any, prompts: dict[str, list[int]], repeats: int) -> list[dict[str, Any]]:
    """Run everything ``repeats`` times; one dictionary per run, times over the whole call."""
    names, runs = list(contestants), []
    for name in names:  # first calls allocate and choose kernels
        contestants[name](prompts["question"])
    for repeat in track(range(repeats), description="measuring"):
        for number, (kind, ids) in enumerate(prompts.items()):
            shift = (repeat + number) % len(names)
            for name in names[shift:] + names[:shift]:
                start = perf_counter()
                token_ids, accept_length = contestants[name](ids)
                runs.append(
                    {
                        "kind": kind,
                        "contestant": name,
                        "ms_per_token": (perf_counter() - start) * 1e3 / len(token_ids),
                        "token_ids": token_ids,
                        "accept_length": accept_length,
                    }
                )
    return runs


def table(runs: list[dict[str, Any]], options: argparse.Namespace) -> Table:
    """Medians by kind of prompt."""
    title = (
        f"SmolLM2-135M fp32 in torch, drafted by its Q4_1 in llama.cpp, K = "
        f"{options.num_draft_tokens}, {options.max_new_tokens} tokens, "
        f"median of {options.repeats}\n{machine()}"
    )
    columns = ("transformers\nms/token", "plain\nms/token", "specdec\nms/token", "accept_length")
    ratio_columns = ("speed-up over\ntransformers", "speed-up\nover plain", "same\nids")
    result = Table("prompt", *columns, *ratio_columns, title=title)
    ratios: dict[str, list[float]] = {"transformers": [], "plain": []}
    for kind in PROMPTS:
        mine = [run for run in runs if run["kind"] == kind]
        ms = {name: median_ms(runs, kind, name) for name in CONTESTANTS}
        accept_length = statistics.median(r["accept_length"] for r in mine if r["accept_length"])
        same = len({tuple(run["token_ids"]) for run in mine}) == 1
        for name, values in ratios.items():
            values.append(ms[name] / ms["speculative"])
        result.add_row(
            kind,
            *(f"{value:.1f}" for value in ms.values()),
            f"{accept_length:.2f}",
            *(f"{values[-1]:.2f}x" for values in ratios.values()),
            "yes" if same else "no",
        )
    medians = (f"{statistics.median(values):.2f}x" for values in ratios.values())
    result.add_row("median", "", "", "", "", *medians, "", style="bold")
    return result


def median_ms(runs: list[dict[str, Any]], kind: str, contestant: str) -> float:
    """Milliseconds per token of one contestant on one kind of prompt."""
    mine = [run for run in runs if (run["kind"], run["contestant"]) == (kind, contestant)]
    return float(statistics.median(run["ms_per_token"] for run in mine))


def plot(runs: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Bars of the medians, by kind of prompt."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    labels = {"transformers": "transformers generate", "plain": "specdec, no draft"}
    colours = {"transformers": "#b8b8c0", "plain": "#7c8aa5", "speculative": "#2a9d6f"}
    for number, name in enumerate(CONTESTANTS):
        bars = axes.bar(
            [index + 0.27 * (number - 1) for index in range(len(PROMPTS))],
            [median_ms(runs, kind, name) for kind in PROMPTS],
            width=0.25,
            color=colours[name],
            label=labels.get(name, f"specdec, K = {options.num_draft_tokens}"),
        )
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    axes.set_xticks(range(len(PROMPTS)), list(PROMPTS))
    axes.set_ylabel("ms per token")
    axes.set_title("SmolLM2-135M, fp32 in torch, drafted by its own 4-bit GGUF in llama.cpp")
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(options.plot, dpi=150)


def machine() -> str:
    """What the figures were made on."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = f"{len(names)} x {names[0].partition(': ')[2]}" if names else model
    return f"{model}, Python {platform.python_version()}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
