"""llama.cpp's model, context and batch as objects that own their memory."""

import ctypes
import os
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from llama_cpp import llama_cpp as lib

from specdec.errors import RuntimeFailure
from specdec_llama_cpp.log import borrowed_log

__all__ = ["Context", "Model", "PackedTokens", "State"]

State: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

# Part of a state is what cutting it would lose: the recurrent one, and the attention window.
WHOLE, PART = lib.LLAMA_STATE_SEQ_FLAGS_NONE, lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
BytePointer = ctypes.POINTER(ctypes.c_uint8)
Int32Pointer = ctypes.POINTER(ctypes.c_int32)
Int8Pointer = ctypes.POINTER(ctypes.c_int8)
SequencePointer = ctypes.POINTER(Int32Pointer)


class Model:
    """The weights of a GGUF file. Freed when nobody holds it, its contexts included."""

    def __init__(
        self,
        path: Path,
        *,
        n_gpu_layers: int = 0,
        repack: bool = False,
        verbose: bool = False,
        vocab_only: bool = False,
    ) -> None:
        start_library()
        parameters = lib.llama_model_default_params()
        parameters.vocab_only = vocab_only
        parameters.n_gpu_layers = n_gpu_layers
        parameters.use_extra_bufts = repack
        with borrowed_log(verbose=verbose) as errors:
            pointer = lib.llama_model_load_from_file(os.fsencode(path), parameters)
        if not pointer:
            raise RuntimeFailure(f"llama.cpp can't load {path}: {spoken(errors)}")
        self.path = path
        self.pointer = pointer
        self.vocab = lib.llama_model_get_vocab(pointer)
        self.vocab_size: int = lib.llama_vocab_n_tokens(self.vocab)
        weakref.finalize(self, silently, lib.llama_model_free, pointer)

    def metadata(self, key: str) -> str | None:
        """A value of the file's header, or None where it has none."""
        buffer = ctypes.create_string_buffer(256)
        size = lib.llama_model_meta_val_str(self.pointer, key.encode(), buffer, len(buffer))
        return buffer.value.decode() if size >= 0 else None

    def description(self) -> str:
        """Architecture, size and quantisation, such as ``llama 256M Q4_1``."""
        buffer = ctypes.create_string_buffer(256)
        lib.llama_model_desc(self.pointer, buffer, len(buffer))
        return buffer.value.decode()


