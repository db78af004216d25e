"""Choices that rounding could change, made by forwards over one token.

A forward over several tokens may round differently from one over one, and where the two best
scores are nearly equal that can change the choice. How far rows differ is measured, and closer
choices than that are made again, on a row as plain decoding has it.
"""

from collections.abc import Sequence

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from specdec.backend import Cache, Logits, ModelBackend, Span
from specdec.drafters import Draft
from specdec.request import Request
from specdec.sampling import largest
from specdec.verify import on_host

__all__ = ["NarrowForwards"]

WIDTHS = (2, 4, 8)  # to measure on
MARGIN = 2.0  # what is measured is one difference, and a gap has two, on a cache that rounded too


class NarrowForwards:
    """What makes speculative decoding equal plain decoding in low precision.

    Attributes:
        rounding: The largest difference between a logit of a wide forward and of a narrow one that
            was seen; None before the first measurement.
    """

    def __init__(self, target: ModelBackend) -> None:
        self.target = target
        self.rounding: float | None = None

    def learn(self, ids: Sequence[int]) -> None:
        """Measure on a text, once."""
        if self.rounding is not None:
            return
        ids = (list(ids) * max(WIDTHS))[: min(max(WIDTHS), self.target.max_context)]
        cache = self.target.new_cache()
        try:
            narrow = [self._row(cache, token) for token in ids]
            self.rounding = 0.0
            for width in WIDTHS:
                self.target.crop(cache, 0)
                for start in range(0, len(ids), width):
                    part = ids[start : start + width]
                    (rows,) = self.target.forward([Span(cache, part, len(part))])
                    for row, token_row in zip(as_numpy(rows), narrow[start:], strict=False):
                        self._compare(row, token_row)
        finally:
            cache.close()

    def decide(
        self, active: Sequence[Request], drafts: Sequence[Draft], rows: Sequence[Logits]
    ) -> tuple[list[Draft], list[Logits]]:
        """End every draft at its first close choice, and give that one a row of its own forward."""
        close = [
            self._first_close(sequence, draft, logits) if draft.token_ids else None
            for sequence, draft, logits in zip(active, drafts, rows, strict=True)
        ]
        if not any(position is not None for position in close):
            return list(drafts), list(rows)
        drafts, rows = list(drafts), [array_namespace(row).asarray(row, copy=True) for row in rows]
        spans = []
        for index, position in enumerate(close):
            if position is not None:
                sequence, token_ids = active[index], drafts[index].token_ids
                held = len(sequence.ids) - 1 + position
                self.target.crop(sequence.cache, held)
                token = token_ids[position - 1] if position else sequence.ids[-1]
                spans.append(Span(sequence.cache, [token], 1))
        decided = iter(self.target.forward(spans))
        for index, position in enumerate(close):
            if position is not None:
                row, draft, wide = next(decided), drafts[index], rows[index]
                self._compare(as_numpy(wide)[position], as_numpy(row)[0])
                xp = array_namespace(wide)
                rows[index] = xp.concat([wide[:position], row])
                drafts[index] = draft._replace(token_ids=draft.token_ids[:position])
                active[index].stats.strict_ct += 1
                active[index].stats.target_forward_ct += 1
        return drafts, rows

    def _first_close(self, sequence: Request, draft: Draft, logits: Logits) -> int | None:
        """The first position, up to the first wrong draft, where rounding could decide."""
        bound = MARGIN * (self.rounding or 0.0)
        if bound == 0.0:
            return None
        scores = as_numpy(sequence.sampler.scores(logits, sequence.ids, draft.token_ids))
        for position, row in enumerate(scores):
            second, best = np.sort(largest(row[None], 2)[0])
            if not best - second > bound:
                return position
            if position < len(draft.token_ids) and row.argmax() != draft.token_ids[position]:
                return None
        return None

    def _row(self, cache: Cache, token: int) -> NDArray[np.float32]:
        (rows,) = self.target.forward([Span(cache, [token], 1)])
        return np.array(as_numpy(rows)[0])

    def _compare(self, wide: Logits, narrow: Logits) -> None:
        with np.errstate(invalid="ignore"):  # a masked score is -inf in both
            seen = float(np.nanmax(np.abs(wide - narrow)))
        self.rounding = max(self.rounding or 0.0, seen)


def as_numpy(rows: Logits) -> NDArray[np.float32]:
    """Rows on the host, wherever they live."""
    rows = on_host(rows)
    return rows if isinstance(rows, np.ndarray) else np.asarray(rows.cpu())
