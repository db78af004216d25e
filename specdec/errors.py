"""The errors of specdec. Each says what happened, the limit, and what to do.

::

    SpecdecError
    ├── VocabularyMismatchError (ValueError)   target and draft have too few tokens in common
    ├── MissingRuntimeError (ImportError)      a backend's runtime isn't installed
    ├── UnsupportedModelError (TypeError)      a model that a backend can't run rightly
    └── BackendError                           what a backend may raise
        ├── ContextFullError (ValueError)      more tokens than a cache can hold
        ├── TokenIdError (ValueError)          an id outside the vocabulary
        ├── CropError (ValueError)             a cache that can't be cut to that length
        ├── LogitsError (ValueError)           rows with a NaN, or without any token
        └── RuntimeFailure (RuntimeError)      torch, llama.cpp, ... failed; the cause is chained

Bad arguments are plain ``ValueError`` or ``TypeError``, raised at the call, before any work.
"""

__all__ = [
    "BackendError",
    "ContextFullError",
    "CropError",
    "LogitsError",
    "MissingRuntimeError",
    "RuntimeFailure",
    "SpecdecError",
    "TokenIdError",
    "UnsupportedModelError",
    "VocabularyMismatchError",
]


class SpecdecError(Exception):
    """The root of the tree."""


class VocabularyMismatchError(SpecdecError, ValueError):
    """Target and draft have too few tokens in common for one to draft for the other."""


class MissingRuntimeError(SpecdecError, ImportError):
    """A backend's runtime isn't installed; the text says what to install."""


class UnsupportedModelError(SpecdecError, TypeError):
    """A model that a backend would compute wrongly, or whose caches it couldn't cut back (C5)."""


class BackendError(SpecdecError):
    """What a backend raises. After it the backend works as if the call had not been made."""


class ContextFullError(BackendError, ValueError):
    """A forward would put more tokens into a cache than it can hold."""


class TokenIdError(BackendError, ValueError):
    """An id is negative or not below the vocabulary's size."""


class CropError(BackendError, ValueError):
    """A cache can't be cut to the asked length."""


class LogitsError(BackendError, ValueError):
    """A model's rows can't be decided: they hold a NaN, or every score is -inf."""


class RuntimeFailure(BackendError, RuntimeError):
    """A runtime failed in the middle of a call; its own exception is the cause."""
