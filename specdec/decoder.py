"""The loop: draft, verify, commit, roll back."""

import operator
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from time import perf_counter
from typing import Unpack, get_args

from specdec.backend import ModelBackend, Span
from specdec.drafters import Draft, Drafter, DraftRequest, ModelDrafter, named_draft
from specdec.prefill import OnPrefill, prefill
from specdec.request import (
    BatchOptions,
    GenerateOptions,
    GenerationResult,
    Request,
    Verification,
    at_least,
    new_request,
)
from specdec.sampling import SamplingParams
from specdec.stopping import TokenEvent
from specdec.vocab import Prompt

__all__ = ["SpeculativeDecoder", "TokenStream"]


class TokenStream(Iterator[TokenEvent]):
    """The tokens of one generation as they come. Closing it early leaves the decoder as new.

    Attributes:
        result: The whole generation, once the last event is out; None before.
    """

    def __init__(self, events: Generator[TokenEvent, None, GenerationResult]) -> None:
        self.result: GenerationResult | None = None
        self._events = events

    def __next__(self) -> TokenEvent:
        try:
            return next(self._events)
        except StopIteration as end:
            self.result = self.result or end.value
            raise

    def collect(self) -> GenerationResult:
        """Decode what is left; the whole generation.

        Raises:
            RuntimeError: The stream was closed early.
        """
        deque(self, maxlen=0)
        if self.result is None:
            raise RuntimeError("the stream was closed before its end: start another one")
        return self.result

    def close(self) -> None:
        """Stop decoding."""
        self._events.close()


