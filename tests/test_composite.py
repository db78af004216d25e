"""Several drafters as one: who drafts when, what it costs, and that all are looked after."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specdec import (
    CompositeDrafter,
    Draft,
    Drafter,
    DraftRequest,
    ModelDrafter,
    PromptLookupDrafter,
    RuntimeFailure,
    SamplingParams,
    SpeculativeDecoder,
    SuffixDrafter,
)
from specdec.rejection import RatioSampler, rejection_plan
from specdec.testing import TableBackend, VirtualClock

NEW = 200


class Known(Drafter):
    """Knows what comes and proposes it, so often as it says; costs nothing."""

    def __init__(self, text: Sequence[int], *, share: float = 1.0) -> None:
        self.text, self.share = list(text), share
        self.rng = np.random.default_rng(0)
        self.asked = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.asked += 1
        drafts = []
        for request in requests:
            begin = len(request.ids)
            right = self.text[begin : begin + request.num_tokens]
            wrong = [1 - min(token, 1) for token in right]
            drafts.append(Draft(right if self.rng.random() < self.share else wrong))
        return drafts


def timed_pair(
    agreement: float, draft_seconds: float
) -> tuple[TableBackend, TableBackend, VirtualClock]:
    """Models that take virtual time: 1 s for a target's forward, a little for each token more."""
    clock = VirtualClock()
    base = TableBackend.random(26, seed=4)
    target = TableBackend(base.table, clock=clock, cost=lambda width: 1 + 0.02 * width)
    table = base.sibling(agreement).table
    draft = TableBackend(table, clock=clock, cost=lambda width: draft_seconds)
    return target, draft, clock


def seconds_of(target: TableBackend, draft: Any, clock: VirtualClock) -> tuple[float, Any]:
    decoder = SpeculativeDecoder(target, draft, clock=clock, keep_caches=0)
    decoder.calibrate([1, 2])
    before = clock.seconds
    result = decoder.generate([1, 2], max_new_tokens=NEW)
    return clock.seconds - before, result


def the_text(target: TableBackend) -> list[int]:
    return [1, 2, *SpeculativeDecoder(target).generate([1, 2], max_new_tokens=NEW).token_ids]


@pytest.mark.parametrize(
    ("share", "agreement", "draft_seconds", "best"),
    [
        (1.0, 0.0, 0.2, "Known"),  # both are right, and one is free
        (0.0, 0.0, 0.05, "ModelDrafter"),
        (0.3, 0.0, 0.02, "ModelDrafter"),
        (0.9, 0.3, 0.5, "Known"),
    ],
)
def test_who_promises_more_drafts(
    share: float, agreement: float, draft_seconds: float, best: str
) -> None:
    target, draft, clock = timed_pair(agreement, draft_seconds)
    text = the_text(target)
    mixed, result = seconds_of(target, [Known(text, share=share), draft], clock)
    model, _ = seconds_of(target, draft, clock)
    known, _ = seconds_of(target, [Known(text, share=share)], clock)
    tally = result.stats.by_drafter
    assert result.token_ids == text[2:]
    assert max(tally, key=lambda name: tally[name][1]) == best
    assert mixed <= 1.15 * min(model, known)


def test_a_lookup_that_is_always_wrong_costs_next_to_nothing() -> None:
    target, draft, clock = timed_pair(0.1, 0.05)
    text = the_text(target)
    wrong = Known(text, share=0.0)
    mixed, result = seconds_of(target, [wrong, draft], clock)
    alone, _ = seconds_of(target, draft, clock)
    assert wrong.asked >= result.stats.target_forward_ct - 2
    assert result.stats.by_drafter.get("Known", (0, 0))[0] <= 4
    assert mixed <= 1.03 * alone


def test_a_lookup_that_is_always_wrong_is_not_used_where_there_is_no_model() -> None:
    target, _, clock = timed_pair(0.0, 0.0)
    text = the_text(target)
    members = [Known(text, share=0.0), Known(text, share=0.0)]
    _, result = seconds_of(target, members, clock)
    assert members[1].asked >= result.stats.target_forward_ct - 2
    assert result.stats.verify_ct < 10


def test_a_lookup_proves_itself_without_being_used() -> None:
    """It begins distrusted; what comes out says that it was right, and it takes over."""
    target, draft, clock = timed_pair(0.0, 0.3)
    drafter = Known(the_text(target))
    _, result = seconds_of(target, [drafter, draft], clock)
    tally = result.stats.by_drafter
    assert tally["Known"][1] > 0.8 * NEW
    assert 0 < tally["ModelDrafter"][0] < 0.2 * NEW


