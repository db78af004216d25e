"""GGUF files with fewer bits per weight, made by llama.cpp itself."""

import ctypes
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llama_cpp import llama_cpp as lib

from specdec.errors import RuntimeFailure
from specdec_llama_cpp.context import spoken, start_library
from specdec_llama_cpp.log import borrowed_log

__all__ = ["QUANTIZATIONS", "checked_kind", "quantize"]

QUANTIZATIONS = {
    "f32": lib.LLAMA_FTYPE_ALL_F32,
    "f16": lib.LLAMA_FTYPE_MOSTLY_F16,
    "bf16": lib.LLAMA_FTYPE_MOSTLY_BF16,
    "q8_0": lib.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q6_k": lib.LLAMA_FTYPE_MOSTLY_Q6_K,
    "q5_k_m": lib.LLAMA_FTYPE_MOSTLY_Q5_K_M,
    "q5_1": lib.LLAMA_FTYPE_MOSTLY_Q5_1,
    "q5_0": lib.LLAMA_FTYPE_MOSTLY_Q5_0,
    "q4_k_m": lib.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "q4_1": lib.LLAMA_FTYPE_MOSTLY_Q4_1,
    "q4_0": lib.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q3_k_m": lib.LLAMA_FTYPE_MOSTLY_Q3_K_M,
    "q2_k": lib.LLAMA_FTYPE_MOSTLY_Q2_K,
}

TENSOR_LINE = re.compile(r"\[ *(\d+)/ *(\d+)\] ")


def checked_kind(kind: str) -> str:
    """The quantisation's name, in lower case.

    Raises:
        ValueError: There is none of that name.
    """
    if str(kind).lower() not in QUANTIZATIONS:
        raise ValueError(f"there is no quantisation {kind!r}: use {', '.join(QUANTIZATIONS)}")
    return kind.lower()


def quantize(
    source: Path,
    target: Path,
    kind: str,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a model once more with fewer bits per weight; the header stays as it is.

    llama.cpp can't be stopped in the middle: Ctrl-C takes effect when the file is written.

    Args:
        source: A GGUF file in F32, F16 or BF16.
        target: Where the other goes. After an error a part of it may lie there.
        kind: One of ``QUANTIZATIONS``.
        progress: Called with ``(done, total)`` tensors, in another thread.

    Raises:
        ValueError: There is no such kind.
        RuntimeFailure: llama.cpp can't read the source or write the target.
    """
    parameters = lib.llama_model_quantize_default_params()
    parameters.ftype = QUANTIZATIONS[checked_kind(kind)]

    def listen(text: str) -> None:
        found = TENSOR_LINE.match(text)
        if found and progress is not None:
            progress(int(found[1]) - 1, int(found[2]))  # it names a tensor before its work on it

    def work() -> None:
        with borrowed_log(listener=listen) as errors:
            code = lib.llama_model_quantize(
                os.fsencode(source), os.fsencode(target), ctypes.byref(parameters)
            )
        if code != 0:
            raise RuntimeFailure(
                f"llama.cpp can't make {target} of {source.name}: {spoken(errors)}"
            )

    start_library()
    # In the main thread Ctrl-C would come up inside the log's callback, and ctypes would drop it.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
