"""Speculative decoding inside transformers' own ``generate``."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import islice
from typing import Any, TypeAlias

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    GenerateDecoderOnlyOutput,
    LogitNormalization,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.streamers import BaseStreamer

from specdec.backend import Logits, ModelBackend
from specdec.decoder import SpeculativeDecoder
from specdec.drafters import Drafter
from specdec.request import BatchOptions
from specdec.sampling import Processor, SamplingParams
from specdec.stats import Stats
from specdec.stream import TokenStream
from specdec.vocab import Vocabulary
from specdec_hf.backend import HFBackend
from specdec_hf.tokens import logits_width, vocabulary

__all__ = ["custom_generate"]

AnyDraft: TypeAlias = ModelBackend | Drafter | str

# What a generation config may not ask for, and the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "is_assistant": (None, False),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}
# What ``generate`` prepares for a model's forward and specdec does by itself.
PREPARED = {
    "attention_mask",
    "cache",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "use_cache",
}
STATEFUL = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
# Those that hold something of every row of the batch, and are asked about one row here.
OF_ONE = {
    PrefixConstrainedLogitsProcessor: "prefix_allowed_tokens_fn",
    EncoderNoRepeatNGramLogitsProcessor: "encoder_no_repeat_ngram_size",
    EncoderRepetitionPenaltyLogitsProcessor: "encoder_repetition_penalty",
}
WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


class custom_generate:
    """What ``model.generate(..., custom_generate=...)`` takes: the decoding loop of specdec.

    ::

        fast = custom_generate(LlamaCppBackend("small.gguf"), tokenizer=tokenizer)
        ids = model.generate(**inputs, max_new_tokens=100, custom_generate=fast)

    Greedy ids are those of ``generate`` itself. Sampled ones follow the same law, by noise of
    specdec's own whose seeds come from torch's generator, so ``torch.manual_seed`` repeats them.
    Logits processors are asked about drafts too, and have to answer by the ids and the row alone.
    Stopping criteria hear of every token that stands, with None for the scores. A text also ends
    where the model's context does.

    transformers (5.24) keeps ``streamer``, ``assistant_model`` and ``tokenizer`` from custom loops.
    Give the streamer here: one that is given to ``generate`` gets the prompt and no more, not even
    its ``end()``. Give the assistant as ``draft``, and instead of ``stop_strings`` a
    ``StopStringCriteria(tokenizer, strings)`` among the ``stopping_criteria``.

    Args:
        draft: As for ``SpeculativeDecoder``: a backend, a ``Drafter``, ``"self"``, a list, or None.
        tokenizer: The model's. None: ids mean what they mean in the draft model.
        streamer: Gets the prompt and then every token, of batches of one.
        **options: For ``SpeculativeDecoder``, such as ``num_draft_tokens=4``.

    Attributes:
        stats: What the latest call cost, for each sequence; None where a criterion broke it off.
    """

    def __init__(
        self,
        draft: AnyDraft | Sequence[AnyDraft] | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        streamer: BaseStreamer | None = None,
        **options: Any,
    ) -> None:
        self.stats: list[Stats | None] = []
        self._draft = draft
        self._tokenizer = tokenizer
        self._streamer = streamer
        # The weights may have changed by the next call, so that no cache is good for it.
        self._options = {"keep_caches": 0, **options}
        self._made_for: tuple[PreTrainedModel, int] | None = None
        self._decoder: SpeculativeDecoder | None = None

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Called by ``generate``.

        Args:
            model: The target.
            input_ids: ``(batch, length)``, padded on the left.
            logits_processor: What the config and the user want done to the scores.
            stopping_criteria: When to stop.
            generation_config: Where the rest comes from.

        Returns:
            ``(batch, length + new)`` ids, padded on the right; in a ``GenerateDecoderOnlyOutput``
            where the config wants a dict.

        Raises:
            ValueError: Something is asked for that can't be honoured; the text names it.
        """
        batch, length = input_ids.shape
        if batch > 1 and (streamer is not None or self._streamer is not None):
            raise ValueError(f"a streamer follows one sequence, and the batch has {batch}")
        _refuse(generation_config, logits_processor, batch, synced_gpus, model_kwargs)
        starts = _starts(input_ids, **model_kwargs)
        rows = [(input_ids[i], start) for i, start in enumerate(starts)]
        sampling = _sampling(logits_processor, bool(generation_config.do_sample), rows)
        decoder = self._decoder_for(model)
        ends, limit, others = _sorted_out(stopping_criteria, decoder.target.vocab.size)
        most = limit - length if limit is not None else decoder.target.max_context
        options: BatchOptions = {"max_new_tokens": max(0, most), "stop_token_ids": ends}
        prompts = [row[start:].tolist() for row, start in rows]
        if streamer is None and self._streamer is not None:
            streamer = self._streamer  # ``generate`` doesn't know it, so it lacks the prompt
            streamer.put(input_ids.cpu())
        if streamer is None and not others:
            results = decoder.generate_batch(prompts, sampling=sampling, max_batch=batch, **options)
            new = [result.token_ids for result in results]
            self.stats = [result.stats for result in results]
        else:
            with ExitStack() as stack:
                streams = [
                    stack.enter_context(closing(decoder.stream(prompt, sampling=params, **options)))
                    for prompt, params in zip(prompts, sampling, strict=True)
                ]
                new = [
                    _followed(stream, row, others, streamer)
                    for stream, row in zip(streams, input_ids, strict=True)
                ]
                # ``generate`` pads a row that is done only where there is an EOS.
                if not any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria):
                    longest = max(map(len, new))
                    for stream, ids in zip(streams, new, strict=True):
                        ids += [event.token_id for event in islice(stream, longest - len(ids))]
            self.stats = [stream.result.stats if stream.result else None for stream in streams]
        sequences = _joined(input_ids, new, generation_config._pad_token_tensor)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences

    def _decoder_for(self, model: PreTrainedModel) -> SpeculativeDecoder:
        made_for = (model, logits_width(model))  # which a resize changes
        if self._decoder is None or self._made_for != made_for:
            target = HFBackend(model=model, vocab=_vocab(model, self._tokenizer, self._draft))
            self._decoder = SpeculativeDecoder(target, self._draft, **self._options)
            self._made_for = made_for
        return self._decoder