def test_a_model_that_was_passed_over_gets_a_round_now_and_then() -> None:
    target, draft, clock = timed_pair(0.0, 0.1)
    text = [1, 2, *SpeculativeDecoder(target).generate([1, 2], max_new_tokens=3000).token_ids]
    decoder = SpeculativeDecoder(target, [Known(text), draft], clock=clock, keep_caches=0)
    result = decoder.generate([1, 2], max_new_tokens=3000)
    rounds = sum(result.stats.propose_histogram)
    assert result.token_ids == text[2:]
    assert 20 < result.stats.draft_forward_ct < rounds


@pytest.mark.parametrize("place", [0, 1])
def test_a_model_that_is_always_wrong_is_tried_again_wherever_it_stands(place: int) -> None:
    target, draft, clock = timed_pair(0.0, 0.1)
    wrong, slow = (TableBackend(-draft.table, clock=clock, cost=lambda _: 20.0) for _ in range(2))
    wrong.cost = draft.cost
    members = [slow, slow]
    members[place] = wrong
    decoder = SpeculativeDecoder(target, members, clock=clock, keep_caches=0)
    decoder.generate([1, 2], max_new_tokens=500)
    assert wrong.forward_ct > 40
    assert slow.forward_ct < 10


def test_a_members_bad_moment_is_forgotten() -> None:
    target, draft, clock = timed_pair(0.0, 0.05)
    draft.cost = lambda width: 50.0 if draft.forward_ct < 6 else 0.05
    decoder = SpeculativeDecoder(target, [draft, Known([])], clock=clock, keep_caches=0)
    speeds = [decoder.generate([1, 2], max_new_tokens=NEW).stats.accept_length for _ in range(8)]
    assert speeds[-1] is not None
    assert speeds[-1] > 4


def test_members_that_propose_nothing_leave_the_turn_to_the_next() -> None:
    class Mute(Drafter):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            return [Draft((), reason="it is mute") for _ in requests]

    target = TableBackend.random(9, seed=5)
    decoder = SpeculativeDecoder(target, [Mute(), Mute(), target], num_draft_tokens=3)
    result = decoder.generate([1, 2], max_new_tokens=40)
    assert set(result.stats.by_drafter) == {"ModelDrafter"}
    assert result.stats.accept_rate == 1
    assert result.stats.reason is None
    silent = SpeculativeDecoder(target, [Mute(), Mute()]).generate([1], max_new_tokens=9)
    assert silent.stats.reason == "it is mute"


def test_a_short_draft_context_leaves_the_rest_to_the_lookup() -> None:
    target = TableBackend.random(4, seed=3)
    draft = target.sibling(0.0, max_context=20)
    decoder = SpeculativeDecoder(target, ["lookup", draft], num_draft_tokens=4)
    result = decoder.generate([1, 2], max_new_tokens=200)
    assert result.stats.by_drafter["PromptLookupDrafter"][1] > 100
    assert draft.fed_ct <= 20 + 4


def test_members_of_a_kind_are_told_apart() -> None:
    target = TableBackend.random(4)
    drafter = CompositeDrafter(
        [SuffixDrafter(), ModelDrafter(target, target.vocab), SuffixDrafter()]
    )
    assert drafter.names == ["SuffixDrafter", "ModelDrafter", "SuffixDrafter 2"]
    assert drafter.info()["runtime"] == "table"
    assert CompositeDrafter([SuffixDrafter()]).info()["runtime"] == "lookup"


def test_what_is_no_composite_is_refused() -> None:
    target = TableBackend.random(4)
    with pytest.raises(ValueError, match="give at least one"):
        SpeculativeDecoder(target, [])
    with pytest.raises(ValueError, match="name a model behind it"):
        SpeculativeDecoder(target, "suffix+")
    bad: Any = ["suffix", 7]
    with pytest.raises(TypeError, match="but int has no vocab"):
        SpeculativeDecoder(target, bad)


def test_a_member_that_answers_wrongly_is_named() -> None:
    class Wordy(Drafter):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            return [Draft([1] * 99) for _ in requests]

    target = TableBackend.random(4)
    with pytest.raises(ValueError, match="Wordy proposed 99 tokens where at most"):
        SpeculativeDecoder(target, [Wordy(), target]).generate([1], max_new_tokens=9)

    class Foreign(Drafter):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            return [Draft([4]) for _ in requests]

    inner = CompositeDrafter([Foreign()])
    with pytest.raises(ValueError, match=r"Foreign proposed \[4\], but ids are 0 to 3"):
        SpeculativeDecoder(target, [inner, target]).generate([1], max_new_tokens=9)


