"""Several drafters as one: the cheap where they promise more, else the next, by measured times."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate
from sys import maxsize
from time import perf_counter
from typing import Any, NamedTuple

from typing_extensions import override

from specdec.costs import READ_TOKENS, Costs
from specdec.drafters import Draft, Drafter, DraftRequest
from specdec.policy import (
    CONFIDENCE_WEIGHT,
    CONFIDENCES,
    WORTH,
    Acceptance,
    FixedLength,
    MeasuredLength,
    believed,
)
from specdec.proposer import Proposer
from specdec.reuse import common_prefix

__all__ = ["CompositeDrafter", "MixedLength", "Source"]

EXPLORE = 64  # rounds in which a model was passed over, after which it gets one


class MemberCosts(Costs):
    """One drafter's times, beside what the target takes whoever drafts."""

    def __init__(self, whole: Costs) -> None:
        super().__init__()
        self._whole = whole

    @property
    @override
    def forward_ct(self) -> int:
        return self._whole.forward_ct

    @override
    def is_plain_stale(self, num_sequences: int = 1) -> bool:
        return self._whole.is_plain_stale(num_sequences)

    @override
    def reading(self, num_tokens: int) -> float:
        return num_tokens * self.read  # unknown is free: a member gets its try anyway

    @override
    def forget_drafts(self) -> None:
        super().forget_drafts()
        if self.forgot_drafts:
            self._lines.clear()

    @override
    def at_stake(self, num_tokens: int, width: int) -> float:
        return 0.0

    @override
    def count_tokens(self, num_tokens: int, lost: float) -> None:
        self._whole.count_tokens(num_tokens, lost)

    @override
    def may_lose(self, steps: float) -> bool:
        return self._whole.may_lose(steps)

    @override
    def rest(self, *, drafting: bool) -> float:
        return self._whole.rest(drafting=drafting)

    @override
    def verify(self, width: int, *, hopeful: bool = True) -> float:
        return self._whole.verify(width, hopeful=hopeful)


class Frequencies(Acceptance):
    """A lookup's: its confidence is a frequency. It has to prove itself, which costs nothing."""

    def __init__(self, max_draft_tokens: int) -> None:
        super().__init__(max_draft_tokens)
        for _ in range(2):
            self.observe((), 1, 0)

    @override
    def of(self, confidence: float) -> float:
        tried, stood = map(float, self._confidences[bisect_left(CONFIDENCES, confidence)])
        return (stood + CONFIDENCE_WEIGHT * confidence) / (tried + CONFIDENCE_WEIGHT)


class MemberLength(MeasuredLength):
    """What one member's drafts promise, for one text."""

    def __init__(self, costs: Costs, max_draft_tokens: int, *, is_lookup: bool) -> None:
        super().__init__(costs, max_draft_tokens)
        self._is_lookup = is_lookup
        if is_lookup:
            self.acceptance = Frequencies(max_draft_tokens)

    def plan(self, limit: int, lag: int, num_sequences: int, *, fixed: bool) -> int:
        """How many tokens to ask for; ``promised`` tells what for."""
        self.costs.forget_drafts()
        self._plain_for = None  # what it would be worth changes in plain steps too
        planned = self.wanted(limit, lag, num_sequences)
        if fixed:
            self._planned, self._probing = limit, False
            self._rate = self.promise(limit)
        return self._planned if fixed else planned

    def give_up(self) -> None:
        """Take the round for a plain step."""
        self._planned, self._confidences, self._probing = 0, [], False

    @property
    def promised(self) -> float:
        """Tokens per second of what was planned."""
        return self._rate if self._planned else 0.0

    def promise(self, num_tokens: int) -> float:
        """Tokens per second of a round with so many drafts."""
        return (1 + sum(self._chances(num_tokens))) / self._seconds[num_tokens]

    def weigh(self, confidences: Sequence[float], num_tokens: int, *, fixed: bool) -> int:
        """How many of the drafts at hand promise most; 0 if plain decoding does. Fixed: all."""
        self._confidences, self._probing = list(confidences), False
        rates = [
            (1 + stood) / seconds
            for stood, seconds in zip(
                accumulate(self._chances(num_tokens)), self._seconds[1:], strict=False
            )
        ]
        self._rate = rates[-1] if fixed else max(rates)
        self._planned = num_tokens if fixed else rates.index(self._rate) + 1
        if not fixed and self._rate < WORTH / self._seconds[0]:
            self._planned = 0
        return self._planned

    @override
    def keep(self, num_proposed: int) -> int:
        """How many of the drafts are worth checking; a lookup's were weighed before."""
        return num_proposed if self._is_lookup else super().keep(num_proposed)

    @property
    def expected(self) -> tuple[float, float]:
        """Tokens and plain steps that its rounds were expected to bring and take."""
        return self._expected_tokens, self._expected_steps


