"""Lossless speculative decoding across runtimes.

::

    from specdec import SpeculativeDecoder
    from specdec.backends import HFBackend, LlamaCppBackend

    decoder = SpeculativeDecoder(
        target=HFBackend("Qwen/Qwen3-8B", dtype="bfloat16"),
        draft=LlamaCppBackend("qwen3-0.6b-q8_0.gguf"),
    )
    print(decoder.generate("Once upon a time,", max_new_tokens=100).text)
"""

from specdec.backend import Cache, Logits, ModelBackend, Span
from specdec.composite import CompositeDrafter
from specdec.decoder import SpeculativeDecoder
from specdec.drafters import Draft, Drafter, DraftRequest, ModelDrafter
from specdec.errors import (
    BackendError,
    ContextFullError,
    CropError,
    LogitsError,
    MissingRuntimeError,
    RuntimeFailure,
    SpecdecError,
    TokenIdError,
    UnsupportedModelError,
    VocabularyMismatchError,
)
from specdec.lookup import PromptLookupDrafter
from specdec.rejection import verify_block, verify_rejection
from specdec.request import (
    BatchItem,
    BatchOptions,
    GenerateOptions,
    GenerationResult,
    Verification,
)
from specdec.sampling import Processor, SamplingParams
from specdec.stats import Stats
from specdec.stopping import FinishReason, TokenEvent, TokenLogprobs
from specdec.stream import TokenStream
from specdec.suffix import SuffixDrafter
from specdec.translate import TranslatingDrafter
from specdec.verify import verify_drafts
from specdec.vocab import Message, Prompt, Vocabulary

__all__ = [
    "BackendError",
    "BatchItem",
    "BatchOptions",
    "Cache",
    "CompositeDrafter",
    "ContextFullError",
    "CropError",
    "Draft",
    "DraftRequest",
    "Drafter",
    "FinishReason",
    "GenerateOptions",
    "GenerationResult",
    "Logits",
    "LogitsError",
    "Message",
    "MissingRuntimeError",
    "ModelBackend",
    "ModelDrafter",
    "Processor",
    "Prompt",
    "PromptLookupDrafter",
    "RuntimeFailure",
    "SamplingParams",
    "Span",
    "SpecdecError",
    "SpeculativeDecoder",
    "Stats",
    "SuffixDrafter",
    "TokenEvent",
    "TokenIdError",
    "TokenLogprobs",
    "TokenStream",
    "TranslatingDrafter",
    "UnsupportedModelError",
    "Verification",
    "Vocabulary",
    "VocabularyMismatchError",
    "verify_block",
    "verify_drafts",
    "verify_rejection",
]
