"""A llama.cpp backend for specdec: any GGUF model, as target or as draft."""

from specdec_llama_cpp.backend import LlamaCppBackend
from specdec_llama_cpp.draft_model import LlamaDraftModel

__all__ = ["LlamaCppBackend", "LlamaDraftModel"]
