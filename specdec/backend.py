"""The backend contract: the one door through which models come in.

A backend is any object of this shape; nothing has to be inherited. ``docs/writing-a-backend.md``
walks through a complete one, and ``specdec.testing.CHECKS`` tests each clause.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from specdec.errors import ContextFullError, CropError, TokenIdError
from specdec.vocab import Vocabulary

__all__ = [
    "Cache",
    "Logits",
    "ModelBackend",
    "Span",
    "check_crop",
    "check_forward",
    "crop_to",
    "num_replayed",
]

# (num_logits, vocab.size) float32: a numpy array, a torch tensor, or another array-API array.
Logits: TypeAlias = Any


class Cache(Protocol):
    """What a model remembers of one sequence. It belongs to the backend that made it."""

    # A backend that goes back by reading tokens again counts them in an attribute
    # ``num_replayed: int``; caches without it are taken to read none.

    def __len__(self) -> int:
        """How many tokens it holds."""

    def close(self) -> None:
        """Give its memory back. It isn't used again; closing twice does nothing."""


class Span(NamedTuple):
    """One sequence's part of a forward."""

    cache: Any  # from the backend's own new_cache, so it knows the type
    tokens: Sequence[int]  # at least one; appended to the cache
    num_logits: int  # rows wanted, for the last so many of the tokens; 0 while reading a prompt


@runtime_checkable
class ModelBackend(Protocol):
    """A causal language model that can look at several tokens at once and take them back.

    C1. ``forward`` appends each span's tokens to its cache and returns, per span and in order, the
        logits of its last ``num_logits`` positions: ``(num_logits, vocab.size)``, float32, on the
        backend's own device. Rows that nobody asked for are not made.
    C2. A batch of spans gives what the spans give one by one, up to rounding. The caches of a
        batch are distinct. A backend without batching runs the spans one by one.
    C3. ``crop(cache, n)`` leaves exactly the first ``n`` tokens, or raises ``CropError``. Crop,
        then forward, equals never having been there. A crop to the present length changes nothing.
    C4. A crop past the end, a forward past ``max_context`` and an id outside the vocabulary raise
        ``CropError``, ``ContextFullError`` and ``TokenIdError`` before anything changes.
    C5. A backend that can't crop restores the cache in another way, or says so at construction.
    C6. Rows are valid until the next ``forward`` on the backend; whoever needs them longer copies.
        A backend for decoders in several threads gives rows of their own, and guards itself.
    C7. After an exception, KeyboardInterrupt included, every cache holds what it held before the
        call, and the next call works as on a fresh backend.
    C8. The same calls give the same rows.
    """

    @property
    def vocab(self) -> Vocabulary:
        """The model's ids and what they spell."""

    @property
    def max_context(self) -> int:
        """The most tokens that one cache can hold."""

    def new_cache(self) -> Cache:
        """An empty cache for one sequence, independent of every other."""

    def forward(self, batch: Sequence[Span]) -> list[Logits]:
        """Feed every span; return its rows (C1, C2, C4, C6)."""

    def crop(self, cache: Cache, length: int) -> None:
        """Cut a cache back to its first ``length`` tokens (C3, C4)."""

    def info(self) -> Mapping[str, object]:
        """What the model runs on: runtime, version, device, dtype, context, threads."""


def check_forward(backend: ModelBackend, batch: Sequence[Span]) -> None:
    """Raise what C4 asks of a forward, and ValueError for a span that makes no sense.

    The first line of every bundled ``forward``; free for others to call.
    """
    size, limit = backend.vocab.size, backend.max_context
    if len(batch) > 1 and len({id(span.cache) for span in batch}) < len(batch):
        raise ValueError("a cache is in the batch twice: join its spans")
    for cache, tokens, num_logits in batch:
        if not 0 <= num_logits <= len(tokens) or not tokens:
            raise ValueError(
                f"a span has {len(tokens)} tokens and asks for {num_logits} rows: "
                "give at least one token and ask for 0 to that many rows"
            )
        if len(cache) + len(tokens) > limit:
            raise ContextFullError(
                f"the cache holds {len(cache)} tokens and {len(tokens)} more were fed, "
                f"but the context is {limit}: shorten the prompt or load with a longer context"
            )
        if min(tokens) < 0 or max(tokens) >= size:
            worst = next(t for t in tokens if not 0 <= t < size)
            raise TokenIdError(
                f"token id {worst} is outside the vocabulary: feed ids from 0 to {size - 1}"
            )


def check_crop(cache: Cache, length: int) -> None:
    """Raise what C4 asks of a crop. The first line of every bundled ``crop``."""
    if not 0 <= length <= len(cache):
        raise CropError(
            f"can't crop to {length} tokens: the cache holds {len(cache)}, so give 0 to that many"
        )


def crop_to(backend: ModelBackend, cache: Cache, length: int) -> None:
    """Crop, and see that it was done.

    Raises:
        CropError: The backend can't, or says nothing and doesn't.
    """
    backend.crop(cache, length)
    if len(cache) != length:
        raise CropError(
            f"{type(backend).__name__} was asked to cut a cache to {length} tokens and left "
            f"{len(cache)}: it breaks clause C3, see specdec.testing.CHECKS"
        )


def num_replayed(cache: Cache) -> int:
    """How many tokens were read again so far to go back in a cache."""
    return getattr(cache, "num_replayed", 0)
