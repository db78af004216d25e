"""Caches that outlive their text, so that the next one feeds only what is new in it."""

import weakref
from collections.abc import Sequence
from itertools import compress, count
from operator import ne

from specdec.backend import Cache, Logits, ModelBackend, Span, crop_to
from specdec.errors import CropError, RuntimeFailure

__all__ = ["KeptCaches"]

BLOCK = 512  # ids that are compared as a whole first, which is quicker than one by one


class KeptCaches:
    """The caches of a model's latest sequences, at most ``limit``, the oldest first.

    The garbage collector may end a forgotten stream, and so call ``give``, at any moment: between
    two steps nothing is taken to be as it was.
    """

    def __init__(self, backend: ModelBackend, limit: int) -> None:
        self.backend = backend
        self.limit = limit
        self._kept: dict[int, tuple[list[int], Cache]] = {}  # numbered as they came
        self._numbers = count()
        self._end = weakref.finalize(self, close_all, self._kept)
        self._end.atexit = False

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, ids: Sequence[int]) -> Cache:
        """A cache that holds a beginning of ``ids``, all but the last at most; or an empty one.

        A cache is used again where that is half of it or half of ``ids``, or where it is the next
        to be dropped: else another conversation that begins alike would lose its own.
        """
        kept, known = list(self._kept.items()), ids[:-1]
        oldest = kept[0][0] if len(kept) == self.limit > 0 else None  # which is the next to go
        shared = {number: common_prefix(held, known) for number, (held, _) in kept}
        usable = [
            number
            for number, (held, _) in kept
            if 2 * shared[number] >= min(len(held), len(known)) or number == oldest
        ]
        number = max(usable, key=shared.__getitem__, default=None)  # of equal ones the oldest
        if number is not None and shared[number] > 0:
            cache = self._cropped(number, shared[number])
            if cache is not None:
                return cache
        elif oldest is not None:  # other texts in a runtime's memory cost time
            self._drop(oldest)
        return self.new_cache()

    def _cropped(self, number: int, length: int) -> Cache | None:
        """A kept cache, cut; None where it is gone or can't be cut, so that it is read anew."""
        _, cache = self._kept.pop(number, (None, None))
        if cache is None:
            return None
        try:
            crop_to(self.backend, cache, length)
        except CropError:
            cache.close()
            return None
        except BaseException:
            cache.close()
            raise
        return cache

    def _drop(self, number: int) -> None:
        _, cache = self._kept.pop(number, (None, None))
        if cache is not None:
            cache.close()

    def give(self, cache: Cache, ids: Sequence[int]) -> None:
        """Keep a cache, which holds the first so many of ``ids``."""
        held = list(ids[: len(cache)])
        if not held or self.limit == 0 or not self._end.alive:
            cache.close()
            return
        self._kept[next(self._numbers)] = held, cache
        for number in list(self._kept)[: -self.limit]:
            self._drop(number)

    def new_cache(self) -> Cache:
        """The model's own; where there are too many, one of the room that is only kept."""
        try:
            return self.backend.new_cache()
        except RuntimeFailure:
            if not self._kept:
                raise
        self.clear()
        return self.backend.new_cache()

    def forward(self, batch: Sequence[Span]) -> list[Logits]:
        """The model's own; where it fails, once more without the caches that are only kept.

        Raises:
            RuntimeFailure: It failed, or fed something else than it was given.
        """
        lengths = [len(span.cache) for span in batch]
        try:
            rows = self.backend.forward(batch)
        except RuntimeFailure:
            if not self._kept or lengths != [len(span.cache) for span in batch]:
                raise
            self.clear()
            rows = self.backend.forward(batch)
        for span, length in zip(batch, lengths, strict=True):
            if len(span.cache) != length + len(span.tokens):
                raise RuntimeFailure(
                    f"{type(self.backend).__name__} was fed {len(span.tokens)} tokens behind "
                    f"{length} and holds {len(span.cache)}: it breaks clause C1, see "
                    "specdec.testing.CHECKS"
                )
        return rows

    def clear(self) -> None:
        """Close them all."""
        close_all(self._kept)


def close_all(kept: dict[int, tuple[list[int], Cache]]) -> None:
    """Close what is kept."""
    while kept:
        kept.popitem()[1][1].close()


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two texts have in common at their beginning."""
    length = min(len(one), len(other))
    blocks = range(0, length, BLOCK)
    at = next((at for at in blocks if one[at : at + BLOCK] != other[at : at + BLOCK]), length)
    return next(compress(count(at), map(ne, one[at:], other[at:])), length)
