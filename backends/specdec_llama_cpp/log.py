"""llama.cpp has one log per process: it is borrowed while a call of ours runs, then given back."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llama_cpp import llama_cpp as lib

__all__ = ["borrowed_log"]

ERROR, CONTINUED = 4, 5  # of ggml_log_level

_lock = threading.Lock()
_borrowers = 0
_owner, _owner_data = lib.llama_log_callback(), ctypes.c_void_p()


class _Reader(threading.local):
    """What the thread that borrowed the log wants of it."""

    errors: list[str] | None = None
    listener: Callable[[str], None] | None = None
    verbose = False
    last_level = 0
    interrupt: BaseException | None = None


_reader = _Reader()


@lib.llama_log_callback  # type: ignore[untyped-decorator]
def _receive(level: int, text: bytes, _data: int | None) -> None:
    try:
        if _reader.verbose and _owner:
            _owner(level, text, _owner_data)
        if _reader.listener is not None:
            _reader.listener(text.decode("utf-8", "replace"))
        if level != CONTINUED:
            _reader.last_level = level
        if _reader.last_level == ERROR and _reader.errors is not None:
            _reader.errors.append(text.decode("utf-8", "replace"))
    except BaseException as error:  # Ctrl-C: out of a callback it would be lost
        _reader.interrupt = error


@contextmanager
def borrowed_log(
    *, verbose: bool = False, listener: Callable[[str], None] | None = None
) -> Iterator[list[str]]:
    """Keep what llama.cpp says in the meantime from stderr, unless ``verbose``.

    Args:
        verbose: Let it through.
        listener: Gets every piece of text, also of lines that are no errors. What it raises comes
            out when the log is given back.

    Yields:
        The error lines of this thread, for the text of an exception.
    """
    global _borrowers
    errors: list[str] = []
    before = _reader.errors, _reader.verbose, _reader.listener
    with _lock:
        if _borrowers == 0:
            lib.llama_log_get(ctypes.byref(_owner), ctypes.byref(_owner_data))
            lib.llama_log_set(_receive, None)
        _borrowers += 1
    _reader.errors, _reader.verbose, _reader.listener = errors, verbose, listener
    try:
        yield errors
    finally:
        _reader.errors, _reader.verbose, _reader.listener = before
        with _lock:
            _borrowers -= 1
            if _borrowers == 0:
                lib.llama_log_set(_owner, _owner_data)
    if _reader.interrupt is not None:
        interrupt, _reader.interrupt = _reader.interrupt, None
        raise interrupt
