"""A transformers model in memory as a GGUF file, tensor by tensor."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from specdec.errors import UnsupportedModelError
from specdec_hf.families import Family, Value, family_of, head_size, hyperparameters, rope
from specdec_hf.gguf_tokenizer import add_tokenizer
from specdec_hf.tokens import eos_ids

__all__ = ["Entry", "OnProgress", "Plan", "plan", "write_gguf"]

OnProgress = Callable[[int, int], None]

STORED = {
    torch.float32: (gguf.GGMLQuantizationType.F32, np.dtype(np.float32)),
    torch.float16: (gguf.GGMLQuantizationType.F16, np.dtype(np.float16)),
    torch.bfloat16: (gguf.GGMLQuantizationType.BF16, np.dtype(np.uint16)),  # numpy has none
}


class Entry(NamedTuple):
    """A tensor of the file: where its numbers are, and what becomes of them."""

    name: str
    source: torch.Tensor  # of the shape in the file; a view costs no memory
    change: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers in the file."""
        # llama.cpp takes vectors and routers in float32 only.
        plain = self.source.ndim == 1 or ".ffn_gate_inp." in self.name
        return torch.float32 if plain else self.source.dtype

    @property
    def nbytes(self) -> int:
        """Room in the file."""
        return int(self.source.numel() * self.dtype.itemsize)

    def array(self) -> np.ndarray[Any, Any]:
        """What is written."""
        values = self.source.detach().cpu()
        if self.change is not None:
            values = self.change(values.float())
        values = values.to(self.dtype).contiguous()
        array: np.ndarray[Any, Any] = (
            values.view(torch.uint16) if values.dtype == torch.bfloat16 else values
        ).numpy()
        return array


class Plan(NamedTuple):
    """What a model's file will hold."""

    arch: str
    header: dict[str, Value]
    entries: list[Entry]


def plan(model: PreTrainedModel) -> Plan:
    """Lay out a file; no weight is read.

    Raises:
        UnsupportedModelError: llama.cpp doesn't compute this model.
    """
    config = model.config.get_text_config(decoder=True)
    family = family_of(config)
    rope_keys, factors = rope(config, family)
    header = hyperparameters(config, family) | rope_keys
    entries = [
        *(Entry(name, values.float()) for name, values in factors.items()),
        *_entries(model, config, family),
    ]
    return Plan(family.arch, {f"{family.arch}.{key}": header[key] for key in header}, entries)


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: OnProgress | None = None,
) -> str | None:
    """Write a model's weights as they are in memory, in their own precision.

    One tensor at a time is copied, so the extra memory is that of the largest.

    Args:
        model: A model of one of ``FAMILIES``.
        path: The file to write.
        tokenizer: Written too, if llama.cpp's gives the same ids.
        progress: Called with ``(done, total)`` bytes.

    Returns:
        Why there is no tokenizer in the file, or None if there is one.

    Raises:
        UnsupportedModelError: llama.cpp doesn't compute this model; nothing was written.
        OSError: The file can't be written; a part of it may be left.
    """
    arch, header, entries = plan(model)
    writer = gguf.GGUFWriter(path, arch)
    try:
        for key, value in header.items():
            _add(writer, key, value)
        size = int(header[f"{arch}.vocab_size"])
        missing = add_tokenizer(writer, tokenizer, size, eos_ids(model, tokenizer))
        for entry in entries:
            kind, stored = STORED[entry.dtype]
            writer.add_tensor_info(
                entry.name, list(entry.source.shape), stored, entry.nbytes, raw_dtype=kind
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done, total = 0, sum(entry.nbytes for entry in entries)
        for entry in entries:
            writer.write_tensor_data(entry.array())
            done += entry.nbytes
            if progress is not None:
                progress(done, total)
        return missing
    finally:
        writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def _entries(model: PreTrainedModel, config: PreTrainedConfig, family: Family) -> Iterator[Entry]:
    arch = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == family.arch)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, weight in _weights(model, family):
        if weight.dtype not in STORED or weight.is_meta:
            where = "not in memory" if weight.is_meta else f"of type {weight.dtype}"
            raise UnsupportedModelError(
                f"{name} is {where}: load the model in float32, float16 or bfloat16, all of it in "
                "memory, or give a GGUF as the draft"
            )
        if name.endswith(".experts.gate_up_proj"):  # gates above, values below
            block = name.split(".")[2]
            gate, up = weight.chunk(2, dim=1)
            yield Entry(f"blk.{block}.ffn_gate_exps.weight", gate)
            yield Entry(f"blk.{block}.ffn_up_exps.weight", up)
            continue
        called = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if called is None:
            raise UnsupportedModelError(
                f"llama.cpp's {family.arch} has no place for {name}. Adapters have to be merged "
                "first (merge_and_unload() in peft); for other changes give a GGUF as the draft"
            )
        if name.endswith(".experts.down_proj"):
            called += ".weight"
        if name.endswith(".shared_expert_gate.weight"):
            weight = weight.squeeze(0)
        yield Entry(called, weight, _change(name, config, family))


def _weights(model: PreTrainedModel, family: Family) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of the text model, by its name in a plain causal language model."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    for name, weight in decoder.named_parameters(remove_duplicate=False):
        yield f"model.{name}", weight
    tied = head.weight is decoder.get_input_embeddings().weight
    for name, weight in head.named_parameters():
        if family.needs_head or not (tied and name == "weight"):
            yield f"lm_head.{name}", weight


def _change(
    name: str, config: PreTrainedConfig, family: Family
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What llama.cpp wants to be different in a tensor, computed in float32."""
    module = name.split(".")[-2]
    if family.in_pairs and module in ("q_proj", "k_proj"):
        heads = config.num_attention_heads if module == "q_proj" else config.num_key_value_heads
        return lambda values: (
            values.view(heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
        )
    offset = family.norm_offset if module.endswith("norm") else 0.0
    scale = 1.0
    if module == family.queries:
        size = head_size(config)
        if config.num_hidden_layers == family.layers_of_27b:
            size = config.hidden_size // config.num_attention_heads
        scale = math.sqrt(size / config.query_pre_attn_scalar)
    if offset == 0.0 and scale == 1.0:
        return None
    return lambda values: (values + offset) * scale
