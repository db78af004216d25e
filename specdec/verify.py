"""Which drafted tokens stand: pure functions over the target's rows."""

import math
import operator
from collections.abc import Iterable, Sequence

import numpy as np
from array_api_compat import array_namespace

from specdec.backend import Logits
from specdec.errors import LogitsError

__all__ = ["masked", "on_host", "pick", "probability", "verify_drafts"]


def on_host(rows: Logits) -> Logits:
    """The same rows as a numpy view where they lie in host memory, else as they are.

    numpy's reductions are many times faster on a CPU than torch's: 75 us against 5.9 ms for the
    argmax of 8 rows of 49,152.
    """
    if isinstance(rows, np.ndarray):
        return rows
    try:
        return np.from_dlpack(rows)
    except (AttributeError, BufferError, RuntimeError, TypeError):
        return rows  # another device, or a dtype that numpy lacks


def masked(rows: Logits, ids: Sequence[int]) -> Logits:
    """A copy of ``rows`` in which these ids can't be chosen."""
    rows = on_host(rows)
    rows = rows.copy() if isinstance(rows, np.ndarray) else rows.clone()
    rows[:, ids] = -math.inf
    return rows


def pick(rows: Logits) -> tuple[list[int], list[float]]:
    """The best id of every row and its score, found where the rows live; the first one on ties.

    A row with a NaN has its NaN as the maximum, so its score tells.

    Args:
        rows: ``(n, vocab)`` scores, any array-API array.
    """
    rows = on_host(rows)
    if isinstance(rows, np.ndarray):
        best = rows.argmax(axis=-1).tolist()
        peaks = [rows.item(row, token) for row, token in enumerate(best)]
    else:
        xp = array_namespace(rows)
        winners = xp.argmax(rows, axis=-1, keepdims=True)
        peaks = xp.take_along_axis(rows, winners, axis=-1)
        both = xp.concat([xp.astype(winners, xp.float64), xp.astype(peaks, xp.float64)], axis=-1)
        home = both.tolist()  # one transfer
        best, peaks = [int(token) for token, _ in home], [peak for _, peak in home]
    return best, peaks


def probability(row: Logits, token: int) -> float:
    """What a row of logits ``(vocab,)`` gives an id."""
    row = on_host(row)
    xp = array_namespace(row)
    weights = xp.exp(row - xp.max(row))
    return float(weights[token] / xp.sum(weights))


def verify_drafts(draft_tokens: Iterable[int], target_logits: Logits) -> tuple[list[int], int]:
    """Keep the drafts that the target would have picked itself, and add the target's next token.

    The target's pick at each position is the argmax of its row, so the result never depends on
    where the drafts came from. Rows of raw logits make this greedy decoding; rows of logits
    perturbed by Gumbel noise make it sampling (Daliri, Musco and Suresh, arXiv 2408.07978).

    Args:
        draft_tokens: The K drafted ids, K >= 0.
        target_logits: ``(K + 1, vocab)`` scores, numpy or torch or any array-API array: row i
            scores the token after the first i drafts.

    Returns:
        ``(accept_tokens, num_correct_drafts)``: the longest prefix of the drafts that matches,
        followed by one token of the target's own (the correction, or the bonus token when every
        draft stood); and the length of that prefix.

    Raises:
        ValueError: The shapes don't fit.
        LogitsError: A ValueError too: a row that counts holds a NaN, or the row that decides the
            last token leaves none (every score is -inf). Rows behind a wrong draft don't count.

    >>> import numpy as np
    >>> rows = np.eye(5)[[3, 1, 4]]  # the target wants 3, then 1, then 4
    >>> verify_drafts([3, 2], rows)
    ([3, 1], 1)
    """
    drafts = list(map(operator.index, draft_tokens))
    if not hasattr(target_logits, "shape"):
        target_logits = np.asarray(target_logits)
    shape = tuple(target_logits.shape)
    if len(shape) != 2 or shape[0] != len(drafts) + 1 or shape[1] == 0:
        raise ValueError(
            f"{len(drafts)} draft tokens need logits of shape ({len(drafts) + 1}, vocab), "
            f"one row more than drafts, but the shape is {shape}"
        )
    choices, scores = pick(target_logits)
    num_correct = 0
    for draft, choice in zip(drafts, choices, strict=False):
        if draft != choice:
            break
        num_correct += 1
    for row, score in enumerate(scores[: num_correct + 1]):
        if math.isnan(score):
            raise LogitsError(
                f"row {row} of the logits holds a NaN: the model overflowed or its weights are "
                "broken; try another dtype"
            )
    if scores[num_correct] == -math.inf:
        raise LogitsError(f"row {num_correct} leaves no token: every score is -inf")
    return choices[: num_correct + 1], num_correct
