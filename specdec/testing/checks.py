"""Checks of the clauses of ``ModelBackend``: plain functions that raise AssertionError.

C7 needs faults of the runtime's own, which only its own tests can make. The checks feed ids that
mean nothing, so any model will do; a tiny one makes them quick. ``tolerance`` is the largest
difference of two rows that counts as rounding, in units of the middle half of the row's scores:
0.001 suits float32, 0.2 suits bfloat16 and quantised kernels.
"""

from collections.abc import Sequence
from contextlib import closing
from typing import Any, Protocol

import numpy as np
from array_api_compat import is_numpy_array, to_device
from numpy.typing import NDArray

from specdec.backend import Cache, Logits, ModelBackend, Span
from specdec.errors import ContextFullError, CropError, TokenIdError

__all__ = ["CHECKS", "Check"]


class Check(Protocol):
    """One clause, as a test."""

    __name__: str

    def __call__(self, backend: ModelBackend, *, tolerance: float = ...) -> None:
        """Raise AssertionError if the backend breaks the clause."""


def check_vocabulary(backend: ModelBackend, *, tolerance: float = 1e-3) -> None:
    """The vocabulary is consistent in itself, and what it encodes it can spell."""
    vocab = backend.vocab
    assert 0 < len(vocab.tokens) <= vocab.size
    assert backend.max_context > 0
    named = [*vocab.eos_ids, *vocab.special_ids, vocab.bos_id]
    assert all(0 <= token < vocab.size for token in named if token is not None)
    if vocab.encode is not None:
        plain = [token for token in vocab.tokens if token and token.strip().isalpha()]
        text = b"".join(plain[:20])
        assert b"".join(map(vocab.spell, vocab.encode(text.decode()))).split() == text.split()
    assert {"runtime", "device"} <= set(backend.info())


def check_rows(backend: ModelBackend, *, tolerance: float = 1e-3) -> None:
    """C1: the last rows that were asked for, however the ids were cut into forwards."""
    ids = some_ids(backend, 24)
    with closing(backend.new_cache()) as whole, closing(backend.new_cache()) as parts:
        assert len(whole) == 0
        rows = feed(backend, whole, ids, len(ids))
        assert len(whole) == len(ids)
        assert rows.shape == (len(ids), backend.vocab.size)
        (raw,) = backend.forward([Span(whole, ids[:2], 1)])
        assert raw.shape == (1, backend.vocab.size)
        assert str(raw.dtype).endswith("float32")

        assert feed(backend, parts, ids[:7], 0).shape[0] == 0
        assert same(feed(backend, parts, ids[7:8], 1), rows[7:8], tolerance)
        assert same(feed(backend, parts, ids[8:], 3), rows[-3:], tolerance)
        assert len(parts) == len(ids)


