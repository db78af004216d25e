"""What is asked of a generation, checked; its state in the loop; and what comes out."""

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, cast

from specdec.backend import Cache, Logits
from specdec.drafters import Drafter
from specdec.errors import ContextFullError
from specdec.policy import FixedLength
from specdec.rejection import RatioSampler, block_plan, rejection_plan
from specdec.sampling import Sampler, SamplingParams, log_probabilities
from specdec.stats import Stats
from specdec.stopping import FinishReason, Output, TokenLogprobs
from specdec.vocab import Prompt, Vocabulary, encode_prompt

__all__ = [
    "BatchItem",
    "BatchOptions",
    "GenerateOptions",
    "GenerationResult",
    "Request",
    "Verification",
    "as_items",
    "at_least",
    "failed_request",
    "new_request",
]

Verification: TypeAlias = Literal["coupled", "rejection", "block"]


class BatchOptions(TypedDict, total=False):
    """What may be asked of a generation and holds for all prompts of a batch.

    Attributes:
        max_new_tokens: The most tokens to put out. Default 256.
        stop: One or several strings that end the text and are not part of it. The earliest in the
            text wins. Default none.
        stop_token_ids: Ids that end the text like an EOS. Default none.
        logprobs: Tell each token's log-probability and those of so many best ids, by the model's
            own distribution: before penalties, temperature and filters. Default neither.
    """

    max_new_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Collection[int]
    logprobs: int | None


class GenerateOptions(BatchOptions, total=False):
    """What may be asked of a generation: ``BatchOptions``, and how to choose tokens.

    Attributes:
        sampling: How to choose tokens. Default greedy.
    """

    sampling: SamplingParams | None


