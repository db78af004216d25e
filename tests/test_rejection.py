"""The papers' rules keep the target's law: proved by enumerating everything that can happen."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specdec.rejection import Plan, block_plan, rejection_plan, verify_block, verify_rejection

Context = tuple[int, ...]
Rows = NDArray[np.floating[Any]]
Rule = Callable[[Context, Rows, Rows], Plan]

RULES = {"rejection": rejection_plan, "block": block_plan}
VERIFIERS = {"rejection": verify_rejection, "block": verify_block}
KINDS = ("random", "p = q", "one-hot p", "one-hot q", "both one-hot", "zeros in q", "zeros in both")
SIZE = 3


class Models(NamedTuple):
    """Two models of a few tokens: a distribution after every context."""

    p: dict[Context, Rows]
    q: dict[Context, Rows]
    num_drafts: int

    def drafts(self) -> Iterator[tuple[Context, Rows, Rows, float]]:
        """Every draft that can be, its rows of p and q, and its probability."""
        width = len(self.q[()])
        for draft in product(range(width), repeat=self.num_drafts):
            prefixes = [draft[:i] for i in range(len(draft) + 1)]
            q = np.array([self.q[prefix] for prefix in prefixes[:-1]])
            chance = float(np.prod([q[i, token] for i, token in enumerate(draft)]))
            if chance > 0:
                yield draft, np.array([self.p[prefix] for prefix in prefixes]), q, chance

    def continuations(self, context: Context = ()) -> Rows:
        """The target's law of what follows, up to strings of ``num_drafts + 1`` tokens."""
        row = self.p[context]
        if len(context) == self.num_drafts:
            return row
        tails = [self.continuations((*context, token)) for token in range(len(row))]
        return np.stack([chance * tail for chance, tail in zip(row, tails, strict=True)])


def law(models: Models, rule: Rule) -> Rows:
    """The law of strings that a rule makes; what a round leaves open comes from p."""
    total = np.zeros_like(models.continuations())
    for draft, p, q, chance in models.drafts():
        plan = rule(draft, p, q)
        assert plan.keep.sum() == pytest.approx(1, abs=1e-12)
        for count, (keep, following) in enumerate(zip(plan.keep, plan.next_probs, strict=True)):
            for token, share in enumerate(following):
                weight = chance * keep * share
                if weight == 0:
                    continue
                text = (*draft[:count], token)
                rest = 1.0 if len(text) > models.num_drafts else models.continuations(text)
                total[text] += weight * rest
    return total


def num_kept(models: Models, rule: Rule) -> float:
    """Expected drafts that stand."""
    return sum(
        chance * float(np.arange(len(p)) @ rule(draft, p, q).keep)
        for draft, p, q, chance in models.drafts()
    )


def make_models(num_drafts: int, kind: str, seed: int, padding: int = 0) -> Models:
    rng, width = np.random.default_rng(seed), SIZE + padding

    def row(*, one_hot: bool, zeros: bool) -> Rows:
        if one_hot:
            return np.asarray(np.eye(width)[rng.integers(SIZE)])
        weights = rng.exponential(size=width) ** rng.choice([1, 4])
        weights[SIZE:] = 0
        if zeros:
            weights[rng.permutation(SIZE)[: rng.integers(1, SIZE)]] = 0
        return np.asarray(weights / weights.sum())

    p: dict[Context, Rows] = {}
    q: dict[Context, Rows] = {}
    for length in range(num_drafts + 1):
        for context in product(range(width), repeat=length):
            p[context] = row(
                one_hot=kind in ("one-hot p", "both one-hot"), zeros=kind == "zeros in both"
            )
            q[context] = row(
                one_hot=kind in ("one-hot q", "both one-hot"), zeros=kind.startswith("zeros")
            )
            if padding:  # ids that only the draft has
                q[context] = 0.7 * q[context] + 0.3 * np.eye(width)[-1]
    return Models(p, p if kind == "p = q" else q, num_drafts)


models = st.builds(
    make_models, st.integers(1, 3), st.sampled_from(KINDS), st.integers(0, 2**32 - 1)
)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_the_law_is_the_targets(rule: str, kind: str, num_drafts: int) -> None:
    for seed in range(3):
        some = make_models(num_drafts, kind, seed)
        np.testing.assert_allclose(law(some, RULES[rule]), some.continuations(), rtol=0, atol=1e-12)


