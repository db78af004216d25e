"""Choices that rounding could change, made again as plain decoding makes them.

A forward over several tokens may round differently from one over one. The keys and values that it
leaves differ too, and in a quantised model the least difference grows: every later row is off by
about as much as the first one. So what a wide forward wrote counts as inexact. Where the best
score is further from the others than rounding was ever seen to move it, nothing depends on that.
Elsewhere the inexact part of the cache is written once more, token by token.
"""

from collections.abc import Sequence
from contextlib import closing

import numpy as np
from array_api_compat import array_namespace

from specdec.backend import Logits, ModelBackend, Span
from specdec.drafters import Draft
from specdec.request import Request
from specdec.rounding import as_numpy, gap_change, read_by_width
from specdec.sampling import largest

__all__ = ["StrictChoices"]

LEARNT = 32  # tokens to measure on
WIDTHS = (2, 4, 8, 16)
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
        with closing(self.target.new_cache()) as cache:
            pairs = read_by_width(self.target, cache, ids, self._widths)
            self.rounding = max(gap_change(row, wide) for *_, row, wide in pairs)

    def decide(
        self, active: Sequence[Request], drafts: Sequence[Draft], rows: Sequence[Logits]
    ) -> tuple[list[Draft], list[Logits]]:
        """End every draft at its first close choice; up to there its rows become exact ones."""
        drafts, rows = list(drafts), list(rows)
        close = {}
        for index, sequence in enumerate(active):
            token_ids, held = drafts[index].token_ids, len(sequence.ids) - 1
            sequence.exact = min(sequence.exact, held)  # an exact row may have refused a draft
            if not token_ids and sequence.exact == held and len(active) == 1:
                sequence.exact += 1  # as plain decoding does it
                continue
            position = self._first_close(sequence, token_ids, rows[index])
            if position is not None:
                close[index] = position
        if close:  # the next forward may end their life
            rows = [copied(row) for row in rows]
        for index, position in close.items():
            sequence, token_ids = active[index], drafts[index].token_ids
            text = [*sequence.ids, *token_ids[:position]]
            self.target.crop(sequence.cache, sequence.exact)
            exact = []
            for place, token in enumerate(text[sequence.exact :], sequence.exact):
                (row,) = self.target.forward([Span(sequence.cache, [token], 1)])
                if place >= len(sequence.ids) - 1:  # of this round
                    exact.append(copied(row))
            sequence.stats.strict_ct += 1
            sequence.stats.target_forward_ct += len(text) - sequence.exact
            sequence.exact = len(text)
            off = gap_change(as_numpy(exact[-1])[0], as_numpy(rows[index])[position])
            self.rounding = max(self.rounding or 0.0, off)
            rows[index] = array_namespace(*exact).concat(exact)
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


def copied(rows: Logits) -> Logits:
    """Rows that the next forward leaves alone."""
    return array_namespace(rows).asarray(rows, copy=True)
