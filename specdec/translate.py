"""Drafts by a model of another tokenizer: its view of the text, and its words in the target's ids.

Text travels here, in bytes. What the draft reads spells exactly what the target's ids spell, so far
as both tables allow; what it says is told in tokens that both have (token-level intersection, Timor
et al. 2025, arXiv 2502.05202), or through text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device
from typing_extensions import override

from specdec.backend import Cache, Logits, ModelBackend, Span, crop_to, num_replayed
from specdec.drafters import Draft, Drafter, DraftRequest, ModelDrafter, goes_on
from specdec.errors import VocabularyMismatchError
from specdec.prefill import prefill
from specdec.reuse import KeptCaches, common_prefix
from specdec.spelling import Speller, common_tokens
from specdec.verify import masked, on_host, pick
from specdec.vocab import Vocabulary

__all__ = ["TranslatingDrafter", "model_drafter"]

USEFUL = 0.5  # of the target's tokens must be such as the draft can spell
MOSTLY = 0.8  # of a text's tokens in both tables: then the draft speaks in those alone
TAIL = 32  # bytes at the end of a text that may be cut into tokens anew
UNSPELLED = 64  # bytes that the draft may owe before it is given up


def model_drafter(
    backend: ModelBackend, target_vocab: Vocabulary, *, keep_caches: int = 0
) -> Drafter:
    """The drafter for a model: ``ModelDrafter``, or ``TranslatingDrafter`` for another tokenizer.

    Raises:
        VocabularyMismatchError: The two vocabularies have too little in common even for that.
    """
    try:
        return ModelDrafter(backend, target_vocab, keep_caches=keep_caches)
    except VocabularyMismatchError as error:
        try:
            return TranslatingDrafter(backend, target_vocab, keep_caches=keep_caches)
        except VocabularyMismatchError as worse:
            raise worse from error


class _Tables:
    """What is known of a pair."""

    def __init__(self, target: Vocabulary, draft: Vocabulary) -> None:
        self.ours, self.theirs = Speller(target), Speller(draft)
        self.to_draft = common_tokens(self.ours, self.theirs)
        self.drafted = frozenset(self.to_draft.values())


class _Text:
    """A text of the target in the draft's tokens.

    Attributes:
        tokens: As much of it as the draft can spell.
        settled: So many of the tokens stay as they are.
        owed: Bytes at the end that they don't spell.
        num_plain: Ids of the target that it was made of, special ones aside.
        lost: Bytes that the draft can't spell and the text went on from.
    """

    def __init__(self, tables: _Tables, start: Sequence[int]) -> None:
        self.tokens = [*start]
        self.settled = len(start)
        self.owed = self.num_plain = self._num_common = 0
        self._num_own_common = 0  # of the settled ones
        self.lost = b""
        self._tables = tables
        self._num_read = 0
        self._tail = b""  # what the tokens behind the settled ones spell, and what is owed

    @property
    def is_shared(self) -> bool:
        """Whether most of either model's tokens for this text are in both tables."""
        own = self._num_own_common + self._count_common(self.tokens[self.settled :])
        return self._num_common >= MOSTLY * self.num_plain and own >= MOSTLY * len(self.tokens)

    def follow(self, ids: Sequence[int]) -> None:
        """Read what is new in the target's ids."""
        ours, to_draft = self._tables.ours, self._tables.to_draft
        new: list[bytes] = []
        for token in ids[self._num_read :]:
            if token not in ours.steering:
                new.append(ours.spell(token))
                self.num_plain += 1
                self._num_common += token in to_draft
                continue
            self._add(b"".join(new))
            self._end(to_draft.get(token))
            new = []
        self._num_read = max(self._num_read, len(ids))  # it may be asked for a part again
        self._add(b"".join(new))
        if self.owed > UNSPELLED:
            self._lose()

    def _add(self, new: bytes) -> None:
        """Cut the tail into tokens, and settle those that are far from its end."""
        if not new:
            return
        self._tail += new
        tokens, spelled = self._tables.theirs.split(self._tail)
        self.tokens[self.settled :] = tokens
        self.owed = len(self._tail) - spelled
        if len(self._tail) <= 4 * TAIL:
            return
        count = place = at = 0
        for number, token in enumerate(tokens, 1):
            at += len(self._tables.theirs.spell(token))
            if at > len(self._tail) - TAIL:
                break
            is_word = self._tail[at : at + 1] == b" " != self._tail[at - 1 : at]
            is_whole = self._tail[at] & 0xC0 != 0x80  # not inside a character
            if is_word or (is_whole and at - place > 8 * TAIL):
                count, place = number, at
        self._settle(self.settled + count)
        self._tail = self._tail[place:]

    def _end(self, token: int | None) -> None:
        """A special id ends the tail; its counterpart follows, if there is one."""
        if self.owed:
            self._lose()
        if token is not None and self.tokens != [token]:  # one BOS is enough
            self.tokens.append(token)
        self._settle(len(self.tokens))
        self._tail, self.owed = b"", 0

    def _settle(self, count: int) -> None:
        self._num_own_common += self._count_common(self.tokens[self.settled : count])
        self.settled = count

    def _count_common(self, tokens: Sequence[int]) -> int:
        return sum(token in self._tables.drafted for token in tokens)

    def _lose(self) -> None:
        self.lost = self.lost or self._tail[-self.owed :][:8]


