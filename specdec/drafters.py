"""Where drafts come from."""

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from typing_extensions import override

from specdec.backend import Cache, Logits, ModelBackend, Span, crop_to, num_replayed
from specdec.policy import FixedLength
from specdec.prefill import prefill
from specdec.reuse import KeptCaches
from specdec.sampling import Sampler
from specdec.verify import masked, probability
from specdec.vocab import Vocabulary, odd_special, shared_ids

__all__ = ["Draft", "DraftRequest", "Drafter", "ModelDrafter", "goes_on"]


class DraftRequest(NamedTuple):
    """One sequence that wants drafts."""

    state: Any  # what the drafter's own ``open`` returned for it
    ids: Sequence[int]  # prompt and output so far; read it, don't keep or change it
    num_tokens: int  # at least 1: the most ids to propose
    sampler: Sampler  # how the target will choose; its ``guess`` is for drafters with logits
    # Told the probability that the drafter gives the id it has just drafted: whether to go on.
    go_on: Callable[[float], bool] | None = None
    policy: FixedLength | None = None  # what asks for so many; a composite chooses by it
    num_ids: int = sys.maxsize  # the target's ids are below it


class Draft(NamedTuple):
    """A drafter's answer to a request."""

    token_ids: Sequence[int]  # 0 to num_tokens ids
    forward_ct: int = 0  # draft-model forwards that it took
    reason: str | None = None  # why fewer were proposed than could be, for the statistics
    replayed_ct: int = 0  # ids that were read again, by a model that can't go back otherwise
    by: str | None = None  # whose draft it is, where several drafters work together


@runtime_checkable
class Drafter(Protocol):
    """Proposes ids for sequences that the target decodes.

    Nothing that a drafter does can change the output, unless the papers' rules are asked for; a
    good one makes it come sooner. The decoder opens each sequence, then alternates ``propose`` and
    ``commit``, and closes it, also after an exception. Inherit for the defaults: a drafter without
    memory is ``propose`` alone.
    """

    def open(self, prompt_ids: Sequence[int]) -> Any:
        """Start a sequence, without work; returns the state that its requests will carry."""
        return None

    def lag(self, state: Any, ids: Sequence[int]) -> int:
        """How many ids it would have to read before it could draft as usual."""
        return 0

    def catch_up(self, state: Any, ids: Sequence[int]) -> None:
        """Read them; called where they are many."""
        return

    def known_part(self, state: Any, ids: Sequence[int]) -> Sequence[int]:
        """The beginning of ``ids`` that it can draft behind without reading; all if there is none.

        A trial may ask for drafts behind that, only to see how long they take.
        """
        return ids

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Draft for every request, in order."""
        ...

    def commit(self, state: Any, ids: Sequence[int]) -> None:
        """Hear what stood: ``ids`` is the sequence after the round, or as it was after a trial."""
        return

    def close(self, state: Any) -> None:
        """Give back what the sequence holds."""
        return

    def clear(self) -> None:
        """Forget what was kept of sequences that are closed."""
        return


@dataclass(slots=True)
class _State:
    """The draft model's side of one sequence: its cache is a prefix of ids + draft."""

    cache: Cache
    ids: Sequence[int]  # as of the last commit
    replayed_ct: int  # ids read again that are in the statistics
    reason: str | None = None

    def count_replayed(self) -> int:
        """How many ids were read again since this was asked last."""
        before, self.replayed_ct = self.replayed_ct, num_replayed(self.cache)
        return self.replayed_ct - before


