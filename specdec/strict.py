"""Choices that rounding could change, made again as plain decoding makes them.

A forward over several tokens may round differently from one over one. The keys and values that it
leaves differ too, and in a quantised model the least difference grows: every later row is off by
about as much as the first one. So what a wide forward wrote counts as inexact. Where the best
score is further from the others than rounding was ever seen to move it, nothing depends on that.
Elsewhere the inexact part of the cache is written once more, token by token.
"""

from collections.abc import Sequence

import numpy as np
from array_api_compat import array_namespace, to_device
from numpy.typing import NDArray

from specdec.backend import Cache, Logits, ModelBackend, Span
from specdec.drafters import Draft
from specdec.request import Request
from specdec.sampling import largest
from specdec.verify import on_host

__all__ = ["StrictChoices"]

LEARNT = 32  # tokens to measure on
WIDTHS = (2, 4, 8, 16)
RIVALS = 8  # best scores of a row whose distances from the best are compared
MARGIN = 1.25  # what comes may be a little more than what was seen


class StrictChoices:
    """What makes speculative decoding equal plain decoding in low precision.

    Attributes:
        rounding: The most that a wide forward was seen to move a good score against the best one,
            in logits; None before the first measurement.
    """

    def __init__(self, target: ModelBackend, max_width: int) -> None:
        self.target = target
        self.rounding: float | None = None
        self._widths = sorted({2, *(w for w in WIDTHS if w < max_width), min(max_width, LEARNT)})

    def learn(self, ids: Sequence[int]) -> None:
        """Measure on a text, once."""
        if self.rounding is not None:
            return
        ids = (list(ids) * LEARNT)[: min(LEARNT, self.target.max_context)]
        cache = self.target.new_cache()
        try:
            exact = [as_numpy(self._row(cache, token)).copy() for token in ids]
            rounding = 0.0
            for width in self._widths:
                self.target.crop(cache, 0)
                for start in range(0, len(ids), width):
                    part = ids[start : start + width]
                    (rows,) = self.target.forward([Span(cache, part, len(part))])
                    for row, exact_row in zip(as_numpy(rows), exact[start:], strict=False):
                        rounding = max(rounding, moved(row, exact_row))
            self.rounding = rounding
        finally:
            cache.close()

    def decide(
        self, active: Sequence[Request], drafts: Sequence[Draft], rows: Sequence[Logits]
    ) -> tuple[list[Draft], list[Logits]]:
        """End every draft at its first close choice, and give that one an exact row."""
        drafts, rows = list(drafts), list(rows)
        close = {}
        for index, sequence in enumerate(active):
            token_ids, held = drafts[index].token_ids, len(sequence.ids) - 1
            if not token_ids and sequence.exact == held and len(active) == 1:
                sequence.exact += 1  # as plain decoding does it
                continue
            position = self._first_close(sequence, token_ids, rows[index])
            if position is not None:
                close[index] = position
        if close:  # the next forward may end their life
            rows = [array_namespace(row).asarray(row, copy=True) for row in rows]
        for index, position in close.items():
            sequence, token_ids, wide = active[index], drafts[index].token_ids, rows[index]
            text = [*sequence.ids, *token_ids[:position]]
            self.target.crop(sequence.cache, sequence.exact)
            for token in text[sequence.exact :]:
                row = self._row(sequence.cache, token)
            sequence.stats.strict_ct += 1
            sequence.stats.target_forward_ct += len(text) - sequence.exact
            sequence.exact = len(text)
            off = moved(as_numpy(wide)[position], as_numpy(row))
            self.rounding = max(self.rounding or 0.0, off)
            rows[index] = array_namespace(wide).concat([wide[:position], row[None]])
            drafts[index] = drafts[index]._replace(token_ids=token_ids[:position])
        return drafts, rows

    def _first_close(
        self, sequence: Request, token_ids: Sequence[int], logits: Logits
    ) -> int | None:
        """The first position, up to the first wrong draft, where rounding could decide."""
        if sequence.sampler.distorts:
            return 0
        if not self.rounding:
            return None
        scores = as_numpy(sequence.sampler.scores(logits, sequence.ids, token_ids))
        for position, row in enumerate(scores):
            second, best = np.sort(largest(row[None], 2)[0])
            if not best - second > MARGIN * self.rounding:
                return position
            if position < len(token_ids) and row.argmax() != token_ids[position]:
                return None
        return None

    def _row(self, cache: Cache, token: int) -> Logits:
        """As plain decoding has it."""
        (rows,) = self.target.forward([Span(cache, [token], 1)])
        return rows[0]


def moved(row: NDArray[np.float32], exact: NDArray[np.float32]) -> float:
    """The most by which good scores of a row stand nearer to or further from the best."""
    best = np.argsort(exact)[-RIVALS:]
    best = best[np.isfinite(exact[best]) & np.isfinite(row[best])]
    gaps, exact_gaps = row[best] - row[best[-1:]], exact[best] - exact[best[-1:]]
    return float(np.abs(gaps - exact_gaps).max(initial=0.0))


def as_numpy(rows: Logits) -> NDArray[np.float32]:
    """Rows on the host, wherever they live."""
    rows = on_host(rows)
    return rows if isinstance(rows, np.ndarray) else np.asarray(to_device(rows, "cpu"))
