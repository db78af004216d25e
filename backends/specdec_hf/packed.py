"""Packed spans: one row of tokens for many sequences, each with a key-value store of its own.

The spans of all sequences lie one after another in a single row, so that every linear layer sees
one matrix and nothing is padded. Only attention has to know where one sequence ends. It learns it
from the cache: transformers hands a layer's new keys and values to ``PackedCache.update``, which
appends them to their sequences and returns itself in their place, and passes what it got on to the
attention function registered here.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache

from specdec.errors import UnsupportedModelError
from specdec_hf.border import borrowed, cache_keyword

__all__ = ["KeyValueStore", "PackedCache", "PackedEngine"]

ATTENTION = "specdec_packed"  # its name among transformers' attention implementations

SMALLEST_BUFFER = 64  # tokens

# Keyword arguments that reach an attention function and don't change what it has to compute.
HARMLESS = frozenset(
    {
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


class PackedEngine:
    """Runs the spans of a batch in one pass.

    Args:
        model: Whose attention goes through ``AttentionInterface``.
        limit: The most tokens of a sequence.
    """

    attention = "packed spans"
    rollback = "crop"

    def __init__(self, model: PreTrainedModel, limit: int) -> None:
        self._model = model
        self._limit = limit
        self._keyword = cache_keyword(model)

    def new(self) -> "KeyValueStore":
        """An empty sequence."""
        return KeyValueStore(self._limit)

    def crop(self, sequence: "KeyValueStore", length: int) -> None:
        """Cut a sequence back."""
        sequence.length = length

    def forward(self, batch: Sequence[tuple["KeyValueStore", Sequence[int], int]]) -> list[Tensor]:
        """Rows of sequences, ids and numbers of rows; after an exception nothing has changed."""
        stores = [store for store, _, _ in batch]
        sizes = [len(tokens) for _, tokens, _ in batch]
        lengths = [store.length for store in stores]
        try:
            logits = self._run(batch, stores, sizes)
            for store, length, size in zip(stores, lengths, sizes, strict=True):
                store.length = length + size
            return list(logits.split([num_logits for _, _, num_logits in batch]))
        except BaseException:
            for store, length in zip(stores, lengths, strict=True):
                store.length = length
            raise

    def _run(
        self,
        batch: Sequence[tuple["KeyValueStore", Sequence[int], int]],
        stores: Sequence["KeyValueStore"],
        sizes: Sequence[int],
    ) -> Tensor:
        """The wanted rows of all spans ``(rows, vocab.size)``."""
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for (store, tokens, num_logits), stop in zip(batch, accumulate(sizes), strict=True):
            ids += tokens
            positions += range(store.length, store.length + len(tokens))
            rows += range(stop - num_logits, stop)
        device = self._model.get_input_embeddings().weight.device
        with borrowed(self._model, ATTENTION):
            packed = torch.tensor([ids, positions], device=device)
            output = self._model(
                input_ids=packed[:1],
                position_ids=packed[1:],
                logits_to_keep=torch.tensor(rows, dtype=torch.long, device=device),
                use_cache=True,
                return_dict=True,
                **{self._keyword: PackedCache(stores, sizes)},
            )
            logits: Tensor = output.logits[0].float()
            return logits


class KeyValueStore:
    """The keys and values of one sequence, every position of every layer.

    Buffers are ``(1, heads, capacity, size)`` and grow by doubling, so that a step copies nothing
    but its own tokens. Windows are a matter of attention, not of storage: cutting a sequence back
    is setting ``length``. What lies past it is rubbish that the next tokens overwrite.
    """

    __slots__ = ("layers", "length", "limit")

    num_replayed = 0

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.length = 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put new keys and values ``(1, heads, new, size)`` behind the present length."""
        end = self.length + keys.shape[2]
        if layer not in self.layers or self.layers[layer][0].shape[2] < end:
            self.layers[layer] = (
                self._grown(layer, 0, keys, end),
                self._grown(layer, 1, values, end),
            )
        key_buffer, value_buffer = self.layers[layer]
        key_buffer[:, :, self.length : end] = keys
        value_buffer[:, :, self.length : end] = values

    def _grown(self, layer: int, which: int, like: Tensor, end: int) -> Tensor:
        old = self.layers[layer][which] if layer in self.layers else like[:, :, :0]
        capacity = min(max(end, 2 * old.shape[2], SMALLEST_BUFFER), self.limit)
        buffer = like.new_empty(1, like.shape[1], capacity, like.shape[3])
        buffer[:, :, : self.length] = old[:, :, : self.length]
        return buffer


