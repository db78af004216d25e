"""The drafters of specdec for llama-cpp-python's own ``Llama``."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel as DraftModel
from numpy.typing import NDArray
from typing_extensions import override

from specdec.backend import ModelBackend
from specdec.drafters import Drafter, DraftRequest
from specdec.request import at_least
from specdec.reuse import common_prefix
from specdec.sampling import Sampler, SamplingParams
from specdec.translate import model_drafter
from specdec.vocab import Vocabulary

__all__ = ["LlamaDraftModel"]


class LlamaDraftModel(DraftModel):  # type: ignore[misc]
    """Any drafter as ``Llama(draft_model=...)``, a second GGUF included.

    ::

        draft = LlamaDraftModel(LlamaCppBackend("small.gguf"))
        llm = Llama("large.gguf", draft_model=draft)

    ``Llama`` asks with the whole text every time. What goes on from the text before is taken for
    the same sequence, so that only what is new is read; anything else closes it and opens another.
    Drafts are greedy guesses: ``Llama`` doesn't say how it samples.

    Args:
        draft: A model of any runtime, or a ``Drafter``.
        vocab: What the ids of the ``Llama`` mean. None: the same as in the draft. A ``Drafter``
            that scores tokens needs it; lookups don't.
        num_draft_tokens: How many tokens to draft.

    Raises:
        VocabularyMismatchError: The draft has too little in common with ``vocab``.
        TypeError: ``draft`` is neither a backend nor a ``Drafter``.
    """

    def __init__(
        self,
        draft: ModelBackend | Drafter,
        *,
        vocab: Vocabulary | None = None,
        num_draft_tokens: int = 8,
    ) -> None:
        if isinstance(draft, ModelBackend):
            vocab = vocab or draft.vocab
            draft = model_drafter(draft, vocab, keep_caches=1)
        elif isinstance(draft, type) or not isinstance(draft, Drafter):
            raise TypeError(f"draft must be a backend or a Drafter, not {type(draft).__name__}")
        self.drafter = draft
        self.num_draft_tokens = at_least(1, num_draft_tokens=num_draft_tokens)
        self._sampler = _Greedy(vocab)
        self._num_ids = sys.maxsize if vocab is None else vocab.size
        self._ids: list[int] = []  # of the open text; none: no text is open
        self._drafted: list[int] = []  # behind these ids
        self._state: Any = None

    @override
    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        """Draft what may follow a text.

        Args:
            input_ids: ``(n,)`` the ids of the text.
            **kwargs: Taken because the protocol has them; nothing is done with them.

        Returns:
            ``(at most num_draft_tokens,)`` ids.
        """
        ids = np.asarray(input_ids).tolist()
        if not ids:
            return np.empty(0, np.intc)
        try:
            self._go_to(ids)
            request = DraftRequest(
                self._state, ids, self.num_draft_tokens, self._sampler, num_ids=self._num_ids
            )
            (draft,) = self.drafter.propose([request])
        except BaseException:  # the drafter may be in the middle of something
            self._drop()
            raise
        self._drafted = list(draft.token_ids)
        return np.array(self._drafted, np.intc)

    def close(self) -> None:
        """Give back what the text holds; another call opens it again."""
        if self._ids:
            self.drafter.commit(self._state, self._ids)
            self._drop()

    def _go_to(self, ids: list[int]) -> None:
        if ids[: len(self._ids)] != self._ids:
            self.close()
        if not self._ids:
            self._state = self.drafter.open(ids)
        else:  # a round ends with the first id that wasn't drafted; more may have been put in
            new = ids[len(self._ids) :]
            stood = common_prefix(new, self._drafted)
            for end in sorted({min(stood + 1, len(new)), len(new)}):
                self.drafter.commit(self._state, self._ids + new[:end])
        self._ids, self._drafted = ids, []
        if self.drafter.lag(self._state, ids) > 0:
            self.drafter.catch_up(self._state, ids)

    def _drop(self) -> None:
        if self._ids:
            state, self._state, self._ids, self._drafted = self._state, None, [], []
            self.drafter.close(state)


class _Greedy(Sampler):
    """Guesses the best token; of unknown vocabularies none."""

    def __init__(self, vocab: Vocabulary | None) -> None:
        self._is_known = vocab is not None
        super().__init__(SamplingParams(), vocab or Vocabulary(1, [b""], frozenset()), 0)

    @override
    def guess(self, logits: Any, ids: Sequence[int], drafts: Sequence[int]) -> int | None:
        if not self._is_known:
            raise ValueError(
                "this drafter scores tokens, so it has to know what the ids mean: give "
                "LlamaDraftModel the vocab= of the Llama, such as LlamaCppBackend(its_path).vocab"
            )
        return super().guess(logits, ids, drafts)
