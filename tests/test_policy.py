"""How many tokens are drafted: near the best number, whatever drafts cost."""

import importlib.util
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec import Draft, Drafter, DraftRequest, SamplingParams, SpeculativeDecoder
from specdec.costs import Costs
from specdec.policy import (
    ODDS,
    PROBE_GAP,
    RATES,
    Acceptance,
    MeasuredLength,
    best_length,
    break_even,
    plan_round,
    standing,
)
from specdec.request import Verification
from specdec.testing import TableBackend, VirtualClock


def load_bench() -> ModuleType:
    path = Path(__file__).parents[1] / "bench" / "policy.py"
    spec = importlib.util.spec_from_file_location("bench_policy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench = load_bench()


def costs(draft: float, *verify: float) -> Costs:
    """Known for certain: ``verify[w]`` for a forward over w + 1 tokens."""
    found = Costs()
    for _ in range(3):
        for width, seconds in enumerate(verify, 1):
            found.count_verify(width, seconds)
        found.count_draft(4 * draft, 4)
    return found


@pytest.mark.parametrize("cell", bench.CELLS, ids=str)
def test_auto_is_near_the_best_fixed_length(cell: tuple[float, str, str]) -> None:
    """In hindsight; not slower than plain by more than 3 %; and as good as it says."""
    found = bench.run(cell, num_tokens=2048, seeds=[0])
    assert found.auto >= 0.95 * found.best
    assert found.auto >= 0.97
    assert found.predicted == pytest.approx(found.auto, rel=0.1)


def test_a_formula_of_the_field() -> None:
    """FIELD: at v = 1 and c = .05 an acceptance of .8 is best used by 8 drafts, for 3.09x."""
    cheap = costs(0.05, *[1.0] * 17)
    for acceptance, best, speedup in ((0.8, 8, 3.09), (0.6, 4, 1.92)):
        length, found = best_length(cheap.rounds(16), acceptance)
        assert length == best
        assert found == pytest.approx(speedup, abs=0.01)
    dear = costs(0.75, *[1.0] * 17)
    assert best_length(dear.rounds(16), 0.7)[0] == 0
    assert break_even(dear.rounds(16)) == pytest.approx(0.76, abs=0.011)
    assert break_even(costs(1.2, *[1.0] * 17).rounds(16)) is None


def test_an_unknown_width_is_tried_and_an_outlier_tried_again() -> None:
    few = Costs()
    few.count_verify(1, 1.0)
    few.count_verify(9, 2.0)
    assert few.verify(5) == 1.0  # what the next smaller one takes
    few.count_verify(5, 9.0)
    assert few.verify(5) == pytest.approx(1.5)  # no more than between its neighbours
    for _ in range(2):
        few.count_verify(5, 9.0)
    assert few.verify(5) == 9.0


def test_what_was_measured_once_in_a_bad_moment_is_forgotten() -> None:
    found = costs(0.1, 1.0, 50.0, 50.0)
    for _ in range(600):
        found.count_verify(1, 1.0)
    assert found.verify(3) == 1.0


def test_a_bad_first_measurement_does_not_switch_drafts_off_for_good() -> None:
    target = TableBackend.random(16, seed=1)
    target.clock = VirtualClock()
    target.cost = lambda tokens: 100.0 if target.forward_ct in range(2, 8) else 1.0
    draft = target.sibling(0.0)
    draft.clock, draft.cost = target.clock, lambda tokens: 8.0 if draft.forward_ct < 8 else 0.05
    decoder = SpeculativeDecoder(target, draft, clock=target.clock)
    for _ in range(8):
        result = decoder.generate([1, 2], max_new_tokens=200)
    assert result.stats.accept_length is not None
    assert result.stats.accept_length > 4


def test_a_hopeless_draft_does_not_even_read_the_prompt() -> None:
    target = TableBackend.random(16, seed=1)
    draft = target.sibling(9.0)
    target.clock = draft.clock = VirtualClock()
    draft.cost = lambda tokens: 3.0 * tokens
    decoder = SpeculativeDecoder(target, draft, clock=target.clock, keep_caches=0)
    decoder.generate([1, 2], max_new_tokens=64)
    before, started = draft.fed_ct, target.clock.seconds
    result = decoder.generate([1] * 50, max_new_tokens=64)
    assert draft.fed_ct == before
    assert target.clock.seconds - started == 49 + 64
    assert "drafting doesn't pay: a draft token takes 3.00 of a plain step" in str(
        result.stats.reason
    )


@pytest.mark.parametrize(
    ("drafts", "seen"),
    [
        (0, "no draft was compared yet, and no acceptance is enough"),
        (7, "too few drafts were compared to say how many stand, and no acceptance is enough"),
        (8, "about 2% of the drafts stand, and no acceptance is enough"),
    ],
)
def test_a_verdict_tells_what_was_seen(drafts: int, seen: str) -> None:
    policy = MeasuredLength(costs(3.0, *[1.0] * 17), 16)
    for _ in range(drafts):
        policy.wanted(16)
        policy.observe(1, 0)
    assert policy.wanted(16) == 0
    assert str(policy.verdict()).endswith(f"a draft token takes 3.00 of a plain step, {seen}")


def test_nothing_of_a_text_is_remembered_but_costs() -> None:
    """After a text that was always wrong, the next one starts as any other."""
    known = costs(0.1, *[1.0] * 17)
    fresh, used = MeasuredLength(known, 16), MeasuredLength(known, 16)
    for _ in range(50):
        used.observe(used.wanted(16), 0)
    assert MeasuredLength(known, 16).wanted(16) == fresh.wanted(16) > used.wanted(16)


def test_drafting_stops_where_the_draft_is_unsure() -> None:
    policy = MeasuredLength(costs(0.3, *[1.0] * 17), 16)
    for _ in range(40):  # what is sure stands, what isn't falls
        planned = policy.wanted(16)
        asked = [policy.go_on(0.99) for _ in range(planned - 1)]
        policy.observe(len(asked) + 1, planned)
    assert policy.wanted(16) > 3
    assert policy.go_on(0.99)
    assert not policy.go_on(0.05)


def test_drafts_that_are_sure_to_fail_are_not_checked() -> None:
    policy = MeasuredLength(costs(0.02, *[1.0 + 0.1 * width for width in range(17)]), 16)

    def kept(confidence: float) -> int:
        """Of one draft, when the next one is wanted."""
        while not policy.wanted(16):
            policy.observe(0, 0)
        policy.go_on(confidence)
        return policy.keep(1)

    for _ in range(10):  # what is unsure falls, whenever it is looked at
        policy.observe(kept(0.001), 0)
    assert kept(0.001) == 0
    policy.observe(0, 0)
    assert kept(0.999) == 1


@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
def test_under_the_papers_rules_every_draft_is_checked(
    verification: Verification, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To give drafts up for how unsure they are would change the law."""
    monkeypatch.setattr(MeasuredLength, "keep", lambda self, num_proposed: 0)
    clock = VirtualClock()
    table = TableBackend.random(12, seed=1).table
    target = TableBackend(table, clock=clock, cost=lambda _: 1.0)
    draft = TableBackend(table, clock=clock, cost=lambda _: 0.05)
    decoder = SpeculativeDecoder(target, draft, verification=verification, clock=clock)
    sampling = SamplingParams(temperature=1, seed=1)
    stats = decoder.generate([1, 2], max_new_tokens=64, sampling=sampling).stats
    assert stats.draft_forward_ct > 0
    assert (stats.num_proposed_drafts > 0) == (verification != "coupled")


@given(st.lists(st.tuples(st.integers(0, 16), st.integers(0, 16)), max_size=60))
def test_acceptance_is_a_probability(rounds: list[tuple[int, int]]) -> None:
    found = Acceptance(16)
    for num_proposed, num_correct in rounds:
        correct = min(num_proposed, num_correct)
        found.observe([0.3] * num_proposed, num_proposed, correct)
    assert all(0.0 <= rate <= 1.0 for rate in found.by_position())
    assert all(0.0 <= found.of(confidence) <= 1.0 for confidence in (0.0, 0.3, 0.9, 1.0))


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30),
        min_size=1,
        max_size=4,
    )
)
def test_texts_that_decode_together_tell_a_little_of_each_other(
    texts: list[list[tuple[int, int]]],
) -> None:
    """By the book: the chances of each rate, given what was seen, and of one more to stand."""
    found = [Acceptance(5) for _ in texts]
    for acceptance, rounds in zip(found, texts, strict=True):
        for num_proposed, num_correct in rounds:
            acceptance.observe([], num_proposed, min(num_proposed, num_correct))
    for acceptance, rates in zip(found, standing(found), strict=True):
        tried, stood = map(float, acceptance.positions.sum(axis=0))
        others = [other for other in found if other is not acceptance]
        beside = sum(float(other.positions[:, 0].sum()) for other in others)
        weight = min(1.0, 8 / beside) if beside else 0.0
        tried += weight * beside
        stood += weight * sum(float(other.positions[:, 1].sum()) for other in others)
        odds = [
            odd * rate**stood * (1 - rate) ** (tried - stood)
            for rate, odd in zip(RATES, ODDS, strict=True)
        ]
        for (tried_here, stood_here), rate in zip(acceptance.positions, rates, strict=True):
            after = [odd * rate for odd, rate in zip(odds, RATES, strict=True)]
            chance = (stood_here + 4 * sum(after) / sum(odds)) / (tried_here + 4)
            assert rate == pytest.approx(chance)
            odds = after


@given(
    samples=st.lists(st.tuples(st.integers(1, 20), st.floats(0.5, 2.0)), min_size=1, max_size=40),
    drafts=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 4)), max_size=8),
    num_sequences=st.integers(1, 8),
    data=st.data(),
)
def test_a_round_takes_what_its_parts_do(
    samples: list[tuple[int, float]],
    drafts: list[tuple[int, int]],
    num_sequences: int,
    data: st.DataObject,
) -> None:
    found = Costs()
    for width, seconds in samples:
        found.count_verify(width, seconds)
    for num_tokens, beside in drafts:
        found.count_draft(0.1 * num_tokens, num_tokens, beside)
    found.count_rest(0.25, drafting=True)
    drafting = data.draw(st.integers(1, num_sequences))
    rounds = found.rounds(16, num_sequences, drafting)
    plain = found.verify(num_sequences)
    assert rounds[0] == plain
    assert found.drafts(0, drafting) == 0
    for count in range(1, 17):
        width = num_sequences + count * drafting
        checking = max(plain, found.verify(width, hopeful=num_sequences == 1))
        whole = found.drafts(count, drafting) + checking + 0.25
        assert rounds[count] == pytest.approx(whole)
    for width in range(1, 30):
        sure, hope = (found.verify(width, hopeful=hopeful) for hopeful in (False, True))
        assert hope <= sure  # hope makes nothing dearer
        known = [seconds for other, seconds in samples if other == width]
        if len(known) >= 3:
            assert sure == pytest.approx(median(known[-9:]))


@given(
    draft=st.floats(1e-4, 10.0),
    verify=st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=17),
    limit=st.integers(0, 20),
    lag=st.integers(0, 100),
    num_sequences=st.integers(1, 8),
)
def test_a_length_is_within_its_limits(
    draft: float, verify: list[float], limit: int, lag: int, num_sequences: int
) -> None:
    known = costs(draft, *verify)
    known.count_read(draft, 3)
    policy = MeasuredLength(known, 16)
    for _ in range(5):
        wanted = policy.wanted(limit, lag, num_sequences)
        assert 0 <= wanted <= min(limit, 16)
        policy.observe(wanted, wanted // 2)


@pytest.mark.parametrize("cost", [0.0, 1e308, float("nan"), float("inf"), -1.0])
def test_any_clock_will_do(cost: float) -> None:
    target = TableBackend.random(8, seed=1)
    target.clock, target.cost = VirtualClock(), lambda tokens: cost
    decoder = SpeculativeDecoder(target, target.sibling(0.1), clock=target.clock)
    for _ in range(3):
        result = decoder.generate([1, 2], max_new_tokens=64)
    assert len(result.token_ids) == 64
    assert "nan" not in str(result.stats.reason)


def test_a_drafter_that_takes_time_and_proposes_nothing_is_asked_seldom() -> None:
    target = TableBackend.random(8, seed=1)
    target.clock, target.cost = VirtualClock(), lambda tokens: 1.0

    class Mute(Drafter):
        asked = 0

        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            self.asked += 1
            target.clock.seconds += 0.5
            return [Draft(())] * len(requests)

    mute = Mute()
    SpeculativeDecoder(target, mute, clock=target.clock).generate([1, 2], max_new_tokens=512)
    assert mute.asked < 30


def test_a_pair_that_wins_does_not_end_with_a_complaint() -> None:
    target = TableBackend.random(16, seed=1)
    target.clock, target.cost = VirtualClock(), lambda tokens: 1.0 if tokens == 1 else 1.8
    draft = target.sibling(0.05)
    draft.clock, draft.cost = target.clock, lambda tokens: 0.05
    decoder = SpeculativeDecoder(target, draft, clock=target.clock)
    for budget in range(60, 80):
        result = decoder.generate([1, 2], max_new_tokens=budget)
        assert result.stats.reason is None


def seen(costs: Costs, proposed: int, correct: int, rounds: int = 20) -> MeasuredLength:
    """The policy of a text whose drafts always came to so much."""
    policy = MeasuredLength(costs, 8)
    for _ in range(rounds):
        policy.acceptance.observe([], proposed, correct)
    return policy


def test_sequences_that_decode_together_choose_together() -> None:
    """What one drafts all wait for: a few that would gain don't make the others lose."""
    dear = costs(0.3, *(1.0 + 0.05 * width for width in range(72)))
    good, useless = seen(dear, 8, 8), seen(dear, 8, 0)
    (alone,) = MeasuredLength.together([good], [99], [0], 1)
    assert alone >= 4
    both = MeasuredLength.together([good, useless], [99, 99], [0, 0], 2)
    assert both[0] >= 4
    assert both[1] == 0
    one_of_eight = MeasuredLength.together([good, *[useless] * 7], [99] * 8, [0] * 8, 8)
    assert one_of_eight == [0] * 8
    all_good = MeasuredLength.together([good] * 8, [99] * 8, [0] * 8, 8)
    assert all_good == [all_good[0]] * 8
    assert 0 < all_good[0] <= alone


def test_near_the_end_of_one_text_the_others_go_on() -> None:
    cheap = costs(0.05, *[1.0] * 72)
    policies = [seen(cheap, 8, 8) for _ in range(3)]
    counts = MeasuredLength.together(policies, [99, 2, 0], [0, 0, 0], 3)
    assert counts == [8, 2, 0]


def test_reading_a_prompt_for_few_tokens_doesnt_pay() -> None:
    known = costs(0.05, *[1.0] * 72)
    for _ in range(3):
        known.count_read(10.0, 100)
    policies = [seen(known, 8, 8) for _ in range(4)]
    assert all(MeasuredLength.together(policies, [400] * 4, [100] * 4, 4))
    assert not any(MeasuredLength.together(policies, [9] * 4, [300] * 4, 4))
    newcomer = MeasuredLength.together(policies, [200, 200, 200, 9], [0, 0, 0, 300], 4)
    assert newcomer == [8, 8, 8, 0]


def test_several_must_promise_more_than_one() -> None:
    known = costs(0.9, *[1.0] * 72)  # one sure draft brings 5 % more
    assert plan_round(known, [[1.0]], [0.0], [50], 1).num_drafts == 1
    assert plan_round(known, [[1.0]] * 2, [0.0] * 2, [50] * 2, 2).num_drafts == 0


def test_what_a_part_of_a_batch_drafts_is_measured_against_all_of_it() -> None:
    known = costs(0.1, *(1.0 + 0.1 * width for width in range(16)))
    plan = plan_round(known, [[1.0, 1.0], ()], [0.0, 0.0], [60, 60], 2)
    assert (plan.num_drafts, plan.num_drafting) == (2, 1)
    assert plan.seconds == pytest.approx([1.1, 1.3, 1.5])
    assert plan.rate == pytest.approx(4 / 1.5)  # two of one's drafts, and one more of each


def test_reading_has_to_pay_before_the_first_of_a_batch_ends() -> None:
    known = costs(0.05, *[1.0] * 72)
    known.count_read(10.0, 100)
    policies = [seen(known, 8, 8) for _ in range(8)]
    assert MeasuredLength.together(policies[:1], [59], [20], 1) == [8]
    assert MeasuredLength.together(policies, [59] * 8, [20] * 8, 8) == [0] * 8
    assert MeasuredLength.together(policies, [59] * 8, [0] * 8, 8) == [8] * 8


def test_a_width_that_was_forgotten_is_at_stake() -> None:
    found = costs(0.1, 1.0, 50.0, 50.0)
    assert found.at_stake(2, 3) == 0
    for _ in range(600):
        found.count_verify(1, 1.0)
    assert found.at_stake(2, 3) == 50.0
    found.count_verify(3, 50.0)
    assert found.at_stake(2, 3) == 0


def test_drafts_that_were_only_tried_are_at_stake() -> None:
    found = costs(0.1, *[1.0] * 9)
    for _ in range(600):
        found.count_verify(1, 1.0)
    assert found.forgot_drafts
    assert found.draft == pytest.approx(0.1)  # believed until it is measured anew
    found.count_draft(6.0, 3)
    found.count_trial(6.0)
    assert found.draft == pytest.approx(2.0)
    assert found.at_stake(2, 1) == pytest.approx(4.0)
    found.count_draft(0.4, 4)
    assert found.at_stake(2, 1) == 0


def test_one_that_is_left_out_is_told_why() -> None:
    known = costs(0.05, *[1.0] * 72)
    known.count_read(300.0, 100)
    policies = [seen(known, 8, 8) for _ in range(2)]
    MeasuredLength.together(policies, [60, 60], [0, 300], 2)
    assert policies[0].verdict() is None
    assert "to read this text" in str(policies[1].verdict())


def test_who_has_read_drafts_without_the_others() -> None:
    known = costs(0.05, *[1.0] * 72)
    known.count_read(300.0, 100)
    policies = [seen(known, 8, 8) for _ in range(2)]
    assert MeasuredLength.together(policies, [60, 60], [300, 300], 2) == [0, 0]
    assert MeasuredLength.together(policies, [60, 60], [0, 300], 2) == [8, 0]
    assert MeasuredLength.together(policies, [60, 60], [0, 0], 2) == [8, 8]


def planned(
    monkeypatch: pytest.MonkeyPatch, policies: Sequence[MeasuredLength], num_rounds: int
) -> list[bool]:
    """Round by round, whether it was planned anew; nobody drafts."""
    plans: list[int] = []

    def counted(*args: Any) -> Any:
        plans.append(1)
        return plan_round(*args)

    monkeypatch.setattr("specdec.policy.plan_round", counted)
    found = []
    for _ in range(num_rounds):
        number, before = len(policies), len(plans)
        counts = MeasuredLength.together(policies, [99] * number, [0] * number, number)
        assert counts == [0] * number
        for each in policies:
            each.observe(0, 0)
        found.append(len(plans) > before)
    return found


def test_plain_steps_in_a_row_are_planned_together(monkeypatch: pytest.MonkeyPatch) -> None:
    dear = costs(9.0, *[1.0] * 72)
    alone = seen(dear, 8, 0)
    assert planned(monkeypatch, [alone], 12) == [True, False, False, False] * 3
    assert alone.predicted_speedup == 1
    newcomer = seen(dear, 8, 0)  # so it is planned anew, and where one leaves
    assert planned(monkeypatch, [alone, newcomer], 2) == [True, False]
    assert planned(monkeypatch, [alone], 2) == [True, False]


def test_a_good_newcomer_drafts_at_once() -> None:
    cheap = costs(0.05, *[1.0] * 72)
    useless = seen(cheap, 8, 0, rounds=200)
    for _ in range(2):
        assert useless.wanted(99) == 0
        useless.observe(0, 0)
    counts = MeasuredLength.together([useless, seen(cheap, 8, 8)], [99, 99], [0, 0], 2)
    assert counts[1] > 0


def test_after_a_plain_step_for_its_time_drafts_go_on() -> None:
    cheap = costs(0.05, *[1.0] * 17)
    good = seen(cheap, 8, 8)
    assert good.wanted(99) == 8
    for _ in range(600):
        cheap.count_verify(9, 1.0)
    assert good.wanted(99) == 0
    good.observe(0, 0)
    cheap.count_verify(1, 1.0)
    assert good.wanted(99) == 8


def test_a_neighbour_that_never_drafts_makes_no_probe_come_sooner_or_cheaper() -> None:
    known = costs(0.9, *[1.0] * 72)
    known.count_read(300.0, 100)
    drafting, waiting = policies = [seen(known, 8, 4), seen(known, 8, 4)]
    known.count_tokens(500, 0.0)
    rounds = []
    for _ in range(60):
        counts = MeasuredLength.together(policies, [60, 60], [0, 300], 2)
        for policy, count in zip(policies, counts, strict=True):
            policy.observe(count, count)
        rounds.append(counts[0])
        assert counts[1] == 0
    probes = [number for number, count in enumerate(rounds) if count]
    assert probes
    assert all(later - sooner > PROBE_GAP for sooner, later in pairwise(probes))
    assert len(probes) < 9  # each costs the other as much time, and that is counted
    assert waiting.predicted_speedup is not None
    assert drafting.predicted_speedup is not None
    assert waiting.predicted_speedup < drafting.predicted_speedup
    assert waiting.predicted_speedup < 1


def test_several_hope_for_nothing_of_a_width_that_was_never_measured() -> None:
    known = costs(0.1, 1.0, 1.0)
    known.count_verify(9, 9.0)
    assert known.verify(5) == 1.0
    assert known.verify(5, hopeful=False) == pytest.approx(1.0 + 8.0 * 3 / 7)
    one, two = known.rounds(4), known.rounds(2, 2)
    assert one[4] < one[0] + 1
    assert two[2] > two[0] + 4


def test_reading_that_was_never_measured_isnt_free() -> None:
    """Where nobody has drafted for long a probe reads all of their texts."""
    known = costs(0.2, *(1.0 + 0.1 * width for width in range(16)))
    assert known.read == 0
    assert known.reading(100) == pytest.approx(100 * 0.2 * 0.1)
    known.count_read(3.0, 100)
    assert known.reading(100) == pytest.approx(3.0)
    assert Costs().reading(100) == 0


def test_a_batch_that_never_took_a_lone_step_goes_on_drafting() -> None:
    known = costs(0.05, *[1.0] * 17)
    policy = seen(known, 8, 8)
    for _ in range(2000):
        known.count_verify(72, 1.0)
    assert MeasuredLength.together([policy] * 8, [99] * 8, [0] * 8, 8) == [8] * 8
    assert MeasuredLength.together([policy], [99], [0], 1) == [0]


def test_more_sequences_and_tokens_than_were_measured_cost_more() -> None:
    known = costs(0.1, *(1.0 + 0.1 * width for width in range(17)))
    assert known.verify(100) == pytest.approx(1.0 + 0.1 * 95, rel=0.05)
    assert known.drafts(4, 8) == pytest.approx(known.drafts(4) * known.verify(8))
    flat = costs(0.1, *[1.0] * 17)
    assert flat.verify(1000) == 1.0
    assert flat.drafts(4, 8) == pytest.approx(flat.drafts(4))


@pytest.mark.parametrize("batch", [2, 4, 8])
@pytest.mark.parametrize("verify", bench.VERIFY)
@pytest.mark.parametrize("draft_step", [0.05, 0.3])
@pytest.mark.parametrize("noise", [0.05, 0.4, 3.0])
def test_a_batch_is_never_much_slower_than_plain(
    batch: int, verify: str, draft_step: float, noise: float
) -> None:
    """Prompts included, which a draft that turns out to be useless has read for nothing."""

    def cost(factor: float, width: int) -> float:
        return factor * float(bench.VERIFY[verify](width))

    def speed(drafts: bool) -> float:
        clock = VirtualClock()
        target = TableBackend.random(40, seed=1, max_context=4096)
        draft = target.sibling(noise, seed=5)
        for model, factor in ((target, 1.0), (draft, draft_step)):
            model.clock, model.cost = clock, partial(cost, factor)
        decoder = SpeculativeDecoder(target, draft if drafts else None, clock=clock)
        decoder.generate_batch([[n, 3] for n in range(batch)], max_batch=batch, max_new_tokens=400)
        return 1 / clock.seconds

    ratio = speed(True) / speed(False)
    assert ratio >= 0.96
    if noise < 0.1 and draft_step < 0.1 and verify != "linear":
        assert ratio > 1.3


def test_times_that_were_forgotten_are_measured_anew_without_reading() -> None:
    """And a draft that has become fast since, or was slow for a moment, drafts again."""
    clock = VirtualClock()
    target = TableBackend.random(16, seed=1)
    target.clock, target.cost = clock, lambda tokens: 1.0
    draft = target.sibling(0.0)
    draft.clock, draft.cost = clock, lambda tokens: 5.0
    decoder = SpeculativeDecoder(target, draft, clock=clock, keep_caches=0)
    prompts = [[text % 16] * 200 for text in range(80)]
    for prompt in prompts[:40]:
        decoder.generate(prompt, max_new_tokens=48)
    fed, forwards = draft.fed_ct, draft.forward_ct
    for prompt in prompts[40:]:
        decoder.generate(prompt, max_new_tokens=48)
    assert draft.forward_ct > forwards
    assert draft.fed_ct - fed <= 2 * (draft.forward_ct - forwards)
    assert 5.0 * (draft.forward_ct - forwards) <= 0.02 * 40 * 48
    draft.cost = lambda tokens: 0.01
    stats = [decoder.generate(prompt, max_new_tokens=48).stats for prompt in prompts]
    assert stats[-1].accept_length is not None
    assert stats[-1].accept_length > 4


def test_nobody_reads_for_drafts_beside_one_that_is_being_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who has been read first is alone for a moment only, too short to let a draft read for it."""
    known = costs(0.05, *[1.0] * 17)
    known.count_read(1.0, 100)
    policies = [seen(known, 8, 8) for _ in range(2)]
    assert MeasuredLength.together(policies, [99, 99], [300, 300], 2) == [8, 8]
    assert MeasuredLength.together(policies, [99, 99], [300, 0], 2, may_read=False) == [0, 8]
    assert MeasuredLength.together(policies, [99, 99], [300, 300], 2, may_read=False) == [0, 0]
    assert policies[0].verdict() is None

    asked: list[tuple[int, bool]] = []
    together = MeasuredLength.together

    def noted(policies: Any, limits: Any, lags: Any, number: int, *, may_read: bool) -> list[int]:
        asked.append((number, may_read))
        return together(policies, limits, lags, number, may_read=may_read)

    monkeypatch.setattr(MeasuredLength, "together", staticmethod(noted))
    target = TableBackend.random(16, seed=1)
    decoder = SpeculativeDecoder(target, target.sibling(0.5), keep_caches=0)
    decoder.generate_batch([[1] * 50, [2] * 900], max_new_tokens=200)
    both = [number for number, each in enumerate(asked) if each == (2, True)]
    assert (1, False) in asked
    assert (1, True) not in asked[: both[-1]]
    assert (2, False) not in asked


@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("other_tokens", [False, True])
@pytest.mark.parametrize("max_context", [30, 4096])
def test_trials_in_every_round_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
    verification: Verification,
    other_tokens: bool,
    max_context: int,
) -> None:
    monkeypatch.setattr(MeasuredLength, "wants_trial", True)
    target = TableBackend.random(16, seed=1, eos_ids=[0])
    table, tokens = target.sibling(0.3).table, target.vocab.tokens
    draft = TableBackend(
        table[::-1, ::-1, ::-1] if other_tokens else table,
        tokens=tokens[::-1] if other_tokens else tokens,
        max_context=max_context,
    )
    decoder = SpeculativeDecoder(target, draft, verification=verification)
    plain = SpeculativeDecoder(target)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8][: 1 + n] * (1 + 7 * n) for n in range(6)]
    sampling = [SamplingParams(temperature=n % 2, seed=n) for n in range(6)]
    for max_batch in (1, 4):
        results = decoder.generate_batch(prompts, sampling=sampling, max_batch=max_batch)
        expected = plain.generate_batch(prompts, sampling=sampling, max_batch=max_batch)
        for number, (result, wanted) in enumerate(zip(results, expected, strict=True)):
            if verification == "coupled" or number % 2 == 0:
                assert result.token_ids == wanted.token_ids
            assert result.error is None


def test_an_answer_without_a_forward_is_no_time_of_a_draft() -> None:
    """As of a draft whose context is full."""
    target = TableBackend.random(16, seed=1)
    target.cost = lambda tokens: 1.0
    draft = target.sibling(0.0, max_context=40)
    draft.clock, draft.cost = target.clock, lambda tokens: 0.1
    decoder = SpeculativeDecoder(target, draft, clock=target.clock, keep_caches=0)
    decoder.generate([1, 2], max_new_tokens=60)
    result = decoder.generate([1, 2] * 50, max_new_tokens=60)
    assert result.stats.num_proposed_drafts == 0
    assert decoder.costs.draft == pytest.approx(0.1)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_pair_that_loses_reads_few_prompts_in_vain(batch: int) -> None:
    """Its times are forgotten now and then; to try it again is worth little more than a probe."""

    def seconds(drafts: bool) -> float:
        clock = VirtualClock()
        table = TableBackend.random(40, seed=1).table
        target = TableBackend(table, clock=clock, cost=lambda width: 0.7 + 0.3 * width)
        draft = TableBackend(table, clock=clock, cost=lambda width: 0.95 + 0.25 * width)
        decoder = SpeculativeDecoder(target, draft if drafts else None, clock=clock, keep_caches=0)
        for text in range(0, 40, batch):
            prompts = [[(text + n) % 40] * 50 for n in range(batch)]
            decoder.generate_batch(prompts, max_batch=batch, max_new_tokens=48)
        return clock.seconds

    assert seconds(False) >= 0.975 * seconds(True)


def test_calibration_measures_what_it_is_told_to() -> None:
    target = TableBackend.random(6, seed=3)
    decoder = SpeculativeDecoder(target, target.sibling(0.3))
    assert decoder.calibrate([1] * 1200, widths=[1, 4], seconds=0.0).widths == (1, 4)
