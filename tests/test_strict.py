"""With ``strict=True`` speculative decoding equals plain decoding where wide forwards round."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from typing_extensions import override

from specdec import SamplingParams, SpeculativeDecoder
from specdec.backend import ModelBackend, Span
from specdec.testing import TableBackend
from specdec.vocab import Vocabulary


class RoundingTable(TableBackend):
    """Wide forwards are off, and so is what comes behind what they wrote."""

    noise = 0.3

    @override
    def forward(self, batch: Sequence[Span]) -> list[NDArray[np.float32]]:
        rows = super().forward(batch)
        for number, (span, mine) in enumerate(zip(batch, rows, strict=True)):
            cache: Any = span.cache
            inexact = getattr(cache, "inexact_from", len(cache))
            inexact = min(inexact, len(cache))
            if len(span.tokens) > 1 and span.num_logits:
                inexact = min(inexact, len(cache) - len(span.tokens))
            cache.inexact_from = inexact
            if inexact < len(cache):
                rng = np.random.default_rng(sum(cache.ids) + len(cache))
                off = rng.uniform(-self.noise, self.noise, mine.shape)
                rows[number] = mine + off.astype(np.float32)
        return rows

    @override
    def crop(self, cache: Any, length: int) -> None:
        super().crop(cache, length)
        if getattr(cache, "inexact_from", length) >= length:
            cache.inexact_from = length


def texts(
    decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], **options: Any
) -> list[list[int]]:
    return [decoder.generate(prompt, **options).token_ids for prompt in prompts]


@given(seed=st.integers(0, 10_000), length=st.integers(1, 6), temperature=st.sampled_from([0, 0.8]))
def test_the_text_is_plain_decodings(seed: int, length: int, temperature: float) -> None:
    target = RoundingTable.random(12, seed=seed)
    options: dict[str, Any] = {
        "max_new_tokens": 24,
        "sampling": SamplingParams(temperature=temperature, seed=seed),
    }
    expected = texts(SpeculativeDecoder(target), [[1, 2]], **options)
    for num_draft_tokens in (length, "auto"):
        decoder = SpeculativeDecoder(
            target, target.sibling(0.2), num_draft_tokens=num_draft_tokens, strict=True
        )
        assert texts(decoder, [[1, 2]], **options) == expected
    assert target.open_caches == 0


def test_without_it_texts_part() -> None:
    parted = 0
    for seed in range(40):
        target = RoundingTable.random(12, seed=seed)
        plain = SpeculativeDecoder(target).generate([1, 2], max_new_tokens=24)
        wide = SpeculativeDecoder(target, target, num_draft_tokens=4)
        parted += wide.generate([1, 2], max_new_tokens=24).token_ids != plain.token_ids
    assert parted > 4


def test_rewritten_tokens_have_the_log_probabilities_of_plain_decoding() -> None:
    """Every second choice is close, so every round is rewritten, with the clear one before it."""
    table = np.full((6, 6, 6), -8.0)
    for token in range(6):
        table[:, token, (token + 1) % 6] = 4.0
        table[:, token, (token + 3) % 6] = 3.9 if token % 2 else 0.0
    target = RoundingTable(table)
    decoder = SpeculativeDecoder(target, TableBackend(table), num_draft_tokens=4, strict=True)
    result = decoder.generate([1, 2], max_new_tokens=40, logprobs=2)
    plain = SpeculativeDecoder(target).generate([1, 2], max_new_tokens=40, logprobs=2)
    assert result.token_ids == plain.token_ids
    assert result.stats.num_correct_drafts >= 10
    assert result.logprobs == plain.logprobs


def test_it_costs_nothing_where_nothing_rounds() -> None:
    target = TableBackend.random(12, seed=1)
    decoder = SpeculativeDecoder(target, target.sibling(0.1), num_draft_tokens=3, strict=True)
    decoder.generate([1, 2], max_new_tokens=4)  # measures
    before = target.forward_ct
    stats = decoder.generate([1, 2], max_new_tokens=24).stats
    assert stats.strict_ct == 0
    assert target.forward_ct - before == 1 + stats.target_forward_ct


def compare(target: ModelBackend, draft: ModelBackend, prompts: list[list[int]]) -> None:
    """Equal with it, not without."""
    expected = texts(SpeculativeDecoder(target), prompts, max_new_tokens=64)
    found = {
        strict: texts(
            SpeculativeDecoder(target, draft, num_draft_tokens=4, strict=strict),
            prompts,
            max_new_tokens=64,
        )
        for strict in (True, False)
    }
    assert found[True] == expected
    assert found[False] != expected


@pytest.mark.usefixtures("one_thread")
def test_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from specdec_hf import HFBackend

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
    )
    vocab = Vocabulary(size=300, tokens=[b"%d " % i for i in range(300)], eos_ids=frozenset())
    model = transformers.LlamaForCausalLM(config).eval().to(torch.bfloat16)
    target = HFBackend(model=model, vocab=vocab)
    rng = np.random.default_rng(1)
    compare(target, target, rng.integers(3, 300, (50, 12)).tolist())


def test_a_quantised_model_with_default_attention(smollm2_gguf: Path) -> None:
    """Some of the 50 prompts with which ``bench/strict.py`` takes minutes."""
    pytest.importorskip("llama_cpp")
    from specdec_llama_cpp import LlamaCppBackend

    target = LlamaCppBackend(smollm2_gguf, flash_attention=False, n_threads=2)
    draft = LlamaCppBackend(smollm2_gguf)
    rng = np.random.default_rng(1)
    compare(target, draft, rng.integers(3, 40_000, (4, 12)).tolist())


@pytest.mark.parametrize(
    "params", [{"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"repetition_penalty": 1.3}]
)
def test_behind_filters_and_penalties_it_decodes_plainly(params: dict[str, Any]) -> None:
    for seed in range(8):
        target = RoundingTable.random(12, seed=seed)
        sampling = SamplingParams(temperature=1.0, seed=seed, **params)
        options: dict[str, Any] = {"max_new_tokens": 24, "sampling": sampling}
        result = SpeculativeDecoder(target, target, strict=True).generate([1, 2], **options)
        assert result.token_ids == SpeculativeDecoder(target).generate([1, 2], **options).token_ids
        assert "strict decoding can't tell" in str(result.stats.reason)


def test_an_interrupted_measurement_is_made_again() -> None:
    target = RoundingTable.random(12, seed=1)
    decoder = SpeculativeDecoder(target, target, num_draft_tokens=4, strict=True)
    target.fail_at, target.fault = target.call_ct + 40, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        decoder.generate([1, 2], max_new_tokens=24)
    expected = SpeculativeDecoder(target).generate([1, 2], max_new_tokens=24).token_ids
    assert decoder.generate([1, 2], max_new_tokens=24).token_ids == expected


def test_the_papers_rules_have_other_texts() -> None:
    target = TableBackend.random(12, seed=1)
    with pytest.raises(ValueError, match='verification="block" another one'):
        SpeculativeDecoder(target, target, strict=True, verification="block")
