"""How near ``num_draft_tokens="auto"`` comes to the best fixed number, on a virtual clock.

A plain step takes 1. Cells differ in what a draft token and wide forwards take, and in how many of
the drafts stand: always as many, fewer or more from the middle on, or by turns in blocks. The best
fixed number of drafts is chosen in hindsight, by its expected speed.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table
from typing_extensions import override

from specdec import Draft, Drafter, DraftRequest, SpeculativeDecoder
from specdec.testing import TableBackend, VirtualClock

DRAFT_STEPS = (0.02, 0.05, 0.1, 0.3, 0.9)
VERIFY: dict[str, Callable[[int], float]] = {
    "flat": lambda width: 1.0,
    "linear": lambda width: 1.0 + 0.15 * (width - 1),
    "step": lambda width: 1.0 if width <= 4 else 1.6,
}
BLOCK = 128  # tokens
CONSTANT = ("0.1", "0.3", "0.5", "0.7", "0.95")
RISING, FALLING, BY_TURNS = "0.1, then 0.95", "0.95, then 0.1", "0.1 and 0.95 by turns"


class Cell(NamedTuple):
    """One setting, in plain steps."""

    draft_step: float
    verify: str
    acceptance: str


CELLS = [
    Cell(*cell) for cell in product(DRAFT_STEPS, VERIFY, (*CONSTANT, RISING, FALLING, BY_TURNS))
]


class Outcome(NamedTuple):
    """Speeds in tokens per plain step."""

    cell: Cell
    auto: float
    predicted: float
    best: float
    best_length: int


class Coin(Drafter):
    """Proposes the target's own tokens, each with some chance only, and takes its time."""

    def __init__(self, target: TableBackend, cell: Cell, num_tokens: int, seed: int) -> None:
        self.target, self.cell, self.num_tokens = target, cell, num_tokens
        self.random = random.Random(seed)

    @override
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft(self.draft(request)) for request in requests]

    def draft(self, request: DraftRequest) -> list[int]:
        ids, drafts = list(request.ids), list[int]()
        chosen = self.target.table.argmax(axis=-1)
        while len(drafts) < request.num_tokens:
            right = int(chosen[(ids or [0])[-2:][0], ids[-1]])
            stands = self.random.random() < chance(self.cell, len(ids), self.num_tokens)
            drafts.append(right if stands else (right + 1) % len(chosen))
            ids.append(drafts[-1])
            self.target.clock.seconds += self.cell.draft_step
        return drafts


def chance(cell: Cell, position: int, num_tokens: int) -> float:
    """Of a draft to stand."""
    if cell.acceptance in CONSTANT:
        return float(cell.acceptance)
    if cell.acceptance == BY_TURNS:
        return 0.1 if position // BLOCK % 2 else 0.95
    return 0.95 if (position < num_tokens / 2) == (cell.acceptance == FALLING) else 0.1


def fixed_speed(cell: Cell, length: int) -> float:
    """What a fixed number of drafts comes to; of two rates each has half of the tokens."""
    seconds = length * cell.draft_step + VERIFY[cell.verify](length + 1)
    rates = [float(cell.acceptance)] if cell.acceptance in CONSTANT else [0.1, 0.95]
    tokens = [sum(rate**n for n in range(length + 1)) for rate in rates]
    return len(rates) / sum(seconds / brought for brought in tokens)


def run(cell: Cell, num_tokens: int = 2048, seeds: Sequence[int] = (0, 1)) -> Outcome:
    """Decode with ``"auto"``; the first text of a pair, so nothing is known of its costs."""
    autos, predictions = [], []
    for seed in seeds:
        target = TableBackend.random(16, seed=seed, max_context=2 * num_tokens)
        target.clock, target.cost = VirtualClock(), VERIFY[cell.verify]
        decoder = SpeculativeDecoder(
            target, Coin(target, cell, num_tokens, seed), clock=target.clock
        )
        stats = decoder.generate([1, 2], max_new_tokens=num_tokens).stats
        autos.append(num_tokens / target.clock.seconds)
        predictions.append(stats.predicted_speedup or 1.0)
    lengths = range(17)
    best = max(lengths, key=lambda length: fixed_speed(cell, length))
    count = len(autos)
    return Outcome(
        cell, sum(autos) / count, sum(predictions) / count, fixed_speed(cell, best), best
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--worst", type=int, help="show only so many, the worst")
    parser.add_argument("--seeds", type=int, default=2, help="texts per cell")
    options = parser.parse_args()
    seeds = range(options.seeds)
    outcomes = [run(cell, options.tokens, seeds) for cell in track(CELLS, description="decoding")]
    outcomes.sort(key=lambda outcome: outcome.auto / outcome.best)
    table = Table(
        *("draft step", "verify", "acceptance", "best K", "best fixed", "auto", "auto / best"),
        "predicted / achieved",
        title=f"{len(CELLS)} cells, {options.tokens} tokens, the worst first; speeds over plain",
    )
    for cell, auto, predicted, best, length in outcomes[: options.worst]:
        table.add_row(
            *(str(cell.draft_step), cell.verify, cell.acceptance, str(length), f"{best:.2f}"),
            *(f"{auto:.2f}", f"{auto / best:.3f}", f"{predicted / auto:.2f}"),
        )
    console = Console()
    console.width = max(120, console.width)
    console.print(table)


if __name__ == "__main__":
    main()
