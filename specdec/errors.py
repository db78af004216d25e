"""The errors of specdec. Each says what happened, the limit, and what to do.

::

    SpecdecError
    ├── VocabularyMismatchError (ValueError)   target and draft don't share a tokenizer
    ├── MissingRuntimeError (ImportError)      a backend's runtime isn't installed
    └── BackendError                           what a backend may raise
        ├── ContextFullError (ValueError)      more tokens than a cache can hold
        ├── TokenIdError (ValueError)          an id outside the vocabulary
        ├── CropError (ValueError)             a cache that can't be cut to that length
        └── RuntimeFailure (RuntimeError)      torch, llama.cpp, ... failed; the cause is chained

Bad arguments are plain ``ValueError`` or ``TypeError``, raised at the call, before any work.
"""

__all__ = [
    "BackendError",
    "ContextFullError",
    "CropError",
    "MissingRuntimeError",
    "RuntimeFailure",
    "SpecdecError",
    "TokenIdError",
    "VocabularyMismatchError",
]


class SpecdecError(Exception):
    """The root of the tree."""


class VocabularyMismatchError(SpecdecError, ValueError):
    """Target and draft don't share a tokenizer, so their ids mean different things."""


class MissingRuntimeError(SpecdecError, ImportError):
    """A backend's runtime isn't installed; the text says what to install."""


class BackendError(SpecdecError):
    """What a backend raises. After it the backend works as if the call had not been made."""


class ContextFullError(BackendError, ValueError):
    """A forward would put more tokens into a cache than it can hold."""


class TokenIdError(BackendError, ValueError):
    """An id is negative or not below the vocabulary's size."""


class CropError(BackendError, ValueError):
    """A cache can't be cut to the asked length."""


class RuntimeFailure(BackendError, RuntimeError):
    """A runtime failed in the middle of a call; its own exception is the cause."""
