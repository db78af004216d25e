"""How far the rows of wide forwards are from those of one-token ones, and what is still rounding.

A target that checks K drafts looks at K + 1 tokens at once. Its runtime may add in another order
then, so its scores may differ a little from those of plain decoding. A little, or it is a fault.
"""

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import numpy as np
from array_api_compat import to_device
from numpy.typing import NDArray

from specdec.backend import Cache, Logits, ModelBackend, Span
from specdec.errors import LogitsError
from specdec.verify import on_host
from specdec.vocab import Vocabulary

__all__ = [
    "Stability",
    "as_numpy",
    "deviation",
    "forward_rows",
    "gap_change",
    "random_ids",
    "read_by_width",
    "rounding_limit",
    "row_stability",
    "sample_ids",
    "spread",
]

# Of a row's spread. Seen on SmolLM2: 7e-6 in float32, 0.15 in bfloat16, and 0.3 in llama.cpp with
# flash attention off. Rows of another text differ by several spreads.
EXACT, LOOSE = 1e-3, 1.0
FULL_PRECISION = ("float32", "float64", "f32", "f64")

TOP = 8  # what rounding does to improbable tokens, which are many, decides nothing

TEXT = (
    "The harbour lay quiet in the early light. Two boats had come back before dawn, and the men "
    "were carrying their boxes of fish up the stone steps to the market. A woman with a red scarf "
    "counted the boxes and wrote the number into a small book: 12, then 7, then 19. Behind her a "
    "boy was mending a net. He had learned it from his grandfather, who used to say that a net is "
    "a number of holes tied together with string. When the bell of the church rang six times, the "
    "first customers came down the hill, and the gulls, which had waited on the roofs, rose into "
    "the air all at once. Nobody looked up; they had seen it every morning of their lives."
)


@dataclass(frozen=True, slots=True)
class Stability:
    """Rows of forwards of one width beside those of one-token forwards over the same ids.

    Attributes:
        width: Tokens per forward.
        num_rows: Rows compared.
        difference: The largest difference of a score; infinite where only one is a number.
        relative: The same in units of the row's spread.
        flips: Rows whose best token is another one.
    """

    width: int
    num_rows: int
    difference: float
    relative: float
    flips: int


def row_stability(
    backend: ModelBackend,
    ids: Sequence[int],
    *,
    widths: Sequence[int] = (2, 5, 9),
    seconds: float = 1.0,
) -> list[Stability]:
    """Compare rows by width on ``ids``, block by block until ``seconds`` are over.

    The first block is always finished. Widths that ``ids`` are too short for are left out.

    Raises:
        LogitsError: A row holds a NaN.
    """
    started = perf_counter()
    widths = [width for width in widths if width <= len(ids)]
    found: dict[int, list[tuple[float, float, bool]]] = {width: [] for width in widths}
    block = max(widths, default=len(ids) + 1)
    with closing(backend.new_cache()) as cache:
        for start in range(0, len(ids) - block + 1, block):
            if start and perf_counter() - started > seconds:
                break
            part = ids[start : start + block]
            for width, position, row, other in read_by_width(backend, cache, part, widths):
                far = deviation(row, other)
                if math.isinf(far) and np.isnan([row, other]).any():
                    raise LogitsError("rows hold NaN")
                if position < block // width * width:  # the last forward may be a narrower one
                    flip = int(row.argmax()) != int(other.argmax())
                    found[width].append((far, far / spread(row), flip))
            backend.crop(cache, start)
            backend.forward([Span(cache, part, 0)])
    return [
        Stability(width, len(rows), max(far), max(relative), sum(flips))
        for width, rows in found.items()
        for far, relative, flips in [zip(*rows, strict=True)]
    ]


class Pair(NamedTuple):
    """The rows of one id by a forward over one token and by a wider one."""

    width: int
    position: int  # of the id in what was read
    row: NDArray[np.float32]
    wide: NDArray[np.float32]