class Source(NamedTuple):
    """A member, asked, checked and timed for one target."""

    costs: Costs
    proposer: Proposer


class MixedLength(FixedLength):
    """How many tokens each member may draft and what it promises, for one text.

    Args:
        costs: The target's.
        sources: The members, with what they cost.
        is_lookup: Which of them run no model.
        num_draft_tokens: The most.
        fixed: Whether that number is wanted in every round.
    """

    def __init__(
        self,
        costs: Costs,
        sources: Sequence[Source],
        is_lookup: Sequence[bool],
        num_draft_tokens: int,
        *,
        fixed: bool,
    ) -> None:
        super().__init__(num_draft_tokens)
        self.costs, self.sources, self.fixed = costs, sources, fixed
        self.members = [
            MemberLength(source.costs, num_draft_tokens, is_lookup=lookup)
            for source, lookup in zip(sources, is_lookup, strict=True)
        ]
        self.chosen: int | None = None  # who drafts in this round
        self.num_passed = 0  # rounds since a model drafted

    @override
    def wanted(self, limit: int, lag: int = 0, num_sequences: int = 1) -> int:
        """The most that any member may be asked for."""
        if limit == 0:  # so nobody is
            self.plan(0, [0] * len(self.members), num_sequences)
        return super().wanted(limit)

    def plan(self, limit: int, lags: Sequence[int], num_sequences: int) -> list[int]:
        """How many tokens to ask each member for; a lookup may be asked for more."""
        self.chosen = None
        return [
            member.plan(limit, lag, num_sequences, fixed=self.fixed)
            for member, lag in zip(self.members, lags, strict=True)
        ]

    def needed(self, number: int) -> float:
        """Tokens per second that a member must promise, as those behind it do."""
        return max((member.promised for member in self.members[number + 1 :]), default=0.0)

    @override
    def keep(self, num_proposed: int) -> int:
        """How many of the drafts are worth checking."""
        if self.fixed or self.chosen is None:
            return num_proposed
        return self.members[self.chosen].keep(num_proposed)

    @override
    def observe(self, num_proposed: int, num_correct: int) -> None:
        """Enter what became of the round's drafts."""
        counted = self.members[-1 if self.chosen is None else self.chosen]
        if self.chosen is None:
            counted.give_up()
            num_proposed = 0
        counted.observe(num_proposed, num_correct)
        for member in self.members:
            if member is not counted:
                member.wait()
        self.chosen = None

    @property
    @override
    def go_on(self) -> Callable[[float], bool] | None:
        """Always: the members have their own."""
        return None if self.fixed else lambda confidence: True

    @property
    @override
    def predicted_speedup(self) -> float | None:
        """What the rounds so far were expected to gain over plain decoding."""
        tokens, steps = map(sum, zip(*(member.expected for member in self.members), strict=True))
        return None if self.fixed or not steps else tokens / steps


@dataclass(slots=True)
class _State:
    members: list[Any]
    due: set[int]  # who is likely to be asked, and should have read the text
    policy: MixedLength | None = None
    num_ids: int = 0  # at the last proposal
    # What lookups proposed and wasn't taken, with its confidences: what comes tells their worth.
    shadows: list[tuple[Acceptance, Sequence[int], Sequence[float]]] = field(default_factory=list)


