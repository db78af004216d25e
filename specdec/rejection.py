"""The papers' rules: accept a draft by the ratio of the two models' probabilities.

p is the target's distribution and q the draft's, everywhere. A rule is first a *plan*: with which
probability each prefix of the drafts is kept, and which distribution the next token comes from.
Plans are pure arithmetic, so their law can be proved by enumeration; ``verify_rejection`` and
``verify_block`` draw from them.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
from array_api_compat import to_device
from numpy.typing import NDArray
from typing_extensions import override

from specdec.backend import Logits
from specdec.errors import LogitsError
from specdec.noise import Lane, gumbel, uniform
from specdec.sampling import Sampler, SamplingParams
from specdec.vocab import Vocabulary

__all__ = [
    "Plan",
    "RatioSampler",
    "block_plan",
    "rejection_plan",
    "verify_block",
    "verify_rejection",
]

Rows: TypeAlias = NDArray[np.floating[Any]]


class Plan(NamedTuple):
    """What may come of a round of K drafts.

    Attributes:
        keep: ``(K + 1,)``: the probability that exactly so many drafts stand.
        next_probs: ``(K + 1, vocab)``: the distribution of the token that follows them. As wide as
            the wider of p and q.
    """

    keep: Rows
    next_probs: Rows


def rejection_plan(draft_tokens: Sequence[int], p: Rows, q: Rows) -> Plan:
    """Leviathan, Kalman and Matias 2023 (arXiv 2211.17192); Chen et al. 2023 (arXiv 2302.01318).

    A draft x stands with probability min(1, p(x) / q(x)); the first that doesn't is replaced by a
    token from the normalised max(p - q, 0).

    Args:
        draft_tokens: The K drafts, drawn from the rows of ``q``.
        p: ``(K + 1, vocab)`` probabilities of the target.
        q: ``(K, vocab)`` probabilities of the draft: those that were really drawn from. Where p and
            q differ in width, the narrower one is taken to give nothing to the ids that it lacks.

    Raises:
        ValueError: The shapes don't fit, a number isn't finite, or a draft has no probability in
            ``q``.
    """
    p, q = _checked(draft_tokens, p, q)
    keep, reached = np.zeros(len(p)), 1.0
    next_probs = [*(_normalised(p[i] - q[i], p[i]) for i in range(len(q))), p[-1]]
    for i, token in enumerate(draft_tokens):
        stands = min(1.0, p[i, token] / q[i, token])
        keep[i], reached = reached * (1 - stands), reached * stands
    keep[-1] = reached
    return Plan(keep, np.array(next_probs))


def block_plan(draft_tokens: Sequence[int], p: Rows, q: Rows) -> Plan:
    """Block verification: Sun et al. 2024 (arXiv 2403.10444), algorithm 2.

    Weighs whole prefixes instead of single tokens, so it never keeps fewer drafts on average than
    rejection does. Arguments and errors as in ``rejection_plan``.
    """
    p, q = _checked(draft_tokens, p, q)
    weight, stands, next_probs = 1.0, [], []
    for i in range(len(p)):
        if i:
            token = draft_tokens[i - 1]
            weight = min(1.0, weight * p[i - 1, token] / q[i - 1, token])
        if i == len(q):
            stands.append(weight)
            next_probs.append(p[i])
        else:
            left = np.maximum(weight * p[i] - q[i], 0)
            total = float(left.sum())
            stands.append(total / (total + 1 - weight) if total + 1 - weight > 0 else 1.0)
            next_probs.append(_normalised(left, p[i]))
    keep, behind = np.zeros(len(p)), 1.0  # the longest prefix that stands counts
    for i in range(len(p) - 1, 0, -1):
        keep[i], behind = behind * stands[i], behind * (1 - stands[i])
    keep[0] = behind
    return Plan(keep, np.array(next_probs))


def verify_rejection(
    draft_tokens: Sequence[int],
    target_probs: Rows,
    draft_probs: Rows,
    uniform: float,
    choose: Callable[[Rows], int],
) -> tuple[list[int], int]:
    """Draw the outcome of ``rejection_plan``.

    Args:
        draft_tokens: The K drafts.
        target_probs: ``(K + 1, vocab)``.
        draft_probs: ``(K, vocab)``.
        uniform: A number from [0, 1), fresh for every round: it decides how many drafts stand.
        choose: Draws an id from a distribution ``(vocab,)``, with randomness of its own.

    Returns:
        ``(accept_tokens, num_correct_drafts)`` as ``verify_drafts``.
    """
    return _drawn(
        rejection_plan(draft_tokens, target_probs, draft_probs), draft_tokens, uniform, choose
    )


def verify_block(
    draft_tokens: Sequence[int],
    target_probs: Rows,
    draft_probs: Rows,
    uniform: float,
    choose: Callable[[Rows], int],
) -> tuple[list[int], int]:
    """Draw the outcome of ``block_plan``. Arguments and result as in ``verify_rejection``."""
    return _drawn(
        block_plan(draft_tokens, target_probs, draft_probs), draft_tokens, uniform, choose
    )


class RatioSampler(Sampler):
    """A draft that draws from its own distribution, and a target that judges by the ratio.

    Guesses of a round are remembered with the distributions they were drawn from; drafts that came
    without a guess, from a lookup say, count as certain to have been proposed.

    Args:
        plan: ``rejection_plan`` or ``block_plan``. The others are those of ``Sampler``.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab: Vocabulary,
        prompt_length: int,
        stop_token_ids: Collection[int] = (),
        *,
        plan: Callable[[Sequence[int], Rows, Rows], Plan],
    ) -> None:
        super().__init__(params, vocab, prompt_length, stop_token_ids)
        self._plan = plan
        self._guesses: dict[int, tuple[int, Rows]] = {}  # by place: the guess, and where from

    @override
    def _guess(self, logits: Logits, ids: Sequence[int], drafts: Sequence[int]) -> int | None:
        """Draw from the draft's own distribution, with noise of this round's own."""
        (q,) = self._probabilities(logits, ids, drafts)
        if np.isnan(q).any():
            return None
        token = self._draw(q, len(ids) << 20 | len(drafts), Lane.DRAFT)
        self._guesses[len(drafts)] = token, q
        return token

    @override
    def forget(self) -> None:
        self._guesses = {}

    @override
    def verify(
        self, draft_tokens: Sequence[int], logits: Logits, ids: Sequence[int]
    ) -> tuple[list[int], int]:
        """Draw the plan's outcome."""
        guesses, self._guesses = self._guesses, {}
        p = self._probabilities(logits, ids, draft_tokens)
        for i, token in enumerate(draft_tokens):
            if token >= p.shape[1] or p[i, token] == 0:
                # It can't stand, so rows behind it don't count; the last one is never drawn from.
                draft_tokens, p = draft_tokens[: i + 1], p[[*range(i + 1), i]]
                break
        if not np.isfinite(p).all():
            raise LogitsError("the target's logits hold a NaN, or a row leaves no token")
        q = np.zeros((len(draft_tokens), max(p.shape[1], 1 + max(draft_tokens, default=0))))
        for i, token in enumerate(draft_tokens):
            guess, drawn_from = guesses.get(i, (-1, p[i]))
            if guess == token:
                q[i, : len(drawn_from)] = drawn_from
            else:
                q[i, token] = 1.0
        plan = self._plan(draft_tokens, p, q)
        coin = uniform(cast("int", self.seed), len(ids), Lane.ACCEPT)
        return _drawn(plan, draft_tokens, coin, lambda r: self._draw(r, len(ids), Lane.NEXT))

    def _probabilities(self, logits: Logits, ids: Sequence[int], drafts: Sequence[int]) -> Rows:
        """``(n, num_tokens)`` in double precision, on the host; NaN where a row leaves nothing."""
        rows = self.filtered(self.adjusted(logits, ids, drafts))
        scores = np.asarray(to_device(rows, "cpu"), np.float64)
        best = scores.max(axis=1, keepdims=True)
        mass = np.exp(scores - np.where(np.isneginf(best), np.nan, best))
        probs = np.zeros((len(mass), self._num_tokens))
        probs[:, : mass.shape[1]] = mass / mass.sum(axis=1, keepdims=True)
        return probs

    def _draw(self, probs: Rows, place: int, lane: Lane) -> int:
        (ids,) = np.nonzero(probs)
        noise = gumbel(cast("int", self.seed), place, lane, ids)
        return int(ids[np.argmax(np.log(probs[ids]) + noise)])


