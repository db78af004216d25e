"""Plain and speculative decoding side by side; where they part, a near tie or a fault."""

import math
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.backend import ModelBackend
from specdec.decoder import SpeculativeDecoder
from specdec.drafters import Drafter
from specdec.prefill import prefill
from specdec.rounding import deviation, gap_change, read_by_width, rounding_limit, spread
from specdec.sampling import Sampler, SamplingParams
from specdec.vocab import Prompt, encode_prompt

__all__ = ["Comparison", "Difference", "compare", "judge"]

WIDTHS = (2, 5, 9)  # to measure rounding with, beside the widest forward of the run
ROWS = 24  # to measure it over, at least
MARGIN = 2.0  # what is measured is a sample: the run's forwards had other widths in another order
FEW_EPS = 8 * float(np.finfo(np.float32).eps)  # of the scores: a tie even where rows are equal


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two texts part.

    Scores are those that decide: logits, or what sampling made of them.

    Attributes:
        position: New tokens before it.
        plain_id: What plain decoding put there; None if its text had ended.
        speculative_id: The same of speculative decoding.
        plain: What ``plain_id`` spells.
        speculative: What ``speculative_id`` spells.
        top_gap: Between the two best scores of the target's row there, in a forward over one token.
        gap: Between the best score and the lower one of the two tokens.
        rounding: The most that a gap between good tokens changes from one-token forwards to wider
            ones, over this text.
        bound: The largest gap that such rounding explains.
        fault: Whether it is more than a near tie.
        why: The same in words.
    """

    position: int
    plain_id: int | None
    speculative_id: int | None
    plain: str
    speculative: str
    top_gap: float
    gap: float
    rounding: float
    bound: float
    fault: bool
    why: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt, decoded both ways.

    Attributes:
        num_tokens: New tokens of plain decoding.
        num_proposed_drafts: Drafts that the target checked. Without any, equality says nothing.
        num_correct_drafts: Those that stood.
        difference: Where the texts part; None if they are equal.
        reason: Why nothing was drafted, or no more from some point on.
        plain_seconds: Decoding plainly, after the prompt.
        speculative_seconds: Decoding with drafts, not strictly.
        strict_seconds: Decoding with drafts, strictly; None if that wasn't asked for.
        strict_ct: Choices that a forward over one token made again.
        loose_equal: Whether the text is equal without ``strict`` too; None if that wasn't asked.
    """

    num_tokens: int
    num_proposed_drafts: int
    num_correct_drafts: int
    difference: Difference | None
    reason: str | None
    plain_seconds: float
    speculative_seconds: float
    strict_seconds: float | None = None
    strict_ct: int = 0
    loose_equal: bool | None = None

    @property
    def verdict(self) -> Literal["equal", "near tie", "fault"]:
        """What came out."""
        if self.difference is None:
            return "equal"
        return "fault" if self.difference.fault else "near tie"


def compare(
    target: ModelBackend,
    draft: ModelBackend | Drafter,
    prompts: Iterable[Prompt],
    *,
    num_draft_tokens: int | Literal["auto"] = 5,
    max_new_tokens: int = 64,
    sampling: SamplingParams | None = None,
    strict: bool = False,
) -> Iterator[Comparison]:
    """Decode every prompt plainly and with drafts, and say where the texts part.

    Args:
        target: The model whose output is wanted.
        draft: What drafts for it.
        prompts: Text, ids or chat messages.
        num_draft_tokens: Drafts per round. ``"auto"`` may draft little, and then shows little.
        max_new_tokens: The most tokens per prompt.
        sampling: How to choose tokens. Without a seed one is drawn for all.
        strict: Compare ``SpeculativeDecoder(strict=True)``, and time it beside the usual one. It
            promises equal texts, so even a near tie is a fault.

    Raises as ``SpeculativeDecoder`` and its ``generate`` do.
    """
    params = sampling or SamplingParams()
    if params.temperature > 0 and params.seed is None:
        params = replace(params, seed=secrets.randbits(63))
    plain = SpeculativeDecoder(target, keep_caches=0)
    fast, exact = (
        SpeculativeDecoder(
            target, draft, num_draft_tokens=num_draft_tokens, strict=it, keep_caches=0
        )
        for it in (False, strict)
    )
    for prompt in prompts:
        ids = encode_prompt(target.vocab, prompt)
        expected, *found = (
            decoder.generate(ids, max_new_tokens=max_new_tokens, sampling=params)
            for decoder in ((plain, fast, exact) if strict else (plain, fast))
        )
        last = found[-1]
        difference = None
        if expected.token_ids != last.token_ids:
            widest = len(last.stats.propose_histogram)  # one more than the most drafts of a round
            difference = judge(
                target, ids, expected.token_ids, last.token_ids, params, widths=(*WIDTHS, widest)
            )
            if strict and not difference.fault:
                why = f"strict decoding should have prevented it: {difference.why}"
                difference = replace(difference, fault=True, why=why)
        yield Comparison(
            num_tokens=len(expected.token_ids),
            num_proposed_drafts=last.stats.num_proposed_drafts,
            num_correct_drafts=last.stats.num_correct_drafts,
            difference=difference,
            reason=last.stats.reason,
            plain_seconds=expected.stats.decode_seconds,
            speculative_seconds=found[0].stats.decode_seconds,
            strict_seconds=last.stats.decode_seconds if strict else None,
            strict_ct=last.stats.strict_ct,
            loose_equal=expected.token_ids == found[0].token_ids if strict else None,
        )


