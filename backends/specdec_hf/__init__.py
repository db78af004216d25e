"""Hugging Face models for specdec: any decoder that transformers runs with attention caches.

The rooms: ``backend`` (the contract), ``packed`` (key-value store and attention), ``tokens`` (what
the ids spell), ``loading`` and ``gguf`` (files to models), ``processors`` (logits processors of
transformers), ``border`` (what depends on the version of transformers, and which models this
backend takes).
"""

from specdec_hf.backend import HFBackend
from specdec_hf.custom_generate import custom_generate
from specdec_hf.processors import from_transformers

__all__ = ["HFBackend", "custom_generate", "from_transformers"]