def _drawn(
    plan: Plan, draft_tokens: Sequence[int], uniform: float, choose: Callable[[Rows], int]
) -> tuple[list[int], int]:
    sums = np.cumsum(plan.keep)
    num_correct = min(int(np.searchsorted(sums, uniform * sums[-1], side="right")), len(sums) - 1)
    return [*draft_tokens[:num_correct], choose(plan.next_probs[num_correct])], num_correct


def _normalised(residual: Rows, fallback: Rows) -> Rows:
    """The positive part as a distribution; ``fallback`` where p = q leaves nothing."""
    residual = np.maximum(residual, 0)
    total = residual.sum()
    return residual / total if total > 0 else fallback


def _checked(draft_tokens: Sequence[int], p: Rows, q: Rows) -> tuple[Rows, Rows]:
    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
    count = len(draft_tokens)
    if p.ndim != 2 or q.ndim != 2 or (len(p), len(q)) != (count + 1, count):
        raise ValueError(
            f"{count} draft tokens need probabilities of shapes ({count + 1}, vocab) and "
            f"({count}, vocab), but they are {p.shape} and {q.shape}"
        )
    if not (np.isfinite(p).all() and np.isfinite(q).all()):
        raise ValueError("probabilities must be finite: p or q holds a NaN or an infinity")
    width = max(p.shape[1], q.shape[1])
    if p.shape[1] != q.shape[1]:
        p, q = (np.pad(rows, [(0, 0), (0, width - rows.shape[1])]) for rows in (p, q))
    for i, token in enumerate(draft_tokens):
        if not (0 <= token < width and q[i, token] > 0):
            raise ValueError(
                f"draft token {token} at {i} can't have come from q: it has none there"
            )
    return p, q
