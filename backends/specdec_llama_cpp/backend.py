"""The llama.cpp backend: many sequences in one context that grows with them."""

import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np
from llama_cpp import llama_cpp as lib

from specdec.backend import Cache, Span, check_crop, check_forward
from specdec.errors import CropError, RuntimeFailure, UnsupportedModelError
from specdec.rewind import Rewind
from specdec.vocab import Vocabulary
from specdec_llama_cpp.context import Context, Model, PackedTokens, State
from specdec_llama_cpp.rollback import go_back, rolls_back
from specdec_llama_cpp.vocabulary import Tokenizer

__all__ = ["LlamaCppBackend"]

CacheDtype: TypeAlias = Literal["f32", "f16", "q8_0"]
Rows: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

CACHE_DTYPES = {"f32": lib.GGML_TYPE_F32, "f16": lib.GGML_TYPE_F16, "q8_0": lib.GGML_TYPE_Q8_0}
FIRST_CELLS, FIRST_SLOTS = 512, 4
ROUNDING = 256  # llama.cpp rounds the room of a context up to a multiple


class LlamaCppCache:
    """One sequence of a backend: a slot in its context."""

    def __init__(self, backend: "LlamaCppBackend", slot: int) -> None:
        self._sequences = backend._sequences
        self._slot = slot
        # Closing only leaves a note: a forgotten cache may be collected at any moment, also while
        # its backend is at work.
        self._release = weakref.finalize(self, backend._released.append, slot)
        self._release.atexit = False

    def __len__(self) -> int:
        return len(self._sequences[self._slot].ids) if self._release.alive else 0

    @property
    def num_replayed(self) -> int:
        """Ids that were read again after crops so far: hardly any where the memory can be cut."""
        return self._sequences[self._slot].num_replayed if self._release.alive else 0

    def close(self) -> None:
        """Give the slot and its room back; twice does nothing."""
        self._release()


