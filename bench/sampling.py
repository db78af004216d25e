"""Sampling on the embedded default: what it costs a round, and what each rule accepts.

``coupled`` decodes the very text that plain decoding gives with the same seed; ``rejection`` and
``block`` are the papers' rules. All runs alternate in one process.
"""

import argparse
import os
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from rich.console import Console
from rich.progress import track
from rich.table import Table

from specdec import SamplingParams, SpeculativeDecoder, Stats
from specdec.backends import HFBackend, LlamaCppBackend
from specdec.embedded import embedded_gguf
from specdec.rejection import RatioSampler
from specdec.request import Verification
from specdec.sampling import Sampler

PROMPTS = (
    "What is the difference between weather and climate?",
    "Write a long story about a clockmaker in a small village by the sea.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "List ten things to pack for a week of hiking in the mountains.",
)
SETTINGS: dict[str, tuple[Verification, float, int]] = {  # rule, temperature, top-k
    "greedy": ("coupled", 0.0, 0),
    "coupled, T = 1": ("coupled", 1.0, 0),
    "coupled, T = 1, top-k 50": ("coupled", 1.0, 50),
    "rejection, T = 1": ("rejection", 1.0, 0),
    "block, T = 1": ("block", 1.0, 0),
}


class Timed:
    """Adds up the time that choosing takes: the scores of target and draft, and the comparison."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for kind in (Sampler, RatioSampler):
            for name in ("guess", "verify"):
                if name in vars(kind):
                    setattr(kind, name, self.wrapped(getattr(kind, name)))

    def wrapped(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = perf_counter()
            result = method(*args)
            self.seconds += perf_counter() - start
            return result

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-draft-tokens", type=int, default=7)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()

    path = embedded_gguf()
    target, draft = HFBackend(path, dtype="float32"), LlamaCppBackend(path)
    runs: dict[str, list[tuple[Stats, float]]] = {name: [] for name in SETTINGS}
    clock = Timed()
    for seed in track(range(options.seeds), description="measuring"):
        for prompt in PROMPTS:
            for name, (verification, temperature, top_k) in SETTINGS.items():
                decoder = SpeculativeDecoder(
                    target,
                    draft,
                    num_draft_tokens=options.num_draft_tokens,
                    verification=verification,
                )
                clock.seconds = 0.0
                result = decoder.generate(
                    [{"role": "user", "content": prompt}],
                    max_new_tokens=options.max_new_tokens,
                    sampling=SamplingParams(temperature=temperature, top_k=top_k, seed=seed),
                )
                runs[name].append((result.stats, clock.seconds))

    table = Table("rule", "accept_rate", "accept_length", "ms per round", "of it choosing")
    for name, measured in runs.items():
        stats = [s for s, _ in measured]
        rounds = sum(s.verify_ct for s in stats)
        proposed = sum(s.num_proposed_drafts for s in stats)
        correct = sum(s.num_correct_drafts for s in stats)
        per_round = statistics.median(s.decode_seconds / s.target_forward_ct for s in stats)
        choosing = statistics.median(t / s.target_forward_ct for s, t in measured)
        table.add_row(
            name,
            f"{correct / proposed:.3f}",
            f"{1 + correct / rounds:.2f}",
            f"{per_round * 1e3:.1f}",
            f"{choosing * 1e3:.2f} ms, {choosing / per_round:.1%}",
        )
    console = Console()
    console.width = max(100, console.width)
    console.print(table)


if __name__ == "__main__":
    main()