@settings(max_examples=60)
@given(models=models, rule=st.sampled_from(list(RULES)))
def test_the_law_is_the_targets_for_any_models(models: Models, rule: str) -> None:
    error = np.abs(law(models, RULES[rule]) - models.continuations()).max()
    assert error < 1e-12


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_drafts", [1, 2])
def test_the_law_is_the_targets_where_the_draft_has_more_ids(rule: str, num_drafts: int) -> None:
    wide = make_models(num_drafts, "random", 4, padding=1)
    np.testing.assert_allclose(law(wide, RULES[rule]), wide.continuations(), rtol=0, atol=1e-12)
    narrow_p = wide._replace(p={context: row[:SIZE] for context, row in wide.p.items()})
    for draft, p, q, _ in narrow_p.drafts():
        padded = np.pad(p, [(0, 0), (0, 1)])
        for ours, theirs in zip(
            RULES[rule](draft, p, q), RULES[rule](draft, padded, q), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)


def unweighted(rule: Rule) -> Rule:
    """Next tokens from p where they should come from the residual."""
    return lambda draft, p, q: rule(draft, p, q)._replace(next_probs=p)


def unblocked(draft: Context, p: Rows, q: Rows) -> Plan:
    """Block's number of drafts with rejection's residual."""
    return block_plan(draft, p, q)._replace(next_probs=rejection_plan(draft, p, q).next_probs)


@pytest.mark.parametrize(
    ("rule", "num_drafts"),
    [(unweighted(rejection_plan), 1), (unweighted(block_plan), 2), (unblocked, 2)],
)
def test_a_wrong_residual_is_found_out(rule: Rule, num_drafts: int) -> None:
    some = make_models(num_drafts, "random", 7)
    assert np.abs(law(some, rule) - some.continuations()).max() > 1e-3


@settings(max_examples=60)
@given(models=models)
def test_block_keeps_no_fewer_than_rejection(models: Models) -> None:
    assert num_kept(models, block_plan) >= num_kept(models, rejection_plan) - 1e-12


def test_block_keeps_more_where_it_can() -> None:
    some = make_models(3, "random", 1)
    assert num_kept(some, block_plan) > num_kept(some, rejection_plan) + 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_equal_models_keep_everything(rule: str) -> None:
    assert num_kept(make_models(3, "p = q", 7), RULES[rule]) == pytest.approx(3, abs=1e-12)


@pytest.mark.parametrize("rule", RULES)
@given(models=models, data=st.data())
@settings(max_examples=40)
def test_an_outcome_follows_the_plan(rule: str, models: Models, data: st.DataObject) -> None:
    draft, p, q, _ = data.draw(st.sampled_from(list(models.drafts())))
    plan = RULES[rule](draft, p, q)
    before = p.copy(), q.copy()
    edges = np.cumsum([0, *plan.keep])
    for count, keep in enumerate(plan.keep):
        if keep < 1e-9:
            continue
        for part in (1e-6, 0.5, 1 - 1e-6):
            seen: list[Rows] = []

            def choose(probs: Rows, seen: list[Rows] = seen) -> int:
                seen.append(probs.copy())
                return 2

            uniform = edges[count] + part * keep
            tokens, num_correct = VERIFIERS[rule](draft, p, q, uniform, choose)
            assert num_correct == count
            assert tokens == [*draft[:count], 2]
            (probs,) = seen
            np.testing.assert_array_equal(probs, plan.next_probs[count])
            assert probs.sum() == pytest.approx(1)
    np.testing.assert_array_equal(p, before[0])
    np.testing.assert_array_equal(q, before[1])


@pytest.mark.parametrize("verify", VERIFIERS.values(), ids=VERIFIERS)
def test_without_drafts_the_next_token_is_the_targets(verify: Callable[..., Any]) -> None:
    p = np.array([[0.2, 0.3, 0.5]])
    assert verify([], p, np.empty((0, 3)), 0.9, lambda row: int(row.argmax())) == ([2], 0)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(
    ("draft", "p_shape", "q_shape"),
    [([0], (1, 3), (1, 3)), ([0], (2, 3), (2, 3)), ([0, 1], (2, 3), (1, 3)), ([0], (3,), (1, 3))],
)
def test_shapes_must_fit(
    rule: Callable[..., Any], draft: list[int], p_shape: Any, q_shape: Any
) -> None:
    with pytest.raises(ValueError, match=r"draft tokens need probabilities of shapes"):
        rule(draft, np.full(p_shape, 1 / 3), np.full(q_shape, 1 / 3))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("token", [1, 3, -1])
def test_a_draft_that_q_never_gives_is_an_error(rule: Callable[..., Any], token: int) -> None:
    p = np.full((2, 3), 1 / 3)
    with pytest.raises(ValueError, match=rf"draft token {token} at 0 can't have come from q"):
        rule([token], p, np.array([[0.5, 0.0, 0.5]]))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_probabilities_must_be_numbers(rule: Callable[..., Any]) -> None:
    p, q = np.full((2, 3), 1 / 3), np.full((1, 3), 1 / 3)
    for rows in (p, q):
        rows[0, 1] = np.nan
        with pytest.raises(ValueError, match="finite"):
            rule([0], p, q)
        rows[0, 1] = 1 / 3
