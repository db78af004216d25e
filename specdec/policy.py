"""How many tokens to draft: as many as bring the most tokens per second, by measured times.

Speeds are compared as tokens per round over seconds per round. With ``p_j`` the chance that the
first j drafts stand, a round of k drafts brings ``1 + p_1 + ... + p_k`` tokens and takes k draft
steps, a target forward over k + 1 tokens, and the loop's own work. k = 0 is plain decoding.
"""

import math
import operator
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import accumulate, zip_longest
from statistics import median
from typing import Any

from typing_extensions import override

__all__ = [
    "TELLING",
    "Acceptance",
    "Costs",
    "FixedLength",
    "MeasuredLength",
    "best_length",
    "break_even",
]

MEMORY = 96  # tokens after which what was seen counts 1/e
# What acceptance may be, and how likely that is to begin with: most pairs are chosen well, and a
# useless one shows soon.
RATES = (0.99, 0.96, 0.9, 0.8, 0.65, 0.5, 0.3, 0.15, 0.02)
ODDS = (0.45, 0.25, 0.08, 0.05, 0.05, 0.04, 0.03, 0.02, 0.03)
NEIGHBOURS = 8.0  # drafts of other texts that count for this one, at most
POOL_WEIGHT = 4.0  # what all positions say of each
WORTH = 1.03  # times the speed of plain decoding that drafts must promise, as costs are noisy
CROWD = 0.04  # and so much more for every neighbour, who seldom drafts alike
PROBE_SHARE = 0.012  # of the time may go into drafts that are not expected to pay
PROBE_GAP = 4  # plain steps between them at least
CONFIDENCE_WEIGHT = 4.0  # what a confidence says by itself, in drafts seen
DOUBT_WEIGHT = 1.25  # failures after which it is believed half how much confidence is worth here
CONFIDENCES = (0.3, 0.5, 0.7, 0.85, 0.95)  # where what a draft thinks of itself is divided
TELLING = 8  # drafts that have to be compared before anyone is told what they are worth
SURE = 3  # samples that are believed against what is hoped for
BUDGET_MEMORY = 512  # tokens after which what was spent on probes counts 1/e
READ_TOKENS = 16
SHORTEST, LONGEST = 1e-9, 1e9  # seconds
STALE = 128  # target forwards after which a width or drafts not seen since lose a sample


