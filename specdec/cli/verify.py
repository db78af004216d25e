"""``specdec verify``: whether speculative decoding gives a pair's own plain text."""

import secrets
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from specdec.cli.as_json import described, print_json
from specdec.cli.cases import cases_of
from specdec.cli.console import EarlyEnd, out
from specdec.cli.models import open_pair
from specdec.cli.options import (
    AsJson,
    Limit,
    MaxNewTokens,
    ModelOptions,
    NumDraftTokens,
    Prompts,
    Seed,
    Temperature,
    as_num_draft_tokens,
    command,
)
from specdec.parity import Comparison, compare
from specdec.prompts import load_prompts
from specdec.report import counted
from specdec.request import at_least
from specdec.sampling import SamplingParams

__all__ = ["verify"]

FEW = 6  # of the shipped prompts: one of each kind
NO_DRAFT = "there is nothing to verify without a draft: give a --draft-model"


@command
def verify(
    models: ModelOptions,
    prompts: Prompts = None,
    limit: Limit = None,
    max_new_tokens: MaxNewTokens = 64,
    num_draft_tokens: NumDraftTokens = "5",
    temperature: Temperature = 0.0,
    seed: Seed = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Verify strict decoding, and say what it costs.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Decode prompts plainly and with drafts, and compare the texts.

    Where two texts part, the target's scores there tell a near tie, which rounding decides, from a
    fault. Ends with 1 if there is a fault (with --strict, if there is any difference).
    """
    length = as_num_draft_tokens(num_draft_tokens)
    at_least(1, max_new_tokens=max_new_tokens)
    if temperature and seed is None:
        seed = secrets.randbits(63)
    sampling = SamplingParams(temperature=temperature, seed=seed)
    given = load_prompts(prompts)[:limit] if prompts else None
    if models.draft_model == "none":
        raise ValueError(NO_DRAFT)
    target, draft = open_pair(models)
    if draft is None:
        raise ValueError(NO_DRAFT)
    cases = cases_of(target, given, limit or FEW)
    comparisons = compare(
        target,
        draft,
        [case.ids for case in cases],
        num_draft_tokens=length,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        strict=strict,
    )
    done: list[tuple[str, Comparison]] = []
    with EarlyEnd() as end:  # what was compared by then is worth a report
        for case, comparison in zip(cases, comparisons, strict=True):
            done.append((case.kind, comparison))
            if not as_json:
                out.out(f"{len(done)} {case.kind}: {as_line(comparison)}")
    found = [comparison for _, comparison in done]
    if as_json:
        asked = {"num_draft_tokens": length, "seed": seed, "strict": strict}
        each = [{"kind": kind, "verdict": one.verdict} | asdict(one) for kind, one in done]
        print_json(
            totals(found)
            | {"interrupted": isinstance(end.error, KeyboardInterrupt)}
            | {"error": str(end.error) if isinstance(end.error, Exception) else None}
            | asked
            | {"prompts": each}
            | described(target, draft)
        )
    else:
        for line in summary(found, of=len(cases)):
            out.out(line)
        if temperature:
            out.out(f"seed {seed}")
    end.reraise()
    if any(one.verdict == "fault" for one in found):
        sys.exit(1)


def as_line(comparison: Comparison) -> str:
    """What came of one prompt."""
    proposed, stood = comparison.num_proposed_drafts, comparison.num_correct_drafts
    drafts = f"{stood} of {counted(proposed, 'draft')} stood"
    if not proposed:
        drafts = f"nothing was drafted ({comparison.reason})"
    difference = comparison.difference
    if difference is None:
        return f"equal, {counted(comparison.num_tokens, 'token')}, {drafts}"
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
    count = f"{len(found)} of " * (len(found) < of) + counted(of, "prompt")
    equal, near, faults = sums["equal"], sums["near_ties"], sums["faults"]
    ties = "a near tie" if near == 1 else "near ties"
    failed = counted(faults, "fault") if faults else "no faults"
    verdict = f"{equal} equal, {near} parted at {ties}, {failed}"
    if not found:
        verdict = "nothing was compared"
    if found and equal == len(found):
        verdict = "all equal to plain decoding"
    yield f"{count}, {counted(sums['num_tokens'], 'token')}: {verdict}"
    if found and not sums["num_proposed_drafts"]:
        yield f"no draft was checked, so this shows nothing: {found[-1].reason}"
    if near:
        yield (
            "at a near tie the target's own rounding decides, which differs with the number of "
            "tokens per forward; --strict decides as plain decoding does"
        )
    if sums["strict_time_ratio"] is not None:
        again = counted(sums["strict_ct"], "token was decided again", "tokens were decided again")
        parted = sums["differ_without_strict"]
        yield (
            f"strict: {again}, for {sums['strict_time_ratio']:.2f} times the time; without it "
            f"{parted} of {counted(len(found), 'text')} differ{'s' * (parted == 1)}"
        )
