"""One by one: sequences in transformers' own caches, for models that packed spans can't serve.

Some of these caches can be cut, some for as long as they record their past, and some not at all.
Before each forward what can't be cut is copied, so that any sequence can go back to a state from
before: after a failure, and wherever a crop goes further than the cache can.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, QuantizedCache, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    StaticLayer,
)

from specdec.errors import UnsupportedModelError
from specdec.rewind import Kept, Rewind
from specdec_hf.border import borrowed, cache_keyword, parameters

__all__ = ["NativeEngine", "NativeSequence", "cache_maker"]

# For models that must read one id at a time: above so many, all of the text at once is quicker.
MANY = 32

NAMES = {  # of their classes
    "offloaded": "DynamicCache(offloading=True)",
    "static": "StaticCache",
    "quantized": "QuantizedCache",
}

# The attributes of a cache and of its layers.
State: TypeAlias = list[dict[str, Any]]


def cache_maker(model: PreTrainedModel, kind: str, limit: int) -> Callable[[], Any]:
    """What makes empty caches of a kind; None from it leaves that to the model.

    Raises:
        UnsupportedModelError: There are none for this model; names their class.
    """
    if kind == "dynamic" and not model._supports_default_dynamic_cache():
        return lambda: None
    config = model.config.get_text_config(decoder=True)
    makers: dict[str, Callable[[], Any]] = {
        "dynamic": lambda: _growing(DynamicCache(config=config)),
        "offloaded": lambda: DynamicCache(config=config, offloading=True),
        "static": lambda: StaticCache(config=config, max_cache_len=limit),
        "quantized": lambda: QuantizedCache("fp8", config=config),
    }
    make, reason = makers[kind], None
    if kind == "offloaded" and model.device.type != "cuda":
        reason = f"it moves keys off a GPU, and the model is on {model.device}"
    else:
        try:
            if kind == "quantized" and not getattr(make(), "is_croppable", False):
                reason = "what it has rounded can't be cut back"
        except (ValueError, KeyError, NotImplementedError) as error:
            reason = str(error).rstrip(".")
    if reason:
        raise UnsupportedModelError(
            f"{NAMES[kind]} can't serve {type(model).__name__}: {reason}. Leave out cache={kind!r}"
        )
    return make


def _update(
    layer: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """``DynamicLayer.update`` in buffers that double, so that a step doesn't copy all the past."""
    if not layer.is_initialized:
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys[:, :, :0], values[:, :, :0]
        layer.buffers = {}
    for name, new in (("keys", keys), ("values", values)):
        old = getattr(layer, name)
        start, end = old.shape[2], old.shape[2] + new.shape[2]
        buffer = layer.buffers.get(name)
        if buffer is None or buffer.shape[2] < end:
            buffer = new.new_empty(*new.shape[:2], max(end, 2 * start, 64), new.shape[3])
            buffer[:, :, :start] = old
            layer.buffers[name] = buffer
        buffer[:, :, start:end] = new
        setattr(layer, name, buffer[:, :, :end])
    return layer.keys, layer.values


GROWING = {
    kind: type(f"Growing{kind.__name__}", (kind,), {"update": _update})
    for kind in (DynamicLayer, LinearAttentionAndFullAttentionLayer)
}


def _growing(cache: Any) -> Any:
    for layer in cache.layers:
        layer.__class__ = GROWING.get(type(layer), type(layer))
    return cache


class NativeSequence:
    """One sequence.

    Attributes:
        cache: Transformers' cache; None before it is made.
        rewind: The ids, and states to go back to.
        pending: A state to restore before the next forward.
        surplus: How many tokens to cut off before the next forward.
        room: How many can be cut off at most.
    """

    __slots__ = ("cache", "pending", "rewind", "room", "surplus")

    def __init__(self, rewind: Rewind[State]) -> None:
        self.cache: Any = None
        self.rewind = rewind
        self.pending: Kept[State] | None = Kept(0, None)
        self.surplus = self.room = 0

    @property
    def length(self) -> int:
        """How many ids it holds."""
        return len(self.rewind.ids)

    @property
    def num_replayed(self) -> int:
        """Ids that were read again so far."""
        return self.rewind.num_replayed

    def restore(self, kept: Kept[State]) -> None:
        """Go back to a kept state, before the next forward."""
        self.pending, self.surplus, self.room = kept, 0, 0


