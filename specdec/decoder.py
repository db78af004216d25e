"""The loop: draft, verify, commit, roll back."""

import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Literal, Unpack, get_args

from specdec import calibration
from specdec.backend import ModelBackend, Span, crop_to, num_replayed
from specdec.composite import CompositeDrafter, Source
from specdec.costs import Costs
from specdec.drafters import Draft, Drafter
from specdec.errors import BackendError
from specdec.named import drafter_for, what_lacks
from specdec.policy import FixedLength, MeasuredLength
from specdec.prefill import OnPrefill
from specdec.proposer import Proposer
from specdec.reading import PromptReader
from specdec.request import (
    BatchItem,
    BatchOptions,
    GenerateOptions,
    GenerationResult,
    Request,
    Verification,
    as_items,
    at_least,
    failed_request,
    new_request,
)
from specdec.reuse import KeptCaches
from specdec.sampling import SamplingParams
from specdec.stopping import TokenEvent
from specdec.stream import TokenStream
from specdec.strict import StrictChoices
from specdec.turns import Turns
from specdec.vocab import Prompt

__all__ = ["SpeculativeDecoder"]

CALIBRATION_TOKENS = 32  # shorter texts aren't worth it


class SpeculativeDecoder:
    """Decodes with a target model, sped up by drafts that cannot change what comes out.

    Calls from several threads take turns, round by round. The caches of the latest texts are kept,
    so that a text that goes on from one of them, as the next turn of a chat does, costs only what
    is new in it.

    Args:
        target: The model whose output is wanted.
        draft: A smaller model, best of the same vocabulary (in any runtime; the target itself
            too), a ``Drafter``, or None for plain decoding. ``"self"``: the target's own weights,
            quantised; ``"self:q8_0"`` and so on for more or fewer bits than the backend chooses.
            ``"lookup"`` and ``"suffix"``: by the text itself. A list: each where it promises most
            (see ``CompositeDrafter``), the cheap ones first.
        num_draft_tokens: How many tokens to draft per round; 0 is plain decoding. ``"auto"``: as
            many as bring the most tokens per second, by measured times and what stood lately; also
            none at all.
        max_draft_tokens: The most that ``"auto"`` may choose.
        verification: How sampled drafts are judged. "coupled": they stand where the target's own
            choice is the same, so one seed gives one text whatever drafts. "rejection" and "block":
            the papers' rules (see ``specdec.rejection``); their texts follow the same law, but
            depend on the draft. Greedy decoding is the same for all.
        strict: Where rounding in forwards over several tokens could change a choice, let a forward
            over one token make it, as plain decoding does. For low precision; costs time. Batches
            are decoded one by one, since neighbours change the rounding too.
        keep_caches: Of how many of the latest texts to keep the caches, in each model. One serves
            one conversation; 0 starts every text afresh, also in how it rounds, as ``strict`` does.
        progress: Called with ``(done, total)`` ids while the target reads a prompt.
        clock: Where times come from, in seconds.

    Attributes:
        costs: What rounds take, as measured so far; ``"auto"`` goes by them.

    Raises:
        VocabularyMismatchError: The draft's vocabulary has too little in common with the target's.
    """

    def __init__(
        self,
        target: ModelBackend,
        draft: ModelBackend | Drafter | str | Sequence[ModelBackend | Drafter | str] | None = None,
        *,
        num_draft_tokens: int | Literal["auto"] = "auto",
        max_draft_tokens: int = 16,
        verification: Verification = "coupled",
        strict: bool = False,
        keep_caches: int = 1,
        progress: OnPrefill | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        if not isinstance(target, ModelBackend):
            raise TypeError(f"target must be a ModelBackend, but {what_lacks(target)}")
        at_least(0, keep_caches=keep_caches)
        drafter: Drafter | None = None
        if draft is not None:
            drafter = drafter_for(target, draft, keep_caches=keep_caches)
        self.target = target
        self.drafter = drafter
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
        self._most = most
        self._strict = StrictChoices(target, most + 1) if strict else None
        self._kept = KeptCaches(target, 0 if strict else keep_caches)
        self._sources: Sequence[Source] = ()
        if isinstance(drafter, CompositeDrafter):
            self._sources = drafter.sources(self.costs, clock)
        self._proposer: Proposer | None = None
        if drafter is not None:
            self._proposer = Proposer(
                drafter,
                target.vocab.size,
                self.costs,
                clock,
                may_stop=verification != "block",
                may_choose=verification == "coupled",
            )
        self._reader = PromptReader(
            self._kept.forward, self._proposer, clock, progress, alone=strict
        )
        self._clock = clock
        self._turns = Turns()
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
            request.raise_error()
            return request.result()

        return TokenStream(events())

    def generate_batch(
        self,
        prompts: Iterable[Prompt | BatchItem],
        *,
        max_batch: int = 8,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[GenerationResult]:
        """Continue several prompts together; each result is what ``generate`` gives it alone.

        One whose processor raises, or whose rows hold a NaN, ends with that error in its result;
        the others go on.

        Args:
            prompts: The prompts, or ``BatchItem`` for one with options of its own; results come in
                their order.
            max_batch: The most sequences in one forward. A waiting one joins when one is done.
            sampling: How to choose tokens: for all prompts, or one for each.
            **options: See ``BatchOptions``.

        Raises as ``generate`` does: for a bad prompt or option before any work.
        """
        at_least(1, max_batch=max_batch)
        items = list(as_items(prompts))
        each = sampling if isinstance(sampling, Sequence) else [sampling] * len(items)
        if len(each) != len(items):
            raise ValueError(
                f"sampling has {len(each)} entries for {len(items)} prompts: give one or one each"
            )
        requests = [
            self._request(item.prompt, **item.over(sampling=params, **options))
            for item, params in zip(items, each, strict=True)
        ]
        deque(self._rounds(requests, max_batch), maxlen=0)
        return [request.result() for request in requests]

    def as_completed(
        self,
        prompts: Iterable[Prompt | BatchItem],
        *,
        max_batch: int = 8,
        **options: Unpack[GenerateOptions],
    ) -> Generator[tuple[int, GenerationResult], None, None]:
        """Continue prompts together, however many, and yield each result when it is done.

        Prompts are taken from ``prompts`` as there is room for them; the others wait meanwhile, and
        what it raises ends them all. One that can't be decoded is a result too, with
        ``finish_reason="error"`` and the ``error``; the others go on.

        Args:
            prompts: The prompts, or ``BatchItem`` for one with options of its own.
            max_batch: The most sequences in one forward. A waiting one joins when one is done.
            **options: See ``GenerateOptions``.

        Yields:
            The number of the prompt, from 0 on, and its result.

        Raises:
            ValueError, TypeError: One of the arguments is wrong; at once.
            BackendError: A runtime failed; the decoder can be used again.
        """
        at_least(1, max_batch=max_batch)
        items = as_items(prompts)
        self._request([0], **options)  # is wrong, if at all, before any work
        numbers: dict[Request, int] = {}

        def requests() -> Iterator[Request]:
            for number, item in enumerate(items):
                try:
                    request = self._request(item.prompt, **item.over(**options))
                except Exception as error:
                    request = failed_request(self.target.vocab, error)
                numbers[request] = number
                yield request

        def results() -> Generator[tuple[int, GenerationResult], None, None]:
            with closing(self._rounds(requests(), max_batch)) as rounds:
                for finished in rounds:
                    for request in finished:
                        yield numbers.pop(request), request.result()

        return results()

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
        elif isinstance(self.drafter, CompositeDrafter):
            fixed = self.num_draft_tokens != "auto"
            request.policy = self.drafter.new_policy(
                self.costs, self._sources, self._most, fixed=fixed
            )
        elif self.num_draft_tokens == "auto":
            request.policy = MeasuredLength(self.costs, self.max_draft_tokens)
        else:
            request.policy = FixedLength(self.num_draft_tokens)
        return request

    def _is_worth_calibrating(self, sequence: Request) -> bool:
        is_long = sequence.output.remaining >= CALIBRATION_TOKENS
        is_measured = sequence.drafter is not None and self.num_draft_tokens == "auto"
        return is_long and is_measured and not self.costs.known

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
        with self._turns.take():
            try:
                self._open(request)
                while not request.ready:
                    self._read([request])
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
        started = self._clock()
        if self._proposer is not None and sequence.drafter is not None:
            self._proposer.try_out(sequence, self._limit(sequence))
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

    def _rounds(
        self, sequences: Iterable[Request], max_batch: int
    ) -> Generator[list[Request], None, None]:
        """Decode all sequences, at most ``max_batch`` at a time; yields those that are done.

        Prompts are read in chunks, between the rounds of those that have been read.
        """
        if self._strict is not None:
            max_batch = 1  # neighbours move the rounding, of llama.cpp's memory for one
        waiting = iter(sequences)
        active: list[Request] = []
        try:
            while joining := [*active, *islice(waiting, max_batch - len(active))]:
                with self._turns.take():
                    for sequence in joining[len(active) :]:
                        if sequence.output.finish_reason is None:
                            active.append(sequence)
                            self._open(sequence)
                    for sequence in self._read(active):
                        if self._is_worth_calibrating(sequence):
                            self._calibrate(sequence)
                    if decoding := [s for s in active if s.ready]:
                        self._round(decoding, may_read=len(decoding) == len(active))
                    self._keep([s for s in active if s.output.finish_reason])
                    active = [s for s in active if s.output.finish_reason is None]
                yield [s for s in joining if s.output.finish_reason]
        except GeneratorExit:  # between rounds, so the caches are as they should be
            left, active = active, []
            self._turns.put_off(partial(self._keep_left, sequence) for sequence in left)
            raise
        finally:
            self._close(active)

    def _open(self, sequence: Request) -> None:
        """Find or make the caches."""
        started = self._clock()
        if self._strict is not None:
            self._strict.learn(sequence.ids)
        sequence.cache = self._kept.take(sequence.ids)
        sequence.opened.callback(sequence.cache.close)
        sequence.stats.cached_tokens = len(sequence.cache)
        if sequence.drafter is not None:
            sequence.draft_state = sequence.drafter.open(sequence.ids)
            sequence.opened.callback(sequence.drafter.close, sequence.draft_state)
        sequence.stats.prefill_seconds = self._clock() - started

    def _read(self, active: Sequence[Request]) -> list[Request]:
        """Read on in prompts; those that have become ready for rounds."""
        ready = self._reader.read(active, [self._limit(sequence) for sequence in active])
        for sequence in ready:
            sequence.exact = len(sequence.cache)
        return ready

    def _keep_left(self, sequence: Request) -> None:
        """Keep the caches of a stream that was closed early.

        That may be in another call's turn, and a fault isn't that call's.
        """
        try:
            self._keep([sequence])
        except BackendError as error:
            warnings.warn(
                f"what a closed stream has left could not be kept: {error}; a text that goes on "
                "from it is read anew",
                RuntimeWarning,
                stacklevel=2,
            )

    def _keep(self, sequences: Sequence[Request]) -> None:
        with ExitStack() as stack:  # closes all, whichever raises
            for sequence in reversed(sequences):
                if sequence.error is not None:  # it may be in the cache too, as a NaN is
                    stack.callback(sequence.opened.close)
                    continue
                sequence.opened.pop_all()
                stack.callback(self._kept.give, sequence.cache, sequence.ids)
                if sequence.drafter is not None:
                    stack.callback(sequence.drafter.close, sequence.draft_state)

    def _close(self, sequences: Sequence[Request]) -> None:
        if not sequences:  # as after a stream that the garbage collector ended
            return
        with self._turns.take(), ExitStack() as stack:
            for sequence in sequences:
                stack.callback(sequence.opened.close)

    def clear(self) -> None:
        """Give back the caches that are kept of earlier texts."""
        with self._turns.take():
            self._kept.clear()
            if self.drafter is not None:
                self.drafter.clear()

    def _round(self, active: Sequence[Request], *, may_read: bool) -> None:
        """Draft, verify, commit, roll back: one target forward for all of ``active``.

        ``may_read``: whether the drafter may read what it lags far behind.
        """
        limits = [max(0, self._limit(sequence)) for sequence in active]
        requests = {}
        if self._proposer is not None:
            self._proposer.time_again(active, limits)
            requests = self._proposer.requests(active, limits, may_read=may_read)
        started = self._clock()
        drafts = [Draft(())] * len(active)
        if self._proposer is not None and requests:
            drafts = self._proposer.propose(active, requests)
        drafted = self._clock()

        batch = [
            Span(sequence.cache, [sequence.ids[-1], *draft.token_ids], len(draft.token_ids) + 1)
            for sequence, draft in zip(active, drafts, strict=True)
        ]
        replayed = [num_replayed(sequence.cache) for sequence in active]
        rows = self._kept.forward(batch)
        if self._strict is not None:
            drafts, rows = self._strict.decide(active, drafts, rows)
        verdicts = [
            sequence.judge(draft.token_ids, logits)
            for sequence, draft, logits in zip(active, drafts, rows, strict=True)
        ]
        verified = self._clock()

        for index, (sequence, draft) in enumerate(zip(active, drafts, strict=True)):
            (tokens, num_correct), logits = verdicts[index], rows[index]
            sequence.commit(tokens, num_correct, logits[:, : self._num_tokens])
            sequence.stats.count_round(draft, num_correct)
            sequence.stats.replayed_ct += num_replayed(sequence.cache) - replayed[index]
            sequence.policy.observe(len(draft.token_ids), num_correct)
            full = len(sequence.ids) > self.target.max_context
            if full and sequence.output.finish_reason is None:
                sequence.output.finish("context")
        committed = self._clock()

        for sequence in active:
            crop_to(self.target, sequence.cache, len(sequence.ids) - 1)
            if sequence.drafter is not None:
                sequence.drafter.commit(sequence.draft_state, sequence.ids)
        rolled_back = self._clock()

        self.costs.count_verify(sum(len(span.tokens) for span in batch), verified - drafted)
        self.costs.count_rest(rolled_back - verified, drafting=bool(requests))
        for sequence in active:
            sequence.stats.count_seconds(
                draft=(drafted - started) / len(active),
                verify=(verified - drafted) / len(active),
                host=(committed - verified) / len(active),
                rollback=(rolled_back - committed) / len(active),
            )
