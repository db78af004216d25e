"""What the runs of a contest come to, in figures and in words. Nothing here prints."""

import statistics
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Self

from specdec.cli.cases import Case
from specdec.cli.contest import (
    PARTS,
    PLAIN,
    SPECULATIVE,
    Run,
    differences,
    medians,
    pooled,
    seconds_of,
)
from specdec.report import counted
from specdec.stats import Stats

__all__ = ["KindResult", "Prices", "Report", "Spread"]


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
        due: Contestants that would have run, had nothing ended it early.

    Attributes:
        contestants: Who ran, plain and speculative last.
        main: Whose speed-up it is about: the speculative decoder's, or else the plain one's.
        kinds: Results by kind of prompt.
        total: The result of all prompts.
        differences: The first difference of each prompt that has one.
    """

    def __init__(
        self, runs: Sequence[Run], cases: Sequence[Case], due: Collection[str] = ()
    ) -> None:
        self.runs = list(runs)
        self.cases = {case.number: case for case in cases}
        present = dict.fromkeys(run.contestant for run in self.runs)
        ours = [name for name in (PLAIN, SPECULATIVE) if name in present]
        self.contestants = [*(name for name in present if name not in ours), *ours]
        self.main = SPECULATIVE if SPECULATIVE in present else PLAIN
        self._missing = [name for name in due if name not in present]
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
        if self._missing:
            missing = " and ".join(self._missing)
            return f"It was interrupted before {missing} decoding ran: there is nothing to compare."
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
        answer = stats.completion_tokens / len(self.of(SPECULATIVE))
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
            f"for answers of {counted(round(answer), 'token')}; "
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
        counts = Counter(reason.partition(":")[0] for reason in reasons)
        return [
            f"In {count} of {counted(len(runs), 'run')} {examples[what]}."
            for what, count in counts.most_common()
        ]

    def _equality(self) -> str | None:
        if len(self.contestants) < 2:
            return None
        if not self.differences:
            return "The same tokens came out for every prompt."
        first, count = self.differences[0], len(self.differences)
        case = self.cases[first.prompt]
        prompts = counted(self.total.num_prompts, "prompt")
        return (
            f"Other tokens than plain decoding's came out for {count} of {prompts}. The first: "
            f"{first.contestant} parts at token {first.position} of prompt {case.number} "
            f"({case.kind}: {shortened(case.text)!r}). specdec verify tells rounding from a fault."
        )


def steps(count: float) -> str:
    """A time in plain steps, in words."""
    return f"{count:.2f} of a plain step" if count < 0.995 else f"{count:.1f} plain steps"


def shortened(text: str, limit: int = 40) -> str:
    """The start of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]}..."