@pytest.mark.parametrize("confidence", [-1.0, -1e-9, 1.5, float("nan"), float("inf")])
def test_a_confidence_that_is_no_probability_is_none(confidence: float) -> None:
    told: list[bool] = []

    class Odd(Drafter):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            for request in requests:
                if request.go_on is not None:
                    told.append(request.go_on(confidence))
            return [Draft([1]) for _ in requests]

    target = TableBackend.random(4, seed=3)
    draft: Any
    for draft in (Odd(), [Odd()], [Odd(), target.sibling(0.3)]):
        result = SpeculativeDecoder(target, draft).generate([1, 2], max_new_tokens=30)
        assert [1, 2, *result.token_ids] == the_text(target)[:32]
    assert told


class Watched(Drafter):
    """Counts what is open; raises where it is told to."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.open_ct, self.clear_ct, self.heard = fails, 0, 0, [0]

    def _may_fail(self, where: str) -> None:
        if where == self.fails:
            raise RuntimeFailure(where)

    def open(self, prompt_ids: Sequence[int]) -> int:
        self._may_fail("open")
        self.open_ct += 1
        return len(prompt_ids)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self._may_fail("propose")
        return [Draft([]) for _ in requests]

    def commit(self, state: int, ids: Sequence[int]) -> None:
        self._may_fail("commit")
        self.heard.append(len(ids))

    def close(self, state: int) -> None:
        self.open_ct -= 1
        self._may_fail("close")

    def clear(self) -> None:
        self.clear_ct += 1
        self._may_fail("clear")


@pytest.mark.parametrize("fails", ["open", "propose", "commit", "close", "clear", ""])
@pytest.mark.parametrize("place", [0, 1])
def test_every_member_is_closed_and_cleared_whichever_raises(fails: str, place: int) -> None:
    target = TableBackend.random(6, seed=3)
    members: list[Any] = [Watched(), target]
    members.insert(2 * place, Watched(fails))
    decoder = SpeculativeDecoder(target, members, num_draft_tokens=2)

    def run() -> None:
        decoder.generate_batch([[1], [2, 3]], max_new_tokens=6)
        decoder.clear()

    if fails and (fails, place) != ("propose", 1):  # the model has had the turn by then
        with pytest.raises(RuntimeFailure, match=fails):
            run()
    else:
        run()
        assert all(w.heard[-1] == 8 for w in members if isinstance(w, Watched))
    if fails != "clear":
        members[2 * place].fails = ""
        decoder.clear()
    assert all(w.open_ct == 0 and w.clear_ct > 0 for w in members if isinstance(w, Watched))
    assert target.open_caches == 0


def test_a_composite_works_alone_and_in_several_decoders() -> None:
    target = TableBackend.random(6, seed=3)
    drafter = CompositeDrafter([PromptLookupDrafter(1, 2), ModelDrafter(target, target.vocab)])
    state = drafter.open([1, 2])
    sampler = RatioSampler(SamplingParams(temperature=1.0), target.vocab, 2, plan=rejection_plan)
    (draft,) = drafter.propose([DraftRequest(state, [1, 2], 3, sampler)])
    assert (len(draft.token_ids), draft.by) == (3, "ModelDrafter")
    drafter.close(state)
    plain = SpeculativeDecoder(target).generate([1, 2], max_new_tokens=50).token_ids
    for length in (2, 5):
        decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=length)
        assert decoder.generate([1, 2], max_new_tokens=50).token_ids == plain


def test_a_guess_of_a_trial_says_nothing_of_a_lookup() -> None:
    """A proposal that isn't a guess stands with the target's probability, also where they agree."""
    target = TableBackend.random(3, seed=1)
    draft = target.sibling(1.5)
    count, token = 4000, 0
    stood = 0
    for seed in range(count):
        params = SamplingParams(temperature=1.0, seed=seed)
        sampler = RatioSampler(params, target.vocab, 2, plan=rejection_plan)
        sampler.guess(draft.table[0, 1][None], [0, 1], [])
        sampler.forget()
        rows = np.stack([target.table[0, 1], target.table[1, token]])
        stood += sampler.verify([token], rows, [0, 1])[1]
    weights = np.exp(target.table[0, 1].astype(float))
    chance = weights[token] / weights.sum()
    assert abs(stood / count - chance) < 4 * np.sqrt(chance * (1 - chance) / count)
