"""A draft from the model itself: its own weights quantised, in a file kept for the next time."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, BinaryIO

import platformdirs
import torch
from rich.filesize import decimal
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from specdec.backend import Span
from specdec.errors import BackendError, RuntimeFailure, UnsupportedModelError
from specdec_hf.export import OnProgress, plan, write_gguf
from specdec_hf.families import trained_context
from specdec_hf.fingerprint import fingerprint

if TYPE_CHECKING:
    from specdec.backends import LlamaCppBackend
    from specdec_hf.backend import HFBackend

__all__ = ["self_draft", "write_quantized"]

FORMAT = 1  # counts up when the same model would be written otherwise
SEAL_SIZE = 32
UNFINISHED, STALE = ".specdec-", 86_400  # the names of rooms for writing; seconds

# What two runtimes' rounding may come to, relative to the logits. SmolLM2-135M differs by 1e-6 in
# float32, 2e-3 in float16 and 1e-2 in bfloat16, and deeper models by more. The rows of one layer's
# queries in a wrong order make 2e-1, a rotary base that is twice too large 2e-2.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
PROBE_LENGTH = 32


def self_draft(
    target: "HFBackend",
    quantization: str = "q4_k_m",
    *,
    folder: Path | None = None,
    **options: Any,
) -> "LlamaCppBackend":
    """The target's own weights, quantised, in llama.cpp.

    They are written as they are in memory, merged adapters included, and only once: the file is
    found again by a hash of them.

    Args:
        target: The model; its vocabulary becomes the draft's.
        quantization: One of ``specdec_llama_cpp.quantize.QUANTIZATIONS``.
        folder: Where such files are kept. None: the environment's ``SPECDEC_CACHE``, or else the
            user's cache folder.
        **options: For ``LlamaCppBackend``. Unless they say otherwise the draft has the target's
            context, and is on a GPU if the target is.

    Raises:
        ValueError: There is no such quantisation.
        MissingRuntimeError: llama-cpp-python isn't installed.
        UnsupportedModelError: A model that can't be written as a GGUF that computes the same.
        BackendError: The folder can't be written, or lacks space.
        RuntimeFailure: llama.cpp failed.
    """
    from specdec.backends import LlamaCppBackend  # says what to install where it is missing
    from specdec_llama_cpp.quantize import checked_kind

    kind, model = checked_kind(quantization), target.model
    key = fingerprint(model, FORMAT, kind)
    folder = folder or _cache_folder()
    file = folder / f"{model.config.model_type}-{kind}-{key[:16]}.gguf"
    if not _is_sealed(file, key):
        with _disk_errors(folder, "set SPECDEC_CACHE to"):
            folder.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(folder)
            _write(target, file, kind, key=key)
    usual = {
        "n_ctx": min(target.max_context, trained_context(model.config)),
        "n_gpu_layers": -1 if model.device.type == "cuda" else 0,
    }
    return LlamaCppBackend(file, vocab=target.vocab, **usual | options)


def write_quantized(target: "HFBackend", path: Path, quantization: str) -> str | None:
    """Write the target's weights, quantised, and its tokenizer to a GGUF of the user's.

    The file is there whole or not at all; one that was there is replaced.

    Returns:
        Why the tokenizer couldn't be written; None if it was.

    Raises as ``self_draft`` does.
    """
    from specdec.backends import LlamaCppBackend  # noqa: F401 - says what to install
    from specdec_llama_cpp.quantize import checked_kind

    kind, path = checked_kind(quantization), path.expanduser().resolve()
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give a file in it")
    with _disk_errors(path.parent, "choose"):
        return _write(target, path, kind, tokenizer=target.tokenizer)


def _cache_folder() -> Path:
    chosen = os.environ.get("SPECDEC_CACHE")
    return Path(os.path.expanduser(chosen)) if chosen else platformdirs.user_cache_path("specdec")


def _remove_leftovers(folder: Path) -> None:
    """What a killed process had begun to write."""
    for room in folder.glob(f"{UNFINISHED}*"):
        if time.time() - room.stat().st_mtime > STALE:
            shutil.rmtree(room, ignore_errors=True)


def _seal(stream: BinaryIO, size: int, key: str) -> bytes:
    """A hash of a file's first bytes and of what it should be."""
    digest = sha256(key.encode())
    stream.seek(0)
    for start in range(0, size, 1 << 24):
        digest.update(stream.read(min(size - start, 1 << 24)))
    return digest.digest()