@dataclass(slots=True)
class _State:
    """The draft's side of one sequence."""

    text: _Text
    cache: Cache
    held: list[int]  # what the cache holds
    reason: str | None = None


@dataclass(slots=True)
class _Run:
    """One request in a round."""

    state: _State
    request: DraftRequest
    fed: list[int]  # goes into the next forward
    left: int  # forwards that may still be made
    through_text: bool
    replayed: int
    draft: list[int] = field(default_factory=list)  # in the target's ids
    own: list[int] = field(default_factory=list)  # in the draft's, where it speaks through text
    ended: int | None = None  # the target's EOS, where the draft ended the text
    forward_ct: int = 0


class TranslatingDrafter(Drafter):
    """Drafts with a model of another tokenizer; the output depends on it as little as on any.

    The text so far is cut anew into the draft's tokens, as its own tokenizer does it where that is
    known to spell the same. Only the end is cut again as the text grows, and the cache keeps what
    stayed. Where no tokens of the draft spell the end exactly, inside a character say, it waits for
    the next round.

    If four fifths of the tokens that either model has for a text are in both tables, the draft's
    rows are narrowed down to those and put into the target's order, so that it guesses with the
    target's noise. Else it writes its own best tokens, and their text is cut into the target's; a
    last one that could have gone on is left out.

    Args:
        backend: The draft model.
        target_vocab: The target's vocabulary.
        keep_caches: How many caches of closed sequences to keep, for texts that begin alike.

    Raises:
        VocabularyMismatchError: The draft can spell fewer than half of the target's tokens.
    """

    def __init__(
        self, backend: ModelBackend, target_vocab: Vocabulary, *, keep_caches: int = 0
    ) -> None:
        self.backend = backend
        self._kept = KeptCaches(backend, keep_caches)
        self._tables = _Tables(target_vocab, backend.vocab)
        _check(self._tables.ours, self._tables.theirs)
        self._start = self._tables.theirs.start()
        pairs = self._tables.to_draft
        ends = sorted(target_vocab.eos_ids, reverse=True)
        own = {pairs[token]: token for token in ends if token in pairs}
        self._eos = {token: own.get(token, ends[-1]) for token in backend.vocab.eos_ids if ends}
        count = target_vocab.num_tokens
        order = np.array([pairs.get(token, -1) for token in range(count)])
        # Which column of the draft's row each target id takes, and which of these are nobody's.
        self._order = np.maximum(order, 0), np.flatnonzero(order < 0)
        self._orders: dict[object, tuple[Any, Any]] = {}  # by device

    @override
    def open(self, prompt_ids: Sequence[int]) -> _State:
        """Cut the prompt into the draft's tokens, and find or make a cache."""
        text = _Text(self._tables, self._start)
        text.follow(prompt_ids)
        reason = self._why_not(text)
        cache = self._kept.new_cache() if reason else self._kept.take(text.tokens)
        return _State(text, cache, text.tokens[: len(cache)], reason=reason)

    @override
    def lag(self, state: _State, ids: Sequence[int]) -> int:
        """In the draft's tokens; a few at the end may be cut anew in every round."""
        return 0 if state.reason else max(0, len(state.text.tokens) - len(state.held) - 2)

    @override
    def catch_up(self, state: _State, ids: Sequence[int]) -> None:
        """Read all but the last token."""
        self._follow(state, ids)
        if state.reason is None:
            tokens = state.text.tokens
            try:
                prefill(self._kept.forward, state.cache, tokens[len(state.held) : -1])
            finally:
                state.held = tokens[: len(state.cache)]

    @override
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Draft in step: one forward per position over all sequences that still draft."""
        runs = [self._run(request) for request in requests]
        live = [run for run in runs if run.left > 0]
        while live:
            rows = self._kept.forward([Span(run.state.cache, run.fed, 1) for run in live])
            for run in live:
                run.state.held += run.fed
                run.forward_ct += 1
                run.left -= 1
            spoken = [self._speak(run, row) for run, row in zip(live, rows, strict=True)]
            live = [run for run, on in zip(live, spoken, strict=True) if on and run.left > 0]
        return [self._draft(run) for run in runs]

    @override
    def commit(self, state: _State, ids: Sequence[int]) -> None:
        """Roll back to what stood, in the draft's tokens."""
        self._follow(state, ids)

    @override
    def close(self, state: _State) -> None:
        """Keep the cache, or give it back where a round was broken off."""
        if len(state.cache) == len(state.held):
            self._kept.give(state.cache, state.held)
        else:
            state.cache.close()

    @override
    def clear(self) -> None:
        """Close the caches that are kept."""
        self._kept.clear()

    def _follow(self, state: _State, ids: Sequence[int]) -> None:
        """Read what is new in the target's text, and cut the cache back to what stayed."""
        text, held = state.text, state.held
        if state.reason is None:
            kept = min(len(held), text.settled)  # those stand in both
            text.follow(ids)
            state.reason = self._why_not(text)
            kept += common_prefix(held[kept:], text.tokens[kept:])
            kept = max(0, min(kept, len(text.tokens) - 1))
            if kept < len(held):
                crop_to(self.backend, state.cache, kept)
                del held[kept:]

    def _why_not(self, text: _Text) -> str | None:
        """Why the draft can't follow a text, if so."""
        limit = self.backend.max_context
        if text.lost:
            return f"the text holds {text.lost!r}, which no tokens of the draft spell"
        if len(text.tokens) > limit:
            return (
                f"the draft's context of {limit} tokens is full: "
                "a draft with a longer one would keep drafting"
            )
        return None

    def _run(self, request: DraftRequest) -> _Run:
        state: _State = request.state
        before = num_replayed(state.cache)
        self._follow(state, request.ids)
        text, steps = state.text, request.num_tokens
        through_text = not text.is_shared
        if through_text:  # so many as usually make the target's, and the one that is left out
            steps = math.ceil((steps + 1) * len(text.tokens) / max(1, text.num_plain))
        if state.reason or text.owed or not text.tokens:
            steps = 0
        # Every token but the last is fed.
        room = self.backend.max_context + 1 - len(text.tokens)
        unread = text.tokens[len(state.held) :]
        return _Run(state, request, unread, min(steps, room), through_text, before)

    def _speak(self, run: _Run, row: Logits) -> bool:
        """Take the next token from a row ``(1, width)``; whether to go on."""
        request, tables = run.request, self._tables
        if not run.through_text:
            row = self._translated(row)
            guess = request.sampler.guess(row, request.ids, run.draft)
            if guess is None:
                return False
            run.draft.append(guess)
            if guess not in tables.to_draft:  # a processor wanted it, and the draft can't go on
                return False
            run.fed = [tables.to_draft[guess]]
            return goes_on(request, row, guess)
        vocab = self.backend.vocab
        row = on_host(row)[:, : vocab.num_tokens]
        (token,), (score,) = pick(masked(row, vocab.holes) if vocab.holes else row)
        run.ended = self._eos.get(token)
        if token in tables.theirs.steering or not score > -math.inf:
            return False
        run.own.append(token)
        run.fed = [token]
        return True

    def _translated(self, row: Logits) -> Logits:
        """The draft's row in the target's order, -inf for ids that the draft lacks."""
        row = on_host(row)
        xp, place = array_namespace(row), device(row)
        if place not in self._orders:
            order, lacking = (xp.asarray(each, device=place) for each in self._order)
            self._orders[place] = order, lacking
        order, lacking = self._orders[place]
        row = xp.take(row, order, axis=1)
        row[:, lacking] = -math.inf
        return row

    def _draft(self, run: _Run) -> Draft:
        tokens, request, ours = run.draft, run.request, self._tables.ours
        if run.through_text:
            tokens, _ = ours.split(b"".join(map(self._tables.theirs.spell, run.own)))
            if run.ended is not None:
                tokens.append(run.ended)
            elif tokens and ours.may_grow(tokens[-1]):
                tokens.pop()
        replayed = num_replayed(run.state.cache) - run.replayed
        return Draft(tokens[: request.num_tokens], run.forward_ct, run.state.reason, replayed)


def _check(ours: Speller, theirs: Speller) -> None:
    target, draft = ours.vocab, theirs.vocab
    plain = [text for i, text in enumerate(target.tokens) if text and i not in ours.steering]
    spelled = len(plain)
    if not all(bytes([byte]) in theirs.ids for byte in range(256)):
        spelled = sum(theirs.fewest(text)[1] == len(text) for text in plain)
    if spelled < USEFUL * len(plain) or not plain:
        known = sum(text in theirs.ids for text in plain)
        both = enumerate(zip(target.tokens, draft.tokens, strict=False))
        first = next((i for i, (one, other) in both if one != other), 0)
        raise VocabularyMismatchError(
            "target and draft have different tokenizers and too little in common: of the target's "
            f"{len(plain)} tokens the draft has {known} and can spell {spelled}, and {USEFUL:.0%} "
            f"are needed (tables of {target.num_tokens} and {draft.num_tokens} tokens; id {first} "
            f"is {target.tokens[first]!r} in the target and {draft.tokens[first]!r} in the draft). "
            "Take a draft of the target's own family, or one for the same languages"
        )
