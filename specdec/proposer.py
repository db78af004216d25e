"""The drafter's side of a round: asked as the policy says, checked, and timed."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec.costs import READ_TOKENS, Costs
from specdec.drafters import Draft, Drafter, DraftRequest
from specdec.request import Request

__all__ = ["Proposer"]

TRIAL_TOKENS = 3


class Proposer:
    """Gets drafts for the sequences of a round.

    Args:
        drafter: Where they come from.
        num_ids: The size of the target's vocabulary.
        costs: Where its times are entered.
        clock: In seconds.
        may_stop: Whether a drafter may be told to stop when it is unsure. Block verification takes
            the length of a block as given beforehand.
        may_choose: Whether drafts may be given up for how unsure they are. The papers' rules need
            every draft that was drawn.
    """

    def __init__(
        self,
        drafter: Drafter,
        num_ids: int,
        costs: Costs,
        clock: Callable[[], float],
        *,
        may_stop: bool,
        may_choose: bool,
    ) -> None:
        self.drafter = drafter
        self._num_ids = num_ids
        self._costs = costs
        self._clock = clock
        self._may_stop = may_stop
        self._may_choose = may_choose

    def requests(
        self, active: Sequence[Request], limits: Sequence[int], *, may_read: bool
    ) -> dict[int, DraftRequest]:
        """What to ask for, by the number of the sequence.

        Args:
            active: All that decode.
            limits: The most drafts that a round of each may check.
            may_read: Whether those who lag far behind may read first. Not while another text is
                being read: it will be there soon, and change what pays.
        """
        requests: dict[int, DraftRequest] = {}
        lags, planned = self._planned(active, limits, may_read=may_read)
        for index, count in planned.items():
            self._catch_up(active[index], lags[index])
            go_on = active[index].policy.go_on if self._may_stop else None
            requests[index] = self._request(active[index], active[index].ids, count, go_on)
        return requests

    def propose(
        self, active: Sequence[Request], requests: Mapping[int, DraftRequest]
    ) -> list[Draft]:
        """One draft per sequence, empty where none was asked for or is worth checking."""
        drafts = [Draft(())] * len(active)
        answers = self.ask(list(requests.values()))
        for index, draft in zip(requests, answers, strict=True):
            if self._may_choose and draft.token_ids:
                kept = active[index].policy.keep(len(draft.token_ids))
                draft = draft._replace(token_ids=draft.token_ids[:kept])
            drafts[index] = draft
        return drafts

    def try_out(self, sequence: Request, limit: int, ids: Sequence[int] | None = None) -> None:
        """Draft twice for the times alone; the first may be slow for being the first.

        Args:
            sequence: What to draft for.
            limit: The most drafts that make sense.
            ids: Its beginning, behind which to draft; None: all of it.
        """
        if limit < 1:
            return
        if ids is None or len(ids) == len(sequence.ids):
            ids = sequence.ids
            self._catch_up(sequence, self.drafter.lag(sequence.draft_state, ids))
        for _ in range(2):
            self.ask([self._request(sequence, ids, min(TRIAL_TOKENS, limit), None)])
            self.drafter.commit(sequence.draft_state, ids)

    def time_again(self, active: Sequence[Request], limits: Sequence[int]) -> None:
        """Try the drafter out if its times were forgotten, without reading if it can."""
        for sequence, limit in zip(active, limits, strict=True):
            if limit > 0 and sequence.policy.wants_trial:
                started = self._clock()
                known = self.drafter.known_part(sequence.draft_state, sequence.ids)
                self.try_out(sequence, limit, known)
                seconds = self._clock() - started
                sequence.stats.prefill_seconds += seconds
                steps = seconds / self._costs.rounds(0, len(active))[0]
                self._costs.count_trial(steps * len(active))
                return

    def read_on(
        self, number: int, active: Sequence[Request], limits: Sequence[int], room: int
    ) -> bool:
        """Let the drafter read a part of a prompt; whether no more is to be read before drafts.

        Args:
            number: Which sequence's, one that the target has read.
            active: All that decode or read together: nothing is read that they won't draft for.
            limits: The most drafts that a round of each may check.
            room: The most ids to read.
        """
        sequence = active[number]
        lag = self.drafter.lag(sequence.draft_state, sequence.ids)
        if lag < READ_TOKENS or number not in self._planned(active, limits, may_read=True)[1]:
            return True
        if 0 < lag * self._costs.read <= self._costs.verify(len(active)):  # as of a lookup
            room = max(room, lag + 1)
        # A model reads one id more than it lags behind.
        ids = sequence.ids[: len(sequence.ids) - max(0, lag + 1 - room)]
        sequence.stats.prefill_seconds += self.read(sequence.draft_state, ids, min(lag, room))
        left = self.drafter.lag(sequence.draft_state, sequence.ids)
        return left < READ_TOKENS or left >= lag

    def _planned(
        self, active: Sequence[Request], limits: Sequence[int], *, may_read: bool
    ) -> tuple[dict[int, int], dict[int, int]]:
        """By the number of the sequence, its lag and how many drafts it is to have, if any."""
        asked = [index for index, each in enumerate(active) if each.drafter is not None]
        if not asked:
            return {}, {}
        sequences = [active[index] for index in asked]
        lags = [self.drafter.lag(each.draft_state, each.ids) for each in sequences]
        counts = sequences[0].policy.together(
            [each.policy for each in sequences],
            [limits[index] for index in asked],
            lags,
            len(active),
            may_read=may_read,
        )
        planned = {index: count for index, count in zip(asked, counts, strict=True) if count > 0}
        return dict(zip(asked, lags, strict=True)), planned

    def _request(
        self,
        sequence: Request,
        ids: Sequence[int],
        count: int,
        go_on: Callable[[float], bool] | None,
    ) -> DraftRequest:
        sequence.sampler.forget()
        state, sampler, policy = sequence.draft_state, sequence.sampler, sequence.policy
        return DraftRequest(state, ids, count, sampler, go_on, policy, self._num_ids)

    def _catch_up(self, sequence: Request, lag: int) -> None:
        if lag >= READ_TOKENS:  # fewer are read with the first draft
            seconds = self.read(sequence.draft_state, sequence.ids, lag)
            sequence.stats.prefill_seconds += seconds

    def read(self, state: Any, ids: Sequence[int], lag: int) -> float:
        """Let the drafter read what it lags behind; the seconds that it took."""
        started = self._clock()
        self.drafter.catch_up(state, ids)
        seconds = self._clock() - started
        self._costs.count_read(seconds, lag)
        return seconds

    def ask(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, checked and timed."""
        lag = sum(self.drafter.lag(request.state, request.ids) for request in requests)
        started = self._clock()
        answers = self.drafter.propose(requests)
        seconds, reading = self._clock() - started, lag * self._costs.read
        name = type(self.drafter).__name__
        if not isinstance(answers, Sequence):
            raise TypeError(
                f"{name}.propose gave {type(answers).__name__}: it has to return a list with one "
                "Draft for each request, such as [Draft([])]"
            )
        if len(answers) != len(requests):
            raise ValueError(
                f"{name} gave {len(answers)} drafts for {len(requests)} requests: give one each, "
                "in order"
            )
        drafts = [
            self._checked(draft, request) for draft, request in zip(answers, requests, strict=True)
        ]
        is_silent = hasattr(self.drafter, "backend") and not any(each.forward_ct for each in drafts)
        if reading <= seconds / 2 and not is_silent:  # else it tells little of a draft
            longest = max(1, *(len(draft.token_ids) for draft in drafts))
            self._costs.count_draft(seconds - reading, longest, len(requests))
        return drafts

    def _checked(self, draft: Draft, request: DraftRequest) -> Draft:
        name, limit, size = type(self.drafter).__name__, request.num_tokens, request.num_ids
        if not isinstance(draft, Draft):
            raise TypeError(f"{name} proposed {draft!r}: make it a Draft, such as Draft([1, 2])")
        try:
            token_ids = list(map(operator.index, draft.token_ids))
        except TypeError:
            raise TypeError(f"{name} proposed {draft.token_ids!r}, but ids are integers") from None
        if len(token_ids) > limit:
            raise ValueError(
                f"{name} proposed {len(token_ids)} tokens where at most {limit} were asked for"
            )
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < size:
            raise ValueError(f"{name} proposed {token_ids}, but ids are 0 to {size - 1}")
        return draft._replace(token_ids=token_ids)
