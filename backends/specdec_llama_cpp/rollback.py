"""Which way back a model's memory has, and the way for memories that llama.cpp can't cut.

llama.cpp's own snapshots (``n_rs_seq``) aren't used: few architectures have them, and after
forwards of single tokens a crop by them succeeds, but leaves another state (seen in 0.3.36).
"""

from contextlib import closing
from typing import Any

import numpy as np

from specdec.backend import ModelBackend, Span
from specdec.errors import CropError, RuntimeFailure
from specdec.rewind import Rewind
from specdec_llama_cpp.context import Context, State

__all__ = ["go_back", "rolls_back"]

ROUNDING = 0.05  # of two rows of one text, in units of their standard deviation


def go_back(
    context: Context,
    slot: int,
    sequence: Rewind[State],
    length: int,
    by_states: bool,
    *,
    torn: bool = False,
) -> bool:
    """Cut a sequence back to ``length`` ids; whether that was possible.

    The memory may hold fewer of them afterwards, and the others are unread: those after the last
    kept state or, where the memory can't be brought back to anything else, all of them.

    Args:
        by_states: Go back to a kept state, rather than cut the memory.
        torn: The memory may be in any state.
    """
    removed = sequence.ids[length:]
    if by_states:
        kept = sequence.crop(length) or (sequence.undo() if torn else None)
        done = kept is None or (
            kept.state is not None and context.restore(slot, kept.state, kept.length)
        )
    else:
        del sequence.ids[length:]
        sequence.num_read = min(sequence.num_read, length)
        done = context.trim(slot, sequence.num_read) and context.holds(slot, sequence.num_read)
    if not done:
        sequence.num_read = 0
        if not context.trim(slot, 0):
            sequence.ids += removed
            return False
    return True


def rolls_back(backend: ModelBackend) -> bool:
    """Feed, crop, feed: whether the rows of the second time are those of the first."""
    count = min(4, backend.max_context)
    ids = [backend.vocab.size * i // count for i in range(count)]
    start, rest = ids[: count // 2], ids[count // 2 :]
    if not start:  # a context of one token, which is cropped by emptying it
        return True
    cache: Any = backend.new_cache()
    with closing(cache):
        backend.forward([Span(cache, start, 0)])
        (first,) = backend.forward([Span(cache, rest, len(rest))])
        try:
            backend.crop(cache, len(start))
            (again,) = backend.forward([Span(cache, rest, len(rest))])
        except (CropError, RuntimeFailure):
            return False
        replayed = cache.num_replayed
    finite = first[np.isfinite(first)]
    tolerance = ROUNDING * float(finite.std()) if finite.size else 0.0
    return not replayed and np.allclose(again, first, rtol=0, atol=tolerance, equal_nan=True)
