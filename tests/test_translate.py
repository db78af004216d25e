"""Drafts by models of other tokenizers: the output is that of plain decoding, whatever they say."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specdec import (
    ModelDrafter,
    SamplingParams,
    SpeculativeDecoder,
    Vocabulary,
    VocabularyMismatchError,
)
from specdec.report import examine
from specdec.spelling import Speller
from specdec.testing import TableBackend
from specdec.translate import TranslatingDrafter, model_drafter

SYLLABLES = [b"a", b"b", b"c", b" ", b"\xc3", b"\xa9", b"ab", b"abc", b"ca", b" a", b" c", b"bb"]
SYLLABLES += ["é".encode(), "aé".encode(), b"cab", b" ab", b"  "]


def vocabulary(*tokens: bytes | None, size: int = 0, **options: Any) -> Vocabulary:
    return Vocabulary(size or len(tokens), tokens, options.pop("eos_ids", frozenset()), **options)


def model(
    tokens: Sequence[bytes | None],
    seed: int = 0,
    *,
    eos_ids: Sequence[int] = (),
    bos_id: int | None = None,
    padding: int = 0,
    warmth: float = 1.0,
    max_context: int = 4096,
) -> TableBackend:
    count = len(tokens)
    table = np.random.default_rng(seed).standard_normal((count, count, count + padding)) * warmth
    return TableBackend(
        table, tokens=tokens, eos_ids=eos_ids, bos_id=bos_id, max_context=max_context
    )


@st.composite
def models(draw: st.DrawFn) -> TableBackend:
    tokens: list[bytes | None] = list(
        draw(st.lists(st.sampled_from(SYLLABLES), min_size=5, max_size=12))
    )
    if draw(st.booleans()):
        tokens.insert(draw(st.integers(0, len(tokens))), None)
    ids = st.integers(0, len(tokens) - 1)
    backend = model(
        tokens,
        draw(st.integers(0, 99)),
        eos_ids=draw(st.lists(ids, max_size=2)),
        bos_id=draw(st.none() | ids),
        padding=draw(st.integers(0, 2)),
        max_context=draw(st.sampled_from([12, 4096])),
    )
    return backend if draw(st.booleans()) else untaught(backend)


@settings(max_examples=300)
@given(
    target=models(),
    draft=models(),
    prompt=st.lists(st.integers(0, 99), min_size=1, max_size=8),
    num_draft_tokens=st.integers(1, 6),
    sampling=st.sampled_from(
        [
            None,
            SamplingParams(temperature=1.0, seed=3),
            SamplingParams(temperature=0.7, seed=4, top_k=3, repetition_penalty=1.3),
        ]
    ),
)
def test_the_output_never_depends_on_the_draft(
    target: TableBackend,
    draft: TableBackend,
    prompt: list[int],
    num_draft_tokens: int,
    sampling: SamplingParams | None,
) -> None:
    known = [i for i, token in enumerate(target.vocab.tokens) if token is not None]
    ids = [known[i % len(known)] for i in prompt]
    try:
        drafter = TranslatingDrafter(draft, target.vocab, keep_caches=1)
    except VocabularyMismatchError:
        assume(False)
    plain = SpeculativeDecoder(target).generate(ids, max_new_tokens=24, sampling=sampling)
    decoder = SpeculativeDecoder(target, Watched(drafter), num_draft_tokens=num_draft_tokens)
    for _ in range(2):  # the second reads what is kept of the first
        result = decoder.generate(ids, max_new_tokens=24, sampling=sampling)
        assert result.token_ids == plain.token_ids
        assert result.finish_reason == plain.finish_reason
    decoder.clear()
    assert target.open_caches == draft.open_caches == 0


class Watched(TranslatingDrafter):
    """Sees to it that what the draft's cache holds spells what the target's ids spell."""

    def __init__(self, inner: TranslatingDrafter) -> None:
        self.__dict__ = inner.__dict__

    def propose(self, requests: Any) -> Any:
        drafts = super().propose(requests)
        for request in requests:
            state, (ours, theirs) = request.state, self.spellers
            if state.reason is None:
                text = b"".join(map(ours.spell, request.ids))
                read = b"".join(map(theirs.spell, state.text.tokens))
                assert text == read + text[len(text) - state.text.owed :]
                assert state.cache.ids == state.held
        return drafts

    @property
    def spellers(self) -> tuple[Speller, Speller]:
        return self._tables.ours, self._tables.theirs


def test_a_permuted_table_is_drafted_with_as_well_as_a_sibling() -> None:
    target = TableBackend.random(12, seed=1)
    order = np.random.default_rng(0).permutation(12)
    letters = [target.vocab.tokens[i] for i in order]
    draft = TableBackend(target.table[np.ix_(order, order, order)], tokens=letters)
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=4)
    assert isinstance(decoder.drafter, TranslatingDrafter)
    for sampling in (None, SamplingParams(temperature=1.0, seed=7)):
        plain = SpeculativeDecoder(target).generate("cab", max_new_tokens=50, sampling=sampling)
        result = decoder.generate("cab", max_new_tokens=50, sampling=sampling)
        assert result.token_ids == plain.token_ids
        assert result.stats.accept_rate == 1.0


def untaught(backend: TableBackend) -> TableBackend:
    """Without its tokenizer, which knows single letters only."""
    backend.vocab = replace(backend.vocab, encode=None)
    return backend


def word_model(words: Sequence[bytes], order: list[int]) -> TableBackend:
    """Says its words in turn."""
    table = np.zeros((len(words),) * 3, np.float32)
    for one, other in zip(order, order[1:] + order[:1], strict=True):
        table[:, one, other] = 9
    return untaught(TableBackend(table, tokens=words))


WORDS = [b" cat", b" dug", b" hims", b" foy", b" him", b" ca", b"t"]
BYTES = b" cat dug hims foy cat"


def byte_model(text: bytes) -> TableBackend:
    """Knows a text by its last two bytes, and has a token for every byte."""
    table = np.zeros((256, 256, 256), np.float32)
    for one, other, third in zip(text, text[1:], text[2:], strict=False):
        table[one, other, third] += 1
    return TableBackend(table, tokens=[bytes([byte]) for byte in range(256)])


def test_bytes_for_words_and_words_for_bytes() -> None:
    target, draft = word_model(WORDS, [0, 1, 2, 3]), byte_model(BYTES)
    plain = SpeculativeDecoder(target).generate([0, 1], max_new_tokens=30)
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=3)
    result = decoder.generate([0, 1], max_new_tokens=30)
    assert result.token_ids == plain.token_ids
    assert result.stats.accept_rate is not None
    assert result.stats.accept_rate > 0.9
    assert result.stats.accept_length is not None
    assert result.stats.accept_length > 2.5

    every_byte = [bytes([byte]) for byte in range(256)]
    target = word_model([*WORDS[:6], *every_byte], [0, 1, 2, 3])
    other_way = SpeculativeDecoder(draft, target, num_draft_tokens=6)
    plain = SpeculativeDecoder(draft).generate(list(b" cat dug"), max_new_tokens=60)
    result = other_way.generate(list(b" cat dug"), max_new_tokens=60)
    assert result.token_ids == plain.token_ids
    assert result.stats.num_correct_drafts > 20


def test_the_draft_reads_little_in_every_round() -> None:
    target, draft = word_model(WORDS, [0, 1, 2, 3]), byte_model(BYTES)
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=2)
    fed = []
    for count in (200, 400):
        before = draft.fed_ct
        stats = decoder.generate([0], max_new_tokens=count).stats
        fed.append((draft.fed_ct - before) / stats.verify_ct)
        decoder.clear()
    assert fed[1] == pytest.approx(fed[0], rel=0.1)
    assert fed[1] < 30


@pytest.mark.parametrize("length", [100, 600, 1200])
def test_a_long_prompt_is_read_once(length: int) -> None:
    """In chunks, so that the drafter hears of beginnings of what it has heard of."""
    target = TableBackend.random(12, seed=1, max_context=2000)
    order = np.arange(12)[::-1]
    draft = TableBackend(
        target.table[np.ix_(order, order, order)],
        tokens=[target.vocab.tokens[i] for i in order],
        max_context=max(length, 300) + 40,
    )
    beside = [[n % 12 for n in range(300)], [5 * n % 12 for n in range(length)]]
    for prompts in (beside[1:], beside):
        decoder = SpeculativeDecoder(target, draft, num_draft_tokens=3, keep_caches=0)
        assert isinstance(decoder.drafter, TranslatingDrafter)
        before = draft.fed_ct
        results = decoder.generate_batch(prompts, max_new_tokens=10)
        assert all(r.stats.accept_rate == 1 and r.stats.reason is None for r in results)
        assert draft.fed_ct - before <= sum(map(len, prompts)) + 12 * len(prompts)


def test_a_character_in_parts_is_waited_for() -> None:
    """The target writes bytes, and the draft knows the character only as a whole."""
    accent = "é".encode()
    words = [b"a", accent[:1], accent[1:], b"b", b"c", b"d"]
    target = word_model(words, [0, 1, 2, 3])
    draft = word_model([b"b", accent, b"a", b"c", b"d"], [2, 1, 0])
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=4)
    result = decoder.generate([0], max_new_tokens=40)
    assert result.token_ids == SpeculativeDecoder(target).generate([0], max_new_tokens=40).token_ids
    assert result.stats.reason is None
    assert result.stats.num_correct_drafts > 0
    assert result.stats.verify_ct < result.stats.target_forward_ct
    assert result.stats.draft_forward_ct == 4 * result.stats.verify_ct


def test_what_can_never_be_spelled_ends_the_drafts_and_is_named() -> None:
    target = word_model([b"a", b"b", b"z", b"c"], [0, 1, 2, 3])
    draft = word_model([b"c", b"b", b"a"], [2, 1, 0])
    result = SpeculativeDecoder(target, draft, num_draft_tokens=2).generate([0], max_new_tokens=99)
    plain = SpeculativeDecoder(target).generate([0], max_new_tokens=99)
    assert result.token_ids == plain.token_ids
    assert result.stats.speculative
    assert result.stats.reason is not None
    assert "the text holds b'zcabzcab', which no tokens of the draft spell" in result.stats.reason


def test_a_short_context_ends_the_drafts_in_the_drafts_own_tokens() -> None:
    target, draft = word_model(WORDS, [0, 1, 2, 3]), byte_model(BYTES)
    draft.max_context = 40
    result = SpeculativeDecoder(target, draft, num_draft_tokens=2).generate([0], max_new_tokens=40)
    plain = SpeculativeDecoder(target).generate([0], max_new_tokens=40)
    assert result.token_ids == plain.token_ids
    assert result.stats.speculative
    assert "the draft's context of 40 tokens is full" in (result.stats.reason or "")


def test_too_little_in_common_is_refused_with_the_numbers() -> None:
    target = vocabulary(b"ab", b"cd", b"ef", b"gh", b"<s>", special_ids=frozenset({4}))
    draft = model([b"a", b"b", b"xx", b"<s>"])
    message = r"of the target's 4 tokens the draft has 0 and can spell 1, and 50% are needed"
    for make in (TranslatingDrafter, model_drafter):
        with pytest.raises(VocabularyMismatchError, match=message):
            make(draft, target)
    assert isinstance(model_drafter(model([b"a", b"b", b"cd", b"q"]), target), TranslatingDrafter)
    assert isinstance(model_drafter(model([b"ab", b"cd", b"ef"]), target), ModelDrafter)


@pytest.mark.parametrize("through_text", [False, True])
def test_the_drafts_end_is_the_targets_end(through_text: bool) -> None:
    draft_words = [b"</s>", *[bytes([byte]) for byte in b" catdughimsfoy"]]
    target = word_model([*WORDS, b"<end>"], [0, 1, 2, 7])
    if not through_text:
        draft_words[1:] = WORDS
    target = TableBackend(target.table, tokens=target.vocab.tokens, eos_ids=[7])
    table = np.zeros((len(draft_words),) * 3)
    spelled = Speller(vocabulary(*draft_words)).fewest(b" cat dug hims")[0]
    for one, other, third in zip([spelled[0], *spelled], spelled, [*spelled[1:], 0], strict=False):
        table[one, other, third] = 9
    draft = TableBackend(table, tokens=draft_words, eos_ids=[0])
    result = SpeculativeDecoder(target, draft, num_draft_tokens=8).generate([0, 1])
    assert (result.token_ids, result.finish_reason) == ([2, 7], "eos")
    assert result.stats.num_correct_drafts >= 2  # what is drafted behind the end counts too


@pytest.mark.parametrize("verification", ["rejection", "block"])
@pytest.mark.parametrize("kind", ["intersection", "text"])
def test_the_papers_rules_keep_the_targets_law(verification: Any, kind: str) -> None:
    """Counts of all texts of three tokens against the exact law, by a chi-square test."""
    words = [b"a", b"b", b"ab"]
    target = model(words, 3, warmth=0.7)
    draft = model([b"ab", b"b", b"a", b"ba"] if kind == "intersection" else [b"b", b"a"], 5)
    decoder = SpeculativeDecoder(
        target, draft, num_draft_tokens=2, verification=verification, keep_caches=0
    )
    assert isinstance(decoder.drafter, TranslatingDrafter)
    probs = np.exp(target.table)
    probs /= probs.sum(axis=-1, keepdims=True)
    prompt = [2, 2] if kind == "text" else [2, 0]
    expected = {
        (i, j, k): probs[prompt[0], prompt[1], i] * probs[prompt[1], i, j] * probs[i, j, k]
        for i in range(3)
        for j in range(3)
        for k in range(3)
    }
    count, stood, proposed, counts = 1500, 0, 0, Counter[tuple[int, ...]]()
    for seed in range(count):
        result = decoder.generate(
            prompt, max_new_tokens=3, sampling=SamplingParams(temperature=1.0, seed=seed)
        )
        counts[tuple(result.token_ids)] += 1
        proposed += result.stats.num_proposed_drafts
        stood += result.stats.num_correct_drafts
    assert 0 < stood < proposed
    squares = [(counts[text] - count * p) ** 2 / (count * p) for text, p in expected.items()]
    assert sum(squares) < 26 + 4.5 * (2 * 26) ** 0.5


def test_a_text_that_cant_be_followed_leaves_the_kept_cache_to_one_that_can() -> None:
    target, draft = model([b"a", b"b", b"ab", b"z"]), model([b"b", b"a", b"ab"], 1)
    drafter = TranslatingDrafter(draft, target.vocab, keep_caches=1)
    text = [0, 1] * 20
    state = drafter.open(text)
    drafter.catch_up(state, text)
    drafter.close(state)
    assert draft.open_caches == 1
    for prompt in ([0, 1] + [3] * 70, text):
        state = drafter.open(prompt)
        lag = drafter.lag(state, prompt)
        drafter.close(state)
        assert lag < 4
    assert state.reason is None


def test_a_round_that_is_broken_off_leaves_no_cache() -> None:
    target = model([b"a", b"b", b"ab"])

    class Fails(TableBackend):
        def forward(self, batch: Any) -> Any:
            rows = super().forward(batch)
            if self.forward_ct == 3:
                raise RuntimeError("broken off")
            return rows

    draft = Fails(model([b"b", b"a", b"ab"], 1).table, tokens=[b"b", b"a", b"ab"])
    drafter = TranslatingDrafter(draft, target.vocab, keep_caches=1)
    decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=4)
    with pytest.raises(RuntimeError, match="broken off"):
        decoder.generate([0, 1, 0, 1], max_new_tokens=9)
    assert draft.open_caches == 0


def test_one_bos_is_enough() -> None:
    tokens = [b"<s>", b"a", b"b", b"ab"]
    target = model(tokens, bos_id=0)
    draft = model([b"b", b"a", b"ab", b"<s>"], 1, bos_id=3)
    for prompt in ([0, 1, 2], [1, 2]):
        drafter = TranslatingDrafter(draft, target.vocab)
        state = drafter.open(prompt)
        assert state.text.tokens == [3, 1, 0][len([0, 1, 2]) - len(prompt) :]


@pytest.mark.usefixtures("one_thread")
def test_a_real_tokenizer_and_others(smollm2_gguf: Any, tiny_llama: Any) -> None:
    """SmolLM2 with a draft that has a few merges of its own, one of bytes, and the other way."""
    pytest.importorskip("llama_cpp")
    from specdec_llama_cpp import LlamaCppBackend

    text = "Once upon a time, déjà vu: 你好, and 12,345 cats.\n\n  def f(x): return x"
    with (
        LlamaCppBackend(smollm2_gguf, n_ctx=512, n_threads=1) as real,
        LlamaCppBackend(tiny_llama.gguf, n_threads=1) as tiny,
    ):
        in_bytes = byte_model(text.encode())
        assert isinstance(model_drafter(tiny, in_bytes.vocab), ModelDrafter)  # ids are bytes first
        sampled = SamplingParams(temperature=0.8, seed=1, top_p=0.9)
        pairs: list[Any] = [(real, tiny, None), (real, in_bytes, sampled), (tiny, real, sampled)]
        if find_spec("transformers") and find_spec("torch"):
            from specdec_hf import HFBackend

            pairs[0] = real, HFBackend(tiny_llama.folder, device="cpu"), None
        for target, draft, sampling in pairs:
            options: Any = {"max_new_tokens": 6, "sampling": sampling}
            plain = SpeculativeDecoder(target).generate(text, **options)
            decoder = SpeculativeDecoder(target, draft, num_draft_tokens=2)
            assert isinstance(decoder.drafter, TranslatingDrafter)
            result = decoder.generate(text, **options)
            assert result.token_ids == plain.token_ids
            assert result.stats.reason is None
            assert result.stats.num_proposed_drafts > 0


def test_the_window_over_the_end_of_a_real_text(tiny_llama: Any) -> None:
    """Token by token gives what the whole text at once gives, but for a few at the seams."""
    pytest.importorskip("llama_cpp")
    from specdec_llama_cpp import LlamaCppBackend

    text = ("the man and the sea, in other words; " * 12 + "  éé ").encode()
    target = model([bytes([byte]) for byte in sorted(set(text))])
    ids = Speller(target.vocab).fewest(text)[0]
    with LlamaCppBackend(tiny_llama.gguf, n_threads=1) as draft:
        drafter = TranslatingDrafter(draft, target.vocab)
        whole, grown = drafter.open(ids), drafter.open(ids[:1])
        assert draft.vocab.encode is not None
        assert whole.text.tokens == draft.vocab.encode(text.decode())
        for end in range(2, len(ids) + 1):
            drafter.commit(grown, ids[:end])
            assert len(grown.text.tokens) - grown.text.settled <= 128
        assert grown.text.tokens == whole.text.tokens


def test_a_report_says_how_the_vocabularies_go_together() -> None:
    target = model([b"a", b"b", b"ab", b"c"], eos_ids=[3])
    drafts = {
        "the same, 4 ids are shared": target,
        "another tokenizer: 2 tokens of the target's 4 (50%) are in the draft's table too; "
        "drafts are translated": model([b"b", b"a", b"ba"]),
    }
    for words, draft in drafts.items():
        report = list(examine(target, draft))[-1]
        assert (report.problem, report.vocabularies) == (None, words)
        assert report.costs is not None
        assert report.costs.draft_ms is not None
    bad = list(examine(target, model([b"x", b"y", b"z"])))[-1]
    assert "of the target's 3 tokens the draft has 0 and can spell 0" in (bad.problem or "")
    assert bad.verdict[0].startswith("this pair can't work: target and draft have different")


def test_rows_of_a_device_are_translated_where_they_are() -> None:
    torch = pytest.importorskip("torch")
    target = vocabulary(b"a", b"b", b"<s>", b"c", special_ids=frozenset({2}))
    drafter = TranslatingDrafter(model([b"c", b"x", b"a", b"b"]), target)
    row = np.array([[3, 9, 1, 2]], np.float32)
    there = torch.tensor(row, requires_grad=True)  # such as numpy can't look at
    for each in (row, there, there):
        found = drafter._translated(each)
        assert type(found) is type(each)
        assert found.tolist() == [[1, 2, -np.inf, 3]]
    assert row.tolist() == [[3, 9, 1, 2]]


def test_what_a_processor_forces_is_proposed_though_the_draft_lacks_it() -> None:
    words = [b"a", b"b", b"ab", b"c", b"cc", b"bc"]
    target, draft = model(words, 1), model([b"c", b"cc", b"bc", b"b", b"a"], 2)

    def force(ids: Sequence[int], row: Any) -> Any:
        return np.where(np.arange(len(row)) == (2 if len(ids) % 3 == 0 else 4), 0.0, -np.inf)

    sampling = SamplingParams(processors=[force])
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=4)
    result = decoder.generate([0, 1, 3, 4, 5, 4] * 4, max_new_tokens=12, sampling=sampling)
    assert result.token_ids == [2, 4, 4] * 4
    assert result.stats.accept_rate == 1.0


def test_text_without_spaces_is_settled_between_characters() -> None:
    """So that the rest is text, and the draft's tokenizer can be asked about it."""
    asked: list[str] = []
    word = "你好".encode()

    def encode(text: str) -> list[int]:
        asked.append(text)
        return list(text.encode())

    draft = model([bytes([byte]) for byte in range(256)][:2])
    draft.vocab = vocabulary(*[bytes([byte]) for byte in range(256)], encode=encode)
    drafter = TranslatingDrafter(draft, vocabulary(word, word[:1], word[1:]))
    state = drafter.open([0] * 60)
    for count in range(60, 200):
        asked.clear()
        drafter.commit(state, [0] * count)
        assert all(len(text.encode()) < 700 for text in asked)
        assert set("".join(asked)) <= set("你好")
    assert state.text.tokens == list(word * 199)
    assert state.text.settled > 6 * 100
