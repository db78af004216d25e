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
from typing import Any, TypeAlias, cast

import numpy as np
from array_api_compat import array_namespace, device

from specdec.backend import Logits
from specdec.noise import Lane, gumbel
from specdec.stopping import TokenLogprobs
from specdec.verify import masked, on_host, pick, verify_drafts
from specdec.vocab import Vocabulary

__all__ = ["Processor", "Sampler", "SamplingParams", "largest", "log_probabilities"]

Processor: TypeAlias = Callable[[Sequence[int], Logits], Logits]

COLDEST = 1e-6  # temperatures below it are taken for it where something is divided by them


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
            logits ``(tokens,)``, padding cut off (numpy in host memory, else where it lives), they
            return a row. They answer by these alone, don't change them, and are asked about drafts
            that won't stand too.

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
        plain: dict[str, object] = {
            "temperature": _number("temperature", self.temperature, 0, math.inf),
            "top_k": _whole("top_k", self.top_k, 0),
            "top_p": _number("top_p", self.top_p, 0, 1, above=True),
            "min_p": _number("min_p", self.min_p, 0, 1),
            "repetition_penalty": _number(
                "repetition_penalty", self.repetition_penalty, 0, math.inf, above=True
            ),
            "presence_penalty": _number("presence_penalty", self.presence_penalty),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty),
            "min_tokens": _whole("min_tokens", self.min_tokens, 0),
            "seed": None if self.seed is None else _whole("seed", self.seed),
        }
        if not isinstance(self.logit_bias, Mapping):
            raise TypeError(f"logit_bias must be a mapping of ids, not {self.logit_bias!r}")
        plain["logit_bias"] = {
            _whole("an id of logit_bias", token, 0): _number(
                f"logit_bias[{token}]", bias, banned=True
            )
            for token, bias in self.logit_bias.items()
        }
        if not isinstance(self.processors, Sequence) or not all(map(callable, self.processors)):
            raise TypeError(
                f"processors must be a list of callables (ids, row) -> row, not {self.processors!r}"
            )
        plain["processors"] = tuple(self.processors)
        for name, value in plain.items():
            object.__setattr__(self, name, value)