def read_by_width(
    backend: ModelBackend, cache: Cache, ids: Sequence[int], widths: Sequence[int]
) -> Iterator[Pair]:
    """Read ``ids`` behind what a cache holds: one by one, then by forwards of each width.

    Each width from the same start: what a wide forward leaves in a cache has been rounded otherwise
    too, and changes the rows behind it.
    """
    held = len(cache)
    narrow = [forward_rows(backend, cache, [token])[0] for token in ids]
    for width in widths:
        backend.crop(cache, held)
        for start in range(0, len(ids), width):
            rows = forward_rows(backend, cache, ids[start : start + width])
            for position, wide in enumerate(rows, start):
                yield Pair(width, position, narrow[position], wide)


def forward_rows(backend: ModelBackend, cache: Cache, ids: Sequence[int]) -> NDArray[np.float32]:
    """Feed ``ids``; the row of each of its real tokens' scores, ``(n, num_tokens)``, copied."""
    (rows,) = backend.forward([Span(cache, ids, len(ids))])
    return as_numpy(rows)[:, : backend.vocab.num_tokens].copy()


def as_numpy(rows: Logits) -> NDArray[np.float32]:
    """Rows on the host, wherever they live."""
    rows = on_host(rows)
    return rows if isinstance(rows, np.ndarray) else np.asarray(to_device(rows, "cpu"))


def gap_change(row: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """The most that a gap between the best token of a row and the next ones is another there."""
    top = np.argsort(row)[-TOP:]
    top = top[np.isfinite(row[top]) & np.isfinite(other[top])]
    changes = row[top] - other[top]
    return float(np.abs(changes - changes[-1]).max()) if len(top) else 0.0


def deviation(row: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """The largest difference of two rows; infinite where only one has a number."""
    finite = np.isfinite(row)
    if not np.array_equal(row[~finite], other[~finite]) or not np.isfinite(other[finite]).all():
        return math.inf
    return float(np.abs(row[finite] - other[finite]).max(initial=0.0))


def spread(row: NDArray[np.float32]) -> float:
    """The middle half of a row's scores, or all of them where half are alike.

    Ids that a model masks may have scores of any size, so the extremes tell little.
    """
    finite = row[np.isfinite(row)]
    if not len(finite):
        return 1.0
    low, high = np.percentile(finite, [25, 75])
    return float(high - low) or float(finite.max() - finite.min()) or 1.0


def rounding_limit(info: Mapping[str, object]) -> float:
    """The largest relative difference that rounding explains, by what a model computes in.

    Anything but full precision, keys and values included, counts as bfloat16 or quantised.
    """
    names = [str(info.get(key, "float32")).lower() for key in ("dtype", "cache_dtype")]
    full = "dtype" in info and all(name in FULL_PRECISION for name in names)
    return EXACT if full else LOOSE


def sample_ids(vocab: Vocabulary, count: int, known: Container[int] | None = None) -> list[int]:
    """``count`` ids of a plain text, or random tokens where the model can't read it.

    Args:
        vocab: The model's.
        count: How many.
        known: The ids to take; all by default.
    """
    try:
        ids = vocab.encode(TEXT) if vocab.encode is not None else []
    except Exception:  # a tokenizer of its own few words
        ids = []
    among = set(usable_ids(vocab, known))
    ids = [token for token in ids if token in among]
    return ids[:count] if len(ids) >= count else random_ids(vocab, count, known)


def random_ids(
    vocab: Vocabulary, count: int, known: Container[int] | None = None, *, seed: int = 0
) -> list[int]:
    """``count`` random ids of tokens that spell something."""
    ids = usable_ids(vocab, known)
    odd = vocab.special_ids | vocab.eos_ids
    plain = [token for token in ids if token not in odd] or ids
    chosen: list[int] = np.random.default_rng(seed).choice(plain, size=count).tolist()
    return chosen


def usable_ids(vocab: Vocabulary, known: Container[int] | None) -> list[int]:
    """The ids of tokens, of those that are known."""
    real = [i for i, token in enumerate(vocab.tokens) if token is not None]
    return real if known is None else [token for token in real if token in known]
