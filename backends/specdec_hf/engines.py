"""Which way a model's spans are run: decided by trying, not by the name of its class."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.errors import RuntimeFailure, UnsupportedModelError
from specdec_hf.border import borrowed, layer_types, why_not_packed
from specdec_hf.native import NativeEngine, cache_maker
from specdec_hf.packed import PackedEngine

__all__ = ["CACHES", "Engine", "choose_engine"]

CACHES = ("packed", "dynamic", "static", "offloaded", "quantized")

PROBE = 8  # tokens


class Engine(Protocol):
    """Runs spans of sequences; arguments are in range already.

    Attributes:
        attention: How, in words.
        rollback: By which means sequences go back.
    """

    attention: str
    rollback: str

    def new(self) -> Any:
        """An empty sequence, with a ``length`` and, if it reads again, a ``num_replayed``."""

    def crop(self, sequence: Any, length: int) -> None:
        """Cut a sequence back."""

    def forward(self, batch: Sequence[tuple[Any, Sequence[int], int]]) -> list[Tensor]:
        """Rows of sequences, ids and numbers of rows; after an exception nothing has changed."""


def choose_engine(model: PreTrainedModel, limit: int, cache: str | None) -> Engine:
    """The quickest engine that computes what the model itself does.

    Args:
        model: A decoder.
        limit: The most tokens of a sequence.
        cache: One of ``CACHES``; None is ``"packed"``, or else ``"dynamic"``.

    Raises:
        ValueError: There is no such kind of cache.
        UnsupportedModelError: No engine does; says what was wrong with each.
        RuntimeFailure: The model's own forward fails.
    """
    if cache is not None and cache not in CACHES:
        raise ValueError(f"there is no cache {cache!r}: choose one of {', '.join(CACHES)}")
    ways: list[tuple[str, bool, Callable[[], Engine]]] = []  # whether one is for recorded pasts
    faults = []
    if cache in (None, "packed"):
        reason = why_not_packed(model)
        if reason:
            faults.append(f"packed spans: {reason}")
        else:
            ways.append(("packed spans", False, lambda: PackedEngine(model, limit)))
    if cache != "packed":
        make = cache_maker(model, cache or "dynamic", limit)
        native = partial(NativeEngine, model, make)
        ways += [
            ("one by one", False, native),
            ("without its recorded past", True, partial(native, records=False)),
            ("in single steps", False, partial(native, records=False, in_steps=True)),
        ]
    cause: Exception | None = None
    engine: Engine | None = None
    probe: _Probe | None = None
    for way, is_for_recorded, new_engine in ways:
        if is_for_recorded and engine and engine.rollback != "recorded past":
            continue
        probe = probe or _Probe(model, limit)
        engine = new_engine()
        try:
            if probe.passes(engine):
                return engine
            faults.append(f"{way}: after a rollback its rows aren't those of a fresh start")
        except Exception as error:
            cause = error
            faults.append(f"{way}: {type(error).__name__}: {error}")
    kinds = ", ".join(layer_types(model))
    raise UnsupportedModelError(
        f"{type(model).__name__} can't run here{f' with cache={cache!r}' if cache else ''}"
        f"{f', with layers of type {kinds}' if kinds else ''}: {'; '.join(faults)}"
    ) from cause


class _Probe:
    """A few ids, the model's own rows of them, and those of the last few without the first.

    What the first ids change in the rows of the last is what a rollback can get wrong, so that is
    the measure for differences.
    """

    def __init__(self, model: PreTrainedModel, limit: int) -> None:
        size = min(PROBE, limit)
        self.cut = size // 2
        width = model.get_output_embeddings().weight.shape[0]
        self.ids = [(3 + 7 * i) % width for i in range(size)]
        try:
            with borrowed(model):
                self.rows = self._rows(model, self.ids)
                without = self._rows(model, self.ids[self.cut :])
        except Exception as error:
            raise RuntimeFailure(
                f"{type(model).__name__} failed in a forward of its own, without a cache "
                f"({type(error).__name__}: {error}): try the model by itself"
            ) from error
        eps = torch.finfo(model.dtype).eps
        if self.rows.is_cuda:
            eps = max(eps, 2**-11)  # TensorFloat-32
        quarters = torch.tensor([0.25, 0.75], device=self.rows.device)
        low, high = self.rows[self.cut :].quantile(quarters, dim=1)
        self.tolerance = eps**0.5 * self._distance(without, self.cut) + 8 * eps * (high - low)

    def passes(self, engine: Engine) -> bool:
        """Feed, take back, feed again: by ones and by more, with another sequence in between."""
        ids, cut = self.ids, self.cut
        if not cut:
            return True  # a context of one token
        sequence, other = engine.new(), engine.new()
        engine.forward([(sequence, ids[:cut], 0), (other, ids[:1], 0)])
        wrong = ids[: -1 - (cut + 1) // 2 : -1]
        _, others = engine.forward([(sequence, wrong, 1), (other, ids[1:], len(ids) - cut)])
        engine.crop(sequence, cut)
        (first,) = engine.forward([(sequence, ids[cut : cut + 1], 1)])
        after = ids[cut + 1 :]
        rest = engine.forward([(sequence, after, len(after))]) if after else []
        found = [(others, cut), (first, cut), *((rows, cut + 1) for rows in rest)]
        return all(self._right(rows, start) for rows, start in found)

    def _right(self, rows: Tensor, start: int) -> bool:
        """Whether those are the model's own from a position on.

        Most of them, that is: rounding may send a token of a mixture of experts elsewhere, and a
        bad state spoils all rows.
        """
        at = slice(start - self.cut, start - self.cut + len(rows))
        right = self._distance(rows, start) <= self.tolerance[at]
        return bool(right.float().mean() > 0.5)

    def _rows(self, model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
        device = model.get_input_embeddings().weight.device
        output = model(torch.tensor([ids], device=device), use_cache=False, return_dict=True)
        rows: Tensor = output.logits[0].float()
        return rows.nan_to_num(0, 0, 0)

    def _distance(self, rows: Tensor, start: int) -> Tensor:
        """Of each row: what half of its scores are at most away from the model's own."""
        return (rows - self.rows[start : start + len(rows)]).abs().median(dim=1).values