class LlamaCppBackend:
    """A GGUF model in llama.cpp.

    Sequences share one llama context, which starts small and doubles with need, so a model with a
    long context costs memory only for what it holds.

    The same calls give the same rows. With flash attention and ``n_threads=1`` a quantised model
    also gives a token the same row, bit for bit, whether it comes alone or with a few others of its
    sequence. Where other sequences lie in memory can still change the rounding.

    Loading feeds a few tokens, takes them back and feeds them again, to see whether llama.cpp can
    cut this model's memory. Where it can't (recurrent and hybrid models) the backend keeps copies
    of the recurrent state; a crop goes back to the latest before it, and the ids in between are
    read again with the next forward: ``info()["rollback"]`` is ``"snapshot and replay"``, not
    ``"crop"``, and ``num_replayed`` of a cache counts those ids.

    One lock guards the context: forwards from several threads wait for each other.

    Args:
        path: The GGUF file; of a split model the first file.
        n_ctx: The most tokens of one sequence. None: what the model was trained for.
        n_gpu_layers: Layers to put on the GPU; negative: all of them. A build of llama.cpp
            without GPU support warns and runs on the CPU.
        n_threads: CPU threads. None: every core up to four, half of them where there are more.
        n_batch: The most tokens that llama.cpp takes at once; longer batches are split.
        flash_attention: Turn off only for models that llama.cpp can't run with it.
        cache_dtype: Type of the stored keys and values. ``"q8_0"`` halves them and needs flash
            attention; ``"f32"`` only counts without it.
        repack: Let llama.cpp rearrange the weights for this CPU (AMX tiles, interleaved rows).
            Often faster on long prompts, but one token and several then run through different
            kernels and round differently.
        vocab: Take this vocabulary in place of the file's.
        verbose: Leave llama.cpp's log on stderr.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: Not a GGUF file, or an argument out of range.
        UnsupportedModelError: A model whose memory goes back in neither way, or that isn't a causal
            language model.
        RuntimeFailure: llama.cpp can't load or run it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_ctx: int | None = None,
        n_gpu_layers: int = 0,
        n_threads: int | None = None,
        n_batch: int = 512,
        flash_attention: bool = True,
        cache_dtype: CacheDtype = "f16",
        repack: bool = False,
        vocab: Vocabulary | None = None,
        verbose: bool = False,
    ) -> None:
        file = checked_path(path)
        if n_threads is not None and n_threads < 1:
            raise ValueError(f"n_threads={n_threads}: give at least 1, or None")
        if n_batch < 1:
            raise ValueError(f"n_batch={n_batch}: give at least 1")
        if cache_dtype not in CACHE_DTYPES:
            raise ValueError(f"cache_dtype={cache_dtype!r}: give one of {', '.join(CACHE_DTYPES)}")
        if cache_dtype == "q8_0" and not flash_attention:
            raise ValueError('cache_dtype="q8_0" needs flash_attention=True')
        can_offload = bool(lib.llama_supports_gpu_offload())
        if n_gpu_layers and not can_offload:
            warnings.warn(
                f"n_gpu_layers={n_gpu_layers}, but this llama-cpp-python was built without GPU "
                "support, so the model runs on the CPU; to rebuild it for NVIDIA: "
                'CMAKE_ARGS="-DGGML_CUDA=on" pip install --force-reinstall --no-cache-dir '
                "llama-cpp-python",
                stacklevel=2,
            )
        model = Model(file, n_gpu_layers=n_gpu_layers, repack=repack, verbose=verbose)
        refuse_unsuitable(model)
        trained: int = lib.llama_model_n_ctx_train(model.pointer)
        if n_ctx is not None and not 1 <= n_ctx <= trained:
            raise ValueError(
                f"n_ctx={n_ctx}: {file.name} was trained for contexts of 1 to {trained}"
            )
        if vocab is not None and vocab.size != model.vocab_size:
            raise ValueError(
                f"vocab= has {vocab.size} ids, but the rows of {file.name} are "
                f"{model.vocab_size} wide: pass a vocabulary of that size"
            )

        self._tokenizer = Tokenizer(model)
        self.vocab = vocab or self._tokenizer.vocabulary()
        self.max_context = n_ctx or trained
        self._n_batch = n_batch
        self._verbose = verbose
        self._on_gpu = bool(n_gpu_layers) and can_offload
        self._parameters = context_parameters(
            n_threads=n_threads or default_threads(),
            flash_attention=flash_attention,
            cache_dtype=cache_dtype,
            on_gpu=self._on_gpu,
        )
        self._info = {
            "runtime": "llama.cpp",
            "version": version("llama-cpp-python"),
            "device": "gpu" if self._on_gpu else "cpu",
            "gpu_offload_available": can_offload,
            "model": model.description(),
            "architecture": model.metadata("general.architecture"),
            "dtype": model.description().split(" ", 2)[-1],
            "cache_dtype": cache_dtype,
            "context": self.max_context,
            "threads": self._parameters.n_threads,
            "batch": n_batch,
            "flash_attention": flash_attention,
            "repack": repack,
            "weight_bytes": lib.llama_model_size(model.pointer),
        }
        self._lock = threading.Lock()
        self._model: Model | None = model
        self._context: Context | None = None
        self._packed = PackedTokens()
        self._fewest_cells, self._most_cells = cell_limits(model, self.max_context)
        self._sequences: dict[int, Rewind[State]] = {}  # of every open slot
        self._released: deque[int] = deque()  # slots of closed caches
        self._torn = False  # the context may hold more of some sequence than its length says
        self._replays = False
        self._info["rollback"] = self._find_rollback(model)

    def info(self) -> Mapping[str, object]:
        """What the model runs on, and how."""
        return dict(self._info)

    def new_cache(self) -> LlamaCppCache:
        """An empty cache.

        Raises:
            RuntimeFailure: As many caches are open as llama.cpp can tell apart.
        """
        with self._lock:
            self._opened()
            self._settle()
            limit = lib.llama_max_parallel_sequences()
            slot = next((i for i in range(limit) if i not in self._sequences), None)
            if slot is None:
                raise RuntimeFailure(
                    f"{limit} caches are open and llama.cpp can't tell more apart: "
                    "close some, or load the model a second time"
                )
            self._sequences[slot] = Rewind()
            return LlamaCppCache(self, slot)

    def forward(self, batch: Sequence[Span]) -> list[Rows]:
        """Feed every span; rows are numpy arrays of their own.

        Raises:
            RuntimeFailure: llama.cpp failed. No cache has changed.
        """
        with self._lock:
            model = self._opened()
            slots = [self._slot_of(span.cache) for span in batch]
            check_forward(self, batch)
            if not batch:
                return []
            self._settle()
            former = [len(span.cache) for span in batch]
            sequences = [self._sequences[slot] for slot in slots]
            context = self._with_room_for(model, sum(len(span.tokens) for span in batch))
            try:
                self._torn = True  # until the lengths are right, whatever comes in between
                if self._replays:
                    for slot, sequence, span in zip(slots, sequences, batch, strict=True):
                        if sequence.apart:
                            self._decode(context, [Span(span.cache, [], 0)], [slot])
                            sequence.commit([])
                        if sequence.wants():
                            sequence.keep(context.state(slot))
                rows = self._decode(context, batch, slots)
                for sequence, span in zip(sequences, batch, strict=True):
                    sequence.commit(span.tokens)
                self._torn = False
                return rows
            except BaseException:
                self._torn = True
                for sequence, length in zip(sequences, former, strict=True):
                    del sequence.ids[length:]
                raise

    def crop(self, cache: Cache, length: int) -> None:
        """Cut a cache back to its first ``length`` tokens.

        Raises:
            CropError: llama.cpp's memory doesn't go back that far. The cache holds what it held.
        """
        with self._lock:
            self._opened()
            slot = self._slot_of(cache)
            check_crop(cache, length)
            self._settle()
            former = len(cache)
            if length == former or self._context is None:
                return
            self._torn = True  # interrupted from here on it is cropped or as before
            if not go_back(self._context, slot, self._sequences[slot], length, self._replays):
                raise CropError(
                    f"llama.cpp can't cut this cache from {former} to {length} tokens: "
                    "close it and read the tokens again into a new one"
                )
            self._torn = False

    def close(self) -> None:
        """Free the weights and every cache; twice does nothing. Rows stay readable."""
        with self._lock:
            self._context = self._model = None
            self._tokenizer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _find_rollback(self, model: Model) -> str:
        """Try which way back this model's memory has."""
        if rolls_back(self):
            return "crop"
        self._replays = True
        with suppress(RuntimeFailure):  # over what the first try couldn't take back
            if rolls_back(self):
                return "snapshot and replay"
        self.close()
        raise UnsupportedModelError(
            f"{model.path.name} is a {self._info['architecture']} model, and this llama.cpp can "
            f"neither cut its {memory_kind(model)} memory back nor restore it: after a crop it "
            "gives other rows; use another model, or another version of llama-cpp-python"
        )

    def _opened(self) -> Model:
        if self._model is None:
            raise ValueError("this backend is closed: load the model again")
        return self._model

    def _slot_of(self, cache: Cache) -> int:
        if not isinstance(cache, LlamaCppCache) or cache._sequences is not self._sequences:
            raise ValueError("this cache belongs to another backend: use one of new_cache()")
        if not cache._release.alive:
            raise ValueError("this cache is closed: use one of new_cache()")
        return cache._slot

    def _settle(self) -> None:
        """Take back what closed caches held and what a failed call left behind."""
        while self._released:
            slot = self._released[0]
            if self._context is not None:
                self._context.trim(slot, 0)
            self._sequences.pop(slot, None)
            self._released.popleft()
        if self._torn and self._context is not None:
            # Every sequence: a failed forward may also have moved the states of others.
            for slot, sequence in self._sequences.items():
                length = len(sequence.ids)
                if not go_back(self._context, slot, sequence, length, self._replays, torn=True):
                    raise RuntimeFailure(
                        "llama.cpp can't take back what a failed call left in its memory: "
                        "load the model again"
                    )
        self._torn = False

    def _with_room_for(self, model: Model, more: int) -> Context:
        """The context, after a move to a larger one where it is too small."""
        old = self._context
        need = sum(len(sequence.ids) for sequence in self._sequences.values()) + more
        slots = max(self._sequences) + 1
        if old is not None and need <= old.cells and slots <= old.slots:
            return old
        if need > self._most_cells:
            raise RuntimeFailure(
                f"the open caches need {need} tokens and this model's rotary factors change past "
                f"{self._most_cells}: close some, or load with n_ctx above {self._most_cells}"
            )
        cells = min(power_of_two(need), len(self._sequences) * self.max_context)
        cells = max(cells, FIRST_CELLS, self._fewest_cells, old.cells if old else 0)
        new = Context(
            model,
            self._parameters,
            cells=min(cells, self._most_cells),
            slots=max(power_of_two(slots), FIRST_SLOTS, old.slots if old else 0),
            n_batch=self._n_batch,
            verbose=self._verbose,
        )
        if old is not None:
            for slot in self._sequences:
                new.take_over(old, slot)
        self._context = new
        return new

    def _decode(self, context: Context, batch: Sequence[Span], slots: list[int]) -> list[Rows]:
        packed, sequences = self._packed, [self._sequences[slot] for slot in slots]
        unread = sum(len(sequence.unread) for sequence in sequences)
        packed.restart(unread + sum(len(span.tokens) for span in batch))
        for slot, sequence, span in zip(slots, sequences, batch, strict=True):
            packed.add(
                [*sequence.unread, *span.tokens],
                position=sequence.num_read,
                slot=slot,
                num_logits=span.num_logits,
            )

        parts: list[Rows] = []
        for start in range(0, packed.count, self._n_batch):
            end = min(start + self._n_batch, packed.count)
            context.decode(packed.piece(start, end))
            count = int(np.count_nonzero(packed.wanted[start:end]))
            if count:
                parts.append(context.rows(count))
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts or [self._no_rows()])
        ends = accumulate(span.num_logits for span in batch)
        return [rows[end - span.num_logits : end] for end, span in zip(ends, batch, strict=True)]

    def _no_rows(self) -> Rows:
        return np.empty((0, self.vocab.size), np.float32)


