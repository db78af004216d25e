"""What a pair's rounds take, measured before the first text is decoded by it."""

from collections.abc import Callable, Sequence

from specdec.backend import ModelBackend, Span
from specdec.costs import Costs
from specdec.request import Request

__all__ = ["SECONDS", "calibrate"]

SECONDS = 0.4
WIDTHS = (1, 5, 2, 9, 3, 17)  # first what tells most
REPEATS = 3


def calibrate(
    target: ModelBackend,
    costs: Costs,
    sequence: Request,
    clock: Callable[[], float],
    *,
    seconds: float = SECONDS,
    widths: Sequence[int] | None = None,
    max_width: int,
) -> None:
    """Time target forwards of several widths behind a sequence's prompt.

    Args:
        target: The model.
        costs: Where the samples go.
        sequence: A sequence whose prompt has been read; its cache is left as it was.
        clock: In seconds.
        seconds: The most to spend beside the first forwards over one token.
        widths: What to measure, all of it. None: some that tell most, as far as the time goes.
        max_width: The widest that will be asked for.
    """
    held, last = len(sequence.cache), sequence.ids[-1]

    def timed(width: int) -> float:
        before = clock()
        target.forward([Span(sequence.cache, [last] * width, width)])
        taken = clock() - before
        target.crop(sequence.cache, held)
        return taken

    timed(1)  # the first is slow for being the first
    started, longest = clock(), 0.0
    room = min(target.max_context - held, max_width)
    wanted = [width for width in widths or WIDTHS if 1 <= width <= room]
    for number, width in enumerate(REPEATS * wanted):
        if number >= (len(wanted) if widths else 1) and clock() - started + longest > seconds:
            return
        taken = timed(width)
        longest = max(longest, taken)
        costs.count_verify(width, taken)