@dataclass(init=False, slots=True)
class BatchItem:
    """A prompt of a batch with options of its own, which come before those of the call.

    Args:
        prompt: Text, ids, or chat messages.
        **options: See ``GenerateOptions``.
    """

    prompt: Prompt
    options: GenerateOptions

    def __init__(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> None:
        self.prompt = prompt
        self.options = options

    def over(self, **options: Unpack[GenerateOptions]) -> GenerateOptions:
        """These options, and the item's own before them."""
        return {**options, **self.options}


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What a generation put out.

    Attributes:
        text: The new text, without special tokens.
        token_ids: The new ids, with the EOS or stop id that ended them.
        finish_reason: ``"eos"``, ``"stop"`` (a stop string or id), ``"length"`` (all that was asked
            for), ``"context"`` (the target's context is full), or in a batch ``"error"``.
        stats: Counters and times.
        logprobs: One per id, if asked for; else None.
        seed: The seed that gives this output again; None if it was greedy.
        error: What ended it, in a batch; the text is what came before.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats
    logprobs: list[TokenLogprobs] | None = None
    seed: int | None = None
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One sequence in the loop. Between rounds its target cache holds ``len(ids) - 1`` tokens."""

    ids: list[int]
    output: Output
    stats: Stats
    sampler: Sampler
    num_logprobs: int | None
    drafter: Drafter | None = None  # None: decode it plainly, for the reason in the statistics
    policy: FixedLength = field(default_factory=lambda: FixedLength(0))
    ready: bool = False  # for rounds: its prompt has been read, by the drafter too
    error: Exception | None = None  # raised by its own processor, say
    exact: int = 0  # tokens of the cache that plain decoding would have written alike
    cache: Cache = field(init=False)
    draft_state: Any = None
    opened: ExitStack = field(default_factory=ExitStack)  # closes what was opened for it

    def judge(self, draft_tokens: Sequence[int], logits: Logits) -> tuple[list[int], int]:
        """The tokens that a round brings, and how many of them are drafts.

        None where that raises: the sequence ends so, and its neighbours go on.
        """
        try:
            return self.sampler.verify(draft_tokens, logits, self.ids)
        except Exception as error:
            self.error = error
            self.output.finish("error")
            self.output.finish_reason = "error"  # whatever stop its last character makes
            return [], 0

    def raise_error(self) -> None:
        """Raise what ended it, if anything did, and forget it."""
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame

    def commit(self, tokens: Sequence[int], num_correct: int, logits: Logits) -> None:
        """Append accepted tokens up to the first stop; what lies behind it is dropped."""
        for index, token in enumerate(tokens):
            self.ids.append(token)
            scores = None
            if self.num_logprobs is not None:
                scores = log_probabilities(logits[index], token, self.num_logprobs)
            if not self.output.add(token, from_draft=index < num_correct, logprobs=scores):
                break

    def result(self) -> GenerationResult:
        """What has been put out."""
        output, stats = self.output, self.stats
        stats.completion_tokens = len(output.token_ids)
        if self.drafter is not None:
            stats.predicted_speedup = self.policy.predicted_speedup
            stats.reason = stats.reason or self.policy.verdict()
        if not stats.speculative and stats.reason is None:
            stats.reason = "the drafter proposed nothing"
        reason = cast("FinishReason", output.finish_reason)
        logprobs = None if self.num_logprobs is None else output.logprobs
        return GenerationResult(
            output.text, output.token_ids, reason, stats, logprobs, self.sampler.seed, self.error
        )


def failed_request(vocab: Vocabulary, error: Exception) -> Request:
    """What a prompt that can't be decoded becomes: it has ended, with that error."""
    output = Output(vocab, 0, stop=(), stop_token_ids=())
    output.finish_reason = "error"
    request = Request([], output, Stats(), Sampler(SamplingParams(), vocab, 0), None)
    request.error = error
    return request


def new_request(
    vocab: Vocabulary,
    max_context: int,
    verification: Verification,
    prompt: Prompt,
    *,
    max_new_tokens: int = 256,
    stop: str | Sequence[str] = (),
    stop_token_ids: Collection[int] = (),
    sampling: SamplingParams | None = None,
    logprobs: int | None = None,
    **unknown: object,
) -> Request:
    """Check every argument, so that no work is done for a bad one.

    Args:
        vocab: The target's.
        max_context: The target's.
        verification: How sampled drafts are judged.
        prompt: Text, ids or chat messages.

    The others are those of ``GenerateOptions``.

    Raises:
        ValueError: A value is out of range, or the prompt is empty or longer than the context.
        TypeError: A value is of the wrong type, or there is no such option.
    """
    if unknown:
        options = ", ".join(sorted(GenerateOptions.__optional_keys__))
        raise TypeError(f"there is no option {next(iter(unknown))!r}; there are {options}")
    at_least(0, max_new_tokens=max_new_tokens)
    if not all(
        isinstance(x, Collection) and not isinstance(x, Mapping) for x in (stop, stop_token_ids)
    ):
        raise TypeError(
            "stop is a text or a list of texts and stop_token_ids a list of ids, not "
            f"{type(stop).__name__} and {type(stop_token_ids).__name__}"
        )
    stops = [stop] if isinstance(stop, str) else list(stop)
    if not all(isinstance(text, str) and text for text in stops):
        raise ValueError(f"a stop string is a text of at least one character: {stops}")
    for token in stop_token_ids:
        if not 0 <= operator.index(token) < vocab.size:
            raise ValueError(f"stop id {token} is outside the vocabulary of {vocab.size} ids")
    ids = encode_prompt(vocab, prompt)
    if len(ids) > max_context:
        raise ContextFullError(
            f"the prompt has {len(ids)} tokens and the target's context is {max_context}: "
            "shorten the prompt or load the target with a longer context"
        )
    output = Output(vocab, max_new_tokens, stop=stops, stop_token_ids=stop_token_ids)
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise TypeError(f"sampling must be SamplingParams, not {type(sampling).__name__}")
    params = sampling or SamplingParams()
    sampler: Sampler
    if params.temperature == 0 or verification == "coupled":
        sampler = Sampler(params, vocab, len(ids), stop_token_ids)
    else:
        plan = rejection_plan if verification == "rejection" else block_plan
        sampler = RatioSampler(params, vocab, len(ids), stop_token_ids, plan=plan)
    if logprobs is not None:
        at_least(0, logprobs=logprobs)
    return Request(ids, output, Stats(prompt_tokens=len(ids)), sampler, logprobs)


def as_items(prompts: Iterable[Prompt | BatchItem]) -> Iterator[BatchItem]:
    """Every prompt with its own options."""
    if isinstance(prompts, str):
        raise TypeError("prompts is one text: give a list of prompts, or call generate")
    return (each if isinstance(each, BatchItem) else BatchItem(each) for each in prompts)


def at_least(limit: int, **named: int) -> int:
    """The one value in ``named``, if it is a whole number of at least ``limit``."""
    ((name, value),) = named.items()
    if isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if number < limit:
        raise ValueError(f"{name} must be at least {limit}, not {number}")
    return number
