"""Hugging Face models for specdec: any decoder that transformers runs with attention caches.

The rooms: ``backend`` (the contract), ``packed`` (key-value store and attention), ``tokens`` (what
the ids spell), ``loading`` and ``gguf`` (files to models), ``border`` (what depends on the version
of transformers, and which models this backend takes).
"""

from specdec_hf.backend import HFBackend

__all__ = ["HFBackend"]