class CompositeDrafter(Drafter):
    """Drafts by the first of its members that promises as many tokens per second as the next ones.

    Lookups, which run no model, are asked in every round; what they propose is compared with what
    comes out even when it isn't taken, so that their worth is always known. A member that runs a
    model drafts where it promises more than those before it, as measured when it did so last, and
    now and then besides.

    Args:
        drafters: The members, those that are cheap first.

    Raises:
        ValueError: There are none.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise ValueError("a composite of no drafters proposes nothing: give at least one")
        self.drafters = tuple(drafters)
        kinds = [type(drafter).__name__ for drafter in drafters]
        seen = [kinds[: number + 1].count(kind) for number, kind in enumerate(kinds)]
        self.names = [f"{k} {n}" if n > 1 else k for k, n in zip(kinds, seen, strict=True)]
        self._is_lookup = [not hasattr(drafter, "backend") for drafter in drafters]
        self._costs = Costs()  # where no decoder brings its own
        self._sources = self.sources(self._costs)

    def info(self) -> dict[str, object]:
        """What a model among the members runs on, and all members' names."""
        infos = [dict(d.backend.info()) for d in self.drafters if hasattr(d, "backend")]
        return {**(infos[0] if infos else {"runtime": "lookup"}), "drafters": list(self.names)}

    def sources(self, costs: Costs, clock: Callable[[], float] = perf_counter) -> Sequence[Source]:
        """The members beside a target of such costs, their own yet unknown."""
        each = [(MemberCosts(costs), drafter) for drafter in self.drafters]
        return [
            Source(mine, Proposer(drafter, maxsize, mine, clock, may_stop=True, may_choose=False))
            for mine, drafter in each
        ]

    def new_policy(
        self, costs: Costs, sources: Sequence[Source], num_draft_tokens: int, *, fixed: bool
    ) -> MixedLength:
        """What chooses between the members for one text."""
        return MixedLength(costs, sources, self._is_lookup, num_draft_tokens, fixed=fixed)

    @override
    def open(self, prompt_ids: Sequence[int]) -> _State:
        """Open it in every member."""
        states: list[Any] = []
        with ExitStack() as undo:
            for drafter in self.drafters:
                states.append(drafter.open(prompt_ids))
                undo.callback(drafter.close, states[-1])
            undo.pop_all()
        return _State(states, set(range(len(states))))

    @override
    def lag(self, state: _State, ids: Sequence[int]) -> int:
        """The most of a member that is likely to be asked: of all at first."""
        lags = [self.drafters[n].lag(state.members[n], ids) for n in state.due]
        return max(lags, default=0)

    @override
    def catch_up(self, state: _State, ids: Sequence[int]) -> None:
        """Let them read."""
        for number in state.due:
            self._read(number, state, ids)

    def _read(self, number: int, state: _State, ids: Sequence[int]) -> None:
        drafter, mine = self.drafters[number], state.members[number]
        if (lag := drafter.lag(mine, ids)) >= READ_TOKENS:
            if state.policy is None:
                drafter.catch_up(mine, ids)
            else:
                state.policy.sources[number].proposer.read(mine, ids, lag)

    @override
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Ask the members in turn, each for the sequences that none before it drafts for."""
        drafts = [Draft(()) for _ in requests]
        plans = [self._plan(request, len(requests)) for request in requests]
        waiting = [n for n, plan in enumerate(plans) if any(plan)]
        for number, name in enumerate(self.names):
            asked = [n for n in waiting if self._is_asked(number, requests[n], plans[n])]
            if not asked:
                continue
            confidences: list[list[float]] = [[] for _ in asked]
            inner = [
                self._request(number, requests[n], plans[n][number], heard)
                for n, heard in zip(asked, confidences, strict=True)
            ]
            policy = requests[asked[0]].state.policy
            answers = policy.sources[number].proposer.ask(inner)
            for n, heard, answer in zip(asked, confidences, answers, strict=True):
                if answer.forward_ct and self._is_lookup[number]:
                    self._is_lookup[number] = False  # it runs a model after all
                taken = self._taken(number, requests[n], answer, heard)
                reason = answer.reason or drafts[n].reason
                if taken.token_ids or answer.forward_ct:
                    # Who has drawn a draft has had its turn, or the draft's law would be another.
                    waiting.remove(n)
                    reason = answer.reason
                drafts[n] = taken._replace(by=name, reason=reason)
        return drafts

    def _plan(self, request: DraftRequest, num_sequences: int) -> list[int]:
        state, ids = request.state, request.ids
        if isinstance(request.policy, MixedLength):
            state.policy = request.policy
        elif state.policy is None:
            state.policy = self.new_policy(
                self._costs, self._sources, request.num_tokens, fixed=True
            )
        state.num_ids, state.shadows = len(ids), []
        policy = state.policy
        limit = min(request.num_tokens, policy.num_draft_tokens)
        lags = [
            drafter.lag(mine, ids)
            for drafter, mine in zip(self.drafters, state.members, strict=True)
        ]
        plan = policy.plan(limit, lags, num_sequences)
        policy.num_passed += 1
        state.due = set()
        if not policy.fixed and policy.costs.is_plain_stale(num_sequences):
            return []
        # What a lookup plans is what it is known for; the match at hand may be a better one.
        return [
            limit if is_lookup else count
            for is_lookup, count in zip(self._is_lookup, plan, strict=True)
        ]

    def _is_asked(self, number: int, request: DraftRequest, plan: Sequence[int]) -> bool:
        policy = request.state.policy
        if self._is_lookup[number]:
            return True
        return plan[number] > 0 and policy.members[number].promised >= policy.needed(number)

    def _request(
        self, number: int, request: DraftRequest, num_tokens: int, heard: list[float]
    ) -> DraftRequest:
        state = request.state
        state.due.add(number)
        self._read(number, state, request.ids)
        go_on: Callable[[float], bool] | None = None
        if self._is_lookup[number]:

            def go_on(confidence: float) -> bool:
                heard.append(believed(confidence))
                return True

        elif request.go_on is not None:
            go_on = state.policy.members[number].go_on
        return request._replace(
            state=state.members[number], num_tokens=num_tokens, go_on=go_on, policy=None
        )

    def _taken(
        self, number: int, request: DraftRequest, answer: Draft, heard: Sequence[float]
    ) -> Draft:
        """What of an answer is proposed; what ran a model must be, whatever it is."""
        state, policy = request.state, request.state.policy
        member, tokens = policy.members[number], answer.token_ids
        if not self._is_lookup[number]:
            policy.chosen, policy.num_passed = number, 0
            return answer
        if tokens:
            count = member.weigh(heard, len(tokens), fixed=policy.fixed)
            if count and member.promised >= policy.needed(number) and not self._explores(policy):
                policy.chosen = number
                return answer._replace(token_ids=tokens[:count])
            state.shadows.append((member.acceptance, tokens, heard))
        return answer._replace(token_ids=())

    def _explores(self, policy: MixedLength) -> bool:
        """Whether a model that was passed over for long should show what it is worth now."""
        pairs = zip(policy.members, self._is_lookup, strict=True)
        waits = any(member.promised for member, is_lookup in pairs if not is_lookup)
        return waits and policy.num_passed > EXPLORE

    @override
    def commit(self, state: _State, ids: Sequence[int]) -> None:
        """Tell them all, and see how good the lookups were that weren't taken."""
        new = ids[state.num_ids :]
        for acceptance, tokens, confidences in state.shadows if new else ():
            count = min(len(tokens), len(new))
            acceptance.observe(confidences[:count], count, common_prefix(tokens, new))
        state.shadows = []
        for drafter, mine in zip(self.drafters, state.members, strict=True):
            drafter.commit(mine, ids)

    @override
    def close(self, state: _State) -> None:
        """Close it in every member, whichever raises."""
        with ExitStack() as stack:
            for drafter, mine in zip(self.drafters, state.members, strict=True):
                stack.callback(drafter.close, mine)

    @override
    def clear(self) -> None:
        """Let every member forget."""
        with ExitStack() as stack:
            for drafter in self.drafters:
                stack.callback(drafter.clear)
