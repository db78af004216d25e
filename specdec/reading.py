"""Reading the prompts of sequences, in chunks, between the rounds of others."""

from collections.abc import Callable, Sequence

from specdec.backend import Span, num_replayed
from specdec.prefill import CHUNK, Forward, OnPrefill
from specdec.proposer import Proposer
from specdec.request import Request

__all__ = ["PromptReader"]

BESIDE = 128  # ids per forward where others wait for their next token


class PromptReader:
    """Reads all but the last id of each prompt, so that the first round is like every other.

    Args:
        forward: The target's.
        proposer: The drafter's side, which reads too; None without one.
        clock: In seconds.
        progress: Told how far the target is with a prompt.
        alone: Read one prompt at a time and in whole chunks, as plain decoding does.
    """

    def __init__(
        self,
        forward: Forward,
        proposer: Proposer | None,
        clock: Callable[[], float],
        progress: OnPrefill | None,
        *,
        alone: bool,
    ) -> None:
        self._forward = forward
        self._proposer = proposer
        self._clock = clock
        self._progress = progress
        self._alone = alone

    def read(self, active: Sequence[Request], limits: Sequence[int]) -> list[Request]:
        """Read on, in one forward of the target, in those of ``active`` that aren't ready.

        Args:
            active: All that decode or read together.
            limits: The most drafts that a round of each may check.

        Returns:
            Those that have become ready.
        """
        reading = [number for number, sequence in enumerate(active) if not sequence.ready]
        room = CHUNK if self._alone or len(reading) == len(active) else BESIDE
        self._read_target(
            [active[number] for number in reading[: 1 if self._alone else None]], room
        )
        ready = []
        for number in reading:
            sequence = active[number]
            if len(sequence.cache) == len(sequence.ids) - 1:
                sequence.ready = (
                    self._proposer is None
                    or sequence.drafter is None
                    or self._proposer.read_on(number, active, limits, room)
                )
                if sequence.ready:
                    ready.append(sequence)
        return ready

    def _read_target(self, reading: Sequence[Request], room: int) -> None:
        batch: list[tuple[Request, Span]] = []
        for sequence in reading:
            start = len(sequence.cache)
            chunk = sequence.ids[start : min(start + room, len(sequence.ids) - 1)]
            room -= len(chunk)
            if chunk:
                batch.append((sequence, Span(sequence.cache, chunk, 0)))
        if not batch:
            return
        replayed = [num_replayed(sequence.cache) for sequence, _ in batch]
        started = self._clock()
        self._forward([span for _, span in batch])
        seconds = (self._clock() - started) / sum(len(span.tokens) for _, span in batch)
        for (sequence, span), before in zip(batch, replayed, strict=True):
            stats = sequence.stats
            stats.prefill_seconds += seconds * len(span.tokens)
            stats.replayed_ct += num_replayed(sequence.cache) - before
            if self._progress is not None:
                cached, read = stats.cached_tokens, len(sequence.cache)
                self._progress(read - cached, len(sequence.ids) - 1 - cached)
