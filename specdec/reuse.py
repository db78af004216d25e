"""Caches that outlive their text, so that the next one feeds only what is new in it."""

import weakref
from collections.abc import Sequence
from itertools import takewhile

from specdec.backend import Cache, Logits, ModelBackend, Span, crop_to
from specdec.errors import CropError, RuntimeFailure

__all__ = ["KeptCaches"]


class KeptCaches:
    """The caches of a model's latest sequences, at most ``limit``, the oldest first."""

    def __init__(self, backend: ModelBackend, limit: int) -> None:
        self.backend = backend
        self.limit = limit
        self._kept: list[tuple[list[int], Cache]] = []
        weakref.finalize(self, close_all, self._kept).atexit = False

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, ids: Sequence[int]) -> Cache:
        """A cache that holds a beginning of ``ids``, all but the last at most; or an empty one.

        A cache is used again where that is half of it or half of ``ids``, or where it is the next
        to be dropped: else another conversation that begins alike would lose its own.
        """
        shared = [common_prefix(kept, ids[:-1]) for kept, _ in self._kept]
        best = max(range(len(shared)), key=shared.__getitem__, default=-1)
        is_full = len(self._kept) == self.limit > 0
        if best >= 0 and shared[best] > 0:
            held = len(self._kept[best][0])
            if 2 * shared[best] >= min(held, len(ids) - 1) or (best == 0 and is_full):
                _, cache = self._kept.pop(best)
                try:
                    crop_to(self.backend, cache, shared[best])
                except CropError:  # then it is read anew
                    cache.close()
                else:
                    return cache
        elif is_full:  # it would go anyway, and other texts in a runtime's memory cost time
            self._kept.pop(0)[1].close()
        return self.backend.new_cache()

    def give(self, cache: Cache, ids: Sequence[int]) -> None:
        """Keep a cache, which holds the first so many of ``ids``."""
        held = list(ids[: len(cache)])
        if not held or self.limit == 0:
            cache.close()
            return
        self._kept.append((held, cache))
        while len(self._kept) > self.limit:
            self._kept.pop(0)[1].close()

    def forward(self, batch: Sequence[Span]) -> list[Logits]:
        """The model's own; where it fails, once more without the caches that are only kept."""
        try:
            return self.backend.forward(batch)
        except RuntimeFailure:
            if not self._kept:
                raise
        self.clear()
        return self.backend.forward(batch)

    def clear(self) -> None:
        """Close them all."""
        close_all(self._kept)


def close_all(kept: list[tuple[list[int], Cache]]) -> None:
    """Close what is in the list and empty it."""
    while kept:
        kept.pop()[1].close()


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two texts have in common at their beginning."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in alike)
