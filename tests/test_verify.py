"""verify_drafts: the longest matching prefix, then the target's own token."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from specdec import LogitsError, verify_drafts


def to_torch(rows: np.ndarray[Any, Any]) -> Any:
    return pytest.importorskip("torch").from_numpy(rows)


LIBRARIES = pytest.mark.parametrize("wrap", [np.asarray, to_torch], ids=["numpy", "torch"])

scores = st.one_of(st.integers(-3, 3).map(float), st.just(-math.inf))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], np.ndarray[Any, Any]]:
    """Few ids and few scores, so that matches, ties and -inf all happen often."""
    num_drafts, vocab = draw(st.integers(0, 6)), draw(st.integers(1, 5))
    rows = draw(hnp.arrays(np.float32, (num_drafts + 1, vocab), elements=scores))
    rows[:, draw(st.integers(0, vocab - 1))] = 2.0  # every row leaves a token
    best = rows.argmax(axis=1).tolist()
    drafts = draw(st.tuples(*(st.sampled_from([b, b, (b + 1) % (vocab + 1)]) for b in best[:-1])))
    return list(drafts), rows


@LIBRARIES
@given(case=cases())
def test_keeps_the_longest_matching_prefix_and_adds_the_targets_token(
    wrap: Any, case: tuple[list[int], np.ndarray[Any, Any]]
) -> None:
    drafts, rows = case
    best = [row.tolist().index(max(row.tolist())) for row in rows]
    expected = 0
    while expected < len(drafts) and drafts[expected] == best[expected]:
        expected += 1
    before = rows.copy()
    assert verify_drafts(drafts, wrap(rows)) == ([*drafts[:expected], best[expected]], expected)
    assert np.array_equal(rows, before)


@LIBRARIES
@pytest.mark.parametrize("num_drafts", [0, 1, 2, 7])
def test_stops_at_every_position(wrap: Any, num_drafts: int) -> None:
    picks = [(5 * i + 1) % 11 for i in range(num_drafts + 1)]
    rows = np.eye(11, dtype=np.float32)[picks]
    for wrong in range(num_drafts + 1):  # wrong == num_drafts: all correct
        drafts = [t if i != wrong else (t + 1) % 11 for i, t in enumerate(picks[:-1])]
        accepted, num_correct = verify_drafts(drafts, wrap(rows))
        assert (accepted, num_correct) == (picks[: wrong + 1], wrong)
        assert all(type(token) is int for token in accepted)


@LIBRARIES
def test_a_tie_goes_to_the_first_id(wrap: Any) -> None:
    rows = wrap(np.array([[0, 3, 3, 1], [2, 2, 2, 2]], np.float32))
    assert verify_drafts([1], rows) == ([1, 0], 1)
    assert verify_drafts([2], rows) == ([1], 0)


@LIBRARIES
@pytest.mark.parametrize("bad", [(1, 4), (3, 4), (2, 0), (2,), (1, 2, 4)])
def test_refuses_rows_that_do_not_fit(wrap: Any, bad: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"1 draft tokens need logits of shape \(2, vocab\)"):
        verify_drafts([1], wrap(np.zeros(bad, np.float32)))


@LIBRARIES
@pytest.mark.parametrize("row", [0, 1, 2])
def test_refuses_nan_in_every_row_that_counts_and_in_no_other(wrap: Any, row: int) -> None:
    rows = np.eye(4, dtype=np.float32)[[1, 2, 3]]
    rows[row, 0] = math.nan
    with pytest.raises(LogitsError, match=f"row {row} of the logits holds a NaN"):
        verify_drafts([1, 2], wrap(rows))
    if row:  # plain decoding would never have looked at what lies behind a wrong draft
        assert verify_drafts([3, 2], wrap(rows)) == ([1], 0)


@LIBRARIES
def test_a_row_without_any_token_matters_only_where_it_decides(wrap: Any) -> None:
    rows = np.eye(4, dtype=np.float32)[[1, 2, 3]]
    rows[1] = -math.inf
    assert verify_drafts([0, 2], wrap(rows)) == ([1], 0)
    with pytest.raises(ValueError, match="row 1 leaves no token"):
        verify_drafts([1, 2], wrap(rows))


@pytest.mark.parametrize("bad", [1.5, "1", None])
def test_refuses_drafts_that_are_no_ids(bad: Any) -> None:
    with pytest.raises(TypeError):
        verify_drafts([bad], np.eye(3)[[1, 2]])


def test_takes_ids_and_rows_in_other_dresses() -> None:
    torch = pytest.importorskip("torch")
    rows = torch.eye(5, dtype=torch.bfloat16)[[3, 1, 4]].requires_grad_()
    assert verify_drafts(torch.tensor([3, 1]), rows) == ([3, 1, 4], 2)
    assert verify_drafts(np.array([3, 0]), rows) == ([3, 1], 1)
    assert verify_drafts([3, 1], rows.tolist()) == ([3, 1, 4], 2)


@pytest.mark.gpu("torch")
def test_works_where_the_rows_live() -> None:
    torch = pytest.importorskip("torch")
    rows = torch.eye(5, device="cuda")[[3, 1, 4]]
    assert verify_drafts([3, 2], rows) == ([3, 1], 1)