class _Part(NamedTuple):
    """What one span's attention looks at: the same in every layer of a kind."""

    store: KeyValueStore
    start: int  # of the span in the packed row
    stop: int
    first: int  # position of the first key that any of its queries sees
    end: int  # one past the last
    mask: Tensor | None  # (new, end - first), added to the scores
    is_causal: bool


class PackedCache(Cache):  # type: ignore[misc]  # transformers isn't typed here
    """One forward over packed spans, in the shape of a transformers cache."""

    def __init__(self, stores: Sequence[KeyValueStore], sizes: Sequence[int]) -> None:
        super().__init__(layers=[])
        self.stores = stores
        self.sizes = sizes
        self.layer = -1  # the one whose keys were written last
        self.written: set[int] = set()
        self.parts: dict[tuple[int | None, torch.dtype, torch.device], list[_Part]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple["PackedCache", "PackedCache"]:
        """Append a layer's keys and values ``(1, heads, total, size)`` to their sequences."""
        if layer_idx in self.written:
            raise UnsupportedModelError(f"layer {layer_idx} was fed twice in one forward")
        self.written.add(layer_idx)
        self.layer = layer_idx
        start = 0
        for store, size in zip(self.stores, self.sizes, strict=True):
            stop = start + size
            store.write(layer_idx, key_states[:, :, start:stop], value_states[:, :, start:stop])
            start = stop
        return self, self

    def plan(self, window: int | None, dtype: torch.dtype, device: torch.device) -> list[_Part]:
        """What each span looks at. Made once per forward and shared by the layers of a kind."""
        kind = window, dtype, device
        if kind not in self.parts:
            masks: dict[tuple[int, int, int], Tensor] = {}
            parts, start = [], 0
            for store, size in zip(self.stores, self.sizes, strict=True):
                past, end = store.length, store.length + size
                first = max(0, past + 1 - window) if window else 0
                fits = not window or end - first <= window
                mask = None
                if size > 1 and not (past == 0 and fits):
                    shape = (size, past - first, end - first)
                    mask = masks.get(shape)
                    if mask is None:
                        mask = masks[shape] = _mask(*shape, window, dtype, device)
                is_causal = size > 1 and mask is None
                parts.append(_Part(store, start, start + size, first, end, mask, is_causal))
                start += size
            self.parts[kind] = parts
        return self.parts[kind]

    # The rest of what models ask of a cache. Positions are passed in, and masks are ours.

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Nothing: positions come with the call."""
        return 0

    def get_query_offset(self, *args: Any, **kwargs: Any) -> int:
        """Nothing: positions come with the call."""
        return 0

    def get_mask_sizes(self, query: int | Tensor, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """As if nothing had been seen; older versions pass positions instead of their number."""
        return (query if isinstance(query, int) else len(query)), 0

    @property
    def is_compileable(self) -> bool:
        """No: shapes change at every call."""
        return False


def _mask(
    size: int, past: int, keys: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    ahead = (
        torch.arange(keys, device=device) - torch.arange(past, past + size, device=device)[:, None]
    )
    hidden = ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)
    return torch.zeros(size, keys, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


class _Window(NamedTuple):
    """What our mask function hands to the layers in place of a mask."""

    size: int


def _describe_mask(*args: Any, **kwargs: Any) -> _Window | None:
    """Say which mask a model wants: None for a causal one, else its window.

    The mask is what transformers' own attention obeys, so it decides, rather than the
    ``sliding_window`` that some models pass to the attention function and others don't.
    """
    if kwargs.get("use_vmap") or "allow_is_bidirectional_skip" in kwargs:
        raise UnsupportedModelError("it attends by a mask that is neither causal nor a window")
    window = kwargs.get("local_size")
    return None if window is None else _Window(window)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: PackedCache,
    value: PackedCache,
    attention_mask: _Window | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of packed queries ``(1, heads, total, size)``, each span to its own sequence.

    Args:
        module: The layer; only named in errors.
        query: After the rotary embedding.
        key: The cache, as ``PackedCache.update`` returned it.
        value: The same.
        attention_mask: What ``_describe_mask`` said.
        scaling: Factor of the scores; one over the root of the size if None.
        dropout: Zero, since models run in evaluation mode.
        sliding_window: Said by the mask already.
        softcap: Scores are squeezed into plus or minus this.
        s_aux: ``(heads,)`` scores of the sinks, which take weight and give nothing.
        is_causal: False is refused.
        kwargs: What models hand down; whatever could matter is refused.

    Returns:
        ``(1, total, heads, size of a value)`` and no weights.

    Raises:
        UnsupportedModelError: An argument that isn't honoured here.
    """
    unknown = [
        k for k, v in kwargs.items() if k not in HARMLESS and v is not None and v is not False
    ]
    if is_causal is False or dropout:
        unknown.append("is_causal=False" if is_causal is False else "dropout")
    if not isinstance(key, PackedCache) or not isinstance(attention_mask, _Window | None):
        unknown.append("keys or masks of its own")
    if unknown:
        raise UnsupportedModelError(f"its {type(module).__name__} asks for {', '.join(unknown)}")
    window = attention_mask.size if attention_mask else None
    explicit = softcap is not None or s_aux is not None
    outputs = []
    for part in key.plan(window, query.dtype, query.device):
        keys, values = part.store.layers[key.layer]
        keys, values = keys[:, :, part.first : part.end], values[:, :, part.first : part.end]
        queries = query[:, :, part.start : part.stop] if len(key.sizes) > 1 else query
        if explicit:
            output = _attend_explicitly(queries, keys, values, part, scaling, softcap, s_aux)
        elif part.mask is None:
            output = scaled_dot_product_attention(
                queries,
                keys,
                values,
                is_causal=part.is_causal,
                scale=scaling,
                enable_gqa=queries.shape[1] != keys.shape[1],
            )
        else:
            # Kernels that take a mask don't all take fewer key heads; a view repeats them for free.
            queries, keys, values = _grouped(queries, keys, values)
            output = scaled_dot_product_attention(
                queries, keys, values, attn_mask=part.mask, scale=scaling
            ).view(1, query.shape[1], part.stop - part.start, values.shape[3])
        outputs.append(output.transpose(1, 2))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), None


def _grouped(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``(key heads, queries per key head, length, size)`` of each, without a copy of the keys."""
    heads = keys.shape[1]
    group = queries.shape[1] // heads
    return (
        queries.reshape(heads, group, *queries.shape[2:]),
        keys[0, :, None].expand(-1, group, -1, -1),
        values[0, :, None].expand(-1, group, -1, -1),
    )


def _attend_explicitly(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    part: _Part,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention in plain operations, for what the fused kernels lack."""
    mask = part.mask
    size, end = part.stop - part.start, part.end - part.first
    if part.is_causal:
        mask = _mask(size, 0, end, None, queries.dtype, queries.device)
    queries, keys, values = _grouped(queries, keys, values)
    scores = queries @ keys.transpose(2, 3)
    scores = scores * (queries.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype).view(*scores.shape[:2], 1, 1).expand(-1, -1, size, 1)
        scores = torch.cat([scores, column], dim=3)
    weights = torch.softmax(scores, dim=3, dtype=torch.float32)[..., :end].to(values.dtype)
    return (weights @ values).reshape(1, -1, size, values.shape[3])


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, _describe_mask)