def judge(
    target: ModelBackend,
    prompt_ids: Sequence[int],
    plain: Sequence[int],
    speculative: Sequence[int],
    sampling: SamplingParams,
    *,
    widths: Sequence[int] = WIDTHS,
) -> Difference:
    """Tell a near tie from a fault where two continuations of a prompt part.

    The target reads the text again, by forwards over one token and by wider ones. It is a near tie
    if their rows differ by rounding only, and if so much rounding could have made plain decoding's
    own row choose either token.
    """
    vocab = target.vocab
    pairs = enumerate(zip_longest(plain, speculative))
    position, (ours, theirs) = next((i, pair) for i, pair in pairs if len(set(pair)) > 1)
    prefix = [*prompt_ids, *plain[:position]]
    sampler = Sampler(sampling, vocab, len(prompt_ids))
    free = replace(sampling, top_k=0, top_p=1.0, min_p=0.0, seed=sampler.seed)
    unfiltered = Sampler(free, vocab, len(prompt_ids))
    row, wide_rows, rounding, relative = measured_rounding(
        target, prompt_ids, plain, speculative, position, widths
    )
    scores = np.asarray(sampler.scores(row[None], prefix))[0]
    low, best = np.sort(scores)[-2:].tolist() if len(scores) > 1 else (-math.inf, scores[0])
    bound = max(MARGIN * rounding, FEW_EPS * abs(best))
    limit = rounding_limit(target.info())
    gap = math.inf
    if ours is None or theirs is None:
        fault = f"the {'plain' if ours is None else 'speculative'} text ended before the other"
    else:
        gap = best - min(scores[ours], scores[theirs])
        seen = [(row, bound), *((wide, 0.0) for wide in wide_rows)]
        odd = [
            token
            for token in (ours, theirs)
            if not any(
                could_choose(sampler, unfiltered, each, prefix, token, within)
                for each, within in seen
            )
        ]
        fault = ""
        if relative > limit:
            fault = (
                f"rows of wider forwards differ by {relative:.3g} of their spread from those of "
                f"one token, and rounding explains {limit:g} at most: the target computes them "
                "wrongly"
            )
        elif odd:
            whose = "plain" if odd[0] == ours else "speculative"
            fault = (
                f"the {whose} text's token lies {best - scores[odd[0]]:.3g} below the best, and "
                f"rounding explains {bound:.3g} at most"
            )
    apart = f"the scores are {gap:.3g} apart"
    if gap > bound:
        apart = "a filter lets one of them in, or another one out, by a hair"
    why = fault or (
        f"near tie: {apart}, and such gaps change by up to {rounding:.3g} between forwards over "
        "one token and several"
    )
    return Difference(
        position=position,
        plain_id=ours,
        speculative_id=theirs,
        plain=spelled(vocab.tokens, ours),
        speculative=spelled(vocab.tokens, theirs),
        top_gap=best - low,
        gap=float(gap),
        rounding=rounding,
        bound=bound,
        fault=bool(fault),
        why=why,
    )


class Rounding(NamedTuple):
    """What a text's rows by one-token forwards, and by wider ones, tell."""

    row: NDArray[np.float32]  # of plain decoding, at the position in question
    wide_rows: list[NDArray[np.float32]]  # the same one, by width
    gap_change: float  # the largest of all positions, between the best tokens
    relative: float  # the largest difference of any score, in units of its row's spread


def measured_rounding(
    target: ModelBackend,
    prompt_ids: Sequence[int],
    plain: Sequence[int],
    speculative: Sequence[int],
    position: int,
    widths: Sequence[int],
) -> Rounding:
    """Read a text again, as plain decoding does and in wider forwards.

    Not at one position only: some rows happen to be equal.
    """
    held = len(prompt_ids) - 1
    tails = plain[position:], speculative[position:]
    text = [prompt_ids[-1], *plain[:position], *max(tails, key=len)]
    text += (text * ROWS)[: max(0, ROWS - len(text))]
    text = text[: target.max_context - held]
    here, far = [], []
    with closing(target.new_cache()) as cache:
        prefill(target.forward, cache, prompt_ids[:-1])
        several = sorted({2, *(width for width in widths if width > 1)})
        for _, place, row, wide in read_by_width(target, cache, text, several):
            far.append((gap_change(row, wide), deviation(row, wide) / spread(row)))
            if place == position:
                here.append((row, wide))
    change, relative = (max(each) for each in zip(*far, strict=True))
    return Rounding(here[0][0], [wide for _, wide in here], change, relative)


def could_choose(
    sampler: Sampler,
    unfiltered: Sampler,
    row: NDArray[np.float32],
    ids: Sequence[int],
    token: int,
    bound: float,
) -> bool:
    """Whether a row no further than ``bound / 2`` from this one would choose the token.

    Tries what is best for it: its rivals are lowered and the rest raised. With filters there are
    two kinds of rivals. Tokens of more probability may leave the token none of the mass, so they
    are lowered to let it in; or are raised, to keep out an improbable one that the noise favours.
    """
    scores = np.asarray(unfiltered.scores(row[None], ids))[0]
    ahead, more_probable = scores >= scores[token], row >= row[token]
    for rivals in (ahead | more_probable, ahead):
        rivals[token] = False
        moved = np.where(rivals, row - bound / 2, row + bound / 2).astype(np.float32)
        found = np.asarray(sampler.scores(moved[None], ids))[0]
        if found[token] >= found.max() > -math.inf:
            return True
    return False


def spelled(tokens: Sequence[bytes | None], token: int | None) -> str:
    """What an id spells, special ones by their names."""
    if token is None:
        return ""
    return (tokens[token] or b"").decode(errors="replace")