def _refuse(
    config: GenerationConfig,
    processors: LogitsProcessorList,
    batch: int,
    synced_gpus: bool,
    model_kwargs: Mapping[str, Any],
) -> None:
    asked = [
        f"{name}={value!r}"
        for name, harmless in REFUSED.items()
        if (value := getattr(config, name, None)) not in harmless
    ]
    asked += ["synced_gpus"] * synced_gpus
    asked += [type(each).__name__ for each in processors if isinstance(each, STATEFUL)]
    asked += [
        f"{name} for several sequences"
        for kind, name in OF_ONE.items()
        if batch > 1 and any(isinstance(each, kind) for each in processors)
    ]
    for name, value in model_kwargs.items():
        if name not in PREPARED and value is not None:
            asked.append(f"the model's argument {name}")
        elif getattr(value, "_is_user_defined", False):
            asked.append(f"a {name} of your own")
    if asked:
        raise ValueError(
            f"specdec can't honour {', '.join(asked)}: leave it out, or call generate without "
            "custom_generate"
        )


def _starts(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **_: Any,
) -> list[int]:
    """How much padding every row begins with."""
    starts = []
    for i, row in enumerate(input_ids):
        mask = torch.ones_like(row) if attention_mask is None else attention_mask[i].to(row.device)
        start = int((mask != 0).int().argmax())
        if not bool((mask[start:] != 0).all()):
            raise ValueError(
                f"the attention_mask of row {i} leaves out ids behind its first one: specdec reads "
                "all, so pad on the left only"
            )
        if position_ids is not None:
            positions = position_ids[i].to(row.device)
            if positions.dim() != 1 or not torch.equal(
                positions[start:], torch.arange(len(row) - start, device=row.device)
            ):
                raise ValueError(
                    "specdec counts positions from a row's first id, and position_ids say otherwise"
                )
        starts.append(start)
    return starts


def _sampling(
    processors: Sequence[Any], do_sample: bool, rows: Sequence[tuple[torch.Tensor, int]]
) -> list[SamplingParams]:
    """How to choose tokens, row by row: what specdec has itself, and the rest as processors."""
    rest = list(processors)
    options: dict[str, Any] = {}
    if rest and type(rest[-1]) is LogitNormalization:
        rest.pop()  # changes no choice
    if do_sample:
        options["temperature"] = 1.0
        warpers = {type(each): each for each in rest if _is_native(each)}
        count = len(warpers)
        if [type(each) for each in rest[len(rest) - count :]] == [
            kind for kind in WARPERS if kind in warpers
        ]:
            del rest[len(rest) - count :]
            if warper := warpers.get(TemperatureLogitsWarper):
                options["temperature"] = warper.temperature
            if warper := warpers.get(TopKLogitsWarper):
                options["top_k"] = warper.top_k
            if warper := warpers.get(TopPLogitsWarper):
                options["top_p"] = max(warper.top_p, 1e-12)  # the best is kept anyway
            if warper := warpers.get(MinPLogitsWarper):
                options["min_p"] = warper.min_p
    seeds = torch.randint(2**63 - 1, (len(rows),)).tolist() if do_sample else [None] * len(rows)
    found = []
    for index, (seed, (row, start)) in enumerate(zip(seeds, rows, strict=True)):
        mine = [_of_row(each, index) for each in rest]
        penalty = 1.0
        if mine and type(mine[0]) is RepetitionPenaltyLogitsProcessor:
            is_whole = (mine[0].prompt_ignore_length or 0) == start
            penalty = mine.pop(0).penalty if is_whole else penalty
        process = [_processor(LogitsProcessorList(mine), row[:start])] if mine else []
        found.append(
            SamplingParams(seed=seed, processors=process, repetition_penalty=penalty, **options)
        )
    return found


