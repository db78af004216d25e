"""A llama.cpp backend for specdec: any GGUF model, as target or as draft."""

from specdec.errors import MissingRuntimeError

try:
    import llama_cpp  # noqa: F401
except ImportError as error:
    raise MissingRuntimeError(
        "llama-cpp-python isn't installed: pip install llama-cpp-python "
        '(for NVIDIA GPUs with CMAKE_ARGS="-DGGML_CUDA=on" in the environment)'
    ) from error

from specdec_llama_cpp.backend import LlamaCppBackend

__all__ = ["LlamaCppBackend"]
