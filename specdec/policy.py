"""How many tokens to draft: as many as bring the most tokens per second, by measured times.

Speeds are compared as tokens per round over seconds per round. With ``p_j`` the chance that the
first j drafts stand, a round of k drafts brings ``1 + p_1 + ... + p_k`` tokens and takes k draft
steps, a target forward over k + 1 tokens, and the loop's own work. k = 0 is plain decoding.
"""

import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, zip_longest
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from specdec.costs import READ_TOKENS, Costs

__all__ = [
    "TELLING",
    "Acceptance",
    "FixedLength",
    "MeasuredLength",
    "best_length",
    "break_even",
]

MEMORY = 96  # tokens after which what was seen counts 1/e
# What acceptance may be, and how likely that is to begin with: most pairs are chosen well, and a
# useless one shows soon.
RATES = np.array((0.99, 0.96, 0.9, 0.8, 0.65, 0.5, 0.3, 0.15, 0.02))
ODDS = np.array((0.45, 0.25, 0.08, 0.05, 0.05, 0.04, 0.03, 0.02, 0.03))
# What a draft that was tried adds to the logarithms of those odds, and one that stood besides.
EVIDENCE = np.stack([np.log(1 - RATES), np.log(RATES / (1 - RATES))])
NEIGHBOURS = 8.0  # drafts of other texts that count for this one, at most
POOL_WEIGHT = 4.0  # what all positions say of each
WORTH = 1.03  # times the speed of plain decoding that drafts must promise, as costs are noisy
CROWD = 0.04  # and so much more for every neighbour, who seldom drafts alike
IN_VAIN = 1.5  # times what reading takes that it must bring: a text may turn out a hard one
PROBE_GAP = 4  # plain steps after which to plan anew where they are best, and perhaps to probe
CONFIDENCE_WEIGHT = 4.0  # what a confidence says by itself, in drafts seen
DOUBT_WEIGHT = 1.25  # failures after which it is believed half how much confidence is worth here
CONFIDENCES = (0.3, 0.5, 0.7, 0.85, 0.95)  # where what a draft thinks of itself is divided
TELLING = 8  # drafts that have to be compared before anyone is told what they are worth


class Acceptance:
    """How often the drafts of one text stand, as seen lately, by position and by confidence."""

    def __init__(self, max_draft_tokens: int) -> None:
        num_kinds = len(CONFIDENCES) + 1
        self._counts = np.zeros((max_draft_tokens + num_kinds + 1, 2))  # these three are its parts
        self.positions = self._counts[:max_draft_tokens]  # tried, stood
        self._confidences = self._counts[max_draft_tokens:-1]  # the same
        self._failures = self._counts[-1]  # expected by confidence, and seen
        self._known: dict[float, float] = {}  # chances by confidence, until something is entered

    def by_position(self) -> list[float]:
        """The chance at each position that a draft stands if those before it did."""
        return standing([self])[0]

    def of(self, confidence: float) -> float:
        """The chance of a draft to which the draft model gave this probability."""
        known = self._known.get(confidence)
        if known is not None:
            return known
        tried, stood = map(float, self._confidences[bisect_left(CONFIDENCES, confidence)])
        expected, seen = map(float, self._failures)
        fails = (seen + DOUBT_WEIGHT) / (expected + DOUBT_WEIGHT) * doubt(confidence)
        stands = max(0.0, 1.0 - fails)
        chance = (stood + CONFIDENCE_WEIGHT * stands) / (tried + CONFIDENCE_WEIGHT)
        self._known[confidence] = chance
        return chance

    def expect(self, chance: float) -> None:
        """Enter a round whose first draft was given up, for so small was its chance."""
        self._age(1)
        self.positions[0] += 1, chance

    def _age(self, num_tokens: int) -> None:
        self._known.clear()
        self._counts *= math.exp(-num_tokens / MEMORY)

    def observe(self, confidences: Sequence[float], num_proposed: int, num_correct: int) -> None:
        """Enter a round: the tokens it brought make what came before count less."""
        self._age(num_correct + 1)
        num_tried = min(num_correct + 1, num_proposed)
        self.positions[:num_tried, 0] += 1
        self.positions[:num_correct, 1] += 1
        for position, confidence in enumerate(confidences[:num_tried]):
            stood = position < num_correct
            self._confidences[bisect_left(CONFIDENCES, confidence)] += 1, stood
            self._failures += doubt(confidence), not stood


