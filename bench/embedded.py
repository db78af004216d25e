"""Plain and speculative decoding of the embedded default, and transformers' own, in turn.

Every prompt is decoded by each contestant in one process, in rotating order, so that a slow moment
of the machine hits all of them. Prints medians and ratios; ``--json FILE`` keeps every run.
"""

import argparse
import json
import platform
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

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
    "story": "Once upon a time, in a small village by the sea, there lived a clockmaker who",
    "code": "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "list": "List ten things to pack for a week of hiking in the mountains.",
    "summary": "Summarise: The steam engine changed how people worked and lived. Factories grew, "
    "cities grew around them, and railways joined the cities. Within a century the world's output "
    "had multiplied, and so had the smoke over its towns.",
    "extraction": "Extract all names and dates as JSON: Ada Lovelace was born on 10 December 1815 "
    "in London. Charles Babbage was born on 26 December 1791 in the same city.",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-draft-tokens", type=int, default=7)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every run to this file")
    options = parser.parse_args()

    path = embedded_gguf()
    target, draft = HFBackend(path, dtype="float32"), LlamaCppBackend(path)
    plain = SpeculativeDecoder(target)
    speculative = SpeculativeDecoder(target, draft, num_draft_tokens=options.num_draft_tokens)

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
    Console().print(table(runs, options))


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
    columns = ("ms/token: transformers", "plain", "speculative", "accept_length")
    result = Table("prompt", *columns, "vs transformers", "vs plain", "same ids", title=title)
    ratios: dict[str, list[float]] = {"transformers": [], "plain": []}
    for kind in PROMPTS:
        mine = [run for run in runs if run["kind"] == kind]
        ms = {
            name: statistics.median(r["ms_per_token"] for r in mine if r["contestant"] == name)
            for name in ("transformers", "plain", "speculative")
        }
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
