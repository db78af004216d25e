"""What a pair of models is and costs, and what it promises: may it work, and does it pay?"""

from collections.abc import Container, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from specdec.backend import ModelBackend, Span
from specdec.decoder import SpeculativeDecoder
from specdec.errors import LogitsError, VocabularyMismatchError
from specdec.policy import best_length, break_even
from specdec.rounding import (
    Stability,
    deviation,
    forward_rows,
    random_ids,
    rounding_limit,
    row_stability,
    sample_ids,
    spread,
)
from specdec.spelling import Speller, common_tokens
from specdec.translate import model_drafter
from specdec.vocab import odd_special, shared_ids

__all__ = ["Expectation", "ModelFacts", "PairCosts", "PairReport", "counted", "examine"]

MAX_DRAFT_TOKENS = 16
WIDTHS = (1, 2, 3, 5, 9, 17)
ACCEPTANCES = (0.5, 0.7, 0.9)
LENGTH = 48  # ids of the text that is measured on: costs little to read, and is like a prompt
ROUNDS = 12  # new tokens, for the loop's own time


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model says of itself.

    Attributes:
        info: What it runs on.
        size: Width of its rows.
        num_tokens: Ids up to its last real token.
        max_context: The most tokens of a text.
        weight_bytes: What its weights take, if its ``info`` has ``"weight_bytes"``.
    """

    info: Mapping[str, object]
    size: int
    num_tokens: int
    max_context: int
    weight_bytes: int | None


@dataclass(frozen=True, slots=True)
class PairCosts:
    """What decoding takes, in milliseconds.

    Attributes:
        plain_ms: A target forward over one token.
        verify_ms: Target forwards by width.
        draft_ms: One draft token; None without a draft, or where it proposed nothing.
        read_ms: One token of a prompt, for the draft.
        rest_ms: The loop's own work in a round.
    """

    plain_ms: float
    verify_ms: Mapping[int, float]
    draft_ms: float | None
    read_ms: float | None
    rest_ms: float


@dataclass(frozen=True, slots=True)
class Expectation:
    """The best fixed number of drafts per round at an acceptance, and its speed-up.

    Attributes:
        acceptance: The chance of a draft to stand if those before it did.
        num_draft_tokens: 0 if plain decoding is best.
        speedup: Over plain decoding, the prompt aside.
    """

    acceptance: float
    num_draft_tokens: int
    speedup: float


@dataclass(frozen=True, slots=True)
class PairReport:
    """What is known of a pair; later reports of ``examine`` know more.

    Attributes:
        target: The target's facts.
        draft: The draft's; None if there is none.
        num_shared: Ids that mean the same in both models: those that can be drafted. Of different
            tokenizers, the target's tokens that the draft has too, under whatever id.
        num_different: Ids that both have and that differ, or are no token in one of them. None if
            the tokenizers are different ones.
        special: Which special tokens differ, in words, if any do.
        problem: Why the pair can't work. None: nothing was found.
        stability: The target's rows by width.
        rounding_limit: The largest relative difference of rows that rounding explains.
        costs: What decoding takes.
        break_even: The acceptance from which drafting pays; None if it never does.
        expectations: At some acceptances. Empty without a draft.
        idle: Why nothing was drafted, if so.
    """

    target: ModelFacts
    draft: ModelFacts | None
    num_shared: int | None = None
    num_different: int | None = None
    special: str | None = None
    problem: str | None = None
    stability: tuple[Stability, ...] = ()
    rounding_limit: float = 0.0
    costs: PairCosts | None = None
    break_even: float | None = None
    expectations: tuple[Expectation, ...] = ()
    idle: str | None = None

    @property
    def vocabularies(self) -> str | None:
        """How the two vocabularies go together, in plain words; None without a draft or before."""
        if self.draft is None or self.num_shared is None:
            return None
        if self.num_different is None:
            part = self.num_shared / self.target.num_tokens
            return (
                f"another tokenizer: {counted(self.num_shared, 'token')} of the target's "
                f"{self.target.num_tokens} ({part:.0%}) {'is' if self.num_shared == 1 else 'are'} "
                "in the draft's table too; drafts are translated"
            )
        same = "the same, " if not self.num_different else ""
        text = same + counted(self.num_shared, "id is shared", "ids are shared")
        if different := self.num_different:
            how = counted(different, "differs and is never drafted", "differ and are never drafted")
            text += f", {how}"
        missing = self.target.num_tokens - self.draft.num_tokens
        if missing > 0:
            text += f", {counted(missing, 'is', 'are')} the target's alone"
        return text

    @property
    def verdict(self) -> list[str]:
        """What it comes to, in plain words."""
        if self.problem is not None:
            return [f"this pair can't work: {self.problem}"]
        lines = [self.special] if self.special else []
        lines += [self._of_rows()] if self.stability else []
        if self.costs is not None:
            lines.append(self._of_costs(self.costs))
        return lines

    def _of_rows(self) -> str:
        """Whether speculative texts will equal plain ones."""
        flips = sum(one.flips for one in self.stability)
        rows = sum(one.num_rows for one in self.stability)
        furthest = max(one.relative for one in self.stability)
        if furthest == 0:
            return (
                f"the target's rows don't depend on the width of a forward ({rows} compared): "
                "texts will be those of plain decoding"
            )
        differ = f"the target's rows differ by width, by up to {furthest:.2g} of their spread"
        if furthest <= 1e-4 and not flips:
            return f"{differ}, as rounding does: texts will be those of plain decoding"
        changed = f"the best token changed in {flips} of {rows}"
        return (
            f"{differ}, and {changed}: texts may part from plain decoding's where two tokens are "
            "nearly as good; strict=True prevents it, and specdec verify shows it"
        )

    def _of_costs(self, costs: PairCosts) -> str:
        """Whether drafting pays."""
        plain = costs.plain_ms
        if self.draft is None:
            width = max(costs.verify_ms, key=lambda w: w / costs.verify_ms[w])
            gain = width * plain / costs.verify_ms[width]
            return (
                f"there is no draft; one that cost nothing and was always right would bring up to "
                f"{gain:.1f}x here, with {counted(width - 1, 'token')}"
            )
        if costs.draft_ms is None:
            return f"nothing was drafted, so nothing can be said of its costs: {self.idle}"
        if self.break_even is None:
            two = costs.verify_ms.get(2, plain) / plain
            return (
                f"this pair never pays here: a draft token takes {costs.draft_ms / plain:.2g} of a "
                f"plain step, and a forward that checks one {two:.2g}"
            )
        usual = next(each for each in self.expectations if each.acceptance == 0.7)
        if not usual.num_draft_tokens:
            hope = "at 70 % expect no gain"
        else:
            tokens = counted(usual.num_draft_tokens, "token")
            hope = f"at 70 % expect {usual.speedup:.1f}x with {tokens}"
        return f"this pair pays from {100 * self.break_even:.0f} % acceptance; {hope}"


def examine(target: ModelBackend, draft: ModelBackend | None) -> Iterator[PairReport]:
    """Look at a pair for a few seconds: one report after the other, each knows more.

    Vocabularies and crops first, then the target's rows by width, then what decoding takes. The
    last report is the whole one; after a problem nothing more is measured.
    """
    report = PairReport(model_facts(target), model_facts(draft) if draft else None)
    yield report
    known: Container[int] | None = None
    if draft is not None:
        common, num_different = min(target.vocab.num_tokens, draft.vocab.num_tokens), None
        try:
            known = shared_ids(target.vocab, draft.vocab)
            num_shared = sum(token in known for token in range(common))
            num_different = common - num_shared
            report = replace(report, special=odd_special(target.vocab, draft.vocab))
        except VocabularyMismatchError:
            try:
                model_drafter(draft, target.vocab)
            except VocabularyMismatchError as error:
                yield replace(report, problem=str(error))
                return
            num_shared = len(common_tokens(Speller(target.vocab), Speller(draft.vocab)))
        report = replace(report, num_shared=num_shared, num_different=num_different)
    room = min(target.max_context, draft.max_context) if draft else target.max_context
    ids = sample_ids(target.vocab, max(1, min(LENGTH, room // 2)), known)
    problem = crop_problem(target, "target") or (crop_problem(draft, "draft") if draft else None)
    report = replace(report, problem=problem)
    yield report
    if problem:
        return

    limit = rounding_limit(target.info())
    try:
        stability = tuple(row_stability(target, ids))
    except LogitsError:
        yield replace(report, problem=nan_problem("target"))
        return
    report = replace(report, stability=stability, rounding_limit=limit)
    worst = max(stability, key=lambda one: one.relative, default=None)
    if worst is not None and worst.relative > limit:
        problem = (
            f"the target's rows in forwards over {worst.width} tokens differ by "
            f"{worst.relative:.2g} of their spread from those of one token, and rounding explains "
            f"{limit:g} at most: it computes them wrongly"
        )
        report = replace(report, problem=problem)
    yield report
    if not report.problem:
        yield with_costs(report, target, draft, ids)


def with_costs(
    report: PairReport, target: ModelBackend, draft: ModelBackend | None, ids: list[int]
) -> PairReport:
    """The report with what decoding takes, and what follows."""
    trial = SpeculativeDecoder(target, draft, num_draft_tokens=4, keep_caches=0)
    proposed = trial.generate(ids, max_new_tokens=ROUNDS).stats
    decoder = SpeculativeDecoder(target, draft, max_draft_tokens=MAX_DRAFT_TOKENS, keep_caches=0)
    costs = decoder.calibrate(ids, seconds=1.0, widths=WIDTHS)
    for _ in range(2):  # each measures a draft once
        decoder.calibrate(ids, seconds=0.0, widths=WIDTHS[:1])
    decoder.generate(ids, max_new_tokens=ROUNDS)  # measures the loop's own time
    unit = 1000
    drafts = proposed.num_proposed_drafts > 0
    found = PairCosts(
        plain_ms=unit * costs.verify(1),
        verify_ms={width: unit * costs.verify(width) for width in costs.widths},
        draft_ms=unit * costs.draft if drafts else None,
        read_ms=unit * costs.read if drafts else None,
        rest_ms=unit * costs.rest(drafting=drafts),
    )
    if not drafts:
        return replace(report, costs=found, idle=proposed.reason)
    return replace(
        report,
        costs=found,
        break_even=break_even(costs.rounds(MAX_DRAFT_TOKENS)),
        expectations=tuple(
            Expectation(acceptance, *best_length(costs.rounds(MAX_DRAFT_TOKENS), acceptance))
            for acceptance in ACCEPTANCES
        ),
    )


def model_facts(backend: ModelBackend) -> ModelFacts:
    """What a model says of itself."""
    info = dict(backend.info())
    weight_bytes = info.get("weight_bytes")
    return ModelFacts(
        info,
        backend.vocab.size,
        backend.vocab.num_tokens,
        backend.max_context,
        weight_bytes if isinstance(weight_bytes, int) else None,
    )


def crop_problem(backend: ModelBackend, name: str) -> str | None:
    """Why a model's caches can't be cut back, if so: after a crop its rows must be as before."""
    ids = random_ids(backend.vocab, min(12, backend.max_context))
    count = len(ids) - len(ids) // 3
    begin, end = ids[:count], ids[count:]
    with closing(backend.new_cache()) as cache, closing(backend.new_cache()) as straight:
        for each in (cache, straight):
            backend.forward([Span(each, begin, 0)])
        if not end:
            return None  # a context of one or two tokens
        backend.forward([Span(cache, begin[: len(end)], 0)])
        try:
            backend.crop(cache, count)
        except Exception as error:  # whatever it is, it is the answer
            return f"the {name} can't crop its cache: {error or type(error).__name__}"
        if len(cache) != count:
            held = counted(len(cache), "token")
            return f"the {name}'s cache holds {held} after a crop to {count}"
        expected = forward_rows(backend, straight, end)
        rows = forward_rows(backend, cache, end)
    if np.isnan(expected).any() or np.isnan(rows).any():
        return nan_problem(name)
    limit = rounding_limit(backend.info())
    pairs = zip(expected, rows, strict=True)
    if any(deviation(row, other) > limit * spread(row) for row, other in pairs):
        return f"the {name}'s rows are other ones after a crop of its cache"
    return None


def nan_problem(name: str) -> str:
    """What to say of a model whose rows hold NaN."""
    return f"the {name}'s rows hold NaN: it overflowed or its weights are broken; try another dtype"


def counted(count: int, one: str, many: str = "") -> str:
    """So many of a thing, in words; by default an s makes many of one."""
    return f"{count} {one if count == 1 else many or f'{one}s'}"
