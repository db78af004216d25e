"""Randomness as a function: a number depends on (seed, position, lane, id), never on a stream.

So plain and speculative decoding, target and draft, see the same noise at the same place, and any
part of it can be had alone, on any device. An id is scattered by a 32-bit mixer (lowbias32 of C.
Wellons' hash-prospector), keyed with 64 bits that splitmix64 (Steele, Lea and Flood 2014) makes of
the place, and mixed again.
"""

from enum import IntEnum
from typing import Any

import numpy as np
from array_api_compat import array_namespace

__all__ = ["Lane", "gumbel", "uniform"]

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
TO_UNIT = (1 - 2**-23) / 2**32  # keeps the largest hash below 1 in float32
CHUNK = 1 << 15  # ids at a time, so that the work stays in the processor's cache


class Lane(IntEnum):
    """Independent uses of one place."""

    TOKEN = 0  # the target's choice, and the draft's guess at it
    DRAFT = 1  # a draft's own sample, where it doesn't share the target's noise
    ACCEPT = 2
    NEXT = 3


def uniform(seed: int, place: int, lane: Lane, index: int = 0) -> float:
    """One number above 0 and, after rounding, at most 1, in double precision."""
    bits = splitmix64(keyed(seed, place, lane) ^ splitmix64(index)) >> 11
    return (bits + 0.5) * 2.0**-53


def gumbel(seed: int, place: int, lane: Lane, ids: Any) -> Any:
    """Standard Gumbel noise for each of ``ids``, where they live.

    Args:
        seed: Any whole number; its low 64 bits count.
        place: Where in the sequence.
        lane: What for.
        ids: ``(n,)`` whole numbers from 0 to below 2**32: int64 of any array library, or numpy
            uint32, which is quicker.

    Returns:
        ``(n,)`` float32.
    """
    key = keyed(seed, place, lane)
    if not isinstance(ids, np.ndarray):
        return gumbel_of(hashed(ids, key), array_namespace(ids))
    noise = np.empty(len(ids), np.float32)
    for start in range(0, len(ids), CHUNK):
        part = slice(start, start + CHUNK)
        noise[part] = gumbel_of(hashed(ids[part].astype(np.uint32), key), np)
    return noise


def keyed(seed: int, place: int, lane: Lane) -> int:
    """64 bits for one place."""
    state = splitmix64(seed & MASK64)
    for word in (place, int(lane)):
        state = splitmix64(state ^ word)
    return state


def splitmix64(x: int) -> int:
    """One step of the generator: a bijection of 64 bits."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def hashed(ids: Any, key: int) -> Any:
    """32 bits for each id: uint32 from uint32; int64 from int64, for libraries without uint32."""
    low, high = key & MASK32, (key >> 32) | 1
    return mixed(times(mixed(ids) ^ low, high))


def mixed(x: Any) -> Any:
    """lowbias32."""
    x = times(x ^ (x >> 16), MULTIPLIERS[0])
    x = times(x ^ (x >> 15), MULTIPLIERS[1])
    return x ^ (x >> 16)


def times(x: Any, factor: int) -> Any:
    """The low 32 bits of a product; int64 wraps on the way, which leaves them right."""
    if isinstance(x, np.ndarray) and x.dtype == np.uint32:
        return x * np.uint32(factor)
    return (x * factor) & MASK32


def gumbel_of(bits: Any, xp: Any) -> Any:
    """Uniform 32-bit numbers to Gumbel noise.

    ``-log(-log1p(-u))`` is large where u is small, and there float32 is fine-grained.
    """
    u = (xp.astype(bits, xp.float32) + 0.5) * TO_UNIT
    return -xp.log(-xp.log1p(-u))
