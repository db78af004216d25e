"""A llama.cpp backend for specdec: any GGUF model, as target or as draft."""

from specdec_llama_cpp.backend import LlamaCppBackend

__all__ = ["LlamaCppBackend"]
