"""GGUF files to transformers models, quickly.

transformers parses the file anew for config, tokenizer and weights, and rebuilds its table of names
for every module. Here one pass over the header serves all. The result is the same, name for name
and bit for bit, and what isn't known to be so is left to transformers' own loader.
"""

import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor
from transformers.utils import logging

__all__ = ["gguf_tokenizer", "load_gguf"]

# Architectures whose configs transformers reads by its plain mapping, and whose weights by name.
PLAIN_ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
}

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9


class _Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]  # rows first
    kind: gguf.GGMLQuantizationType
    data: memoryview  # a whole file from the tensor's first byte on


class _File(NamedTuple):
    metadata: dict[str, Any]  # arrays of strings by their length only
    tensors: list[_Tensor]


def load_gguf(
    path: Path, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase] | None:
    """The model and tokenizer of a file, or None if it is for transformers' own loader.

    Args:
        path: The file.
        dtype: Of the weights, which are dequantised.
    """
    try:
        file = _read(path)
    except (struct.error, KeyError, ValueError):  # cut short, or of a kind not known here
        return None
    if file is None or file.metadata.get("general.architecture") not in PLAIN_ARCHITECTURES:
        return None
    if file.metadata.get("general.name") == "mistral":  # a Llama by architecture
        return None
    config = _config(file)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    weights = _weights(file, config, model_class, dtype)
    if weights is None:
        return None
    with _no_bar():  # of weights that are there already
        model = model_class.from_pretrained(None, config=config, state_dict=weights, dtype=dtype)
    # For a Llama AutoTokenizer comes to this class too, after parsing the whole file for a config.
    kind = PreTrainedTokenizerFast if config.model_type == "llama" else AutoTokenizer
    return model, gguf_tokenizer(path, kind)


def gguf_tokenizer(path: Path, kind: Any = AutoTokenizer) -> PreTrainedTokenizerBase:
    """The tokenizer that a file describes, whatever else lies in its folder.

    Given the folder, transformers would prefer a ``tokenizer.json`` beside the file, and lose the
    file's chat template and special tokens over it.
    """
    with TemporaryDirectory() as empty:
        return kind.from_pretrained(empty, gguf_file=str(path.absolute()))


@contextmanager
def _no_bar() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _config(file: _File) -> PreTrainedConfig:
    """As transformers reads it: known keys renamed, the rest left to the class's defaults."""
    architecture = file.metadata["general.architecture"]
    values: dict[str, Any] = {
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in file.tensors)
    }
    for key, value in file.metadata.items():
        group, _, rest = key.partition(".")
        name = GGUF_CONFIG_MAPPING.get(group, {}).get(rest)
        if name is not None and name != -1:
            values[name] = value[0] if isinstance(value, list) and len(value) == 1 else value
    if "vocab_size" not in values and "tokenizer.ggml.tokens" in file.metadata:
        values["vocab_size"] = file.metadata["tokenizer.ggml.tokens"]
    values["model_type"] = PLAIN_ARCHITECTURES[architecture]
    return AutoConfig.for_model(**values)


def _weights(
    file: _File, config: PreTrainedConfig, model_class: type[PreTrainedModel], dtype: torch.dtype
) -> dict[str, torch.Tensor] | None:
    architecture = file.metadata["general.architecture"]
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    with torch.device("meta"):
        skeleton = model_class(config)
    wanted = {
        gguf_name: name
        for name in skeleton.state_dict()
        if (gguf_name := names.get_name(name, try_suffixes=(".weight", ".bias")))
    }
    tied = set(skeleton._tied_weights_keys or ()) if config.tie_word_embeddings else set()
    found = {wanted[tensor.name] for tensor in file.tensors if tensor.name in wanted}
    if set(skeleton.state_dict()) - tied - found:
        return None
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(
        config=_processor_config(config)
    )
    weights = {}
    for tensor in file.tensors:
        if tensor.name in wanted:
            values = processor.process(weights=_dequantized(tensor), name=tensor.name).weights
            array = np.require(values, requirements=["C", "W", "O"])
            weights[wanted[tensor.name]] = torch.from_numpy(array).to(dtype)
    return weights


def _processor_config(config: PreTrainedConfig) -> Mapping[str, Any]:
    return {key: getattr(config, key) for key in ("num_attention_heads", "num_key_value_heads")}


def _dequantized(tensor: _Tensor) -> np.ndarray[Any, Any]:
    block, size = gguf.GGML_QUANT_SIZES[tensor.kind]
    shape = (*tensor.shape[:-1], tensor.shape[-1] // block * size)
    if np.prod(shape) > len(tensor.data):
        raise ValueError(f"the file ends inside the tensor {tensor.name}: fetch it again")
    raw = np.frombuffer(tensor.data, np.uint8, count=int(np.prod(shape))).reshape(shape)
    values: np.ndarray[Any, Any] = gguf.dequantize(raw, tensor.kind)
    return values


def _read(path: Path) -> _File | None:
    """The header of a little-endian GGUF file of version 2 or 3, and where its tensors are."""
    with path.open("rb") as stream:
        blob = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    if bytes(blob[:4]) != b"GGUF" or struct.unpack_from("<I", blob, 4)[0] not in (2, 3):
        return None
    reader = _Reader(blob)
    reader.position = 8
    tensor_count, key_count = reader.scalar("Q"), reader.scalar("Q")
    metadata = {}
    for _ in range(key_count):
        key = reader.string()
        metadata[key] = reader.value(reader.scalar("I"))
    entries = []
    for _ in range(tensor_count):
        name = reader.string()
        shape = reader.scalars("Q", reader.scalar("I"))[::-1]
        entries.append((name, tuple(shape), reader.scalar("I"), reader.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    start = -(-reader.position // alignment) * alignment
    return _File(
        metadata,
        [
            _Tensor(name, shape, gguf.GGMLQuantizationType(kind), blob[start + offset :])
            for name, shape, kind, offset in entries
        ],
    )


class _Reader:
    """A position in a file, and what can be read there."""

    def __init__(self, blob: memoryview) -> None:
        self.blob = blob
        self.position = 0

    def scalars(self, code: str, count: int) -> list[Any]:
        layout = f"<{count}{code}"
        values = struct.unpack_from(layout, self.blob, self.position)
        self.position += struct.calcsize(layout)
        return list(values)

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def string(self) -> str:
        length = self.scalar("Q")
        self.position += length
        return str(self.blob[self.position - length : self.position], "utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.scalar(SCALARS[kind])
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind != STRING:
            return self.scalars(SCALARS[kind], count)
        for _ in range(count):
            self.position += 8 + struct.unpack_from("<Q", self.blob, self.position)[0]
        return count
