"""From a model's logits to scores whose argmax is the choice.

Every step is a function of a row and the ids before it, applied at every position alike, to the
target and to the draft. The order is that of transformers: bias, penalties, minimum length and
processors on the logits; then temperature, top-k, top-p and min-p; then Gumbel noise.
"""

import math
import operator
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from array_api_compat import array_namespace, device

from specdec.backend import Logits
from specdec.noise import Lane, gumbel
from specdec.stopping import TokenLogprobs
from specdec.verify import masked, on_host, pick, verify_drafts
from specdec.vocab import Vocabulary

__all__ = ["Processor", "Sampler", "SamplingParams", "log_probabilities"]

Processor: TypeAlias = Callable[[Sequence[int], Logits], Logits]

COLDEST = 1e-6  # temperatures below it are taken for it, so that every score stays finite


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. The defaults are greedy decoding.

    Attributes:
        temperature: 0 takes the best token; above it one is drawn, from logits / temperature.
        top_k: Draw from the k best tokens, and those that tie with the last of them. 0: from all.
        top_p: Draw from the fewest best tokens that have this much probability together.
        min_p: Draw from tokens with at least this part of the best one's probability.
        repetition_penalty: Divides the logits of ids in prompt and output where they are positive,
            multiplies them where negative.
        presence_penalty: Taken off the logits of ids in the output.
        frequency_penalty: Taken off them once for every time they stand there.
        logit_bias: Added to the logits of ids.
        min_tokens: No EOS and no stop id before so many new tokens.
        seed: Of the noise. None draws one, which the result tells. With one seed the tokens are the
            same whatever drafts, and whether anything does.
        processors: Callables ``(ids, row) -> row``: given prompt and output so far and a row of
            logits ``(vocab,)``, where it lives, they return a row. They answer by these alone and
            don't change them.

    Raises:
        ValueError: A value is out of range or not finite; the text names it and the range.
        TypeError: A value is of the wrong type.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    seed: int | None = None
    processors: Sequence[Processor] = ()

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, "finite and at least 0", lambda t: t >= 0)
        _check_whole("top_k", self.top_k, "at least 0 (0: all)", lambda k: k >= 0)
        _check_number("top_p", self.top_p, "above 0 and at most 1", lambda p: 0 < p <= 1)
        _check_number("min_p", self.min_p, "from 0 to 1", lambda p: 0 <= p <= 1)
        _check_number(
            "repetition_penalty", self.repetition_penalty, "finite and above 0", lambda r: r > 0
        )
        _check_number("presence_penalty", self.presence_penalty, "finite", math.isfinite)
        _check_number("frequency_penalty", self.frequency_penalty, "finite", math.isfinite)
        _check_whole("min_tokens", self.min_tokens, "at least 0", lambda n: n >= 0)
        if self.seed is not None:
            _check_whole("seed", self.seed, "a whole number", lambda _: True)
        if not isinstance(self.logit_bias, Mapping):
            raise TypeError(f"logit_bias must be a mapping of ids, not {self.logit_bias!r}")
        for token, bias in self.logit_bias.items():
            _check_whole("an id of logit_bias", token, "at least 0", lambda i: i >= 0)
            _check_number(f"logit_bias[{token}]", bias, "below infinity", lambda _: True)
        if not isinstance(self.processors, Sequence) or not all(map(callable, self.processors)):
            raise TypeError(
                f"processors must be a list of callables (ids, row) -> row, not {self.processors!r}"
            )


