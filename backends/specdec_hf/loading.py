"""Names and files to models: Hugging Face folders, hub ids and GGUF files."""

import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from specdec_hf.gguf import gguf_tokenizer, load_gguf

__all__ = ["as_device", "as_dtype", "load"]


def as_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """A torch dtype by its name; None for ``"auto"``.

    Raises:
        ValueError: No floating-point dtype has that name.
    """
    if dtype == "auto":
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"{dtype!r} is no dtype of weights: try 'bfloat16', 'float32' or 'auto'")
    return found


def as_device(device: str | torch.device | None) -> torch.device:
    """The device of that name, if this machine has it; for None a GPU if there is one.

    Raises:
        ValueError: There is no such device.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise ValueError(
            f"device {str(device)!r} isn't there: torch {torch.__version__} sees the CPU and "
            f"{gpus} CUDA devices; choose one of them, or None"
        ) from error
    return found


def load(
    name: str,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    gguf_file: str | None,
    revision: str | None,
    trust_remote_code: bool,
    local_files_only: bool,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, on its device, and its tokenizer.

    Raises:
        FileNotFoundError: A path that isn't there.
        OSError: A hub id that is neither stored here nor can be fetched.
    """
    if not name:
        raise ValueError("the name of the model is empty: give a folder, a .gguf file or a hub id")
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf" and gguf_file is None:
        path, gguf_file = path.parent, path.name
    local = path.exists()
    if not local and (path.is_absolute() or name.startswith(".") or gguf_file):
        raise FileNotFoundError(f"{name!r} isn't there: check the path")
    if local and gguf_file is not None and not (path / gguf_file).is_file():
        raise FileNotFoundError(f"{gguf_file!r} isn't in the folder {str(path)!r}: check the name")
    if local and gguf_file is None and not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"{str(path)!r} holds no model: give a folder with a config.json, or a .gguf file"
        )
    source = str(path) if local else name
    hub = {"revision": revision, "local_files_only": local_files_only}
    try:
        if gguf_file is not None:
            return _load_gguf(source, gguf_file, dtype or torch.float32, device, hub)
        hub["trust_remote_code"] = trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(source, **hub)
        return _load_weights(source, dtype, device, hub), tokenizer
    except OSError as error:
        if local:
            raise
        raise OSError(
            f"{name!r} is no folder here, no model in the cache, and couldn't be fetched "
            f"({_first_line(error)}): check the id and the network, or give a folder"
        ) from error


def _load_gguf(
    source: str, gguf_file: str, dtype: torch.dtype, device: torch.device, hub: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    path = Path(cached_file(source, gguf_file, **hub))
    loaded = load_gguf(path, dtype)
    if loaded is None:
        try:
            model = AutoModelForCausalLM.from_pretrained(
                str(path.parent), gguf_file=path.name, dtype=dtype
            )
            loaded = model, gguf_tokenizer(path)
        except Exception as error:
            raise ValueError(
                f"transformers {transformers.__version__} can't read {gguf_file!r} "
                f"({type(error).__name__}: {_first_line(error)}): try it in llama.cpp"
            ) from error
    model, tokenizer = loaded
    return model.to(device), tokenizer


def _load_weights(
    source: str, dtype: torch.dtype | None, device: torch.device, hub: dict[str, Any]
) -> PreTrainedModel:
    options = {"dtype": dtype or "auto", **hub}
    if device.type != "cpu":
        options["device_map"] = {"": device}  # straight there, without a copy in host memory
    try:
        return AutoModelForCausalLM.from_pretrained(source, use_safetensors=True, **options)
    except OSError as error:
        if "safetensors" not in str(error):
            raise
        warnings.warn(
            f"{source!r} has no safetensors, so pickled weights are read: a pickle can run code "
            "when it is opened, and torch's weights_only mode is all that stands in its way",
            stacklevel=4,
        )
    return AutoModelForCausalLM.from_pretrained(source, use_safetensors=False, **options)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
