"""The backend contract, kept by a transformers model."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.backend import Cache, Span, check_crop, check_forward
from specdec.errors import RuntimeFailure, UnsupportedModelError
from specdec.vocab import Vocabulary
from specdec_hf.border import check_model, context_limit
from specdec_hf.engines import choose_engine
from specdec_hf.loading import as_device, as_dtype, load
from specdec_hf.self_draft import self_draft, write_quantized
from specdec_hf.tokens import logits_width, vocabulary

if TYPE_CHECKING:
    from specdec.backends import LlamaCppBackend

__all__ = ["HFBackend"]


class HFCache:
    """What the model remembers of one sequence. Made by ``HFBackend.new_cache``."""

    __slots__ = ("_owner", "_sequence")

    def __init__(self, owner: "HFBackend", sequence: Any) -> None:
        self._owner = owner
        self._sequence = sequence

    def __len__(self) -> int:
        return self._sequence.length if self._sequence else 0

    @property
    def num_replayed(self) -> int:
        """Ids that were read again so far, because the model can't go back by itself."""
        return self._sequence.num_replayed if self._sequence else 0

    def close(self) -> None:
        """Free the tensors."""
        self._sequence = None


class HFBackend:
    """A causal language model in transformers.

    The spans of a forward are packed into one row without padding, whatever their lengths, so a
    batch costs about one pass over the weights. Every position is kept, in windowed layers too, so
    any cache can be cut back to any length.

    Models that this can't serve, such as recurrent ones, run their spans one by one in caches of
    transformers' own. Where those can't be cut, a state from before is restored and what follows
    it read again. Which way a model goes is tried out at construction, in a few short forwards
    that are compared with its own; ``info()["rollback"]`` says what came of it: ``"crop"``,
    ``"recorded past"`` or ``"snapshot and replay"``.

    ``HFBackend("name")`` loads a model; ``HFBackend(model=..., tokenizer=...)`` takes one that is
    there. Its configuration, mode, hooks and generation settings are never changed: its attention
    implementation is exchanged during a forward and put back after it. Don't call one model from
    two threads at a time.

    Args:
        path_or_hub_id: A folder, a ``.gguf`` file, or the id of a model on the hub.
        model: A loaded model, instead of a name.
        tokenizer: The tokenizer of ``model``.
        vocab: What the ids of ``model`` mean, instead of a tokenizer.
        dtype: Of the weights: a torch dtype, its name, or ``"auto"``, which is what the files were
            saved in, and float32 for a GGUF.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``; None is the GPU if there is one. Not for
            ``model``, which stays where it is.
        gguf_file: A GGUF file inside the folder or hub repository; its weights are dequantised.
        revision: Branch, tag or commit on the hub.
        max_context: The most tokens of a sequence, if less than what the model was made for.
            Models whose rotary embedding changes with the length end where it changes.
        cache: ``"packed"`` is as above, and None too where it can be. The others are transformers'
            own: ``"dynamic"``; ``"static"``, which takes the memory and time of ``max_context``
            tokens from the first; ``"offloaded"``, for a GPU whose memory is short;
            ``"quantized"``, if it can be cut back.
        trust_remote_code: Run Python code that the model brings along. Read it first.
        local_files_only: Never ask the hub.

    Raises:
        UnsupportedModelError: A model that would be computed wrongly, or a kind of cache that can't
            be had for it; names the class and its layers, or that of the cache.
        ValueError: An argument out of range, or arguments that don't go together.
        OSError: A model that isn't there and can't be fetched.
    """

    def __init__(
        self,
        path_or_hub_id: str | PathLike[str] | None = None,
        *,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        vocab: Vocabulary | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        gguf_file: str | None = None,
        revision: str | None = None,
        max_context: int | None = None,
        cache: str | None = None,
        trust_remote_code: bool = False,
        local_files_only: bool = False,
    ) -> None:
        if path_or_hub_id is not None:
            if model is not None or tokenizer is not None or vocab is not None:
                raise ValueError(
                    "give a path or hub id, or model= with its tokenizer or vocab=, not both"
                )
            model, tokenizer = load(
                str(path_or_hub_id),
                dtype=as_dtype(dtype),
                device=as_device(device),
                gguf_file=gguf_file,
                revision=revision,
                trust_remote_code=trust_remote_code,
                local_files_only=local_files_only,
            )
        elif model is None:
            raise ValueError("give a path or hub id, or model= with its tokenizer or vocab=")
        elif dtype != "auto" or any((device, gguf_file, revision, trust_remote_code)):
            raise ValueError(
                "dtype, device, gguf_file, revision and trust_remote_code are for loading, and "
                "model= is loaded: leave them out"
            )
        self._model = check_model(model)
        self._tokenizer = tokenizer
        self._vocab = _vocab(self._model, tokenizer, vocab)
        self._max_context = _max_context(context_limit(self._model.config), max_context)
        self._lock = Lock()
        self._engine = choose_engine(self._model, self._max_context, cache)

    @property
    def vocab(self) -> Vocabulary:
        """The model's ids and what they spell."""
        return self._vocab

    @property
    def max_context(self) -> int:
        """The most tokens that one cache can hold."""
        return self._max_context

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model."""
        return self._model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Its tokenizer; None if ``vocab=`` was given instead."""
        return self._tokenizer

    def new_cache(self) -> HFCache:
        """An empty cache for one sequence."""
        return HFCache(self, self._engine.new())

    def crop(self, cache: Cache, length: int) -> None:
        """Cut a cache back to its first ``length`` tokens.

        Raises:
            CropError: It holds fewer.
            ValueError: It is closed, or another backend's.
        """
        with self._lock:
            sequence = self._sequence(cache)
            check_crop(cache, length)
            self._engine.crop(sequence, length)

    def forward(self, batch: Sequence[Span]) -> list[torch.Tensor]:
        """Feed spans, in one pass if they can be packed.

        Args:
            batch: Spans of distinct caches.

        Returns:
            Per span ``(num_logits, vocab.size)``, float32, on the model's device.

        Raises:
            ContextFullError: A cache would hold more than ``max_context`` tokens.
            TokenIdError: An id outside the vocabulary.
            ValueError: A cache that is closed, another backend's, or twice in the batch.
            RuntimeFailure: torch failed; the caches are as before.
            UnsupportedModelError: The model asks for a kind of attention that isn't honoured here.
        """
        with self._lock:
            sequences = [self._sequence(span.cache) for span in batch]
            check_forward(self, batch)
            if not batch:
                return []
            spans = [
                (sequence, span.tokens, span.num_logits)
                for sequence, span in zip(sequences, batch, strict=True)
            ]
            name = type(self._model).__name__
            try:
                return self._engine.forward(spans)
            except UnsupportedModelError as error:
                raise UnsupportedModelError(f"{name} can't run here: {error}") from error
            except Exception as error:
                raise RuntimeFailure(
                    f"{name} failed in a forward of {len(batch)} spans "
                    f"({type(error).__name__}: {error}): the caches are as before"
                ) from error

    def self_draft(self, quantization: str = "q4_k_m", **options: Any) -> "LlamaCppBackend":
        """The model's own weights as they are now, quantised, in llama.cpp; ``draft="self"``.

        The first time they are written to a file in the user's cache folder (or the environment's
        ``SPECDEC_CACHE``), which is found again by a hash of the weights.

        Args:
            quantization: ``"q4_0"``, ``"q8_0"`` and so on.
            **options: For ``LlamaCppBackend``, such as ``n_threads=4``.

        Raises:
            ValueError: There is no such quantisation, or a bad option.
            MissingRuntimeError: llama-cpp-python isn't installed.
            UnsupportedModelError: A model that llama.cpp doesn't compute.
            BackendError: The file can't be written.
        """
        return self_draft(self, quantization, **options)

    def write_quantized(
        self, path: str | PathLike[str], quantization: str = "q4_k_m"
    ) -> str | None:
        """Write the model as a quantised GGUF, with its tokenizer if llama.cpp has the like of it.

        Returns:
            Why there is no tokenizer in the file, or None if there is one.

        Raises as ``self_draft`` does.
        """
        return write_quantized(self, Path(path), quantization)

    def _sequence(self, cache: Cache) -> Any:
        if not isinstance(cache, HFCache) or cache._owner is not self:
            raise ValueError("the cache belongs to another backend: make one by new_cache()")
        if cache._sequence is None:
            raise ValueError("the cache is closed: make another by new_cache()")
        return cache._sequence

    def info(self) -> dict[str, object]:
        """What the model runs on."""
        return {
            "runtime": "transformers",
            "version": transformers.__version__,
            "torch": torch.__version__,
            "device": str(self._model.device),
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "architecture": type(self._model).__name__,
            "attention": self._engine.attention,
            "rollback": self._engine.rollback,
            "context": self._max_context,
            "threads": torch.get_num_threads(),
            "weight_bytes": sum(each.nbytes for each in self._model.parameters()),
        }


def _vocab(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, vocab: Vocabulary | None
) -> Vocabulary:
    if (tokenizer is None) == (vocab is None):
        raise ValueError(
            "model= needs to know what its ids spell: give its tokenizer, or vocab=, not both"
        )
    if vocab is None:
        return vocabulary(model, tokenizer)
    if vocab.size != logits_width(model):
        raise ValueError(
            f"vocab.size is {vocab.size}, but the model's rows are {logits_width(model)} wide"
        )
    return vocab


def _max_context(limit: int, wanted: int | None) -> int:
    if wanted is None:
        return limit
    if not 1 <= wanted <= limit:
        raise ValueError(f"max_context is {wanted}: the model can have 1 to {limit} tokens")
    return wanted