def _is_sealed(file: Path, key: str) -> bool:
    """Whether a file is whole and the one for this key. GGUF readers ignore its seal."""
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size - SEAL_SIZE
            return _seal(stream, size, key) == stream.read()
    except OSError:
        return False


def _write(
    target: "HFBackend",
    file: Path,
    kind: str,
    *,
    key: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> str | None:
    """Export, check, quantise, and only then put the file in its place."""
    from specdec_llama_cpp.quantize import quantize

    model, folder = target.model, file.parent
    with (
        TemporaryDirectory(prefix=UNFINISHED, dir=folder) as room,
        _bar(f"writing {file.name}") as (exported, quantized),
    ):
        _check_room(model, folder, kind)
        whole, small = Path(room, "whole.gguf"), Path(room, "small.gguf")
        reason = write_gguf(model, whole, tokenizer=tokenizer, progress=exported)
        _check_export(target, whole)
        try:
            quantize(whole, small, kind, progress=quantized)
        except RuntimeFailure as error:  # llama.cpp doesn't say that a disk is full
            raise OSError(str(error)) from error
        with small.open("r+b") as stream:
            if key is not None:
                stream.write(_seal(stream, small.stat().st_size, key))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(small, file)
    return reason


def _check_room(model: PreTrainedModel, folder: Path, kind: str) -> None:
    # Some tensors, the head above all, get more bits than the kind is named for.
    bits = 32 if kind == "f32" else 16 if kind.endswith("f16") else int(kind[1]) + 2.5
    need = sum(entry.nbytes + entry.source.numel() * bits / 8 for entry in plan(model).entries)
    if need > shutil.disk_usage(folder).free:
        raise OSError(f"a {kind} file takes {decimal(int(need))} for a while")


def _check_export(target: "HFBackend", file: Path) -> None:
    """Compare rows of the exported model with the target's."""
    from specdec.backends import LlamaCppBackend

    vocab, tolerance = target.vocab, TOLERANCES.get(target.model.dtype, 1e-3)
    spelled = [i for i, text in enumerate(vocab.tokens) if text and i not in vocab.special_ids]
    plain = spelled or range(vocab.size)
    count = min(PROBE_LENGTH, target.max_context, trained_context(target.model.config))
    ids = [plain[(2 * i + 1) * len(plain) // (2 * count)] for i in range(count)]
    try:
        with LlamaCppBackend(
            file, vocab=vocab, n_ctx=count, flash_attention=False, cache_dtype="f32"
        ) as exported:
            (found,) = exported.forward([Span(exported.new_cache(), ids, count)])
    except RuntimeFailure as error:
        said = str(error).replace(str(file), "it")
        raise UnsupportedModelError(
            f"{type(target.model).__name__} can't be written for llama.cpp: {said}. As a draft "
            "give a smaller model of the same vocabulary instead"
        ) from error
    (rows,) = target.forward([Span(target.new_cache(), ids, count)])
    expected = rows.cpu()
    difference = (torch.from_numpy(found) - expected).norm() / expected.norm().clamp_min(1e-30)
    off = float(difference)
    if not off <= tolerance:  # so that NaN is refused too
        raise UnsupportedModelError(
            f"{type(target.model).__name__} written as a GGUF computes something else: the logits "
            f"of {count} ids differ by {off:.1e} of their size, and {tolerance:.0e} is allowed "
            f"for {target.model.dtype}. Pass a GGUF of the model as the draft instead"
        )


@contextmanager
def _disk_errors(folder: Path, choose: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if os.path.isdir(folder):  # numpy doesn't say that a disk is full
            reason += f", {decimal(shutil.disk_usage(folder).free)} left"
        raise BackendError(
            f"can't write to {folder} ({reason}): {choose} a folder that can be written and has "
            "room"
        ) from error


@contextmanager
def _bar(text: str) -> Iterator[tuple[OnProgress, OnProgress]]:
    """One bar for two halves of the work; transformers' switch for bars counts."""
    shown = 0.0
    layout = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}"
    bar = logging.tqdm(total=1.0, desc=text, bar_format=layout, leave=False, disable=None)

    def half(start: float) -> OnProgress:
        def show(done: int, total: int) -> None:
            nonlocal shown
            now = start + done / total / 2
            bar.update(now - shown)
            shown = now

        return show

    with bar:
        yield half(0.0), half(0.5)
