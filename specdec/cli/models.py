"""From what a user types to a backend."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.backend import ModelBackend
from specdec.backends import backend_names, load_backend
from specdec.cli.console import err

__all__ = ["ModelOptions", "open_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How to load models; each backend takes what concerns it.

    Attributes:
        device: Where torch models run (``cpu``, ``cuda``, ``cuda:1``); None: a GPU if there is one.
        dtype: Of torch models (``float32``, ``bfloat16``); None: the one of the file.
        n_gpu_layers: Layers that llama.cpp puts on the GPU; -1: all.
        n_ctx: Context of llama.cpp models in tokens; None: the trained one.
        n_threads: Threads of llama.cpp; None: its own choice.
        trust_remote_code: Whether code from a model's repository may run.
    """

    device: str | None = None
    dtype: str | None = None
    n_gpu_layers: int = 0
    n_ctx: int | None = None
    n_threads: int | None = None
    trust_remote_code: bool = False

    def arguments(self, backend: str) -> dict[str, Any]:
        """Keyword arguments for a backend, by its name; other packages' backends get none."""
        if backend == "hf":
            chosen = {"device": self.device, "dtype": self.dtype}
            return {
                **{name: value for name, value in chosen.items() if value is not None},
                "trust_remote_code": self.trust_remote_code,
            }
        if backend == "llama-cpp":
            return {
                "n_gpu_layers": self.n_gpu_layers,
                "n_ctx": self.n_ctx,
                "n_threads": self.n_threads,
            }
        return {}


def open_model(spec: str, options: ModelOptions) -> ModelBackend:
    """Load ``[BACKEND:]MODEL``; without a backend, a GGUF goes to llama.cpp and the rest to HF."""
    name, separator, path = spec.partition(":")
    if not separator or name not in backend_names():
        name, path = ("llama-cpp" if Path(spec).suffix == ".gguf" else "hf"), spec
    with err.status(f"loading {path} ({name})"):
        backend: ModelBackend = load_backend(name)(path, **options.arguments(name))
    return backend
