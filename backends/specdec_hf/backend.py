"""The backend contract, kept by a transformers model."""

from collections.abc import Sequence
from itertools import accumulate
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
from specdec_hf.border import borrowed, cache_keyword, call, check_model, context_limit
from specdec_hf.loading import as_device, as_dtype, load
from specdec_hf.packed import KeyValueStore, PackedCache
from specdec_hf.self_draft import self_draft, write_quantized
from specdec_hf.tokens import logits_width, vocabulary

if TYPE_CHECKING:
    from specdec.backends import LlamaCppBackend

__all__ = ["HFBackend"]


class HFCache:
    """The keys and values of one sequence. Made by ``HFBackend.new_cache``."""

    __slots__ = ("_owner", "_store")

    def __init__(self, owner: "HFBackend", store: KeyValueStore) -> None:
        self._owner = owner
        self._store: KeyValueStore | None = store

    def __len__(self) -> int:
        return self._store.length if self._store else 0

    def close(self) -> None:
        """Free the tensors."""
        self._store = None


class HFBackend:
    """A causal language model in transformers, with its own key-value store.

    The spans of a forward are packed into one row without padding, whatever their lengths, so a
    batch costs about one pass over the weights. Every position is kept, in windowed layers too, so
    any cache can be cut back to any length.

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
        trust_remote_code: Run Python code that the model brings along. Read it first.
        local_files_only: Never ask the hub.

    Raises:
        UnsupportedModelError: A model that packed spans can't serve; names its class and layers.
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
        self._cache_keyword = cache_keyword(self._model)
        self._lock = Lock()
        self._try_out()

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
        return HFCache(self, KeyValueStore(self._max_context))

    def crop(self, cache: Cache, length: int) -> None:
        """Cut a cache back to its first ``length`` tokens.

        Raises:
            CropError: It holds fewer.
            ValueError: It is closed, or another backend's.
        """
        with self._lock:
            store = self._store(cache)
            check_crop(cache, length)
            store.length = length

    def forward(self, batch: Sequence[Span]) -> list[torch.Tensor]:
        """Feed spans, all in one pass.

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
            stores = [self._store(span.cache) for span in batch]
            check_forward(self, batch)
            if not batch:
                return []
            lengths = [store.length for store in stores]
            try:
                logits = self._run(batch, stores)
                for span, store in zip(batch, stores, strict=True):
                    store.length += len(span.tokens)
                return list(logits.split([span.num_logits for span in batch]))
            except BaseException as error:
                for store, length in zip(stores, lengths, strict=True):
                    store.length = length
                if not isinstance(error, Exception):
                    raise
                name = type(self._model).__name__
                if isinstance(error, UnsupportedModelError):
                    raise UnsupportedModelError(f"{name} can't run here: {error}") from error
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

    def _run(self, batch: Sequence[Span], stores: Sequence[KeyValueStore]) -> torch.Tensor:
        """The wanted rows of all spans ``(rows, vocab.size)``. Lengths are left to the caller."""
        sizes = [len(span.tokens) for span in batch]
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for span, store, stop in zip(batch, stores, accumulate(sizes), strict=True):
            ids += span.tokens
            positions += range(store.length, store.length + len(span.tokens))
            rows += range(stop - span.num_logits, stop)
        device = self._model.get_input_embeddings().weight.device
        with borrowed(self._model):
            packed = torch.tensor([ids, positions], device=device)
            arguments: dict[str, Any] = {self._cache_keyword: PackedCache(stores, sizes)}
            logits = call(
                self._model,
                input_ids=packed[:1],
                position_ids=packed[1:],
                logits_to_keep=torch.tensor(rows, dtype=torch.long, device=device),
                **arguments,
            )
            return logits[0].float()

    def _try_out(self) -> None:
        """Refuse here, rather than in the first forward, a model that looks into its cache."""
        try:
            self.forward([Span(self.new_cache(), [0] * min(2, self._max_context), 0)])
        except RuntimeFailure as error:
            cause = error.__cause__
            if not isinstance(cause, AttributeError | TypeError | IndexError):
                raise
            raise UnsupportedModelError(
                f"{type(self._model).__name__} can't run here, because it looks into the keys and "
                f"values of its full_attention layers ({cause})"
            ) from cause

    def _store(self, cache: Cache) -> KeyValueStore:
        if not isinstance(cache, HFCache) or cache._owner is not self:
            raise ValueError("the cache belongs to another backend: make one by new_cache()")
        if cache._store is None:
            raise ValueError("the cache is closed: make another by new_cache()")
        return cache._store

    def info(self) -> dict[str, object]:
        """What the model runs on."""
        return {
            "runtime": "transformers",
            "version": transformers.__version__,
            "torch": torch.__version__,
            "device": str(self._model.device),
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "architecture": type(self._model).__name__,
            "attention": "packed spans",
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