def check_batch(backend: ModelBackend, *, tolerance: float = 1e-3, far: int = 320) -> None:
    """C2: a ragged batch gives what its spans give one by one.

    Looks at short texts, and at one of ``far`` tokens beside them; give more than the model's
    attention window if that is longer.
    """
    far = min(far, backend.max_context)
    for lengths in ((3, 11, 1, 6), (max(1, far - 4), 11, max(1, far // 2), 6)):
        batch_at_once(backend, lengths, tolerance)


def batch_at_once(backend: ModelBackend, lengths: Sequence[int], tolerance: float) -> None:
    """Four texts, ragged, beside each other and each alone."""
    news, wanted = (4, 1, 2, 5), (4, 1, 0, 2)
    texts = [
        some_ids(backend, old + new, seed)
        for seed, (old, new) in enumerate(zip(lengths, news, strict=True))
    ]
    alone = []
    for ids, count in zip(texts, wanted, strict=True):
        with closing(backend.new_cache()) as cache:
            alone.append(feed(backend, cache, ids, count))
    caches = [backend.new_cache() for _ in texts]
    backend.forward(
        [Span(c, ids[:old], 0) for c, ids, old in zip(caches, texts, lengths, strict=True)]
    )
    spans = [
        Span(cache, ids[old:], count)
        for cache, ids, old, count in zip(caches, texts, lengths, wanted, strict=True)
    ]
    together = [to_numpy(rows) for rows in backend.forward(spans)]
    assert len(together) == len(spans)
    for cache, ids, rows, expected in zip(caches, texts, together, alone, strict=True):
        assert len(cache) == len(ids)
        assert rows.shape == expected.shape
        assert same(rows, expected, tolerance)
        cache.close()


def check_crop(backend: ModelBackend, *, tolerance: float = 1e-3, far: int = 320) -> None:
    """C3 and C5: crop, then forward, equals never having been there.

    Looks at the first tokens and at those before position ``far``; give one past the model's
    attention window if that is longer. Both caches are fed in the same steps, so that nothing but
    the crops can make a difference.
    """
    far = min(far, backend.max_context)
    for start, end in ((0, min(64, far)), (max(0, far - 32), far)):
        crop_at_random(backend, start, end, tolerance)


def crop_at_random(backend: ModelBackend, start: int, end: int, tolerance: float) -> None:
    """Feed up to ``end``, from ``start`` on in small steps with detours that are taken back."""
    rng = np.random.default_rng(0)
    ids = some_ids(backend, end)
    other = some_ids(backend, end, seed=1)
    with closing(backend.new_cache()) as cache, closing(backend.new_cache()) as straight:
        for begin in range(0, start, 256):
            for each in (cache, straight):
                feed(backend, each, ids[begin : min(begin + 256, start)], 0)
        length = start
        while length < len(ids):
            detour = int(rng.integers(0, min(9, len(ids) - length) + 1))
            if detour:
                feed(backend, cache, other[length : length + detour], 1)
            backend.crop(cache, length)
            assert len(cache) == length
            step = ids[length : length + int(rng.integers(1, 6))]
            rows = feed(backend, cache, step, len(step))
            assert same(rows, feed(backend, straight, step, len(step)), tolerance)
            length += len(step)
        for length in (len(ids), len(ids) - 1, len(ids) // 2, 1, 0):
            backend.crop(cache, length)
            assert len(cache) == length
            backend.crop(straight, 0)
            if length:
                feed(backend, straight, ids[:length], 0)
            if length < len(ids):
                rows = feed(backend, cache, ids[length : length + 1], 1)
                expected = feed(backend, straight, ids[length : length + 1], 1)
                assert same(rows, expected, tolerance)
                backend.crop(cache, length)


def check_limits(backend: ModelBackend, *, tolerance: float = 1e-3) -> None:
    """C4: what can't be done is refused by name, and changes nothing for anyone."""
    ids = some_ids(backend, 9)
    with closing(backend.new_cache()) as cache, closing(backend.new_cache()) as fresh:
        expected = feed(backend, fresh, ids, 1)
        with closing(backend.new_cache()) as good:
            feed(backend, cache, ids[:-1], 0)
            # As many as don't fit, but no list that fills the memory where nearly anything fits.
            too_many = ids[:1] * min(backend.max_context - len(ids) + 2, 1 << 20)
            bad_spans = [
                (Span(cache, [backend.vocab.size], 1), TokenIdError),
                (Span(cache, [-1], 1), TokenIdError),
                (Span(cache, ids[:2], 3), ValueError),
                (Span(cache, [], 0), ValueError),
                (Span(good, ids, 1), ValueError),
            ]
            if len(cache) + len(too_many) > backend.max_context:
                bad_spans.append((Span(cache, too_many, 1), ContextFullError))
            for span, error in bad_spans:
                assert raises(error, lambda span=span: backend.forward([Span(good, ids, 1), span]))
                assert (len(good), len(cache)) == (0, len(ids) - 1)
            for length in (len(ids), -1):
                assert raises(CropError, lambda length=length: backend.crop(cache, length))
            assert same(feed(backend, cache, ids[-1:], 1), expected, tolerance)
            assert same(feed(backend, good, ids, 1), expected, tolerance)


def check_rows_stay(backend: ModelBackend, *, tolerance: float = 1e-3) -> None:
    """C6: rows live until the next forward, whatever else is called."""
    ids = some_ids(backend, 8)
    with closing(backend.new_cache()) as cache:
        (rows,) = backend.forward([Span(cache, ids, 5)])
        before = to_numpy(rows).copy()
        backend.crop(cache, 2)
        backend.new_cache().close()
        assert np.array_equal(to_numpy(rows), before)


def check_isolation(backend: ModelBackend, *, tolerance: float = 1e-3) -> None:
    """Caches don't meet, and a closed one leaves nothing behind."""
    ids, other = some_ids(backend, 8), some_ids(backend, 8, seed=1)
    with closing(backend.new_cache()) as cache:
        expected = feed(backend, cache, ids, 8)
    for _ in range(40):  # more than a runtime would hold if closing did nothing
        neighbour = backend.new_cache()
        feed(backend, neighbour, other, 0)
        neighbour.close()
        neighbour.close()
    with closing(backend.new_cache()) as cache, closing(backend.new_cache()) as neighbour:
        rows = [feed(backend, cache, ids[:4], 4)]
        feed(backend, neighbour, other, 0)
        backend.crop(neighbour, 3)
        rows.append(feed(backend, cache, ids[4:], 4))
        assert same(np.concatenate(rows), expected, tolerance)


def check_determinism(backend: ModelBackend, *, tolerance: float = 1e-3) -> None:
    """C8: the same calls give the same rows."""
    ids = some_ids(backend, 12)
    runs = []
    for _ in range(2):
        with closing(backend.new_cache()) as cache:
            runs.append([feed(backend, cache, ids[:9], 1), feed(backend, cache, ids[9:], 3)])
    for first, second in zip(*runs, strict=True):
        assert np.array_equal(first, second)


CHECKS: tuple[Check, ...] = (
    check_vocabulary,
    check_rows,
    check_batch,
    check_crop,
    check_limits,
    check_rows_stay,
    check_isolation,
    check_determinism,
)


def some_ids(backend: ModelBackend, count: int, seed: int = 0) -> list[int]:
    """Random ids of real tokens."""
    real = [i for i, token in enumerate(backend.vocab.tokens) if token is not None]
    return [int(i) for i in np.random.default_rng(seed).choice(real, size=count)]


def feed(
    backend: ModelBackend, cache: Cache, ids: Sequence[int], num_logits: int
) -> NDArray[np.float32]:
    """One forward of one span; its rows, copied."""
    (rows,) = backend.forward([Span(cache, ids, num_logits)])
    return to_numpy(rows).copy()


def to_numpy(rows: Logits) -> NDArray[np.float32]:
    """Rows from any device."""
    return np.asarray(rows if is_numpy_array(rows) else to_device(rows, "cpu"))


def same(rows: NDArray[np.float32], expected: NDArray[np.float32], tolerance: float) -> bool:
    """Whether two sets of rows are equal up to rounding.

    The middle half of a row gives the scale, since masked ids may have scores of any size.
    """
    if rows.shape != expected.shape:
        return False
    for row, other in zip(rows, expected, strict=True):
        finite = np.isfinite(other)
        if not np.array_equal(row[~finite], other[~finite]):
            return False
        low, high = np.percentile(other[finite], [25, 75])
        if not (np.abs(row[finite] - other[finite]) <= tolerance * (high - low)).all():
            return False
    return True


def raises(error: type[Exception], call: Any) -> bool:
    """Whether a call raises that error."""
    try:
        call()
    except error:
        return True
    return False