def _number(
    name: str,
    value: object,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    above: bool = False,
    banned: bool = False,
) -> float:
    """A finite float from ``low`` (or above it) to ``high``; with ``banned`` -inf is one too."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{name} must be a number, not {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.nan
    if math.isfinite(number) and (low < number if above else low <= number) and number <= high:
        return number
    if banned and number == -math.inf:
        return number
    span = ["finite"] if high == math.inf else []
    span += [f"{'above' if above else 'at least'} {low}"] if low > -math.inf else []
    span += [f"at most {high}"] if high < math.inf else []
    raise ValueError(f"{name} must be {' and '.join(span)}, not {value!r}")


def _whole(name: str, value: object, low: int | None = None) -> int:
    """``value`` as an int of at least ``low``."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if low is not None and number < low:
        raise ValueError(f"{name} must be at least {low}, not {value!r}")
    return number


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
        self._looks_back = bool(
            params.logit_bias
            or params.repetition_penalty != 1
            or params.presence_penalty
            or params.frequency_penalty
            or params.processors
        )
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
        rows = self._kept(rows)
        self._noise = {key: noise for key, noise in self._noise.items() if key[0] >= len(ids)}
        first = len(ids) + len(drafts) + 1 - rows.shape[0]
        for i in range(rows.shape[0]):
            self._perturb(rows[i], first + i)
        return rows

    def guess(self, logits: Logits, ids: Sequence[int], drafts: Sequence[int]) -> int | None:
        """What a draft proposes behind ``ids + drafts``, by its own row of logits ``(1, width)``.

        None if the row leaves nothing or holds a NaN, or a processor raises. A guess must be
        proposed, or dropped for a reason that doesn't depend on it.
        """
        try:
            return self._guess(logits, ids, drafts)
        except Exception:  # where the target gets there, it is raised
            return None

    def _guess(self, logits: Logits, ids: Sequence[int], drafts: Sequence[int]) -> int | None:
        (token,), (score,) = pick(self.scores(logits, ids, drafts))
        return token if score > -math.inf else None

    def forget(self) -> None:
        """Start a round afresh: nothing that was guessed so far is proposed."""

    def verify(
        self, draft_tokens: Sequence[int], logits: Logits, ids: Sequence[int]
    ) -> tuple[list[int], int]:
        """Which drafts stand, by the target's rows ``(K + 1, width)``; as ``verify_drafts``."""
        for count in range(len(draft_tokens), 0, -1):
            drafts = draft_tokens[:count]
            try:
                return verify_drafts(drafts, self.scores(logits[: count + 1], ids, drafts))
            except Exception:  # plain decoding puts out what is before that, or never comes to it
                continue
        return verify_drafts((), self.scores(logits[:1], ids, ()))

    def adjusted(self, logits: Logits, ids: Sequence[int], drafts: Sequence[int] = ()) -> Logits:
        """The model's rows after bias, penalties, minimum length and processors."""
        rows = on_host(logits)[:, : self._num_tokens]
        if self._holes:
            rows = masked(rows, [i for i in self._holes if i < rows.shape[1]])
        if not self._looks_back and len(ids) - self._prompt_length >= self.params.min_tokens:
            return rows
        xp = array_namespace(rows)
        skip = len(drafts) + 1 - rows.shape[0]
        return xp.stack(
            [self._adjusted(row, [*ids, *drafts[: skip + i]], xp) for i, row in enumerate(rows)]
        )

    def filtered(self, rows: Logits) -> Logits:
        """What tokens are drawn from: the rows left by the filters, divided by the temperature."""
        return self._kept(rows) / max(self.params.temperature, COLDEST)

    def _kept(self, rows: Logits) -> Logits:
        """A copy of ``rows``, -inf where top-k, top-p or min-p leave nothing."""
        params, xp = self.params, array_namespace(rows)
        if not self.has_filters:
            return xp.asarray(rows, copy=True)
        warmth = max(params.temperature, COLDEST)
        top, floors = rows, []
        if 0 < params.top_k < rows.shape[1]:
            top = largest(rows, params.top_k)
            floors.append(xp.min(top, axis=-1, keepdims=True))
        if params.top_p < 1 or params.min_p > 0:
            best = xp.max(top, axis=-1, keepdims=True)
            best = xp.where(best == -xp.inf, 0.0, best)  # a row may leave nothing
            if params.top_p < 1:
                top = xp.flip(xp.sort(top, axis=-1), axis=-1)
                mass = xp.exp((top - best) / warmth)
                better = xp.cumulative_sum(mass, axis=-1) - mass
                enough = params.top_p * xp.sum(mass, axis=-1, keepdims=True)
                kept = (better < enough) | (better == 0)  # the best, however small top_p is
                floors.append(xp.min(xp.where(kept, top, xp.inf), axis=-1, keepdims=True))
            if params.min_p > 0:
                floors.append(best + warmth * math.log(params.min_p))
        for floor in floors[1:]:
            floors[0] = xp.maximum(floors[0], floor)
        # A NaN is not less than anything: it stays, and is found out.
        return xp.where(rows < floors[0], -xp.inf, rows) if floors else xp.asarray(rows, copy=True)

    @property
    def has_filters(self) -> bool:
        """Whether top-k, top-p or min-p leave tokens out."""
        return bool(self.params.top_k or self.params.top_p < 1 or self.params.min_p)

    @property
    def distorts(self) -> bool:
        """Whether scores may lie further apart than the logits they are made of."""
        params = self.params
        return self.has_filters or bool(params.processors) or params.repetition_penalty != 1

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
            if getattr(row, "shape", None) != (self._num_tokens,):
                raise ValueError(
                    f"{processor!r} must give a row of {self._num_tokens}, not {row!r}"
                )
        return row[:width]

    def _perturb(self, row: Logits, position: int) -> None:
        """Add the noise of a position in place; only to what the filters left, if that is little.

        The noise is multiplied by the temperature in place of dividing the row by it: the argmax
        is the same, and nothing has to be done where nothing is left.
        """
        xp, width = array_namespace(row), row.shape[0]
        if self.has_filters and isinstance(row, np.ndarray):
            left = np.flatnonzero(row != -np.inf)
            if 4 * len(left) < width:
                row[left] += self._noise_for(left, position)
                return
        key = position, device(row)
        if key not in self._noise:
            ids = xp.arange(self._num_tokens, device=device(row))
            self._noise[key] = self._noise_for(ids, position)
        row += self._noise[key][:width]

    def _noise_for(self, ids: Any, position: int) -> Any:
        noise = gumbel(cast("int", self.seed), position, Lane.TOKEN, ids)
        return self.params.temperature * noise


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
    top: list[tuple[int, float]] = []
    if count:
        least = xp.min(largest(row[None], min(count, row.shape[0])))
        (among,) = xp.nonzero(row >= least)  # ties included; the first ids win
        pairs = zip(among.tolist(), row[among].tolist(), strict=True)
        top = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count]
    return TokenLogprobs(float(row[token]), dict(top))


def largest(rows: Logits, count: int) -> Logits:
    """The ``count`` largest scores of every row, in any order."""
    if isinstance(rows, np.ndarray):
        return np.partition(rows, rows.shape[1] - count, axis=-1)[:, rows.shape[1] - count :]
    return array_namespace(rows).sort(rows, axis=-1)[:, rows.shape[1] - count :]