def standing(texts: Sequence[Acceptance]) -> list[list[float]]:
    """The chance, by text and position, that a draft stands if those before it did.

    Args:
        texts: Those that are decoded together. They tell little of each other, but something while
            they are new.
    """
    seen = np.array([text.positions for text in texts])
    own = seen.sum(axis=1)
    others = own.sum(axis=0) - own
    tally = own + others * (NEIGHBOURS / np.maximum(NEIGHBOURS, others[:, :1]))
    odds = ODDS * np.exp(tally @ EVIDENCE)
    all_stand = odds @ powers(seen.shape[1] + 1)
    pooled = POOL_WEIGHT * all_stand[:, 1:] / all_stand[:, :-1]
    chances: list[list[float]] = ((seen[..., 1] + pooled) / (seen[..., 0] + POOL_WEIGHT)).tolist()
    return chances


@cache
def powers(count: int) -> NDArray[np.float64]:
    """The first so many powers of each of ``RATES``, from the 0th on."""
    return RATES[:, None] ** np.arange(count)


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
        *,
        may_read: bool = True,
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
    def wants_trial(self) -> bool:
        """Whether something should be drafted only to see how long it takes."""
        return False

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
        self._rate = 0.0  # tokens per second that each who drafts has to keep up with
        self._confidences: list[float] = []
        self._extra = 0.0  # seconds of the round before its first draft
        self._probing = False
        self._given_up = 0  # drafts, when none was kept
        self._plain_ct = 0  # steps since the last draft
        self._plain_for: int | None = None  # so many sequences, for whom plain steps were best
        self._num_compared = 0  # drafts
        self._num_drafting = 1  # sequences that draft in step
        self._stake = 0.0  # plain steps that drafts may take beyond what is hoped
        self._beside = 0  # drafts of the others, for which this one waits if it has none
        self._is_left_out = False  # others draft, and this one would have to read too much
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
        *,
        may_read: bool = True,
    ) -> list[int]:
        """What ``wanted`` says for each of some sequences that share the costs of a round.

        All draft, or all but those who would have to read much first, or nobody: whatever promises
        most. Who drafts does so up to a common number, and to what is worth its places in the
        target's forward.
        """
        costs, number = policies[0].costs, len(policies)
        is_due = policies[0]._plain_ct % PROBE_GAP == 0
        if not is_due and all(policy._plain_for == num_sequences for policy in policies):
            return [0] * number  # a few plain steps change little, and planning takes time
        chances: list[list[float]] = []
        rates = standing([policy.acceptance for policy in policies])
        for policy, limit, own in zip(policies, limits, rates, strict=True):
            policy._rates = own
            chances.append(list(accumulate(own[:limit], operator.mul)))
        # Seconds for each, and those like it, before the first draft.
        reading = [costs.reading(lag) * num_sequences / number for lag in lags]
        # Having read is good until a text ends, and its successor changes what pays. If texts end
        # anywhere up to twice their limit, the first of n does so at 2 / (n + 1) of it.
        horizons = [min((limit + 1) * 2 / (num_sequences + 1), MEMORY) for limit in limits]
        late = [lag >= READ_TOKENS for lag in lags]
        who: list[Sequence[Sequence[float]]] = [chances]
        read = [[] if is_late else mine for mine, is_late in zip(chances, late, strict=True)]
        if not may_read:
            who = [read]
        elif any(late) and not all(late):  # first: of equals, those who read nothing
            who.insert(0, read)
        plans = [plan_round(costs, each, reading, horizons, num_sequences) for each in who]
        plan = max(plans, key=lambda each: (each.num_drafts > 0, each.rate))
        planned, seconds, probing = plan.num_drafts, plan.seconds, False
        is_stale = costs.is_plain_stale(num_sequences)
        if is_stale:
            planned = 0
        elif planned == 0 and len(seconds) > 1:
            planned = min(range(1, len(seconds)), key=seconds.__getitem__)
            loss = (seconds[planned] + plan.reading) / seconds[0] - 1
            drafters = (p for p, mine in zip(policies, plan.chances, strict=True) if mine)
            rested = max(policy._plain_ct for policy in drafters) >= PROBE_GAP
            probing = rested and costs.may_lose(loss * number)
            planned = planned if probing else 0
        width = num_sequences + plan.num_drafting * planned
        stake = costs.at_stake(planned, width) if planned else 0.0
        if stake > 0:  # to hope anew is a probe, and may take longer than saved up; that is owed
            probing = costs.may_lose(0.0)
            planned = planned if probing else 0
        is_plain_best = plan.num_drafts == planned == 0 and not is_stale
        checking = seconds[planned] - costs.drafts(planned, plan.num_drafting) - seconds[0]
        for index, (policy, mine) in enumerate(zip(policies, plan.chances, strict=True)):
            # Else the end of the text is near, or another text is being read.
            if len(chances[index]) == policy.num_draft_tokens and may_read:
                policy._pays, policy._is_left_out = plan.num_drafts > 0, not mine
            policy._seconds, policy._num_drafting = seconds, plan.num_drafting
            policy._rate, policy._extra = plan.rate / plan.num_drafting, plan.reading
            policy._confidences, policy._given_up, policy._probing = [], 0, probing
            policy._planned = min(planned, len(mine))
            policy._beside = planned if number > 1 else 0
            policy._plain_for = num_sequences if is_plain_best else None
            policy._stake = (stake + plan.reading) / seconds[0] if stake else 0.0
            if number > 1 and policy._planned and not probing:
                policy._planned = worth_checking(
                    mine[:planned],
                    policy._rate * checking / planned,
                    plan.rate * reading[index] / horizons[index],
                )
        return [policy._planned for policy in policies]

    @property
    @override
    def wants_trial(self) -> bool:
        """Whether the times of drafts were forgotten, and other trials and probes are paid for."""
        return self.costs.forgot_drafts and self.costs.may_lose(0.0)

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
            checking = self._seconds[count] - self.costs.drafts(count, self._num_drafting) - plain
            if tokens - self._rate * checking > best:
                best, kept = tokens - self._rate * checking, count
        self._given_up = 0 if kept else num_proposed
        return kept

    def observe(self, num_proposed: int, num_correct: int) -> None:
        """Enter what became of the round's drafts; that none came is as bad as a wrong one."""
        self._num_compared += min(num_proposed, num_correct + 1)
        if self._given_up:
            drafting = self.costs.drafts(self._given_up, self._num_drafting) + self._extra
            steps = 1 + drafting / self._seconds[0]
            self.acceptance.expect(*self._chances(1))
            chances = []
        else:
            num_proposed = max(num_proposed, min(self._planned, 1))
            longest = num_proposed or self._beside
            extra = self._extra * bool(longest)
            steps = (self._seconds[longest] + extra) / self._seconds[0]
            chances = self._chances(num_proposed)
            self.acceptance.observe(self._confidences, num_proposed, num_correct)
        self._plain_ct = 0 if self._planned else self._plain_ct + 1
        self._expected_tokens += 1 + sum(chances)
        self._expected_steps += steps
        lost = max(0.0, max(steps - 1, self._stake) - num_correct) if self._probing else 0.0
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
        if self._pays and self._is_left_out:
            return "to read this text would take the draft longer than its drafts would save"
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