class Context:
    """Room for the keys and values of some sequences."""

    def __init__(
        self,
        model: Model,
        parameters: Any,
        *,
        cells: int,
        slots: int,
        n_batch: int,
        verbose: bool,
    ) -> None:
        parameters.n_ctx, parameters.n_seq_max = cells, slots
        # llama.cpp aborts the process where a batch can't hold one token of every sequence.
        parameters.n_batch = parameters.n_ubatch = max(n_batch, slots)
        with borrowed_log(verbose=verbose) as errors:
            pointer = lib.llama_init_from_model(model.pointer, parameters)
        if not pointer:
            raise RuntimeFailure(
                f"llama.cpp can't make a context of {cells} tokens for {slots} sequences: "
                f"{spoken(errors)}; close caches, load with a smaller n_ctx, or, where the model "
                "doesn't allow flash attention, with flash_attention=False"
            )
        self.model = model
        self.pointer = pointer
        self.memory = lib.llama_get_memory(pointer)
        self.cells, self.slots, self.verbose = cells, slots, verbose
        self.window: int = lib.llama_model_n_swa(model.pointer)
        weakref.finalize(self, silently, lib.llama_free, pointer)

    def decode(self, piece: Any) -> None:
        """Run the model over a batch. After an error the memory may hold a part of it."""
        with borrowed_log(verbose=self.verbose) as errors:
            code = lib.llama_decode(self.pointer, piece)
        if code != 0:
            raise RuntimeFailure(
                f"llama.cpp failed on {piece.n_tokens} tokens with code {code}: {spoken(errors)}"
            )

    def rows(self, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The logits of the last decode, in the order of its tokens: ``(count, vocab)``.

        A copy: the next decode, of another thread perhaps, writes over the buffer or frees it.
        """
        start = lib.llama_get_logits(self.pointer)
        return np.ctypeslib.as_array(start, (count, self.model.vocab_size)).copy()

    def length(self, slot: int) -> int:
        """How many tokens the memory holds of a sequence."""
        return int(lib.llama_memory_seq_pos_max(self.memory, slot)) + 1

    def holds(self, slot: int, length: int) -> bool:
        """Whether the memory holds ``length`` tokens, those of an attention window included.

        Tokens that have left the window are overwritten by other sequences' now and then, and after
        a crop they would be in it again. What is left of a sequence has no gaps.
        """
        first = lib.llama_memory_seq_pos_min(self.memory, slot)
        in_window = max(0, length - self.window + 1) if self.window else 0
        return self.length(slot) == length and first <= in_window

    def trim(self, slot: int, length: int) -> bool:
        """Cut a sequence back; whether the memory now holds no more than ``length`` tokens."""
        if slot >= self.slots:  # so it was never fed
            return True
        done = lib.llama_memory_seq_rm(self.memory, slot, length, -1)
        return bool(done) and self.length(slot) <= length

    def state(self, slot: int, *, whole: bool = False) -> State:
        """A copy of what the memory holds of a sequence, or of what cutting it would lose."""
        part = WHOLE if whole else PART
        size = lib.llama_state_seq_get_size_ext(self.pointer, slot, part)
        state = np.empty(size, np.uint8)
        data = pointer_to(state, 0, BytePointer)
        with borrowed_log(verbose=self.verbose) as errors:
            written = lib.llama_state_seq_get_data_ext(self.pointer, data, size, slot, part)
        if not written:
            raise RuntimeFailure(f"llama.cpp can't copy its memory's state: {spoken(errors)}")
        return state[:written]

    def restore(self, slot: int, state: State, length: int, *, whole: bool = False) -> bool:
        """Put a state of ``length`` tokens back; whether the memory now holds just them."""
        part = WHOLE if whole else PART
        data = pointer_to(state, 0, BytePointer)
        with borrowed_log(verbose=self.verbose):
            read = lib.llama_state_seq_set_data_ext(self.pointer, data, state.size, slot, part)
            return bool(read) and self.trim(slot, length) and self.length(slot) == length

    def take_over(self, other: "Context", slot: int) -> None:
        """Copy a sequence from another context of the same model, bit for bit."""
        length = other.length(slot)
        if length and not self.restore(slot, other.state(slot, whole=True), length, whole=True):
            raise RuntimeFailure(
                f"llama.cpp can't move a sequence of {length} tokens to a context of {self.cells}"
            )


class PackedTokens:
    """Tokens of several sequences in a row, laid out as ``llama_decode`` reads them."""

    def __init__(self) -> None:
        self.count = 0
        self._allocate(512)

    def _allocate(self, capacity: int) -> None:
        self.ids, self.positions, self.slots = np.zeros((3, capacity), np.int32)
        self.wanted = np.zeros(capacity, np.int8)
        # Each token belongs to one sequence: a list of one slot, given by its address.
        self._slot_counts = np.ones(capacity, np.int32)
        addresses = self.slots.ctypes.data + self.slots.itemsize * np.arange(capacity)
        self._slot_lists = addresses.astype(np.uintp)

    def restart(self, capacity: int) -> None:
        """Forget what it holds and make room for ``capacity`` tokens."""
        self.count = 0
        if capacity > len(self.ids):
            self._allocate(2 * capacity)

    def add(self, tokens: Sequence[int], *, position: int, slot: int, num_logits: int) -> None:
        """Append tokens of one sequence, rows wanted for the last ``num_logits``."""
        start, end = self.count, self.count + len(tokens)
        self.ids[start:end] = tokens
        self.positions[start:end] = range(position, position + len(tokens))
        self.slots[start:end] = slot
        self.wanted[start : end - num_logits] = 0
        self.wanted[end - num_logits : end] = 1
        self.count = end

    def piece(self, start: int, end: int) -> Any:
        """The tokens from ``start`` to ``end`` as a ``llama_batch``: pointers, no copy."""
        return lib.llama_batch(
            end - start,
            pointer_to(self.ids, start, Int32Pointer),
            None,
            pointer_to(self.positions, start, Int32Pointer),
            pointer_to(self._slot_counts, start, Int32Pointer),
            pointer_to(self._slot_lists, start, SequencePointer),
            pointer_to(self.wanted, start, Int8Pointer),
        )


def pointer_to(array: np.ndarray[Any, Any], index: int, kind: Any) -> Any:
    """A C pointer to an element of a contiguous array."""
    return ctypes.cast(array.ctypes.data + index * array.itemsize, kind)


@cache
def start_library() -> None:
    """Prepare llama.cpp, once per process."""
    with borrowed_log():
        lib.llama_backend_init()


def silently(free: Any, pointer: int) -> None:
    """Free something without a line in the log."""
    with borrowed_log():
        free(pointer)


def spoken(errors: list[str]) -> str:
    """What llama.cpp said, on one line."""
    return " ".join("".join(errors).split()) or "it doesn't say why"
