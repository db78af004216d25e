"""The loop: draft, verify, commit, roll back."""

import operator
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from time import perf_counter
from typing import Literal, Unpack, get_args

from specdec import calibration
from specdec.backend import ModelBackend, Span
from specdec.drafters import Draft, Drafter, DraftRequest, ModelDrafter, named_draft
from specdec.policy import Costs, FixedLength, MeasuredLength
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
from specdec.strict import StrictChoices
from specdec.vocab import Prompt

__all__ = ["SpeculativeDecoder", "TokenStream"]

CALIBRATION_SECONDS = 0.4
TRIAL_TOKENS = 3  # of a first draft
CALIBRATION_TOKENS = 32  # shorter texts aren't worth it


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
        num_draft_tokens: How many tokens to draft per round; 0 is plain decoding. ``"auto"``: as
            many as bring the most tokens per second, by measured times and what stood lately; also
            none at all.
        max_draft_tokens: The most that ``"auto"`` may choose.
        verification: How sampled drafts are judged. "coupled": they stand where the target's own
            choice is the same, so one seed gives one text whatever drafts. "rejection" and "block":
            the papers' rules (see ``specdec.rejection``); their texts follow the same law, but
            depend on the draft. Greedy decoding is the same for all.
        strict: Where rounding in forwards over several tokens could change a choice, let a forward
            over one token make it, as plain decoding does. For low precision; costs time.
        progress: Called with ``(done, total)`` ids while the target reads a prompt.
        clock: Where times come from, in seconds.

    Attributes:
        costs: What rounds take, as measured so far; ``"auto"`` goes by them.

    Raises:
        VocabularyMismatchError: Target and draft have different tokenizers.
    """

    def __init__(
        self,
        target: ModelBackend,
        draft: ModelBackend | Drafter | str | None = None,
        *,
        num_draft_tokens: int | Literal["auto"] = "auto",
        max_draft_tokens: int = 16,
        verification: Verification = "coupled",
        strict: bool = False,
        progress: OnPrefill | None = None,
        clock: Callable[[], float] = perf_counter,
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
        self.num_draft_tokens: int | Literal["auto"] = "auto"
        if not isinstance(num_draft_tokens, str):
            self.num_draft_tokens = at_least(0, num_draft_tokens=num_draft_tokens)
        elif num_draft_tokens != "auto":
            raise ValueError(f'num_draft_tokens is a number or "auto", not {num_draft_tokens!r}')
        self.max_draft_tokens = at_least(1, max_draft_tokens=max_draft_tokens)
        self.costs = Costs()
        if verification not in get_args(Verification):
            known = ", ".join(get_args(Verification))
            raise ValueError(f"verification must be one of {known}, not {verification!r}")
        self.verification = verification
        if strict and verification != "coupled":
            raise ValueError(
                f'strict=True gives the text of plain decoding, and verification="{verification}" '
                "another one of the same law: leave one of them out"
            )
        most = self.max_draft_tokens if num_draft_tokens == "auto" else int(num_draft_tokens)
        self._strict = StrictChoices(target, most + 1) if strict else None
        self._progress = progress
        self._clock = clock
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
        elif self._limit(request) < 1:
            request.stats.reason = "there was room for fewer than two new tokens"
        elif self._strict is not None and request.sampler.distorts:
            request.stats.reason = (
                "strict decoding can't tell what rounding changes behind filters, penalties and "
                "processors, so it drafts nothing with them"
            )
        if request.stats.reason:
            request.drafter = None
        elif self.num_draft_tokens == "auto":
            request.policy = MeasuredLength(self.costs, self.max_draft_tokens)
        else:
            request.policy = FixedLength(self.num_draft_tokens)
        return request

    def _is_worth_calibrating(self, sequence: Request) -> bool:
        is_long = sequence.output.remaining >= CALIBRATION_TOKENS
        return is_long and isinstance(sequence.policy, MeasuredLength) and not self.costs.known

    def _limit(self, sequence: Request) -> int:
        """The most drafts that a round may check: one token of every round is the target's own."""
        room = self.target.max_context - len(sequence.ids)
        return min(sequence.output.remaining - 1, room)

    def calibrate(
        self,
        prompt: Prompt,
        *,
        seconds: float = calibration.SECONDS,
        widths: Sequence[int] | None = None,
    ) -> Costs:
        """Measure what rounds take; ``"auto"`` does it by itself in a decoder's first call.

        Args:
            prompt: What to measure on.
            seconds: The most to spend on target forwards, the first ones aside.
            widths: Numbers of tokens of a forward to measure. None: some that tell most.

        Returns:
            ``costs``, with the samples entered.

        Raises as ``generate`` does.
        """
        for width in widths or ():
            at_least(1, widths=width)
        request = self._request(prompt)
        self._open(request)
        try:
            self._calibrate(request, seconds, widths)
        finally:
            self._close([request])
        return self.costs

    def _calibrate(
        self,
        sequence: Request,
        seconds: float = calibration.SECONDS,
        widths: Sequence[int] | None = None,
    ) -> None:
        """Try two drafts, of which the first may be slow for being the first, and forwards."""
        started = self._clock()
        drafter, count = sequence.drafter, min(TRIAL_TOKENS, self._limit(sequence))
        if drafter is not None and count > 0:
            self._open_draft(sequence, drafter)
            for _ in range(2):
                asked = DraftRequest(sequence.draft_state, sequence.ids, count, sequence.sampler)
                self._ask(drafter, [asked], lag=0)
                drafter.commit(sequence.draft_state, sequence.ids)
        calibration.calibrate(
            self.target,
            self.costs,
            sequence,
            self._clock,
            seconds=seconds,
            widths=widths,
            max_width=self.max_draft_tokens + 1,
        )
        sequence.stats.prefill_seconds += self._clock() - started

    def _rounds(self, sequences: Iterable[Request], max_batch: int) -> Generator[None, None, None]:
        """Decode all sequences, at most ``max_batch`` at a time; yields after every round."""
        waiting = deque(s for s in sequences if s.output.finish_reason is None)
        active: list[Request] = []
        try:
            while waiting or active:
                while waiting and len(active) < max_batch:
                    self._open(waiting[0])
                    active.append(waiting.popleft())
                    if self._is_worth_calibrating(active[-1]):
                        self._calibrate(active[-1])
                self._round(active)
                if finished := [s for s in active if s.output.finish_reason]:
                    active = [s for s in active if s.output.finish_reason is None]
                    self._close(finished)
                yield
        finally:
            self._close(active)

    def _open(self, sequence: Request) -> None:
        """Read the prompt, all but its last id, so that the first round is like every other."""
        started = self._clock()
        if self._strict is not None:
            self._strict.learn(sequence.ids)
        with ExitStack() as undo:
            sequence.cache = self.target.new_cache()
            undo.callback(sequence.cache.close)
            prefill(self.target, sequence.cache, sequence.ids[:-1], self._progress)
            undo.pop_all()
        sequence.lag, sequence.exact = len(sequence.ids), len(sequence.cache)
        sequence.stats.prefill_seconds = self._clock() - started

    def _open_draft(self, sequence: Request, drafter: Drafter) -> None:
        """Let the drafter read the text so far."""
        started = self._clock()
        sequence.draft_state = drafter.open(sequence.ids)
        sequence.is_open, sequence.lag = True, 0
        seconds = self._clock() - started
        self.costs.count_read(seconds, len(sequence.ids))
        sequence.stats.prefill_seconds += seconds

    def _close(self, sequences: Iterable[Request]) -> None:
        with ExitStack() as stack:  # closes all, whichever raises
            for sequence in sequences:
                stack.callback(sequence.cache.close)
                if sequence.drafter is not None and sequence.is_open:
                    stack.callback(sequence.drafter.close, sequence.draft_state)

    def _round(self, active: Sequence[Request]) -> None:
        """Draft, verify, commit, roll back: one target forward for all of ``active``."""
        requests = self._requests(active)
        started = self._clock()
        drafts = self._propose(active, requests)
        drafted = self._clock()

        batch = [
            Span(sequence.cache, [sequence.ids[-1], *draft.token_ids], len(draft.token_ids) + 1)
            for sequence, draft in zip(active, drafts, strict=True)
        ]
        rows = self.target.forward(batch)
        if self._strict is not None:
            drafts, rows = self._strict.decide(active, drafts, rows)
        verdicts = [
            sequence.sampler.verify(draft.token_ids, logits, sequence.ids)
            for sequence, draft, logits in zip(active, drafts, rows, strict=True)
        ]
        verified = self._clock()

        for index, (sequence, draft) in enumerate(zip(active, drafts, strict=True)):
            (tokens, num_correct), logits = verdicts[index], rows[index]
            sequence.lag += index not in requests
            sequence.commit(tokens, num_correct, logits[:, : self._num_tokens])
            sequence.stats.count_round(draft, num_correct)
            sequence.policy.observe(len(draft.token_ids), num_correct)
            full = len(sequence.ids) > self.target.max_context
            if full and sequence.output.finish_reason is None:
                sequence.output.finish("context")
        committed = self._clock()

        for sequence in active:
            if sequence.output.finish_reason is None:
                self.target.crop(sequence.cache, len(sequence.ids) - 1)
                if sequence.drafter is not None and sequence.is_open:
                    sequence.drafter.commit(sequence.draft_state, sequence.ids)
        rolled_back = self._clock()

        self.costs.count_verify(sum(len(span.tokens) for span in batch), verified - drafted)
        self.costs.count_rest(rolled_back - verified)
        for sequence in active:
            sequence.stats.count_seconds(
                draft=(drafted - started) / len(active),
                verify=(verified - drafted) / len(active),
                host=(committed - verified) / len(active),
                rollback=(rolled_back - committed) / len(active),
            )

    def _requests(self, active: Sequence[Request]) -> dict[int, DraftRequest]:
        """What to ask of the drafter, by the number of the sequence."""
        requests = {}
        for index, sequence in enumerate(active):
            limit = max(0, self._limit(sequence))
            wanted = sequence.policy.wanted(limit, sequence.lag, len(active))
            if wanted > 0 and sequence.drafter is not None:
                if not sequence.is_open:
                    self._open_draft(sequence, sequence.drafter)
                # Block verification takes the length of a block as given beforehand.
                go_on = None if self.verification == "block" else sequence.policy.go_on
                requests[index] = DraftRequest(
                    sequence.draft_state, sequence.ids, wanted, sequence.sampler, go_on
                )
        return requests

    def _propose(
        self, active: Sequence[Request], requests: Mapping[int, DraftRequest]
    ) -> list[Draft]:
        """One draft per sequence, empty where none is wanted."""
        drafts = [Draft(())] * len(active)
        if self.drafter is None or not requests:
            return drafts
        lag = sum(active[index].lag for index in requests)
        answers = self._ask(self.drafter, list(requests.values()), lag)
        for index, draft in zip(requests, answers, strict=True):
            drafts[index], active[index].lag = draft, 0
        return drafts

    def _ask(self, drafter: Drafter, requests: Sequence[DraftRequest], lag: int) -> list[Draft]:
        """A drafter's answers, checked and timed; ``lag`` ids are read first."""
        started = self._clock()
        answers = drafter.propose(requests)
        seconds, reading = self._clock() - started, lag * self.costs.read
        if len(answers) != len(requests):
            raise ValueError(
                f"{type(drafter).__name__} gave {len(answers)} drafts for "
                f"{len(requests)} requests: give one each, in order"
            )
        drafts = [
            draft._replace(token_ids=self._checked(draft, request.num_tokens))
            for draft, request in zip(answers, requests, strict=True)
        ]
        if reading < seconds / 2:  # else it tells little of a draft
            longest = max(1, *(len(draft.token_ids) for draft in drafts))
            self.costs.count_draft(seconds - reading, longest, len(requests))
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
