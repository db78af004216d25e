"""Going back in sequences whose state can't be cut: kept states, and reading again what follows."""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Kept", "Rewind"]

State = TypeVar("State")


class Kept(NamedTuple, Generic[State]):
    """What a model remembered of the first so many ids; None of none."""

    length: int
    state: State | None


class Rewind(Generic[State]):
    """One sequence of a model that can't go back by itself, for backends to hold in a cache.

    A crop returns to the latest kept state before it and leaves the ids in between to be read with
    the next forward, so going back costs a wider forward rather than one more. Only once they are
    more than ``max_unread`` they are read ``apart``, so that the state behind them can be kept::

        if rewind.apart:
            read(rewind.unread)
            rewind.commit([])
        if rewind.wants():
            rewind.keep(copy of the state)
        read([*rewind.unread, *tokens])
        rewind.commit(tokens)

    Args:
        max_kept: The most states to hold. They are the sparser the longer ago they were.
        max_unread: The most ids to read again and again.

    Attributes:
        ids: What the sequence holds.
        num_read: How many of them the model's present state has read.
        num_replayed: Ids that were read more than once so far.
    """

    def __init__(self, max_kept: int = 4, max_unread: int = 8) -> None:
        self.ids: list[int] = []
        self.num_read = self.num_replayed = 0
        self._max_kept = max_kept
        self._max_unread = max_unread
        self._kept: list[Kept[State]] = []

    @property
    def unread(self) -> Sequence[int]:
        """What has to be fed before anything new."""
        return self.ids[self.num_read :]

    @property
    def apart(self) -> bool:
        """Whether that should be a forward of its own."""
        return len(self.ids) - self.num_read > self._max_unread

    def wants(self) -> bool:
        """Whether the present state should be kept before the next forward."""
        return self.num_read > 0 and all(kept.length != self.num_read for kept in self._kept)

    def keep(self, state: State) -> None:
        """Hold a copy of the state after ``num_read`` ids."""
        self._kept.append(Kept(self.num_read, state))
        if len(self._kept) > self._max_kept:
            lengths = [0, *(kept.length for kept in self._kept)]
            gaps = [
                (lengths[at + 1] - lengths[at - 1]) / (self.num_read - lengths[at])
                for at in range(1, len(lengths) - 1)
            ]
            del self._kept[gaps.index(min(gaps))]

    def commit(self, tokens: Sequence[int]) -> None:
        """Enter a forward that has fed ``unread`` and then ``tokens``."""
        self.num_replayed += len(self.unread)
        self.ids += tokens
        self.num_read = len(self.ids)

    def cut(self, length: int) -> None:
        """Enter that the present state itself was cut back to ``length`` ids."""
        self.num_read = length
        self.crop(length)

    def crop(self, length: int) -> Kept[State] | None:
        """Go back to ``length`` ids; the state to restore, or None to stay with the present one."""
        del self.ids[length:]
        self._kept = [kept for kept in self._kept if kept.length <= length]
        return self.undo() if self.num_read > length else None

    def undo(self) -> Kept[State]:
        """The latest kept state, to restore because the present one is no good any more."""
        kept = [kept for kept in self._kept if kept.length <= self.num_read]
        last = kept[-1] if kept else Kept[State](0, None)
        self.num_read = last.length
        return last

    def restart(self) -> Kept[State]:
        """As ``undo``, but from nothing: for models that read all at once better than in parts."""
        self.num_read = 0
        return Kept[State](0, None)
