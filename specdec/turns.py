"""Whose turn it is: threads that share a decoder, and what they put off to between turns."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import RLock

__all__ = ["Turns"]


class Turns:
    """One thread at a time.

    The garbage collector ends forgotten streams at any moment, in any thread, perhaps in the middle
    of a turn or of a backend's own work: to wait there would be a deadlock. So what is left to do
    then is put off until it is nobody's turn.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._depth = 0  # how often the thread whose turn it is has entered
        self._left = deque[Callable[[], None]]()

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait for a turn and have it; a thread may take one in its own."""
        with self._lock:
            self._do_left()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
        self._settle()  # what was put off in this turn

    def put_off(self, work: Iterable[Callable[[], None]]) -> None:
        """Do some work at once if it is nobody's turn, else when the turn is over."""
        self._left.extend(work)
        self._settle()

    def _settle(self) -> None:
        while self._left and self._depth == 0 and self._lock.acquire(blocking=False):
            try:
                self._do_left()
            finally:
                self._lock.release()

    def _do_left(self) -> None:
        if self._depth > 0:
            return
        self._depth += 1
        try:
            while self._left:
                self._left.popleft()()
        finally:
            self._depth -= 1