class Costs:
    """Seconds that the parts of a round take, as measured: medians of the latest.

    What was measured in a bad moment and never again is forgotten.

    What goes into drafts that aren't expected to pay is kept here too, so that short texts add up.
    """

    def __init__(self) -> None:
        self._tokens = self._lost = 0.0  # lately; plain steps
        self._forward_ct = 0
        self._seen: dict[int, int] = {}  # when a width was, in forwards
        self._verify: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=9))
        self._widths: list[tuple[int, float]] = []  # medians by width
        self._draft: dict[int, deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=24))
        self._lines: dict[int, tuple[float, float]] = {}  # seconds at 0 drafts, and for each more
        self._drafted_in = 0  # the last of these, STALE forwards each
        self._rest = {drafting: deque[float](maxlen=15) for drafting in (False, True)}
        self._read: deque[float] = deque(maxlen=5)

    def count_verify(self, width: int, seconds: float) -> None:
        """Enter a target forward over ``width`` tokens."""
        width = rounded(width)
        self._verify[width].append(positive(seconds))
        self._seen[width] = self._forward_ct = self._forward_ct + 1
        if self._forward_ct % STALE == 0:
            self._forget()
        self.forget_drafts()
        self._widths = sorted((w, median(samples)) for w, samples in self._verify.items())

    def _forget(self) -> None:
        for width, seen in list(self._seen.items()):
            if width > 1 and self._forward_ct - seen >= STALE:
                self._verify[width].popleft()
                if not self._verify[width]:
                    del self._verify[width], self._seen[width]

    @property
    def forward_ct(self) -> int:
        """Target forwards so far."""
        return self._forward_ct

    def forget_drafts(self) -> None:
        """Drafts lose a sample after so many target forwards without one."""
        if (era := self.forward_ct // STALE) > self._drafted_in:
            self._drafted_in = era
            for num_sequences, samples in list(self._draft.items()):
                samples.popleft()
                self._fit(num_sequences)

    def count_draft(self, seconds: float, num_tokens: int, num_sequences: int = 1) -> None:
        """Enter drafts of up to ``num_tokens`` for several sequences in step."""
        self._draft[num_sequences].append((num_tokens, positive(seconds)))
        self._drafted_in = math.ceil(self.forward_ct / STALE)
        self._fit(num_sequences)

    def _fit(self, num_sequences: int) -> None:
        if samples := self._draft[num_sequences]:
            self._lines[num_sequences] = line_through(samples)
        else:
            del self._draft[num_sequences], self._lines[num_sequences]

    def count_rest(self, seconds: float, *, drafting: bool) -> None:
        """Enter the loop's own time in a round, rollback included."""
        self._rest[drafting].append(positive(seconds))

    def count_read(self, seconds: float, num_tokens: int) -> None:
        """Enter the reading of ``num_tokens`` by the drafter; a few tell nothing of each."""
        if num_tokens >= READ_TOKENS or not self._read:
            self._read.append(positive(seconds) / num_tokens)

    @property
    def known(self) -> bool:
        """Whether a plain step was ever measured."""
        return 1 in self._verify

    def is_plain_stale(self, num_sequences: int = 1) -> bool:
        """Whether the last plain step is so long ago that one more is worth it."""
        seen = self._seen.get(rounded(num_sequences), self._forward_ct)
        return self._forward_ct - seen >= 4 * STALE

    def count_tokens(self, num_tokens: int, lost: float) -> None:
        """Enter what a round brought, and the plain steps that it lost if it was a probe."""
        keep = math.exp(-num_tokens / BUDGET_MEMORY)
        self._tokens = self._tokens * keep + num_tokens
        self._lost = self._lost * keep + lost

    def may_lose(self, steps: float) -> bool:
        """Whether drafts that lose so many plain steps are within what may go into probes."""
        return self._lost + steps <= PROBE_SHARE * self._tokens

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths that were measured, the smallest first."""
        return tuple(width for width, _ in self._widths)

    @property
    def draft(self) -> float:
        """One more draft token; a quarter of a plain step until one was measured."""
        return self.drafts(2) - self.drafts(1)

    def drafts(self, num_tokens: int, num_sequences: int = 1) -> float:
        """Drafts of so many tokens for each of some sequences in step, or for about so many.

        A line through what was measured: a round's first draft takes longer, since it feeds what
        the target has put out. More sequences than were measured take as much more as they do in
        the target.
        """
        if not self._draft or num_tokens == 0:
            return num_tokens * self.verify(num_sequences) / 4
        nearest = min(self._lines, key=lambda n: abs(n - num_sequences))
        base, step = self._lines[nearest]
        more = self.verify(num_sequences) / self.verify(nearest) if num_sequences > nearest else 1.0
        return more * (base + step * num_tokens)

    def rest(self, *, drafting: bool) -> float:
        """The loop's own work in a round; a rollback may have its price."""
        plain, drafted = (median(self._rest[kind] or [0.0]) for kind in (False, True))
        return max(plain, drafted) if drafting else plain

    @property
    def read(self) -> float:
        """One token that the drafter has to catch up with."""
        return median(self._read) if self._read else 0.0

    def verify(self, width: int) -> float:
        """A target forward over ``width`` tokens.

        Optimistic where little is known, so that what may be good is tried: a width that was never
        measured costs what the next smaller one does, and a width that was measured once or twice
        no more than a line between its neighbours. Widths beyond all that were measured lie on a
        line with the first and the last.
        """
        widths, width = self._widths, rounded(width)
        if not widths:
            return 1.0
        at = bisect_left(widths, (width, 0.0))
        here = at < len(widths) and widths[at][0] == width
        below, above = widths[:at], widths[at + here :]
        if here and (len(self._verify[width]) >= SURE or not below or not above):
            return widths[at][1]
        if not below:
            return above[0][1]
        if not above:
            (first, least), (last, most) = widths[0], widths[-1]
            slope = max(0.0, most - least) / max(1, last - first)
            return most + slope * (width - last)
        (left, low), (right, high) = below[-1], above[0]
        line = low + (high - low) * (width - left) / (right - left)
        return min(line, widths[at][1] if here else low)

    def rounds(self, max_draft_tokens: int, num_sequences: int = 1) -> list[float]:
        """Whole rounds of 0, 1, ... drafts, of sequences that draft alike."""
        plain, rest = self.verify(num_sequences), self.rest(drafting=True)
        seconds = [plain + self.rest(drafting=False)]
        for count in range(1, max_draft_tokens + 1):
            # A wider forward is never cheaper, only noise is.
            checking = max(plain, self.verify(num_sequences * (count + 1)))
            seconds.append(self.drafts(count, num_sequences) + checking + rest)
        return seconds

    def round(self, num_drafts: int) -> float:
        """A whole round of one sequence."""
        return self.rounds(num_drafts)[num_drafts]


def rounded(width: int) -> int:
    """Forwards wider than one sequence makes them are told apart by an eighth of their width."""
    shift = width.bit_length() - 4 if width >= 32 else 0
    return width >> shift << shift


def positive(seconds: float) -> float:
    """A time that can be divided by, whatever a clock says."""
    return min(seconds, LONGEST) if seconds > SHORTEST else SHORTEST


def line_through(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds at 0 and per token, through ``(tokens, seconds)`` and two samples at ``(0, 0)``."""
    each = [seconds / count for count, seconds in samples]
    if len(samples) < SURE:
        return 0.0, min(each)
    most, weight = 2 * median(each), len(samples) + 2  # what is slower is an outlier
    clipped = [(count, min(seconds, most * count)) for count, seconds in samples]
    count = sum(n for n, _ in clipped) / weight
    seconds = sum(s for _, s in clipped) / weight
    spread = sum((n - count) ** 2 for n, _ in clipped) + 2 * count**2
    joint = sum((n - count) * (s - seconds) for n, s in clipped) + 2 * count * seconds
    step = min(max(0.0, joint / spread), seconds / count)
    return seconds - step * count, step


class Acceptance:
    """How often the drafts of one text stand, as seen lately, by position and by confidence."""

    def __init__(self, max_draft_tokens: int) -> None:
        self._positions = [[0.0, 0.0] for _ in range(max_draft_tokens)]  # tried, stood
        self._confidences = [[0.0, 0.0] for _ in range(len(CONFIDENCES) + 1)]
        self._failures = [0.0, 0.0]  # expected by confidence, and seen
        self._known: dict[float, float] = {}  # chances by confidence, until something is entered

    @property
    def tally(self) -> tuple[float, float]:
        """How many drafts were compared, up to the first wrong one, and how many of them stood."""
        tried, stood = map(sum, zip(*self._positions, strict=True))
        return tried, stood

    def by_position(self, neighbours: tuple[float, float] = (0.0, 0.0)) -> list[float]:
        """The chance at each position that a draft stands if those before it did.

        Args:
            neighbours: The tally of other texts that are decoded beside this one. They tell little
                of it, but something while it is new.
        """
        weight = NEIGHBOURS / max(NEIGHBOURS, neighbours[0])
        tried, stood = (
            own + weight * other for own, other in zip(self.tally, neighbours, strict=True)
        )
        pairs = list(zip(RATES, ODDS, strict=True))
        odds = [odd * rate**stood * (1 - rate) ** (tried - stood) for rate, odd in pairs]
        rates, before = [], sum(odds)
        for tried_here, stood_here in self._positions:
            odds = list(map(operator.mul, odds, RATES))
            together, before = sum(odds) / before, sum(odds)
            rates.append((stood_here + POOL_WEIGHT * together) / (tried_here + POOL_WEIGHT))
        return rates

    def of(self, confidence: float) -> float:
        """The chance of a draft to which the draft model gave this probability."""
        known = self._known.get(confidence)
        if known is not None:
            return known
        tried, stood = self._confidences[bisect_left(CONFIDENCES, confidence)]
        expected, seen = self._failures
        fails = (seen + DOUBT_WEIGHT) / (expected + DOUBT_WEIGHT) * doubt(confidence)
        stands = max(0.0, 1.0 - fails)
        chance = (stood + CONFIDENCE_WEIGHT * stands) / (tried + CONFIDENCE_WEIGHT)
        self._known[confidence] = chance
        return chance

    def expect(self, chance: float) -> None:
        """Enter a round whose first draft was given up, for so small was its chance."""
        self._age(1)
        self._positions[0][0] += 1
        self._positions[0][1] += chance

    def _age(self, num_tokens: int) -> None:
        self._known.clear()
        keep = math.exp(-num_tokens / MEMORY)
        for pair in (*self._positions, *self._confidences, self._failures):
            pair[:] = [count * keep for count in pair]

    def observe(self, confidences: Sequence[float], num_proposed: int, num_correct: int) -> None:
        """Enter a round: the tokens it brought make what came before count less."""
        self._age(num_correct + 1)
        for position in range(min(num_correct + 1, num_proposed)):
            pairs = [self._positions[position]]
            if position < len(confidences):
                pairs.append(self._confidences[bisect_left(CONFIDENCES, confidences[position])])
                self._failures[0] += doubt(confidences[position])
                self._failures[1] += position == num_correct
            for pair in pairs:
                pair[0] += 1
                pair[1] += position < num_correct


def doubt(confidence: float) -> float:
    """How often a draft fails to which the draft model gave this probability, to begin with."""
    return 1.0 - math.pow(confidence, 0.08)


def believed(confidence: float) -> float:
    """A drafter's confidence; none where it is no probability."""
    return confidence if 0.0 <= confidence <= 1.0 else 0.0


class FixedLength:
    """The same number of drafts in every round."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens

    def wanted(self, limit: int, lag: int = 0, num_sequences: int = 1) -> int:
        """The most tokens to draft in the next round, up to ``limit``."""
        return min(limit, self.num_draft_tokens)

    @staticmethod
    def together(
        policies: Sequence[Any],
        limits: Sequence[int],
        lags: Sequence[int],
        num_sequences: int,
    ) -> list[int]:
        """What ``wanted`` says for each of some sequences, of policies of the same kind."""
        asked = zip(policies, limits, lags, strict=True)
        return [policy.wanted(limit, lag, num_sequences) for policy, limit, lag in asked]

    def keep(self, num_proposed: int) -> int:
        """How many of the drafts, the first so many, are worth a place in the target's forward."""
        return num_proposed

    def observe(self, num_proposed: int, num_correct: int) -> None:
        """Makes no difference."""

    @property
    def go_on(self) -> Callable[[float], bool] | None:
        """Tells a drafter, by the probability that it gives its last draft, whether to go on."""
        return None

    @property
    def predicted_speedup(self) -> float | None:
        """What the rounds so far were expected to gain over plain decoding, if anything was."""
        return None

    def verdict(self) -> str | None:
        """Why nothing is drafted any more, if so."""
        return None


class MeasuredLength(FixedLength):
    """The number of drafts, up to a limit, that promises the most tokens per second, for one text.

    What its drafts were worth is forgotten with the text; the costs are its pair's and stay.
    """

    def __init__(self, costs: Costs, max_draft_tokens: int) -> None:
        super().__init__(max_draft_tokens)
        self.costs = costs
        self.acceptance = Acceptance(max_draft_tokens)
        self._planned = 0
        self._pays = True
        self._rate = 0.0  # tokens per second to keep up with
        self._confidences: list[float] = []
        self._extra = 0.0  # seconds of the round before its first draft
        self._probing = False
        self._given_up = 0  # drafts, when none was kept
        self._plain_ct = 0  # steps since the last draft
        self._num_compared = 0  # drafts
        self._num_sequences = 1
        self._expected_tokens = self._expected_steps = 0.0
        self._rates: list[float] = []  # of standing, by position
        self._seconds: list[float] = []  # of a round, by its drafts

    def wanted(self, limit: int, lag: int = 0, num_sequences: int = 1) -> int:
        """The number of drafts for the next round; 0 is a plain step.

        Where none is expected to pay, the cheapest number is drafted now and then, in case the text
        has changed.

        Args:
            limit: The most that make sense.
            lag: Tokens that the drafter has to catch up with first.
            num_sequences: How many decode together, all like this one.
        """
        return self.together([self], [limit], [lag], num_sequences)[0]

    @staticmethod
    @override
    def together(
        policies: Sequence["MeasuredLength"],
        limits: Sequence[int],
        lags: Sequence[int],
        num_sequences: int,
    ) -> list[int]:
        """What ``wanted`` says for each of some sequences that share the costs of a round.

        Nobody drafts where that doesn't pay for all of them, and where it does, each so many up to
        the common number as are worth their places in the target's forward.
        """
        costs, number = policies[0].costs, len(policies)
        most = min(max(limits), policies[0].num_draft_tokens)
        seconds = costs.rounds(most, num_sequences)
        tallies = [policy.acceptance.tally for policy in policies]
        tried, stood = map(sum, zip(*tallies, strict=True))
        chances = []
        for policy, limit, lag, own in zip(policies, limits, lags, tallies, strict=True):
            policy._rates = policy.acceptance.by_position((tried - own[0], stood - own[1]))
            policy._seconds, policy._confidences, policy._given_up = seconds, [], 0
            policy._num_sequences = num_sequences
            policy._extra = lag * costs.read * num_sequences  # the others wait, or read likewise
            chances.append(list(accumulate(policy._rates[: min(limit, most)], operator.mul)))
        horizons = [min(limit + 1, MEMORY) for limit in limits]  # that catching up is good for
        extra = sum(policy._extra for policy in policies)
        planned, rate = common_length(
            seconds, chances, extra / sum(horizons), WORTH + CROWD * (num_sequences - 1)
        )
        for policy, mine in zip(policies, chances, strict=True):
            if len(mine) == policy.num_draft_tokens:  # near the end even a good draft may not pay
                policy._pays = planned > 0
        probing = False
        if most > 0 and costs.is_plain_stale(num_sequences):
            planned = 0
        elif most > 0 and planned == 0:
            cheapest = min(range(1, most + 1), key=seconds.__getitem__)
            loss = (seconds[cheapest] + extra / number) / seconds[0] - 1
            rested = max(policy._plain_ct for policy in policies) >= PROBE_GAP
            probing = rested and costs.may_lose(loss * number)
            planned = cheapest if probing else 0
        checking = seconds[planned] - costs.drafts(planned, num_sequences) - seconds[0]
        for policy, mine, horizon in zip(policies, chances, horizons, strict=True):
            policy._rate, policy._probing = rate, probing
            policy._planned = min(planned, len(mine))
            if number > 1 and planned and not probing:
                reading = rate * policy._extra / horizon
                policy._planned = worth_checking(mine[:planned], rate * checking / planned, reading)
        return [policy._planned for policy in policies]

    @property
    def go_on(self) -> Callable[[float], bool]:
        """Whether another draft pays, after one to which the draft gives this probability."""
        return self._go_on

    def _go_on(self, confidence: float) -> bool:
        self._confidences.append(believed(confidence))
        done = len(self._confidences)
        chance, gain = self._chances(done)[-1], 0.0
        for count in range(done + 1, self._planned + 1):
            chance *= self._rates[count - 1]
            gain += chance
            if gain > self._rate * (self._seconds[count] - self._seconds[done]):
                return True
        return False

    def _chances(self, num_proposed: int) -> list[float]:
        """For each draft of this round that it stands with all before it, as expected."""
        known = [self.acceptance.of(confidence) for confidence in self._confidences]
        return list(accumulate((known + self._rates[len(known) :])[:num_proposed], operator.mul))

    def keep(self, num_proposed: int) -> int:
        """How many are worth checking, now that it is known how sure the draft was of each."""
        best, kept, tokens = 0.0, 0, 0.0
        plain = self._seconds[0]
        for count, chance in enumerate(self._chances(num_proposed), 1):
            tokens += chance
            checking = self._seconds[count] - self.costs.drafts(count, self._num_sequences) - plain
            if tokens - self._rate * checking > best:
                best, kept = tokens - self._rate * checking, count
        self._given_up = 0 if kept else num_proposed
        return kept

    def observe(self, num_proposed: int, num_correct: int) -> None:
        """Enter what became of the round's drafts; that none came is as bad as a wrong one."""
        self._num_compared += min(num_proposed, num_correct + 1)
        if self._given_up:
            drafting = self.costs.drafts(self._given_up, self._num_sequences) + self._extra
            steps = 1 + drafting / self._seconds[0]
            self.acceptance.expect(*self._chances(1))
            chances = []
        else:
            num_proposed = max(num_proposed, min(self._planned, 1))
            extra = self._extra * bool(num_proposed)
            steps = (self._seconds[num_proposed] + extra) / self._seconds[0]
            chances = self._chances(num_proposed)
            self.acceptance.observe(self._confidences, num_proposed, num_correct)
        self._plain_ct = 0 if self._planned else self._plain_ct + 1
        self._expected_tokens += 1 + sum(chances)
        self._expected_steps += steps
        lost = max(0.0, steps - num_correct - 1) if self._probing else 0.0
        self.costs.count_tokens(num_correct + 1, lost)

    def wait(self) -> None:
        """Enter a round that went without its drafts, and isn't entered here else."""
        self._plain_ct += 1

    @property
    def predicted_speedup(self) -> float | None:
        """What the rounds so far were expected to gain over plain decoding."""
        return self._expected_tokens / self._expected_steps if self._expected_steps else None

    def verdict(self) -> str | None:
        """Why nothing is drafted any more, by the largest cost."""
        if self._pays:
            return None
        costs, plain = self.costs, self.costs.round(0)
        shares = {
            "a draft token takes": costs.draft / plain,
            "checking one draft takes": costs.verify(2) / plain - 1,
        }
        cost = max(shares, key=shares.__getitem__)
        least = break_even(costs.rounds(self.num_draft_tokens))
        needed = "no acceptance is enough" if least is None else f"it takes {least:.0%}"
        seen = f"about {self.acceptance.by_position()[0]:.0%} of the drafts stand"
        if self._num_compared < TELLING:
            seen = "too few drafts were compared to say how many stand"
        if not self._num_compared:
            seen = "no draft was compared yet"
        return (
            f"drafting doesn't pay: {cost} {shares[cost]:.2f} of a plain step, {seen}, and {needed}"
        )


def common_length(
    seconds: Sequence[float],
    chances: Sequence[Sequence[float]],
    reading: float,
    worth: float = WORTH,
) -> tuple[int, float]:
    """How many drafts promise sequences that draft alike the most, and how much that is.

    Args:
        seconds: Of a round, by its drafts.
        chances: Of each sequence's drafts to stand with all before them.
        reading: Seconds per token that drafting costs beside the rounds.
        worth: Times the speed of plain decoding that drafts must promise.

    Returns:
        The number, 0 if plain decoding is about as good, and each sequence's tokens per second.
    """
    stood = [sum(each) / len(chances) for each in zip_longest(*chances, fillvalue=0.0)]
    tokens = accumulate(stood, initial=1.0)
    rates = [
        1 / (taken / brought + (reading if count else 0.0))
        for count, (taken, brought) in enumerate(zip(seconds, tokens, strict=True))
    ]
    best = max(range(len(rates)), key=rates.__getitem__)
    return (best, rates[best]) if rates[best] > worth * rates[0] else (0, rates[0])


def worth_checking(chances: Sequence[float], price: float, reading: float) -> int:
    """How many of a sequence's drafts are worth their places in the target's forward.

    Args:
        chances: Of each to stand with all before it.
        price: Of a place, in tokens.
        reading: Tokens that are lost per token that drafting brings, for what has to be read first.
    """
    gains = [0.0, *accumulate(chance - price for chance in chances)]
    best = max(range(len(gains)), key=gains.__getitem__)
    return best if gains[best] > reading * (1 + sum(chances[:best])) else 0


def best_length(seconds: Sequence[float], acceptance: float) -> tuple[int, float]:
    """The best fixed number of drafts where each stands with one chance, and its speed-up.

    Args:
        seconds: Of a round, by its drafts, as ``Costs.rounds`` has them.
        acceptance: The chance.
    """
    tokens = accumulate(acceptance**count for count in range(len(seconds)))
    speeds = [brought * seconds[0] / taken for brought, taken in zip(tokens, seconds, strict=True)]
    best = max(range(len(speeds)), key=speeds.__getitem__)
    return best, speeds[best]


def break_even(seconds: Sequence[float]) -> float | None:
    """The acceptance from which drafting pays, to a percent; None if it never does."""
    percents = (percent / 100 for percent in range(1, 101))
    return next((rate for rate in percents if best_length(seconds, rate)[0]), None)
