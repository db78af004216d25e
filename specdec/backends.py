"""The backends that are installed, under one roof.

``from specdec.backends import HFBackend`` imports torch at that moment, not before.
``load_backend("hf")`` finds a backend by its entry point in the group ``specdec.backends``, the
bundled ones and those of other packages alike.
"""

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from specdec.errors import MissingRuntimeError

if TYPE_CHECKING:
    from specdec_hf import HFBackend as HFBackend
    from specdec_llama_cpp import LlamaCppBackend as LlamaCppBackend

__all__ = ["HFBackend", "LlamaCppBackend", "load_backend"]

GROUP = "specdec.backends"

# class -> (import package, what to install)
BUNDLED = {
    "HFBackend": ("specdec_hf", "hf"),
    "LlamaCppBackend": ("specdec_llama_cpp", "llama-cpp"),
}


def __getattr__(name: str) -> Any:
    if name not in BUNDLED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package, extra = BUNDLED[name]
    try:
        return getattr(import_module(package), name)
    except ModuleNotFoundError as error:
        raise MissingRuntimeError(
            f"{name} needs the module {error.name!r}, which isn't installed: "
            f"install specdec-llm with its extra [{extra}]"
        ) from error


def load_backend(name: str) -> Any:
    """The backend class that an installed package offers under ``name``.

    Raises:
        ValueError: No package offers it; the text lists what there is.
        MissingRuntimeError: Its runtime isn't installed.
    """
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise ValueError(f"no backend is called {name!r}; installed are: {known}")
    try:
        return found[name].load()
    except ModuleNotFoundError as error:
        raise MissingRuntimeError(
            f"the backend {name!r} needs the module {error.name!r}, which isn't installed: "
            f"install it, or specdec-llm with its extra [{name}]"
        ) from error