def _is_native(warper: object) -> bool:
    plain = getattr(warper, "min_tokens_to_keep", 1) == 1
    return (
        type(warper) in WARPERS
        and plain
        and getattr(warper, "filter_value", -math.inf) == -math.inf
    )


def _of_row(processor: Any, index: int) -> Any:
    """A processor for one row of the batch that it was made for."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if type(processor) is RepetitionPenaltyLogitsProcessor and isinstance(ignored, torch.Tensor):
        return RepetitionPenaltyLogitsProcessor(processor.penalty, int(ignored[index]))
    return processor


def _processor(processors: LogitsProcessorList, padding: torch.Tensor) -> Processor:
    """Asks on the device of the ids, with the padding before them, as ``generate`` does."""

    def process(ids: Sequence[int], row: Logits) -> Logits:
        scores = torch.as_tensor(row).to(padding.device, copy=True)
        before = torch.cat([padding, padding.new_tensor(list(ids))])
        (after,) = processors(before[None], scores[None])
        return after.to(row.device) if isinstance(row, torch.Tensor) else after.cpu().numpy()

    return process


def _sorted_out(
    criteria: StoppingCriteriaList, num_ids: int
) -> tuple[list[int], int | None, StoppingCriteriaList]:
    """The ids that end a text, its most ids, and the criteria that aren't about these."""
    ends: set[int] = set()
    limits: list[int] = []
    others = StoppingCriteriaList()
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            ends.update(i for i in criterion.eos_token_id.tolist() if 0 <= i < num_ids)
        elif type(criterion) is MaxLengthCriteria:
            limits.append(criterion.max_length)
        else:
            others.append(criterion)
    return sorted(ends), min(limits, default=None), others


def _followed(
    stream: TokenStream,
    row: torch.Tensor,
    criteria: StoppingCriteriaList,
    streamer: BaseStreamer | None,
) -> list[int]:
    """The new ids of one sequence, up to where a criterion ends it."""
    new: list[int] = []
    for event in stream:
        new.append(event.token_id)
        if streamer is not None:
            streamer.put(torch.tensor([event.token_id]))
        if criteria:
            ids = torch.cat([row, row.new_tensor(new)])[None]
            if bool(criteria(ids, None).all()):
                break
    if streamer is not None:
        streamer.end()
    return new


def _joined(
    input_ids: torch.Tensor, new: Sequence[Sequence[int]], pad: torch.Tensor | None
) -> torch.Tensor:
    """Prompts and new ids, padded on the right."""
    longest = max(map(len, new))
    if pad is None and any(len(ids) < longest for ids in new):
        raise ValueError("the texts differ in length, and there is no pad_token_id: give one")
    filler = 0 if pad is None else int(pad)
    padded = [[*ids, *[filler] * (longest - len(ids))] for ids in new]
    return torch.cat([input_ids, input_ids.new_tensor(padded).reshape(len(new), longest)], dim=1)


def _vocab(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    draft: AnyDraft | Sequence[AnyDraft] | None,
) -> Vocabulary:
    """Every id may come, as in ``generate``; and what ends a text is for the criteria to say."""
    drafts = draft if isinstance(draft, list | tuple) else [draft]
    known = next((each.vocab for each in drafts if isinstance(each, ModelBackend)), None)
    if tokenizer is not None:
        known = vocabulary(model, tokenizer)
    size = logits_width(model)
    tokens = list(known.tokens[:size]) if known else []
    tokens += [None] * (size - len(tokens))
    nameless = {i for i, token in enumerate(tokens) if known and not token}
    special = known.special_ids | known.eos_ids if known else frozenset()
    return Vocabulary(
        size,
        [token or b"<%d>" % i for i, token in enumerate(tokens)],
        frozenset(),
        special_ids=frozenset(i for i in special | nameless if i < size),
        bos_id=known.bos_id if known else None,
        encode=known.encode if known else None,
    )
