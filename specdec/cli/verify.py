"""``specdec verify``: whether speculative decoding gives a pair's own plain text."""

import secrets
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec.backend import ModelBackend
from specdec.cli.as_json import print_json
from specdec.cli.console import errors_as_lines, out
from specdec.cli.models import open_pair
from specdec.cli.options import (
    AsJson,
    Debug,
    Device,
    DraftModel,
    Dtype,
    GpuLayers,
    MaxNewTokens,
    NumContext,
    NumDraftTokens,
    NumThreads,
    TargetModel,
    TrustRemoteCode,
    as_num_draft_tokens,
    backend_options,
)
from specdec.parity import Comparison, compare
from specdec.prompts import KindedPrompt, load_prompts, shipped_prompts
from specdec.request import at_least
from specdec.rounding import random_ids
from specdec.sampling import SamplingParams
from specdec.vocab import Prompt, Vocabulary, encode_prompt

__all__ = ["verify"]

FEW = 6  # of the shipped prompts: one of each kind


@errors_as_lines
def verify(
    target_model: TargetModel = None,
    draft_model: DraftModel = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A prompt per line, or JSON lines with prompt and, if wanted, kind; none: six of "
            "its own. Texts go into the chat template, if there is one."
        ),
    ] = None,
    max_new_tokens: MaxNewTokens = 64,
    num_draft_tokens: NumDraftTokens = "5",
    temperature: Annotated[float, typer.Option(help="0: the best token; 1: as it is.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of the noise; one is drawn if none.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Verify strict decoding, and say what it costs.")
    ] = False,
    as_json: AsJson = False,
    device: Device = None,
    dtype: Dtype = "auto",
    n_gpu_layers: GpuLayers = 0,
    n_ctx: NumContext = None,
    n_threads: NumThreads = None,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Decode prompts plainly and with drafts, and compare the texts.

    Where two texts part, the target's scores there tell a near tie, which rounding decides, from a
    fault. Ends with 1 if there is a fault (with --strict, if there is any difference).
    """
    options = backend_options(
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        n_gpu_layers=n_gpu_layers,
        n_ctx=n_ctx,
        n_threads=n_threads,
    )
    length = as_num_draft_tokens(num_draft_tokens)
    at_least(1, max_new_tokens=max_new_tokens)
    if temperature and seed is None:
        seed = secrets.randbits(63)
    sampling = SamplingParams(temperature=temperature, seed=seed)
    given = None if prompts is None else load_prompts(prompts)
    target, draft = open_pair(target_model, draft_model, options)
    if draft is None:
        raise ValueError("there is nothing to verify without a draft: give a --draft-model")
    cases = default_prompts(target)
    if given is not None:
        cases = [KindedPrompt(kind, as_ids(target.vocab, prompt)) for kind, prompt in given]
    comparisons = compare(
        target,
        draft,
        [prompt for _, prompt in cases],
        num_draft_tokens=length,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        strict=strict,
    )
    done: list[tuple[str, Comparison]] = []
    stopped: BaseException | None = None
    try:
        for (kind, _), comparison in zip(cases, comparisons, strict=True):
            done.append((kind, comparison))
            if not as_json:
                out.out(f"{len(done)} {kind}: {as_line(comparison)}")
    except (Exception, KeyboardInterrupt) as error:  # what was compared is worth a report
        stopped = error
    found = [comparison for _, comparison in done]
    if as_json:
        models = {"target": dict(target.info()), "draft": dict(draft.info())}
        asked = {"num_draft_tokens": length, "seed": seed, "strict": strict}
        each = [{"kind": kind, "verdict": one.verdict} | asdict(one) for kind, one in done]
        print_json(
            totals(found)
            | {"interrupted": stopped is not None}
            | asked
            | {"prompts": each}
            | models
        )
    else:
        for line in summary(found, of=len(cases)):
            out.out(line)
        if temperature:
            out.out(f"seed {seed}")
    if stopped is not None:
        raise stopped
    if any(one.verdict == "fault" for one in found):
        sys.exit(1)


def default_prompts(target: ModelBackend) -> list[KindedPrompt]:
    """Some of the shipped ones, cut where the context is short; random ids where they can't be."""
    room = max(1, target.max_context // 2)
    try:
        return [
            KindedPrompt(kind, as_ids(target.vocab, prompt)[:room])
            for kind, prompt in shipped_prompts()[:FEW]
        ]
    except Exception:  # a model of another language, or without a tokenizer
        ids = (random_ids(target.vocab, min(12, room), seed=number) for number in range(FEW))
        return [KindedPrompt("random ids", each) for each in ids]


def as_ids(vocab: Vocabulary, prompt: Prompt) -> list[int]:
    """A prompt's ids; a text by the chat template, if the model has one."""
    if isinstance(prompt, str) and vocab.encode_chat is not None:
        return encode_prompt(vocab, [{"role": "user", "content": prompt}])
    return encode_prompt(vocab, prompt)


def as_line(comparison: Comparison) -> str:
    """What came of one prompt."""
    proposed, stood = comparison.num_proposed_drafts, comparison.num_correct_drafts
    drafts = f"{stood} of {proposed} drafts stood"
    if not proposed:
        drafts = f"nothing was drafted ({comparison.reason})"
    difference = comparison.difference
    if difference is None:
        return f"equal, {comparison.num_tokens} tokens, {drafts}"
    gap = f"top-two gap {difference.top_gap:.3g}"
    return (
        f"differs at new token {difference.position + 1}: {difference.plain!r} plainly, "
        f"{difference.speculative!r} with drafts; {gap}; {difference.why}"
    )


def totals(found: Sequence[Comparison]) -> dict[str, Any]:
    """The counts of all prompts, and what strict decoding cost."""
    verdicts = Counter(one.verdict for one in found)
    usual = sum(one.speculative_seconds for one in found)
    strict = [one.strict_seconds for one in found if one.strict_seconds is not None]
    return {
        "equal": verdicts["equal"],
        "near_ties": verdicts["near tie"],
        "faults": verdicts["fault"],
        "num_tokens": sum(one.num_tokens for one in found),
        "num_proposed_drafts": sum(one.num_proposed_drafts for one in found),
        "num_correct_drafts": sum(one.num_correct_drafts for one in found),
        "strict_ct": sum(one.strict_ct for one in found),
        "strict_time_ratio": sum(strict) / usual if strict and usual else None,
        "differ_without_strict": sum(one.loose_equal is False for one in found),
    }


def summary(found: Sequence[Comparison], *, of: int) -> Iterator[str]:
    """The lines under the prompts."""
    sums = totals(found)
    count = f"{len(found)} of {of} prompts" if len(found) < of else f"{of} prompts"
    equal, near, faults = sums["equal"], sums["near_ties"], sums["faults"]
    verdict = f"{equal} equal, {near} parted at near ties, {faults or 'no'} faults"
    if found and equal == len(found):
        verdict = "all equal to plain decoding"
    yield f"{count}, {sums['num_tokens']} tokens: {verdict}"
    if found and not sums["num_proposed_drafts"]:
        yield f"no draft was checked, so this shows nothing: {found[-1].reason}"
    if near:
        yield (
            "at a near tie the target's own rounding decides, which differs with the number of "
            "tokens per forward; --strict decides as plain decoding does"
        )
    if sums["strict_time_ratio"] is not None:
        yield (
            f"strict: {sums['strict_ct']} tokens were decided again, for "
            f"{sums['strict_time_ratio']:.2f} times the time; without it "
            f"{sums['differ_without_strict']} of {len(found)} texts differ"
        )
