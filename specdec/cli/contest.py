"""Contestants decode the same prompts in turn, and what their times say. Nothing here prints."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from time import perf_counter
from typing import NamedTuple, Self, TypeAlias

from specdec.decoder import SpeculativeDecoder
from specdec.policy import Costs
from specdec.stats import Stats

__all__ = [
    "PARTS",
    "PLAIN",
    "SPECULATIVE",
    "Case",
    "Contestant",
    "Difference",
    "KindResult",
    "Report",
    "Run",
    "Spread",
    "SweepPoint",
    "by_decoder",
    "by_lengths",
    "chances_by_position",
    "pooled",
    "run_contest",
    "sweep_points",
]

PLAIN, SPECULATIVE = "plain", "speculative"
PARTS = ("prefill", "draft", "verify", "rollback", "host")  # of the time, as in Stats
COUNTERS = (
    *("prompt_tokens", "completion_tokens", "verify_ct", "target_forward_ct", "draft_forward_ct"),
    *(
        "num_proposed_drafts",
        "num_correct_drafts",
        "strict_ct",
        *(f"{part}_seconds" for part in PARTS),
    ),
)
WARM_UP = 8  # tokens of the first, unmeasured call: it allocates, chooses kernels and calibrates

# From prompt ids and the most new tokens to the new ids, and their statistics if it keeps any.
Contestant: TypeAlias = Callable[[Sequence[int], int], tuple[list[int], Stats | None]]


class Case(NamedTuple):
    """A prompt as it is measured."""

    number: int  # from 1
    kind: str
    text: str
    ids: Sequence[int]


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
        result = decoder.generate(ids, max_new_tokens=max_new_tokens)
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


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, and the lowest and highest value around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class KindResult:
    """What the runs of one kind of prompt say, or of all.

    Attributes:
        kind: The kind.
        num_prompts: Prompts of it that were run.
        ms_per_token: By contestant: the median over its prompts.
        speedup: By rival: how much faster the main contestant was, over the prompts.
        accept_length: Of the speculative runs together; None if nothing was drafted.
        accept_rate: The like.
        same_output: Whether all runs of a prompt put out the same ids, for every prompt.
    """

    kind: str
    num_prompts: int
    ms_per_token: dict[str, float]
    speedup: dict[str, Spread]
    accept_length: float | None
    accept_rate: float | None
    same_output: bool


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


@dataclass(frozen=True, slots=True)
class Prices:
    """What speculation costs, in plain steps: forwards over one token, with all around them.

    Attributes:
        draft: A draft token.
        verify: A target forward.
        rollback: Cutting back after it, over what a plain step has of that.
        host: The loop's own work, over a plain step's.
        prefill: A prompt, over what the target alone takes for it.
    """

    draft: float
    verify: float
    rollback: float
    host: float
    prefill: float


class Report:
    """What the runs of a contest say.

    Args:
        runs: All runs, or the first of them; at least one.
        cases: The prompts.

    Attributes:
        contestants: Who ran, plain and speculative last.
        main: Whose speed-up it is about: the speculative decoder's, or else the plain one's.
        kinds: Results by kind of prompt.
        total: The result of all prompts.
        differences: The first difference of each prompt that has one.
    """

    def __init__(self, runs: Sequence[Run], cases: Sequence[Case]) -> None:
        self.runs = list(runs)
        self.cases = {case.number: case for case in cases}
        present = dict.fromkeys(run.contestant for run in self.runs)
        ours = [name for name in (PLAIN, SPECULATIVE) if name in present]
        self.contestants = [*(name for name in present if name not in ours), *ours]
        self.main = SPECULATIVE if SPECULATIVE in present else PLAIN
        ran = {run.kind for run in self.runs}
        kinds = [kind for kind in dict.fromkeys(case.kind for case in cases) if kind in ran]
        self.kinds = [self._result(kind, kind) for kind in kinds]
        self.total = self._result("all prompts")
        self.differences = differences(self.runs)

    def of(self, contestant: str, kind: str | None = None) -> list[Run]:
        """The runs of a contestant, of one kind of prompt or of all."""
        return [r for r in self.runs if r.contestant == contestant and kind in (None, r.kind)]

    def stats(self, contestant: str, kind: str | None = None) -> Stats:
        """The statistics of those together."""
        return pooled(run.stats for run in self.of(contestant, kind) if run.stats)

    def speedups(self, rival: str, kind: str | None = None) -> list[float]:
        """For each prompt that both ran: how much faster the main contestant was."""
        mine, theirs = medians(self.of(self.main, kind)), medians(self.of(rival, kind))
        return [theirs[prompt] / mine[prompt] for prompt in mine if prompt in theirs]

    @property
    def time(self) -> dict[str, float]:
        """Which part of the main contestant's time went into each of ``PARTS``."""
        stats = self.stats(self.main)
        parts = {part: seconds_of(stats, part) for part in PARTS}
        return {part: value / (sum(parts.values()) or 1.0) for part, value in parts.items()}

    @property
    def prices(self) -> Prices | None:
        """What speculation costs; None unless both ran and something was drafted."""
        plain, stats = self.stats(PLAIN), self.stats(SPECULATIVE)
        if not plain.target_forward_ct or not stats.num_proposed_drafts:
            return None
        step = plain.decode_seconds / plain.target_forward_ct

        def per_forward(which: Stats, part: str) -> float:
            return seconds_of(which, part) / which.target_forward_ct / step

        def per_prompt(who: str) -> float:
            return self.stats(who).prefill_seconds / len(self.of(who)) / step

        return Prices(
            draft=stats.draft_seconds / stats.num_proposed_drafts / step,
            verify=per_forward(stats, "verify"),
            rollback=per_forward(stats, "rollback") - per_forward(plain, "rollback"),
            host=per_forward(stats, "host") - per_forward(plain, "host"),
            prefill=per_prompt(SPECULATIVE) - per_prompt(PLAIN),
        )

    def findings(self) -> list[str]:
        """The same in words: how fast and why, what it costs, whether the output is equal."""
        texts = [self._speed(), self._costs(), self._time(), *self._reasons(), self._equality()]
        return [text for text in texts if text]

    def as_dict(self) -> dict[str, object]:
        """Ready for JSON."""
        return {
            "runs": [run.as_dict() for run in self.runs],
            "kinds": [asdict(kind) for kind in self.kinds],
            "total": asdict(self.total),
            "time": self.time,
            "prices": self.prices and asdict(self.prices),
            "differences": [asdict(difference) for difference in self.differences],
            "findings": self.findings(),
        }

    def _result(self, name: str, kind: str | None = None) -> KindResult:
        runs = [run for run in self.runs if kind in (None, run.kind)]
        stats = self.stats(SPECULATIVE, kind)
        times = {who: medians(self.of(who, kind)) for who in self.contestants}
        speedups = {who: self.speedups(who, kind) for who in self.contestants if who != self.main}
        return KindResult(
            kind=name,
            num_prompts=len({run.prompt for run in runs}),
            ms_per_token={who: statistics.median(ms.values()) for who, ms in times.items() if ms},
            speedup={who: Spread.of(values) for who, values in speedups.items() if values},
            accept_length=stats.accept_length,
            accept_rate=stats.accept_rate,
            same_output=not differences(runs),
        )

    def _speed(self) -> str | None:
        if self.main == PLAIN:
            return "Decoding was plain: there is no draft."
        if PLAIN not in self.total.speedup:
            return None
        speedup = self.total.speedup[PLAIN].median
        rival = f"plain decoding: {speedup:.2f}x, the median over the prompts"
        if speedup > 1.02:
            return f"Faster than {rival}."
        idle = self._idle()
        if speedup >= 0.98 and idle > 0.5:
            return f"As fast as {rival}, because nothing was drafted in {idle:.0%} of the forwards."
        how = "As fast as" if speedup >= 0.98 else "Slower than"
        return f"{how} {rival}, because {self.largest_cost()}."

    def _idle(self) -> float:
        """The part of the target's forwards that checked no draft."""
        stats = self.stats(SPECULATIVE)
        return 1 - stats.verify_ct / max(1, stats.target_forward_ct)

    def largest_cost(self) -> str:
        """In words, what speculation spends most on that plain decoding doesn't."""
        prices, stats = self.prices, self.stats(SPECULATIVE)
        if prices is None:
            return "nothing was drafted"
        spent = {
            "draft": prices.draft * stats.num_proposed_drafts,
            "verify": (prices.verify - 1) * stats.target_forward_ct,
            "rollback": prices.rollback * stats.target_forward_ct,
            "host": prices.host * stats.target_forward_ct,
            "prefill": prices.prefill * len(self.of(SPECULATIVE)),
        }
        largest = max(spent, key=lambda part: spent[part])
        plain = self.stats(PLAIN)
        decoding = plain.decode_seconds / plain.completion_tokens
        decoding *= stats.completion_tokens / stats.decode_seconds
        if decoding > 1:  # all that is lost is lost on prompts
            largest = "prefill"
        return {
            "draft": f"a draft token takes {steps(prices.draft)} and {stats.accept_rate:.0%} of "
            "them stood",
            "verify": f"a target forward takes {steps(prices.verify)} when it checks drafts and "
            f"brings {stats.completion_tokens / stats.target_forward_ct:.1f} tokens",
            "rollback": f"taking back what didn't stand takes {steps(prices.rollback)} per round",
            "host": f"the loop's own work takes {steps(prices.host)} more per round",
            "prefill": f"reading a prompt with the draft as well takes {steps(prices.prefill)}, "
            f"for answers of {stats.completion_tokens / len(self.of(SPECULATIVE)):.0f} tokens; "
            f"decoding itself is {decoding:.2f}x as fast",
        }[largest]

    def _costs(self) -> str | None:
        prices, stats = self.prices, self.stats(SPECULATIVE)
        if prices is None:
            return None
        forwards = stats.target_forward_ct
        width = 1 + stats.num_proposed_drafts / forwards
        text = (
            f"A draft token takes {steps(prices.draft)} and {stats.accept_rate:.0%} of them stood; "
            f"a target forward over {width:.1f} tokens takes {steps(prices.verify)} and brings "
            f"{stats.completion_tokens / forwards:.1f} tokens (means)."
        )
        if self._idle() >= 0.1:
            text += f" In {self._idle():.0%} of the forwards nothing was drafted."
        return text

    def _time(self) -> str:
        names = {
            "prefill": "reading prompts",
            "draft": "drafting",
            "verify": "target forwards",
            "rollback": "rollback",
            "host": "the loop's own work",
        }
        parts = sorted(self.time.items(), key=lambda item: -item[1])
        shares = ", ".join(f"{share:.1%} {names[part]}" for part, share in parts if share >= 0.0005)
        return f"Where the time went: {shares}."

    def _reasons(self) -> list[str]:
        """Why nothing was drafted; reasons that differ in their figures only are said once."""
        runs = self.of(SPECULATIVE)
        reasons = [run.stats.reason for run in runs if run.stats and run.stats.reason]
        examples = {reason.partition(":")[0]: reason for reason in reversed(reasons)}
        counted = Counter(reason.partition(":")[0] for reason in reasons)
        return [
            f"In {count} of {len(runs)} runs {examples[what]}."
            for what, count in counted.most_common()
        ]

    def _equality(self) -> str | None:
        if len(self.contestants) < 2:
            return None
        if not self.differences:
            return "The same tokens came out for every prompt."
        first, count = self.differences[0], len(self.differences)
        case = self.cases[first.prompt]
        return (
            f"Other tokens than plain decoding's came out for {count} of {self.total.num_prompts} "
            f"prompts. The first: {first.contestant} parts at token {first.position} of prompt "
            f"{case.number} ({case.kind}: {shortened(case.text)!r}). specdec verify tells rounding "
            "from a fault."
        )


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
    by_length: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        by_length[int(run.contestant)].append(run)
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
    by_prompt: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        by_prompt[run.prompt].append(figure(run))
    return {prompt: statistics.median(values) for prompt, values in by_prompt.items()}


def differences(runs: Iterable[Run]) -> list[Difference]:
    """The first output of each prompt that isn't the plain one, in order of the prompts."""
    by_prompt: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        by_prompt[run.prompt].append(run)
    found = []
    for prompt, its in sorted(by_prompt.items()):
        usual = next((run for run in its if run.contestant == PLAIN), its[0]).token_ids
        odd = next((run for run in its if run.token_ids != usual), None)
        if odd is not None:
            pairs = zip_longest(usual, odd.token_ids)
            position = next(i for i, (one, other) in enumerate(pairs) if one != other)
            found.append(Difference(prompt, odd.contestant, position))
    return found


def steps(count: float) -> str:
    """A time in plain steps, in words."""
    return f"{count:.2f} of a plain step" if count < 0.995 else f"{count:.1f} plain steps"


def shortened(text: str, limit: int = 40) -> str:
    """The start of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]}..."
