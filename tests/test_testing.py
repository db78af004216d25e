"""The conformance checks pass what is right and catch what is wrong, clause by clause."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specdec import ContextFullError, RuntimeFailure, Span
from specdec.testing import CHECKS, Check, TableBackend
from specdec.testing.table import TableCache


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("fill", [None, -np.inf, -1e9, 1e9])
def test_the_reference_backend_conforms(check: Check, fill: float | None) -> None:
    check(model_of(TableBackend, fill))


def model_of(kind: type[TableBackend], fill: float | None) -> TableBackend:
    """A random model, with an id of padding that scores ``fill`` as some real models' do."""
    base = TableBackend.random(9, padding=0 if fill is None else 1)
    if fill is not None:
        base.table[..., 9:] = fill
    return kind(base.table, max_context=400)


class AllRows(TableBackend):
    """C1: returns more rows than were asked for."""

    def forward(self, batch: Any) -> Any:
        return super().forward([Span(s.cache, s.tokens, len(s.tokens)) for s in batch])


class FirstRows(TableBackend):
    """C1: returns the first rows in place of the last."""

    def forward(self, batch: Any) -> Any:
        rows = super().forward([Span(s.cache, s.tokens, len(s.tokens)) for s in batch])
        return [row[: span.num_logits] for row, span in zip(rows, batch, strict=True)]


class DoubleRows(TableBackend):
    """C1: rows of another dtype."""

    def forward(self, batch: Any) -> Any:
        return [rows.astype(np.float64) for rows in super().forward(batch)]


class ShuffledBatch(TableBackend):
    """C2: mixes up the spans of a batch."""

    def forward(self, batch: Any) -> Any:
        if len(batch) > 2 and len({s.num_logits for s in batch}) > 1:
            rows = super().forward(batch)
            return [row[::-1] for row in rows]
        return super().forward(batch)


class WidestWindow(TableBackend):
    """C2: in a batch every sequence loses what the longest has behind its window of 200."""

    def forward(self, batch: Sequence[Span]) -> Any:
        lost = max(len(span.cache) for span in batch) - 200
        rows = super().forward(batch)
        short = [len(span.cache) - len(span.tokens) <= lost for span in batch]
        return [row * (0.5 if gone else 1) for row, gone in zip(rows, short, strict=True)]


class DeafCrop(TableBackend):
    """C3: does nothing when asked to crop."""

    def crop(self, cache: Any, length: int) -> None:
        pass


class EagerCrop(TableBackend):
    """C3: takes back one token too many."""

    def crop(self, cache: Any, length: int) -> None:
        super().crop(cache, max(0, length - 1))


class StaleCrop(TableBackend):
    """C3: reports the right length over the wrong contents."""

    def crop(self, cache: Any, length: int) -> None:
        ids = list(cache.ids)
        super().crop(cache, length)
        cache.ids[:] = ids[len(ids) - length :]


class WrappedWindow(TableBackend):
    """C3: keeps only the last 200 tokens, so a crop past them restores nothing."""

    def crop(self, cache: Any, length: int) -> None:
        wrapped = len(cache) > 200
        super().crop(cache, length)
        if wrapped:
            cache.ids[:] = [0] * length


class Unlimited(TableBackend):
    """C4: forgets its limits."""

    def forward(self, batch: Any) -> Any:
        return [np.zeros((s.num_logits, self.vocab.size), np.float32) for s in batch]


class LateLimits(TableBackend):
    """C4: notices a full context only when half of it has happened."""

    def forward(self, batch: Sequence[Span]) -> Any:
        rows = []
        for span in batch:
            rows += super().forward([span])
        return rows


class SharedRows(TableBackend):
    """C6: its rows change when something else is called."""

    last: Any = np.zeros(0)

    def forward(self, batch: Any) -> Any:
        rows = super().forward(batch)
        self.last = rows[-1]
        return rows

    def crop(self, cache: Any, length: int) -> None:
        super().crop(cache, length)
        self.last[:] = 0


class SharedCache(TableBackend):
    """All sequences write into the same memory."""

    shared: TableCache | None = None

    def new_cache(self) -> TableCache:
        cache = super().new_cache()
        if self.shared is not None and not self.shared.closed:
            cache.ids = self.shared.ids
        self.shared = cache
        return cache


class Leaky(TableBackend):
    """Holds 20 sequences and never gets one back."""

    def new_cache(self) -> TableCache:
        if self.call_ct > 20:
            raise RuntimeFailure("no more slots")
        return super().new_cache()


class Dice(TableBackend):
    """C8: never says the same thing twice."""

    def forward(self, batch: Any) -> Any:
        return [rows + self.forward_ct * 0.1 for rows in super().forward(batch)]


class SmallTable(TableBackend):
    """Its vocabulary claims an EOS that it doesn't have."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "eos_ids": [99]})


@pytest.mark.parametrize(
    ("mutant", "caught_by"),
    [
        (AllRows, "check_rows"),
        (FirstRows, "check_rows"),
        (DoubleRows, "check_rows"),
        (ShuffledBatch, "check_batch"),
        (WidestWindow, "check_batch"),
        (DeafCrop, "check_crop"),
        (EagerCrop, "check_crop"),
        (StaleCrop, "check_crop"),
        (WrappedWindow, "check_crop"),
        (Unlimited, "check_limits"),
        (LateLimits, "check_limits"),
        (SharedRows, "check_rows_stay"),
        (SharedCache, "check_isolation"),
        (Leaky, "check_isolation"),
        (Dice, "check_determinism"),
        (SmallTable, "check_vocabulary"),
    ],
)
@pytest.mark.parametrize("fill", [None, -1e9])
def test_a_broken_backend_is_caught(
    mutant: type[TableBackend], caught_by: str, fill: float | None
) -> None:
    (check,) = (check for check in CHECKS if check.__name__ == caught_by)
    with pytest.raises((AssertionError, RuntimeFailure)):
        check(model_of(mutant, fill))


def test_every_check_is_proved_to_catch_something() -> None:
    marks = test_a_broken_backend_is_caught.pytestmark  # type: ignore[attr-defined]
    (cases,) = (mark.args[1] for mark in marks if mark.args[0] == ("mutant", "caught_by"))
    assert {caught_by for _, caught_by in cases} == {check.__name__ for check in CHECKS}


def test_the_reference_backend_refuses_what_it_should() -> None:
    with pytest.raises(ValueError, match="a table is of shape"):
        TableBackend(np.zeros((3, 4, 4)))
    backend = TableBackend.random(4, max_context=5)
    cache = backend.new_cache()
    with pytest.raises(ContextFullError, match="holds 0 tokens and 6 more were fed"):
        backend.forward([Span(cache, [0] * 6, 1)])
    cache.close()
    with pytest.raises(ValueError, match="closed"):
        backend.forward([Span(cache, [0], 1)])
