"""How far the rows of wide forwards are from those of one-token ones, and what is still rounding.

A target that checks K drafts looks at K + 1 tokens at once. Its runtime may add in another order
then, so its scores may differ a little from those of plain decoding. A little, or it is a fault.
"""

import math
from collections.abc import Container, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from array_api_compat import is_numpy_array, to_device
from numpy.typing import NDArray

from specdec.backend import Cache, ModelBackend, Span
from specdec.vocab import Vocabulary

__all__ = [
    "Stability",
    "deviation",
    "forward_rows",
    "random_ids",
    "rounding_limit",
    "row_stability",
    "sample_ids",
    "spread",
]

# Of a row's spread. Seen on SmolLM2: 7e-6 in float32, 0.15 in bfloat16, and 0.3 in llama.cpp with
# flash attention off. Rows of another text differ by several spreads.
EXACT, LOOSE = 1e-3, 1.0
FULL_PRECISION = ("float32", "float64", "f32", "f64")

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
            narrow = [forward_rows(backend, cache, [token])[0] for token in part]
            for width in widths:
                backend.crop(cache, start)
                for at in range(0, block - width + 1, width):
                    wide = forward_rows(backend, cache, part[at : at + width])
                    for row, other in zip(narrow[at : at + width], wide, strict=True):
                        far = deviation(row, other)
                        flip = int(row.argmax()) != int(other.argmax())
                        found[width].append((far, far / spread(row), flip))
            backend.crop(cache, start)
            backend.forward([Span(cache, part, 0)])
    return [
        Stability(
            width,
            len(rows),
            max(far for far, _, _ in rows),
            max(relative for _, relative, _ in rows),
            sum(flip for _, _, flip in rows),
        )
        for width, rows in found.items()
    ]


def forward_rows(backend: ModelBackend, cache: Cache, ids: Sequence[int]) -> NDArray[np.float32]:
    """Feed ``ids``; the row of each of its real tokens' scores, ``(n, num_tokens)``, copied."""
    (rows,) = backend.forward([Span(cache, ids, len(ids))])
    host = np.asarray(rows if is_numpy_array(rows) else to_device(rows, "cpu"))
    return host[:, : backend.vocab.num_tokens].copy()


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
