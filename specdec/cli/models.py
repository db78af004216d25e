"""From what a user types to a backend."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.backend import ModelBackend
from specdec.backends import load_backend
from specdec.cli.console import err
from specdec.embedded import embedded_gguf

__all__ = ["Options", "open_model", "open_pair"]

Options = Mapping[str, Mapping[str, Any]]  # keyword arguments by the name of the backend


def open_model(spec: str, options: Options) -> ModelBackend:
    """Load ``[BACKEND:]MODEL``; without a backend, a GGUF goes to llama.cpp and the rest to HF."""
    name, separator, path = spec.partition(":")
    if not separator or len(name) < 2 or Path(spec).exists():  # C:\model is a path
        name, path = ("llama-cpp" if Path(spec).suffix.lower() == ".gguf" else "hf"), spec
    load = load_backend(name)
    if not path:
        raise ValueError(f"{spec!r} names no model: put one after the colon")
    with err.status(f"loading {Path(path).name} ({name})"):
        return load(path, **options.get(name, {}))


def open_pair(
    target: str | None, draft: str | None, options: Options
) -> tuple[ModelBackend, ModelBackend | None]:
    """Load what was named, or the embedded default where nothing was; a draft may be "none"."""
    if target is None:
        if draft not in (None, "none"):
            raise ValueError("--draft-model needs a --target-model beside it")
        gguf = embedded_gguf()
        target, draft = f"hf:{gguf}", draft or f"llama-cpp:{gguf}"
    loaded = open_model(target, options)
    return loaded, None if draft in (None, "none") else open_model(draft, options)
