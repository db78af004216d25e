"""The tokens of one generation as they come."""

from collections import deque
from collections.abc import Generator, Iterator

from specdec.request import GenerationResult
from specdec.stopping import TokenEvent

__all__ = ["TokenStream"]


class TokenStream(Iterator[TokenEvent]):
    """The tokens of one generation as they come. Closing it early leaves the decoder as new.

    Attributes:
        result: The whole generation, once the last event is out; None before.
    """

    def __init__(self, events: Generator[TokenEvent, None, GenerationResult]) -> None:
        self.result: GenerationResult | None = None
        self._events = events

    def __next__(self) -> TokenEvent:
        try:
            return next(self._events)
        except StopIteration as end:
            self.result = self.result or end.value
            raise

    def collect(self) -> GenerationResult:
        """Decode what is left; the whole generation.

        Raises:
            RuntimeError: The stream was closed early.
        """
        deque(self, maxlen=0)
        if self.result is None:
            raise RuntimeError("the stream was closed before its end: start another one")
        return self.result

    def close(self) -> None:
        """Stop decoding."""
        self._events.close()