def _check_number(name: str, value: object, what: str, holds: Callable[[float], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if math.isnan(value) or value == math.inf or not holds(float(value)):
        raise ValueError(f"{name} must be {what}, not {value!r}")


def _check_whole(name: str, value: object, what: str, holds: Callable[[int], bool]) -> None:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if isinstance(value, bool) or not holds(number):
        raise ValueError(f"{name} must be {what}, not {value!r}")


class Sampler:
    """The choices of one sequence: the target's, and a draft's guesses at them.

    Both take the argmax of ``scores``, with the same noise at the same position (the Gumbel-max
    trick), so a guess is right wherever the models nearly agree, and no draft can change a choice.

    Args:
        params: How to choose.
        vocab: The target's vocabulary.
        prompt_length: Ids before the output, for the penalties that count the output only.
        stop_token_ids: What ``min_tokens`` holds back beside the EOS.

    Attributes:
        seed: The seed in use, drawn if none was given; None when nothing is drawn.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab: Vocabulary,
        prompt_length: int,
        stop_token_ids: Collection[int] = (),
    ) -> None:
        worst = max(params.logit_bias, default=0)
        if worst >= vocab.size:
            raise ValueError(
                f"logit_bias names id {worst}, and the vocabulary has ids 0 to {vocab.size - 1}"
            )
        self.params = params
        self.seed = self._seed(params)
        self._prompt_length = prompt_length
        self._num_tokens = vocab.num_tokens
        self._holes = vocab.holes
        self._ends = sorted({*vocab.eos_ids, *stop_token_ids})
        self._noise: dict[tuple[int, object], Any] = {}  # target and draft want the same

    @staticmethod
    def _seed(params: SamplingParams) -> int | None:
        if params.temperature == 0:
            return None
        return secrets.randbits(63) if params.seed is None else params.seed

    def scores(self, logits: Logits, ids: Sequence[int], drafts: Sequence[int] = ()) -> Logits:
        """Rows whose argmax is the choice.

        Args:
            logits: ``(n, width)`` raw rows. The last is for the position after ``ids + drafts``,
                those before it for the positions before. A draft's may be narrower.
            ids: Prompt and output so far.
            drafts: Ids supposed to follow, at least ``n - 1``.

        Returns:
            ``(n, at most vocab.num_tokens)``; -inf where a token can't be chosen. ``logits`` stays
            as it is.
        """
        rows = self.adjusted(logits, ids, drafts)
        if self.seed is None:
            return rows
        rows = self.filtered(rows)
        first = len(ids) + len(drafts) + 1 - rows.shape[0]
        return array_namespace(rows).stack(
            [self._perturbed(row, first + i) for i, row in enumerate(rows)]
        )

    def guess(self, logits: Logits, ids: Sequence[int], drafts: Sequence[int]) -> int | None:
        """What a draft proposes behind ``ids + drafts``, by its own row of logits ``(1, width)``.

        None if the row holds a NaN.
        """
        (token,), (score,) = pick(self.scores(logits, ids, drafts))
        return None if math.isnan(score) else token

    def verify(
        self, draft_tokens: Sequence[int], logits: Logits, ids: Sequence[int]
    ) -> tuple[list[int], int]:
        """Which drafts stand, by the target's rows ``(K + 1, width)``; as ``verify_drafts``."""
        return verify_drafts(draft_tokens, self.scores(logits, ids, draft_tokens))

    def adjusted(self, logits: Logits, ids: Sequence[int], drafts: Sequence[int] = ()) -> Logits:
        """The model's rows after bias, penalties, minimum length and processors."""
        rows = on_host(logits)[:, : self._num_tokens]
        if self._holes:
            rows = masked(rows, [i for i in self._holes if i < rows.shape[1]])
        if not self._looks_back(len(ids) - self._prompt_length):
            return rows
        xp = array_namespace(rows)
        skip = len(drafts) + 1 - rows.shape[0]
        return xp.stack(
            [self._adjusted(row, [*ids, *drafts[: skip + i]], xp) for i, row in enumerate(rows)]
        )

    def filtered(self, rows: Logits) -> Logits:
        """Rows divided by the temperature, -inf where top-k, top-p or min-p leave nothing."""
        params, xp = self.params, array_namespace(rows)
        rows = rows / max(params.temperature, COLDEST)
        if not self._filters:
            return rows
        best = xp.max(rows, axis=-1, keepdims=True)
        best = xp.where(xp.isfinite(best), best, xp.zeros_like(best))  # a row may be all -inf
        floors, top = [], rows
        if 0 < params.top_k < rows.shape[1]:
            top = _largest(rows, params.top_k)
            floors.append(xp.min(top, axis=-1, keepdims=True))
        if params.top_p < 1:
            top = xp.flip(xp.sort(top, axis=-1), axis=-1)
            mass = xp.exp(top - best)
            better = xp.cumulative_sum(mass, axis=-1) - mass
            enough = params.top_p * xp.sum(mass, axis=-1, keepdims=True)
            kept = (better < enough) | (better == 0)  # the best one, however small top_p is
            floors.append(xp.min(xp.where(kept, top, xp.inf), axis=-1, keepdims=True))
        if params.min_p > 0:
            floors.append(best + math.log(params.min_p))
        for floor in floors:
            rows = xp.where(rows >= floor, rows, -xp.inf)
        return rows

    @property
    def _filters(self) -> bool:
        return bool(self.params.top_k or self.params.top_p < 1 or self.params.min_p)

    def _looks_back(self, num_new: int) -> bool:
        params = self.params
        return bool(
            params.logit_bias
            or params.repetition_penalty != 1
            or params.presence_penalty
            or params.frequency_penalty
            or params.processors
            or num_new < params.min_tokens
        )

    def _adjusted(self, row: Logits, ids: list[int], xp: Any) -> Logits:
        params = self.params
        row = xp.astype(row, xp.float32, copy=True)

        def at(tokens: Any) -> Any:
            chosen = [int(token) for token in tokens if token < row.shape[0]]
            return xp.asarray(chosen, dtype=xp.int64, device=device(row))

        def add(amounts: Mapping[int, float]) -> None:
            known = {token: amount for token, amount in amounts.items() if token < row.shape[0]}
            row[at(known)] += xp.asarray(list(known.values()), dtype=xp.float32, device=device(row))

        if params.logit_bias:
            add(params.logit_bias)
        if params.repetition_penalty != 1:
            seen = at(set(ids))
            values = row[seen]
            penalty = params.repetition_penalty
            row[seen] = xp.where(values > 0, values / penalty, values * penalty)
        output = ids[self._prompt_length :]
        if params.presence_penalty or params.frequency_penalty:
            presence, frequency = params.presence_penalty, params.frequency_penalty
            add({token: -presence - frequency * n for token, n in Counter(output).items()})
        if len(output) < params.min_tokens:
            row[at(self._ends)] = -xp.inf
        width = row.shape[0]
        if params.processors and width < self._num_tokens:  # ids may be such as the draft lacks
            missing = xp.full((self._num_tokens - width,), -xp.inf, device=device(row))
            row = xp.concat([row, xp.astype(missing, row.dtype)])
        for processor in params.processors:
            row = processor(ids, row)
        return row[:width]

    def _perturbed(self, row: Logits, position: int) -> Logits:
        """Add the noise of a position, made only for what the filters left if that is little."""
        assert self.seed is not None
        xp, width = array_namespace(row), row.shape[0]
        if self._filters:
            (left,) = xp.nonzero(row > -xp.inf)
            if 4 * left.shape[0] < width:
                scores = xp.full_like(row, -xp.inf)
                scores[left] = row[left] + gumbel(self.seed, position, Lane.TOKEN, left)
                return scores
        key = position, device(row)
        if key not in self._noise:
            self._noise = {k: noise for k, noise in self._noise.items() if k[0] > position - 64}
            ids = xp.arange(self._num_tokens, device=device(row))
            self._noise[key] = gumbel(self.seed, position, Lane.TOKEN, ids)
        return row + self._noise[key][:width]


def log_probabilities(row: Logits, token: int, count: int) -> TokenLogprobs:
    """The log-probabilities of a token and of the ``count`` best ids in a row of logits.

    Args:
        row: ``(vocab,)`` raw logits, where they live.
        token: The id.
        count: How many best ids.
    """
    row = on_host(row)
    xp = array_namespace(row)
    row = xp.astype(row, xp.float64)
    best = xp.max(row)
    row = row - (best + xp.log(xp.sum(xp.exp(row - best))))
    top: list[int] = []
    if count:
        least = xp.min(_largest(row[None], min(count, row.shape[0])))
        (among,) = xp.nonzero(row >= least)  # ties included; the first ids win
        top = sorted(among.tolist(), key=lambda i: (-float(row[i]), i))[:count]
    return TokenLogprobs(float(row[token]), {i: float(row[i]) for i in top})


def _largest(rows: Logits, count: int) -> Logits:
    """The ``count`` largest scores of every row, in any order."""
    if isinstance(rows, np.ndarray):
        return np.partition(rows, rows.shape[1] - count, axis=-1)[:, rows.shape[1] - count :]
    return array_namespace(rows).sort(rows, axis=-1)[:, rows.shape[1] - count :]