class RoundPlan(NamedTuple):
    """What sequences that decode together had best draft.

    Attributes:
        num_drafts: How many tokens each; 0 if plain decoding is about as good.
        rate: Tokens per second of all that promises.
        seconds: Of a round, by the drafts of each.
        num_drafting: How many sequences draft.
        reading: Seconds that these need to read before their first drafts.
        chances: Of each sequence's drafts to stand with all before them.
    """

    num_drafts: int
    rate: float
    seconds: list[float]
    num_drafting: int
    reading: float
    chances: Sequence[Sequence[float]]


def plan_round(
    costs: Costs,
    chances: Sequence[Sequence[float]],
    reading: Sequence[float],
    horizons: Sequence[float],
    num_sequences: int,
) -> RoundPlan:
    """The common number of drafts that promises the most tokens per second.

    Args:
        costs: Of their pair.
        chances: Of each sequence's drafts to stand with all before them; none if it can't draft.
        reading: Seconds that each needs before its first draft.
        horizons: Tokens for which having read is of use.
        num_sequences: How many decode together; more than are given are like these.
    """
    number = len(chances)
    drafting = max(1, num_sequences * sum(map(bool, chances)) // number)
    seconds = costs.rounds(max(map(len, chances)), num_sequences, drafting)
    stood = [sum(each) / number for each in zip_longest(*chances, fillvalue=0.0)]
    to_read = sum(each for each, mine in zip(reading, chances, strict=True) if mine)
    per_token = IN_VAIN * to_read * number / sum(horizons)
    rates = [
        num_sequences / (taken / brought + (per_token if count else 0.0))
        for count, (taken, brought) in enumerate(
            zip(seconds, accumulate(stood, initial=1.0), strict=True)
        )
    ]
    best = max(range(len(rates)), key=rates.__getitem__)
    if rates[best] <= (WORTH + CROWD * (num_sequences - 1)) * rates[0]:
        best = 0
    return RoundPlan(best, rates[best], seconds, drafting, to_read, chances)


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