class SpeculativeDecoder:
    """Decodes with a target model, sped up by drafts that cannot change what comes out.

    Args:
        target: The model whose output is wanted.
        draft: A smaller model of the same vocabulary (in any runtime; the target itself too), a
            ``Drafter``, or None for plain decoding. ``"self"``: the target's own weights,
            quantised; ``"self:q8_0"`` and so on for more or fewer bits than the backend chooses.
        num_draft_tokens: The most tokens to draft per round; 0 is plain decoding.
        verification: How sampled drafts are judged. "coupled": they stand where the target's own
            choice is the same, so one seed gives one text whatever drafts. "rejection" and "block":
            the papers' rules (see ``specdec.rejection``); their texts follow the same law, but
            depend on the draft. Greedy decoding is the same for all.
        progress: Called with ``(done, total)`` ids while the target reads a prompt.

    Raises:
        VocabularyMismatchError: Target and draft have different tokenizers.
    """

    def __init__(
        self,
        target: ModelBackend,
        draft: ModelBackend | Drafter | str | None = None,
        *,
        num_draft_tokens: int = 5,
        verification: Verification = "coupled",
        progress: OnPrefill | None = None,
    ) -> None:
        if not isinstance(target, ModelBackend):
            raise TypeError(f"target must be a ModelBackend, but {_what_lacks(target)}")
        if isinstance(draft, str):
            draft = named_draft(target, draft)
        if isinstance(draft, ModelBackend):
            draft = ModelDrafter(draft, target.vocab)
        elif draft is not None and (isinstance(draft, type) or not isinstance(draft, Drafter)):
            raise TypeError(
                f'draft must be "self", a backend or a Drafter, but {_what_lacks(draft)}'
            )
        self.target = target
        self.drafter = draft
        self.num_draft_tokens = at_least(0, num_draft_tokens=num_draft_tokens)
        if verification not in get_args(Verification):
            known = ", ".join(get_args(Verification))
            raise ValueError(f"verification must be one of {known}, not {verification!r}")
        self.verification = verification
        self._progress = progress
        self._num_tokens = target.vocab.num_tokens

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerationResult:
        """Continue one prompt.

        Args:
            prompt: Text, ids, or chat messages (``{"role": ..., "content": ...}``).
            **options: See ``GenerateOptions``.

        Raises:
            ValueError: A value is out of range, the prompt is empty or longer than the context.
            TypeError: A value is of the wrong type, or there is no such option.
            BackendError: A runtime failed; the decoder can be used again.
        """
        return self.stream(prompt, **options).collect()

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> TokenStream:
        """Continue one prompt, token by token. Arguments and errors as in ``generate``."""
        request = self._request(prompt, **options)

        def events() -> Generator[TokenEvent, None, GenerationResult]:
            with closing(self._rounds([request], max_batch=1)) as rounds:
                for _ in rounds:
                    yield from request.output.take()
            return request.result()

        return TokenStream(events())

    def generate_batch(
        self,
        prompts: Iterable[Prompt],
        *,
        max_batch: int = 8,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[GenerationResult]:
        """Continue several prompts together; each result is what ``generate`` gives it alone.

        Args:
            prompts: The prompts; results come in their order.
            max_batch: The most sequences in one forward. A waiting one joins when one is done.
            sampling: How to choose tokens: for all prompts, or one for each.
            **options: See ``BatchOptions``.

        Raises as ``generate`` does.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts is one text: give a list of prompts, or call generate")
        at_least(1, max_batch=max_batch)
        prompts = list(prompts)
        each = sampling if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(
                f"sampling has {len(each)} entries for {len(prompts)} prompts: give one or one each"
            )
        requests = [
            self._request(prompt, sampling=params, **options)
            for prompt, params in zip(prompts, each, strict=True)
        ]
        deque(self._rounds(requests, max_batch), maxlen=0)
        return [request.result() for request in requests]

    def _request(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Request:
        target = self.target
        request = new_request(
            target.vocab, target.max_context, self.verification, prompt, **options
        )
        request.drafter = self.drafter
        if self.drafter is None:
            request.stats.reason = "no draft was given"
        elif self.num_draft_tokens == 0:
            request.stats.reason = "num_draft_tokens is 0"
        elif self._num_wanted(request) < 1:
            request.stats.reason = "there was room for fewer than two new tokens"
        if request.stats.reason:
            request.drafter = None
        return request

    def _num_wanted(self, sequence: Request) -> int:
        """The most drafts that a round may check: one token of every round is the target's own."""
        room = self.target.max_context - len(sequence.ids)
        return min(self.num_draft_tokens, sequence.output.remaining - 1, room)

    def _rounds(self, sequences: Iterable[Request], max_batch: int) -> Generator[None, None, None]:
        """Decode all sequences, at most ``max_batch`` at a time; yields after every round."""
        waiting = deque(s for s in sequences if s.output.finish_reason is None)
        active: list[Request] = []
        try:
            while waiting or active:
                while waiting and len(active) < max_batch:
                    self._open(waiting[0])
                    active.append(waiting.popleft())
                self._round(active)
                if finished := [s for s in active if s.output.finish_reason]:
                    active = [s for s in active if s.output.finish_reason is None]
                    self._close(finished)
                yield
        finally:
            self._close(active)

    def _open(self, sequence: Request) -> None:
        """Read the prompt, all but its last id, so that the first round is like every other."""
        started = perf_counter()
        sequence.cache = self.target.new_cache()
        try:
            prefill(self.target, sequence.cache, sequence.ids[:-1], self._progress)
            if sequence.drafter is not None:
                sequence.draft_state = sequence.drafter.open(sequence.ids)
        except BaseException:
            sequence.cache.close()
            raise
        sequence.stats.prefill_seconds = perf_counter() - started

    def _close(self, sequences: Iterable[Request]) -> None:
        with ExitStack() as stack:  # closes all, whichever raises
            for sequence in sequences:
                stack.callback(sequence.cache.close)
                if sequence.drafter is not None:
                    stack.callback(sequence.drafter.close, sequence.draft_state)

    def _round(self, active: Sequence[Request]) -> None:
        """Draft, verify, commit, roll back: one target forward for all of ``active``."""
        started = perf_counter()
        drafts = self._propose(active)
        drafted = perf_counter()

        batch = [
            Span(sequence.cache, [sequence.ids[-1], *draft.token_ids], len(draft.token_ids) + 1)
            for sequence, draft in zip(active, drafts, strict=True)
        ]
        rows = self.target.forward(batch)
        verdicts = [
            sequence.sampler.verify(draft.token_ids, logits, sequence.ids)
            for sequence, draft, logits in zip(active, drafts, rows, strict=True)
        ]
        verified = perf_counter()

        for sequence, draft, verdict, logits in zip(active, drafts, verdicts, rows, strict=True):
            tokens, num_correct = verdict
            sequence.commit(tokens, num_correct, logits[:, : self._num_tokens])
            sequence.stats.count_round(draft, num_correct)
            full = len(sequence.ids) > self.target.max_context
            if full and sequence.output.finish_reason is None:
                sequence.output.finish("context")
        committed = perf_counter()

        for sequence in active:
            if sequence.output.finish_reason is None:
                self.target.crop(sequence.cache, len(sequence.ids) - 1)
                if sequence.drafter is not None:
                    sequence.drafter.commit(sequence.draft_state, sequence.ids)
        rolled_back = perf_counter()

        for sequence in active:
            sequence.stats.count_seconds(
                draft=(drafted - started) / len(active),
                verify=(verified - drafted) / len(active),
                host=(committed - verified) / len(active),
                rollback=(rolled_back - committed) / len(active),
            )

    def _propose(self, active: Sequence[Request]) -> list[Draft]:
        """One draft per sequence, empty where none is wanted."""
        drafts = [Draft(())] * len(active)
        requests: dict[int, DraftRequest] = {}
        for index, sequence in enumerate(active):
            wanted = self._num_wanted(sequence)
            if sequence.drafter is not None and wanted > 0:
                requests[index] = DraftRequest(
                    sequence.draft_state, sequence.ids, wanted, sequence.sampler
                )
        if self.drafter is not None and requests:
            answers = self.drafter.propose(list(requests.values()))
            if len(answers) != len(requests):
                raise ValueError(
                    f"{type(self.drafter).__name__} gave {len(answers)} drafts for "
                    f"{len(requests)} requests: give one each, in order"
                )
            for (index, request), draft in zip(requests.items(), answers, strict=True):
                token_ids = self._checked(draft, request.num_tokens)
                drafts[index] = Draft(token_ids, draft.forward_ct, draft.reason)
        return drafts

    def _checked(self, draft: Draft, limit: int) -> list[int]:
        name, size = type(self.drafter).__name__, self.target.vocab.size
        token_ids = list(map(operator.index, draft.token_ids))
        if len(token_ids) > limit:
            raise ValueError(
                f"{name} proposed {len(token_ids)} tokens where at most {limit} were asked for"
            )
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < size:
            raise ValueError(f"{name} proposed {token_ids}, but ids are 0 to {size - 1}")
        return token_ids


def _what_lacks(thing: object) -> str:
    """Which members of a backend an object doesn't have, for a message."""
    members = ("vocab", "max_context", "new_cache", "forward", "crop", "info")
    lacking = [member for member in members if not hasattr(thing, member)]
    return f"{type(thing).__name__} has no {', '.join(lacking)}"