class ModelDrafter(Drafter):
    """Drafts with a smaller model, choosing as the target will, K forwards for K tokens.

    The last proposal of a round is fed only if it stood, as the first of two ids of the next
    round's first forward.

    Args:
        backend: The draft model.
        target_vocab: The target's vocabulary. An id that means something else in the draft is
            never proposed.
        keep_caches: How many caches of closed sequences to keep, for texts that begin alike.

    Raises:
        VocabularyMismatchError: The two models have different tokenizers.

    Warns where a special id means something else in the draft.
    """

    def __init__(
        self, backend: ModelBackend, target_vocab: Vocabulary, *, keep_caches: int = 0
    ) -> None:
        self.backend = backend
        self._kept = KeptCaches(backend, keep_caches)
        self._shared = shared_ids(target_vocab, backend.vocab)
        if odd := odd_special(target_vocab, backend.vocab):
            warnings.warn(f"{odd}. They are never drafted", stacklevel=2)
        self._num_tokens = min(target_vocab.num_tokens, backend.vocab.num_tokens)
        self._foreign = [i for i in range(self._num_tokens) if i not in self._shared]

    @override
    def open(self, prompt_ids: Sequence[int]) -> _State:
        """Find or make a cache; a prompt that the draft can't follow isn't read."""
        reason = self._why_not(len(prompt_ids), prompt_ids)
        cache = self._kept.new_cache() if reason else self._kept.take(prompt_ids)
        return _State(cache, prompt_ids, num_replayed(cache), reason)

    @override
    def lag(self, state: _State, ids: Sequence[int]) -> int:
        """One id is always left for the next draft, and one more where all of the last stood."""
        return 0 if state.reason else max(0, len(ids) - len(state.cache) - 2)

    @override
    def catch_up(self, state: _State, ids: Sequence[int]) -> None:
        """Read all but the last id."""
        unread = ids[len(state.cache) : -1]
        state.reason = state.reason or self._why_not(len(ids), unread)
        if state.reason is None:
            prefill(self._kept.forward, state.cache, unread)

    @override
    def known_part(self, state: _State, ids: Sequence[int]) -> Sequence[int]:
        """What is in the cache, and as much more as every draft reads."""
        return ids[: len(state.cache) + 2]

    @override
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Draft in step: one forward per position over all sequences that still draft."""
        tokens: list[list[int]] = [[] for _ in requests]
        forwards = [0] * len(requests)
        live: list[tuple[int, Cache, Sequence[int], int]] = []
        for index, (state, ids, wanted, *_) in enumerate(requests):
            unread = ids[len(state.cache) :]
            state.reason = state.reason or self._why_not(len(ids), unread)
            if state.reason is None:
                # Every proposal but the last is fed, so n of them fill len(ids) + n - 1 slots.
                room = self.backend.max_context + 1 - len(ids)
                live.append((index, state.cache, unread, min(wanted, room)))
        while live:
            batch = [Span(cache, fed, 1) for _, cache, fed, _ in live]
            rows = self._kept.forward(batch)
            going: list[tuple[int, Cache, Sequence[int], int]] = []
            for (index, cache, _, wanted), row in zip(live, rows, strict=True):
                forwards[index] += 1
                request, draft = requests[index], tokens[index]
                logits = row[:, : self._num_tokens]
                if self._foreign:
                    logits = masked(logits, self._foreign)
                token = request.sampler.guess(logits, request.ids, draft)
                if token is not None and token in self._shared:
                    draft.append(token)
                    if goes_on(request, logits, token) and wanted > 1:
                        going.append((index, cache, [token], wanted - 1))
            live = going
        return [
            Draft(draft, forward_ct, request.state.reason, request.state.count_replayed())
            for draft, forward_ct, request in zip(tokens, forwards, requests, strict=True)
        ]

    @override
    def commit(self, state: _State, ids: Sequence[int]) -> None:
        """Roll back to what stood."""
        if len(state.cache) >= len(ids):
            crop_to(self.backend, state.cache, len(ids) - 1)
        state.ids = ids

    @override
    def close(self, state: _State) -> None:
        """Keep the cache, or give it back where a round was broken off."""
        if len(state.cache) < len(state.ids):
            self._kept.give(state.cache, state.ids)
        else:
            state.cache.close()

    @override
    def clear(self) -> None:
        """Close the caches that are kept."""
        self._kept.clear()

    def _why_not(self, num_ids: int, unread: Sequence[int]) -> str | None:
        """Why the draft can't follow a sequence, if so."""
        limit, size = self.backend.max_context, self.backend.vocab.size
        if num_ids > limit:
            return (
                f"the draft's context of {limit} tokens is full: "
                "a draft with a longer one would keep drafting"
            )
        if unread and max(unread) >= size:
            return f"the text holds id {max(unread)} and the draft knows {size} ids only"
        return None


def goes_on(request: DraftRequest, logits: Logits, token: int) -> bool:
    """Whether to draft on after ``token``, by the draft's row ``(1, width)`` that it is of."""
    return request.go_on is None or request.go_on(probability(logits[0], token))
