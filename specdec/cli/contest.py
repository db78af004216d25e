"""Contestants decode the same prompts in turn, and what their runs add up to."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from time import perf_counter
from typing import TypeAlias

from specdec.cli.cases import Case
from specdec.costs import Costs
from specdec.decoder import SpeculativeDecoder
from specdec.stats import Stats

__all__ = [
    "PARTS",
    "PLAIN",
    "SPECULATIVE",
    "Contestant",
    "Difference",
    "Run",
    "SweepPoint",
    "by_decoder",
    "by_lengths",
    "chances_by_position",
    "differences",
    "medians",
    "pooled",
    "run_contest",
    "seconds_of",
    "sweep_points",
]

PLAIN, SPECULATIVE = "plain", "speculative"
PARTS = ("prefill", "draft", "verify", "rollback", "host")  # of the time, as in Stats
COUNTERS = [each.name for each in fields(Stats) if each.default == 0]
WARM_UP = 8  # tokens of the first, unmeasured call: it allocates, chooses kernels and calibrates

# From prompt ids and the most new tokens to the new ids, and their statistics if it keeps any.
Contestant: TypeAlias = Callable[[Sequence[int], int], tuple[list[int], Stats | None]]


@dataclass(frozen=True, slots=True)
class Run:
    """One call of one contestant.

    Attributes:
        prompt: The number of the prompt.
        kind: Its kind.
        contestant: Who decoded it.
        seconds: The whole call, with the prompt read by all models.
        token_ids: What came out.
        stats: None for a contestant that keeps none.
    """

    prompt: int
    kind: str
    contestant: str
    seconds: float
    token_ids: list[int]
    stats: Stats | None

    @property
    def ms_per_token(self) -> float:
        """Milliseconds per new token, over the whole call."""
        return self.seconds * 1e3 / max(1, len(self.token_ids))

    def as_dict(self) -> dict[str, object]:
        """Ready for JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        stats = self.stats and self.stats.as_dict()
        return fields | {"ms_per_token": self.ms_per_token, "stats": stats}


def by_decoder(decoder: SpeculativeDecoder) -> Contestant:
    """A decoder as a contestant: greedy, with new caches in each call."""

    def decode(ids: Sequence[int], max_new_tokens: int) -> tuple[list[int], Stats | None]:
        try:
            result = decoder.generate(ids, max_new_tokens=max_new_tokens)
        finally:
            decoder.clear()
        return result.token_ids, result.stats

    return decode


def by_lengths(
    decoder: SpeculativeDecoder,
    lengths: Iterable[int],
    *,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, Contestant]:
    """A contestant for each fixed number of drafts, called by it, with a decoder's models."""
    target, drafter = decoder.target, decoder.drafter
    return {
        str(n): by_decoder(SpeculativeDecoder(target, drafter, num_draft_tokens=n, clock=clock))
        for n in lengths
    }


def run_contest(
    contestants: Mapping[str, Contestant],
    cases: Sequence[Case],
    *,
    max_new_tokens: int,
    repeats: int = 1,
    clock: Callable[[], float] = perf_counter,
) -> Iterator[Run]:
    """Let all decode every prompt ``repeats`` times, in an order that rotates.

    So a slow moment of the machine hits all of them. Runs come as they are done: whoever stops
    early has those.
    """
    names = list(contestants)
    for name in names:
        contestants[name](cases[0].ids, min(WARM_UP, max_new_tokens))
    for repeat in range(repeats):
        for place, case in enumerate(cases):
            shift = (repeat + place) % len(names)
            for name in names[shift:] + names[:shift]:
                started = clock()
                token_ids, stats = contestants[name](case.ids, max_new_tokens)
                seconds = clock() - started
                yield Run(case.number, case.kind, name, seconds, token_ids, stats)


def pooled(parts: Iterable[Stats]) -> Stats:
    """Counters, times and histograms of several runs, added up."""
    total = Stats()
    for stats in parts:
        for name in COUNTERS:
            setattr(total, name, getattr(total, name) + getattr(stats, name))
        for name in ("accept_histogram", "propose_histogram"):
            pairs = zip_longest(getattr(total, name), getattr(stats, name), fillvalue=0)
            setattr(total, name, [one + other for one, other in pairs])
    return total


def seconds_of(stats: Stats, part: str) -> float:
    """The time of one of ``PARTS``."""
    return float(getattr(stats, f"{part}_seconds"))


def decoding_ms(run: Run) -> float:
    """Milliseconds per token of a run with statistics, without its prompt."""
    return run.stats.decode_seconds * 1e3 / len(run.token_ids) if run.stats else run.ms_per_token


def medians(
    runs: Iterable[Run], figure: Callable[[Run], float] = lambda run: run.ms_per_token
) -> dict[int, float]:
    """By prompt, the median over its repeats."""
    by_prompt = grouped(runs, lambda run: run.prompt)
    return {prompt: statistics.median(map(figure, its)) for prompt, its in by_prompt.items()}


def grouped(runs: Iterable[Run], key: Callable[[Run], int]) -> dict[int, list[Run]]:
    """The runs by what they have in common."""
    groups: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        groups[key(run)].append(run)
    return groups


@dataclass(frozen=True, slots=True)
class Difference:
    """A prompt for which a contestant's output isn't the plain one.

    Attributes:
        prompt: Its number.
        contestant: Whose output it is.
        position: The first new token that differs, from 0, or the end of the shorter output.
    """

    prompt: int
    contestant: str
    position: int


def differences(runs: Iterable[Run]) -> list[Difference]:
    """The first output of each prompt that isn't the plain one, in order of the prompts."""
    found = []
    for prompt, its in sorted(grouped(runs, lambda run: run.prompt).items()):
        usual = next((run for run in its if run.contestant == PLAIN), its[0]).token_ids
        odd = next((run for run in its if run.token_ids != usual), None)
        if odd is not None:
            pairs = zip_longest(usual, odd.token_ids)
            position = next(i for i, (one, other) in enumerate(pairs) if one != other)
            found.append(Difference(prompt, odd.contestant, position))
    return found


def chances_by_position(stats: Stats) -> list[float]:
    """For each position of a draft: how often it stood, of the times that one was proposed there.

    It stands only where those before it did.
    """
    accepted, proposed = stats.accept_histogram, stats.propose_histogram
    return [
        sum(accepted[position:]) / sum(proposed[position:]) for position in range(1, len(proposed))
    ]


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """The speed-up of decoding with a fixed number of drafts over none; prompts don't count."""

    num_draft_tokens: int
    measured: float
    predicted: float


def sweep_points(runs: Sequence[Run], costs: Costs) -> list[SweepPoint]:
    """What fixed numbers of drafts brought, and what they should have by costs and acceptance.

    Args:
        runs: Of the contestants of ``by_lengths``, the one without drafts among them.
        costs: Of the same models.
    """
    by_length = grouped(runs, lambda run: int(run.contestant))
    plain = medians(by_length[0], decoding_ms)
    chances = chances_by_position(
        pooled(run.stats for run in by_length[max(by_length)] if run.stats)
    )
    points = []
    for length in sorted(by_length):
        mine = medians(by_length[length], decoding_ms)
        ratios = [plain[prompt] / mine[prompt] for prompt in mine if prompt in plain]
        tokens = 1 + sum(chances[:length])
        if ratios:
            predicted = tokens * costs.round(0) / costs.round(length)
            points.append(SweepPoint(length, statistics.median(ratios), predicted))
    return points
