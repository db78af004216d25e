"""The backends that are installed, under one roof.

``from specdec.backends import HFBackend`` imports torch at that moment, not before.
``load_backend("hf")`` finds a backend by its entry point in the group ``specdec.backends``, the
bundled ones and those of other packages alike.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from specdec.backend import ModelBackend
from specdec.errors import MissingRuntimeError

if TYPE_CHECKING:
    from specdec_hf import HFBackend as HFBackend
    from specdec_llama_cpp import LlamaCppBackend as LlamaCppBackend

__all__ = ["HFBackend", "LlamaCppBackend", "backend_names", "load_backend"]

GROUP = "specdec.backends"
PACKAGES = {"HFBackend": "specdec_hf", "LlamaCppBackend": "specdec_llama_cpp"}
EXTRAS = {"specdec_hf": "hf", "specdec_llama_cpp": "llama-cpp"}  # what brings their runtimes


def __getattr__(name: str) -> Any:
    if name not in PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _saying_what_to_install(name, PACKAGES[name]):
        return getattr(import_module(PACKAGES[name]), name)


def backend_names() -> list[str]:
    """The names under which installed packages offer backends."""
    return sorted(point.name for point in entry_points(group=GROUP))


def load_backend(name: str) -> Callable[..., ModelBackend]:
    """The backend class that an installed package offers under ``name``.

    Raises:
        ValueError: No package offers it; the text lists what there is.
        MissingRuntimeError: Its runtime isn't installed.
    """
    for point in entry_points(group=GROUP, name=name):
        with _saying_what_to_install(f"the backend {name!r}", point.module):
            backend: Callable[..., ModelBackend] = point.load()
            return backend
    known = ", ".join(backend_names()) or "none"
    raise ValueError(f"no backend is called {name!r}; installed are: {known}")


@contextmanager
def _saying_what_to_install(who: str, package: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(package)
        remedy = f"install specdec-llm with its extra [{extra}]" if extra else "install it"
        raise MissingRuntimeError(
            f"{who} needs the module {error.name!r}, which isn't installed: {remedy}"
        ) from error
