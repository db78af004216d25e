"""Prompt lookup: the index finds what a scan finds, and the output is plain decoding's."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec import (
    Drafter,
    DraftRequest,
    ModelDrafter,
    PromptLookupDrafter,
    SamplingParams,
    SpeculativeDecoder,
    SuffixDrafter,
)
from specdec.sampling import Sampler
from specdec.testing import TableBackend

SAMPLER = Sampler(SamplingParams(), TableBackend.random(4).vocab, 1)
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)
MIXES: dict[str, Callable[[TableBackend, TableBackend], Any]] = {
    "lookup": lambda target, draft: PromptLookupDrafter(1, 3),
    "suffix": lambda target, draft: SuffixDrafter(),
    "suffix, memory": lambda target, draft: SuffixDrafter(memory_tokens=20),
    "lookup + model": lambda target, draft: ["lookup", draft],
    "model + lookup": lambda target, draft: [draft, PromptLookupDrafter(1, 2)],
    "all": lambda target, draft: [SuffixDrafter(memory_tokens=9), "lookup", draft],
    "two models": lambda target, draft: [ModelDrafter(draft, target.vocab), target],
}
NAMES = st.sampled_from(sorted(MIXES))
SAMPLINGS = st.sampled_from([SamplingParams(), SamplingParams(temperature=1.0, seed=3)])


def ask(drafter: Drafter, state: Any, ids: Sequence[int], num_tokens: int) -> list[int]:
    (draft,) = drafter.propose([DraftRequest(state, ids, num_tokens, SAMPLER)])
    return list(draft.token_ids)


def scanned(ids: list[int], least: int, most: int, num_tokens: int) -> list[int]:
    """The longest match, then the latest, by looking everywhere; a copy may overlap itself."""
    for length in range(min(most, len(ids) - 1), least - 1, -1):
        for end in range(len(ids) - 1, length - 1, -1):
            if ids[end - length : end] == ids[-length:]:
                out = list(ids)
                for place in range(num_tokens):
                    out.append(out[end + place])
                return out[len(ids) :]
    return []


@given(
    ids=TEXTS,
    lengths=st.tuples(st.integers(1, 3), st.integers(0, 3)),
    steps=st.lists(st.integers(1, 5), max_size=9),
    num_tokens=st.integers(1, 9),
)
def test_the_index_finds_what_a_scan_finds(
    ids: list[int], lengths: tuple[int, int], steps: list[int], num_tokens: int
) -> None:
    least, most = lengths[0], sum(lengths)
    drafter, end = PromptLookupDrafter(least, most), 1
    state = drafter.open(ids[:1])
    for step in [0, *steps]:
        end = min(end + step, len(ids))
        text = ids[:end]
        assert drafter.lag(state, text) <= max(0, len(text) - 1)
        assert ask(drafter, state, text, num_tokens) == scanned(text, least, most, num_tokens)
        assert drafter.lag(state, text) == 0
        drafter.commit(state, text)


def test_the_end_of_the_text_does_not_find_itself() -> None:
    drafter = PromptLookupDrafter(1, 3)
    assert ask(drafter, drafter.open([]), [1, 2, 3], 5) == []
    assert ask(drafter, drafter.open([]), [1, 1], 3) == [1, 1, 1]
    assert ask(drafter, drafter.open([]), [0, 1, 2, 3, 1, 2], 3) == [3, 1, 2]


@pytest.mark.parametrize("lengths", [(0, 3), (4, 3), (-1, -1)])
def test_lengths_that_find_nothing_are_refused(lengths: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="give lengths from 1 on"):
        PromptLookupDrafter(*lengths)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[TableBackend, TableBackend]:
    """Small alphabets make loops, matches and stops frequent."""
    size = draw(st.integers(2, 5))
    target = TableBackend.random(
        size,
        seed=draw(st.integers(0, 999)),
        padding=draw(st.integers(0, 2)),
        eos_ids=draw(st.sets(st.integers(0, size - 1), max_size=1)),
        max_context=draw(st.integers(12, 60)),
    )
    draft = target.sibling(draw(st.sampled_from([0.0, 0.7])), max_context=draw(st.integers(4, 60)))
    return target, draft


@given(
    pair=pairs(),
    name=NAMES,
    sampling=SAMPLINGS,
    lengths=st.lists(st.integers(1, 10), min_size=1, max_size=4),
    num_draft_tokens=st.integers(0, 9) | st.just("auto"),
    max_batch=st.integers(1, 3),
    strict=st.booleans(),
)
def test_output_is_plain_decodings(
    pair: tuple[TableBackend, TableBackend],
    name: str,
    sampling: SamplingParams,
    lengths: list[int],
    num_draft_tokens: Any,
    max_batch: int,
    strict: bool,
) -> None:
    """One by one, together, and again on the same decoder, which may remember by then."""
    target, draft = pair
    size = len(target.vocab.tokens)
    prompts = [[(3 * n + i * i) % size for i in range(n)] for n in lengths]
    options: Any = {"max_new_tokens": 40, "sampling": sampling}
    plain = [SpeculativeDecoder(target).generate(prompt, **options) for prompt in prompts]
    expected = [(result.token_ids, result.finish_reason) for result in plain]
    decoder = SpeculativeDecoder(
        target, MIXES[name](target, draft), num_draft_tokens=num_draft_tokens, strict=strict
    )
    for _ in range(2):
        alone = [decoder.generate(prompt, **options) for prompt in prompts]
        together = decoder.generate_batch(prompts, max_batch=max_batch, **options)
        assert [(r.token_ids, r.finish_reason) for r in alone] == expected
        assert [(r.token_ids, r.finish_reason) for r in together] == expected
        for result in (*alone, *together):
            stats = result.stats
            both = stats.by_drafter.values()
            assert sum(proposed for proposed, _ in both) == stats.num_proposed_drafts
            assert sum(stood for _, stood in both) == stats.num_correct_drafts
    decoder.clear()
    assert draft.open_caches == 0


def test_eos_and_special_ids_are_proposed_like_any() -> None:
    """A prompt that holds an EOS is repeated up to it, and ends there."""
    target = TableBackend.random(6, seed=3)
    plain = SpeculativeDecoder(target).generate([0, 1], max_new_tokens=40).token_ids
    ends = target.random(6, seed=3, eos_ids={plain[5]})
    prompt = [0, 1, *plain[:8]]
    drafter = PromptLookupDrafter(2, 2)
    state = drafter.open(prompt)
    assert plain[5] in ask(drafter, state, [*prompt, 0, 1], 8)
    decoder = SpeculativeDecoder(ends, drafter, num_draft_tokens=8)
    result = decoder.generate([*prompt, 0, 1], max_new_tokens=40)
    assert result.finish_reason == "eos"
    assert result.token_ids == plain[: plain.index(plain[5]) + 1]
    assert result.stats.num_correct_drafts > 0


@pytest.mark.parametrize("verification", ["rejection", "block"])
@pytest.mark.parametrize("name", ["lookup", "suffix, memory", "lookup + model", "model + lookup"])
def test_the_papers_rules_keep_the_law(verification: Any, name: str) -> None:
    """Over many seeds; what a lookup proposes counts as certain, whatever a model has guessed."""
    target = TableBackend.random(3, seed=5)
    draft = target.sibling(1.0)
    prompt, count = [0, 1, 2, 0, 1, 0, 1], 1000
    decoders = {
        "rule": SpeculativeDecoder(
            target, MIXES[name](target, draft), num_draft_tokens=3, verification=verification
        ),
        "plain": SpeculativeDecoder(target),
    }
    seen: dict[str, dict[tuple[int, ...], int]] = {which: {} for which in decoders}
    for which, decoder in decoders.items():
        for seed in range(count):
            sampling = SamplingParams(temperature=1.0, seed=seed)
            ids = tuple(decoder.generate(prompt, max_new_tokens=3, sampling=sampling).token_ids)
            seen[which][ids] = seen[which].get(ids, 0) + 1
    chances = {ids: law(target, prompt, ids) for ids in seen["plain"] | seen["rule"]}
    for which in decoders:
        distance = sum((seen[which].get(ids, 0) / count - p) ** 2 / p for ids, p in chances.items())
        assert count * distance < 60  # chi-squared with 26 degrees of freedom: 1e-4


def law(target: TableBackend, prompt: list[int], ids: Sequence[int]) -> float:
    text, chance = [*prompt], 1.0
    for token in ids:
        row = np.exp(target.table[text[-2], text[-1]].astype(float))
        chance *= row[token] / row.sum()
        text.append(token)
    return float(chance)