def checked_path(path: str | os.PathLike[str]) -> Path:
    """The path of a GGUF file, or an error that says what is there instead."""
    file = Path(path).expanduser()
    if file.is_dir():
        raise ValueError(
            f"{file} is a folder: give the GGUF file; for a model folder use HFBackend"
        )
    if not file.exists():
        raise FileNotFoundError(f"there is no file {file}")
    with file.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{file} is not a GGUF file: it starts with {magic!r}, not b'GGUF'")
    return file


def refuse_unsuitable(model: Model) -> None:
    """Raise for models that can't be decoded speculatively here, by name."""
    architecture = model.metadata("general.architecture")
    if lib.llama_model_has_encoder(model.pointer) or lib.llama_model_is_diffusion(model.pointer):
        raise UnsupportedModelError(
            f"{model.path.name} is a {architecture} model, not a causal language model"
        )


def memory_kind(model: Model) -> str:
    """What llama.cpp calls the memory of a model."""
    if lib.llama_model_is_recurrent(model.pointer):
        return "recurrent"
    return "hybrid" if lib.llama_model_is_hybrid(model.pointer) else "attention"


def cell_limits(model: Model, max_context: int) -> tuple[int, int]:
    """The fewest and the most tokens that a context may have room for.

    Models with two sets of rotary factors (LongRoPE) choose by the room of the context, so it must
    not grow from one side of their limit to the other.
    """
    prefix = f"{model.metadata('general.architecture')}.rope.scaling"
    limit = int(model.metadata(f"{prefix}.original_context_length") or 0)
    if not limit or model.metadata(f"{prefix}.type") == "yarn":
        return 0, 2**31
    limit -= limit % ROUNDING
    return (limit + ROUNDING, 2**31) if max_context > limit else (0, limit)


def context_parameters(
    *, n_threads: int, flash_attention: bool, cache_dtype: CacheDtype, on_gpu: bool
) -> Any:
    """llama.cpp's parameters for every context of a backend, all but its size."""
    parameters = lib.llama_context_default_params()
    parameters.n_threads = parameters.n_threads_batch = n_threads
    parameters.flash_attn_type = int(flash_attention)
    parameters.type_k = parameters.type_v = CACHE_DTYPES[cache_dtype]
    parameters.offload_kqv = parameters.op_offload = on_gpu
    parameters.kv_unified = True
    parameters.swa_full = True  # a window that has dropped tokens can't be cut back
    parameters.no_perf = True
    return parameters


def default_threads() -> int:
    """Threads that don't get in each other's way: two of them may share a core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    return cores if cores <= 4 else max(4, cores // 2)


def power_of_two(least: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (least - 1).bit_length()