class NativeEngine:
    """Runs spans one by one, each on a cache of transformers'.

    Args:
        model: Any decoder.
        make_cache: Makes an empty cache, or returns None if the model makes its own.
        records: Whether a cache that can record its past should.
        in_steps: Whether the model must be fed one id at a time once its cache isn't empty. Some
            recurrent layers of transformers start from nothing when they see several.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        make_cache: Callable[[], Any],
        *,
        records: bool = True,
        in_steps: bool = False,
    ) -> None:
        self._model = model
        self._make_cache = make_cache
        self._records = records
        self._in_steps = in_steps
        self._keyword = cache_keyword(model)
        self._takes = {"position_ids", "logits_to_keep"} & parameters(model)
        self.attention = "one by one, in single steps" if in_steps else "one by one"
        self.rollback = "snapshot and replay"

    def new(self) -> NativeSequence:
        """An empty sequence."""
        return NativeSequence(Rewind(max_kept=16) if self._in_steps else Rewind())

    def crop(self, sequence: NativeSequence, length: int) -> None:
        """Cut a sequence back; the work is left to its next forward."""
        rewind = sequence.rewind
        more = rewind.num_read - length
        if 0 < more <= sequence.room - sequence.surplus:
            sequence.surplus += more
            rewind.cut(length)
        elif kept := rewind.crop(length):
            sequence.restore(kept)

    def forward(self, batch: Sequence[tuple[NativeSequence, Sequence[int], int]]) -> list[Tensor]:
        """Rows of sequences, ids and numbers of rows; after an exception nothing has changed."""
        before: list[tuple[NativeSequence, int]] = []
        rows = []
        try:
            with borrowed(self._model):
                for sequence, tokens, num_logits in batch:
                    before.append((sequence, sequence.length))
                    rows.append(self._feed(sequence, tokens, num_logits))
        except BaseException:
            for sequence, length in before:
                sequence.restore(sequence.rewind.crop(length) or sequence.rewind.undo())
            raise
        return rows

    def _feed(self, sequence: NativeSequence, tokens: Sequence[int], num_logits: int) -> Tensor:
        rewind = sequence.rewind
        if self._in_steps and len(tokens) > MANY:
            sequence.restore(rewind.restart())
        elif rewind.apart:
            self._read(sequence, rewind.unread, 0)
            rewind.commit([])
        in_steps = self._in_steps and rewind.num_read > 0
        rows = []
        for stop, piece in _pieces(tokens, in_steps):
            if rewind.wants():
                self._prepare(sequence)
                rewind.keep(_snapshot(sequence.cache))
            wanted = min(len(piece), max(0, num_logits - (len(tokens) - stop)))
            rows.append(self._read(sequence, [*rewind.unread, *piece], wanted))
            rewind.commit(piece)
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _prepare(self, sequence: NativeSequence) -> None:
        """Bring a cache to where its sequence says that it is."""
        if sequence.pending:
            if sequence.pending.state is None:
                sequence.cache = self._make_cache()
            else:
                _restore(sequence.cache, *sequence.pending)
        elif sequence.surplus or _recording(sequence.cache):
            sequence.cache.crop(-sequence.surplus)  # a crop by 0 forgets what was recorded
        sequence.pending, sequence.surplus, sequence.room = None, 0, 0

    def _read(self, sequence: NativeSequence, ids: Sequence[int], num_logits: int) -> Tensor:
        """Feed ids behind what was read; the rows of the last so many of them."""
        self._prepare(sequence)
        start = sequence.rewind.num_read
        for stop, piece in _pieces(ids, self._in_steps and start > 0):
            logits = self._call(sequence, piece, start + stop - len(piece), num_logits)
        sequence.room = self._room(sequence.cache, start, len(ids))
        return logits

    def _room(self, cache: Any, start: int, size: int) -> int:
        """How many tokens can be cut off behind a forward of that size."""
        if not getattr(cache, "is_croppable", False):
            return 0
        if not any(hasattr(layer, "record_past") for layer in cache.layers):
            self.rollback = "crop"
            return start + size
        if not self._records:
            return 0
        self.rollback = "recorded past"
        if _recording(cache):
            return size
        cache.activate_past_recording()  # only now, since the first forward pads
        return 0

    def _call(
        self, sequence: NativeSequence, ids: Sequence[int], past: int, num_logits: int
    ) -> Tensor:
        device = self._model.get_input_embeddings().weight.device
        arguments: dict[str, Any] = {self._keyword: sequence.cache}
        if "position_ids" in self._takes:
            positions = torch.arange(past, past + len(ids), device=device)
            arguments["position_ids"] = positions[None]
        if "logits_to_keep" in self._takes:
            arguments["logits_to_keep"] = max(1, num_logits)  # 0 would be all of them
        output = self._model(
            input_ids=torch.tensor([list(ids)], device=device),
            use_cache=True,
            return_dict=True,
            **arguments,
        )
        if sequence.cache is None:
            sequence.cache = getattr(output, self._keyword)
        logits: Tensor = output.logits[0]
        return logits[len(logits) - num_logits :].float()


def _pieces(ids: Sequence[int], in_steps: bool) -> Iterator[tuple[int, Sequence[int]]]:
    """The ids, whole or one by one, each time with where they end."""
    if in_steps:
        for at in range(len(ids)):
            yield at + 1, ids[at : at + 1]
    else:
        yield len(ids), ids


def _recording(cache: Any) -> bool:
    return any(getattr(layer, "record_past", False) for layer in getattr(cache, "layers", ()))


def _parts(cache: Any) -> list[Any]:
    return [cache, *getattr(cache, "layers", ())]


def _stays(part: Any) -> frozenset[str]:
    """Attributes of which no copy is needed: those before any length stay as they are."""
    update = getattr(type(part), "update", None)
    if update in (_update, DynamicLayer.update, StaticLayer.update):
        return frozenset({"keys", "values", "buffers"})
    return frozenset({"layers"})


def _snapshot(cache: Any) -> State:
    return [
        {name: _copy(value) for name, value in vars(part).items() if name not in _stays(part)}
        for part in _parts(cache)
    ]


def _restore(cache: Any, length: int, state: State | None) -> None:
    assert state is not None
    if hasattr(cache, "layers"):
        del cache.layers[len(state) - 1 :]  # those that were made since
    for part, attributes in zip(_parts(cache), state, strict=True):
        vars(part).update(_copy(attributes))
        cuttable = getattr(type(part), "update", None) in (_update, DynamicLayer.update)
        if cuttable and part.is_initialized:
            part.keys, part.values = part.keys[..., :length, :], part.values[..., :length, :]


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_copy, value))
    return value
