"""From what a user types to a backend."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from specdec.backend import ModelBackend
from specdec.backends import load_backend
from specdec.cli.console import err
from specdec.cli.options import ModelOptions, Options
from specdec.composite import CompositeDrafter
from specdec.embedded import embedded_gguf
from specdec.named import named_draft, named_lookups
from specdec.translate import model_drafter

__all__ = ["Quantization", "open_model", "open_pair"]

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


def open_model(spec: str, options: Options) -> ModelBackend:
    """Load ``[BACKEND:]MODEL``; without a backend, a GGUF goes to llama.cpp and the rest to HF."""
    name, path, load = parsed(spec)
    with err.status(f"loading {Path(path).name} ({name})"):
        return load(path, **options.get(name, {}))


def parsed(spec: str) -> tuple[str, str, Callable[..., ModelBackend]]:
    """The backend's name, the model's and what loads it."""
    name, separator, path = spec.partition(":")
    if not separator or len(name) < 2 or Path(spec).exists():  # C:\model is a path
        name, path = ("llama-cpp" if Path(spec).suffix.lower() == ".gguf" else "hf"), spec
    load = load_backend(name)
    if not path:
        raise ValueError(f"{spec!r} names no model: put one after the colon")
    return name, path, load


def open_pair(
    models: ModelOptions,
) -> tuple[ModelBackend, ModelBackend | CompositeDrafter | None]:
    """Load what was named, or the embedded default where nothing was.

    A target that isn't named is the embedded one. So is a draft, for the embedded target; for any
    other it is ``"self"`` where that can be had. Lookups come with or without a model.
    """
    name = models.draft_model
    lookups, rest = named_lookups(name) if name and not Path(name).exists() else ([], name)
    if not lookups:
        return open_models(models)
    if rest in (None, "none"):
        target, _ = open_models(replace(models, draft_model="none"))
        return target, CompositeDrafter(lookups)
    target, draft = open_models(replace(models, draft_model=rest))
    model = [] if draft is None else [model_drafter(draft, target.vocab, keep_caches=1)]
    return target, CompositeDrafter([*lookups, *model])


def open_models(models: ModelOptions) -> tuple[ModelBackend, ModelBackend | None]:
    """Load a target and a model that drafts, as they were named or by default."""
    target, draft, options = models.target_model, models.draft_model, models.by_backend
    itself = draft is not None and draft.partition(":")[0] == "self"
    if target is None:
        if not itself and draft not in (None, "none"):
            raise ValueError(
                f"--draft-model {draft} isn't lookup, suffix, self or none, so it names a model, "
                "and that needs a --target-model beside it"
            )
        gguf = embedded_gguf()
        target, draft = f"hf:{gguf}", draft or f"llama-cpp:{gguf}"
    quantization = draft.partition(":")[2].lower() if itself and draft else ""
    if quantization and quantization not in get_args(Quantization):
        kinds = ", ".join(get_args(Quantization))
        raise ValueError(f"--draft-model {draft} names no quantisation: self: goes with {kinds}")
    own = {name: value for name, value in options["llama-cpp"].items() if value}
    named = draft not in (None, "none") and not itself
    if draft is not None and named:
        parsed(draft)  # raises, if at all, before the target is loaded
    loaded = open_model(target, options)
    if draft is None:
        return loaded, own_draft(loaded, own)
    if draft == "none":
        return loaded, None
    return loaded, open_model(draft, options) if named else named_draft(loaded, draft, **own)


def own_draft(target: ModelBackend, options: Mapping[str, Any]) -> ModelBackend | None:
    """A draft that nobody asked for: the target's own if it can be made, or none, saying why."""
    if not hasattr(target, "self_draft"):
        return None
    try:
        return named_draft(target, "self", **options)
    except Exception as error:  # nobody asked for a draft, so its failure is no error
        err.out(f"no draft: {error}", style="yellow")
        return None
