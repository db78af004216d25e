"""What a model is, as a short text: a hash of its config and of every weight."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec_hf.export import Entry, plan

__all__ = ["fingerprint"]

PIECE = 1 << 24  # bytes of a tensor that are hashed at a time, and copied if they must be
VOLATILE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}


def fingerprint(model: PreTrainedModel, *settings: object) -> str:
    """A hash, in hex, of what would be exported of a model as it is in memory, and of the settings.

    sha256 is what most processors have instructions for: 1.1 GB/s on one core where blake2b came to
    0.4.

    Raises:
        UnsupportedModelError: A model that can't be exported; found before any weight is read.
    """
    entries = plan(model).entries
    config = _lasting(model.config.get_text_config(decoder=True).to_dict())
    digest = sha256(json.dumps([*settings, config], sort_keys=True, default=str).encode())
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing frees the GIL
        for part in pool.map(_hash, entries):
            digest.update(part)
    return digest.hexdigest()


def _lasting(config: Any) -> Any:
    """What a config says of the model, not of the file or the program that it came from."""
    if not isinstance(config, dict):
        return config
    return {str(key): _lasting(value) for key, value in config.items() if key not in VOLATILE}


def _hash(entry: Entry) -> bytes:
    """Of the values, however they lie in memory, on whatever device."""
    tensor = entry.source.detach()
    digest = sha256(f"{entry.name} {tensor.dtype} {list(tensor.shape)}".encode())
    rows = tensor.reshape(1, -1) if tensor.dim() < 2 else tensor
    row_size = rows.nbytes // max(1, len(rows))
    for part in rows.split(max(1, PIECE // max(1, row_size))):
        digest.update(part.cpu().contiguous().view(torch.uint8).numpy())  # numpy has no bfloat16
    return digest.digest()
