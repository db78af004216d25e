"""From what a user types to a backend."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from specdec.backend import ModelBackend
from specdec.backends import load_backend
from specdec.cli.console import err
from specdec.drafters import named_draft
from specdec.embedded import embedded_gguf

__all__ = ["Options", "Quantization", "open_model", "open_pair"]

Quantization: TypeAlias = Literal[
    "f32",
    "f16",
    "bf16",
    "q8_0",
    "q6_k",
    "q5_k_m",
    "q5_1",
    "q5_0",
    "q4_k_m",
    "q4_1",
    "q4_0",
    "q3_k_m",
    "q2_k",
]

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
    """Load what was named, or the embedded default where nothing was.

    Args:
        target: None is the embedded default.
        draft: ``"none"``, ``"self"``, ``"self:q8_0"`` and so on, or a model. None is the embedded
            draft for the embedded target, and for any other ``"self"`` where that can be had.
        options: Keyword arguments for backends.
    """
    itself = draft is not None and draft.partition(":")[0] == "self"
    if target is None:
        if not itself and draft not in (None, "none"):
            raise ValueError("--draft-model needs a --target-model beside it")
        gguf = embedded_gguf()
        target, draft = f"hf:{gguf}", draft or f"llama-cpp:{gguf}"
    quantization = draft.partition(":")[2].lower() if itself and draft else ""
    if quantization and quantization not in get_args(Quantization):
        kinds = ", ".join(get_args(Quantization))
        raise ValueError(f"--draft-model {draft} names no quantisation: self: goes with {kinds}")
    loaded = open_model(target, options)
    own = {name: value for name, value in options.get("llama-cpp", {}).items() if value}
    if draft == "none":
        return loaded, None
    if draft is None:
        return loaded, own_draft(loaded, own)
    return loaded, named_draft(loaded, draft, **own) if itself else open_model(draft, options)


def own_draft(target: ModelBackend, options: Mapping[str, Any]) -> ModelBackend | None:
    """A draft that nobody asked for: the target's own if it can be made, or none, saying why."""
    if not hasattr(target, "self_draft"):
        return None
    try:
        return named_draft(target, "self", **options)
    except Exception as error:  # nobody asked for a draft, so its failure is no error
        err.out(f"no draft: {error}", style="yellow")
        return None
