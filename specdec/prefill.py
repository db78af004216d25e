"""Reading a prompt into a cache, in chunks."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from specdec.backend import Cache, Logits, Span

__all__ = ["CHUNK", "Forward", "OnPrefill", "prefill"]

Forward: TypeAlias = Callable[[Sequence[Span]], list[Logits]]
OnPrefill: TypeAlias = Callable[[int, int], None]

CHUNK = 512  # ids per forward: bounds the memory of activations, and wide enough to be quick


def prefill(
    forward: Forward, cache: Cache, ids: Sequence[int], progress: OnPrefill | None = None
) -> None:
    """Feed ``ids`` without asking for rows, and report ``(done, total)`` after each chunk."""
    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        forward([Span(cache, chunk, 0)])
        if progress is not None:
            progress(start + len(chunk), len(ids))
