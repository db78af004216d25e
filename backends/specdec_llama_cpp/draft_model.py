"""The drafters of specdec for llama-cpp-python's own ``Llama``."""

import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel as DraftModel
from numpy.typing import NDArray
from typing_extensions import override

from specdec.backend import ModelBackend
from specdec.composite import CompositeDrafter
from specdec.costs import READ_TOKENS, Costs
from specdec.drafters import Drafter, DraftRequest
from specdec.named import named_lookups
from specdec.proposer import Proposer
from specdec.request import at_least
from specdec.reuse import common_prefix
from specdec.sampling import Sampler, SamplingParams
from specdec.translate import model_drafter
from specdec.vocab import Vocabulary

__all__ = ["LlamaDraftModel"]

NO_VOCAB = (
    "this drafter scores tokens, so it has to know what the ids mean: give LlamaDraftModel the "
    "vocab= of the Llama, such as LlamaCppBackend(its_path).vocab"
)


class LlamaDraftModel(DraftModel):  # type: ignore[misc]
    """Any drafter as ``Llama(draft_model=...)``, a second GGUF included.

    ::

        draft = LlamaDraftModel(LlamaCppBackend("small.gguf"))
        llm = Llama("large.gguf", draft_model=draft)

    ``Llama`` asks with the whole text every time. What goes on from the text before is taken for
    the same sequence, so that only what is new is read; anything else closes it and opens another.
    Drafts are greedy guesses: ``Llama`` doesn't say how it samples.

    Args:
        draft: A model of any runtime, a ``Drafter``, ``"suffix"`` or ``"lookup"``; or a list of
            them, the cheap ones first (see ``CompositeDrafter``).
        vocab: What the ids of the ``Llama`` mean. None: the same as in the model. A ``Drafter``
            that scores tokens needs it; lookups don't.
        num_draft_tokens: How many tokens to draft.

    Raises:
        VocabularyMismatchError: The draft has too little in common with ``vocab``.
        TypeError: ``draft`` is none of these.
        ValueError: No lookup is called so, or ``vocab`` is missing.
    """

    def __init__(
        self,
        draft: ModelBackend | Drafter | str | Sequence[ModelBackend | Drafter | str],
        *,
        vocab: Vocabulary | None = None,
        num_draft_tokens: int = 8,
    ) -> None:
        several = list(draft) if isinstance(draft, list | tuple) else [draft]
        models = [one for one in several if isinstance(one, ModelBackend)]
        vocab = vocab or (models[0].vocab if models else None)
        drafters = [each for one in several for each in _drafters(one, vocab)]
        self.drafter = drafters[0] if len(drafters) == 1 else CompositeDrafter(drafters)
        self.num_draft_tokens = at_least(1, num_draft_tokens=num_draft_tokens)
        self._sampler = _Greedy(vocab)
        self._num_ids = sys.maxsize if vocab is None else vocab.size
        self._proposer = Proposer(
            self.drafter, self._num_ids, Costs(), perf_counter, may_stop=True, may_choose=False
        )
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
            (draft,) = self._proposer.ask([request])
        except BaseException:  # the drafter may be in the middle of something
            self._drop()
            raise
        self._drafted = list(draft.token_ids)
        return np.array(self._drafted, np.intc)

    def close(self) -> None:
        """Give back what the text holds; another call opens it again."""
        if self._ids:
            try:
                self.drafter.commit(self._state, self._ids)
            finally:
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
        if (lag := self.drafter.lag(self._state, ids)) >= READ_TOKENS:
            self._proposer.read(self._state, ids, lag)

    def _drop(self) -> None:
        if self._ids:
            state, self._state, self._ids, self._drafted = self._state, None, [], []
            self.drafter.close(state)


def _drafters(draft: object, vocab: Vocabulary | None) -> list[Drafter]:
    """What was given as a draft, made one or several."""
    if isinstance(draft, str):
        lookups, name = named_lookups(draft)
        if name is not None:
            raise ValueError(
                f'no draft is called {draft!r} here: give "lookup", "suffix", or a backend'
            )
        return lookups
    if isinstance(draft, ModelBackend) and vocab is not None:
        return [model_drafter(draft, vocab, keep_caches=1)]
    if isinstance(draft, type) or not isinstance(draft, Drafter):
        raise TypeError(f"draft must be a backend or a Drafter, not {type(draft).__name__}")
    if vocab is None and any(hasattr(d, "backend") for d in getattr(draft, "drafters", [draft])):
        raise ValueError(NO_VOCAB)
    return [draft]


class _Greedy(Sampler):
    """Guesses the best token; of unknown vocabularies none."""

    def __init__(self, vocab: Vocabulary | None) -> None:
        self._is_known = vocab is not None
        super().__init__(SamplingParams(), vocab or Vocabulary(1, [b""], frozenset()), 0)

    @override
    def guess(self, logits: Any, ids: Sequence[int], drafts: Sequence[int]) -> int | None:
        if not self._is_known:
            raise ValueError(NO_VOCAB)
        return super().guess(logits, ids, drafts)
