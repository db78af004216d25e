"""Processors of transformers answer here what they answer there, with and without a draft."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import ModelBackend, SamplingParams, SpeculativeDecoder
from specdec.testing import TableBackend

pytestmark = pytest.mark.usefixtures("one_thread")

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from specdec_hf import HFBackend, from_transformers  # noqa: E402 - needs both runtimes

WIDTH = 12
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 1, 4, 1]
MAKERS: dict[str, Callable[[], Any]] = {
    "no repeat": lambda: transformers.NoRepeatNGramLogitsProcessor(3),
    "min length": lambda: transformers.MinLengthLogitsProcessor(20, 5, "cpu"),
    "suppress": lambda: transformers.SuppressTokensLogitsProcessor([2, 7], "cpu"),
    "bias": lambda: transformers.SequenceBiasLogitsProcessor({(7,): 2.5, (4, 1, 8): -4.0}),
    "penalty": lambda: transformers.RepetitionPenaltyLogitsProcessor(1.7),
}


def all_of_them() -> Any:
    return transformers.LogitsProcessorList([make() for make in MAKERS.values()])


def some_row() -> Any:
    return np.random.default_rng(7).standard_normal(WIDTH).astype(np.float32)


@pytest.mark.parametrize("make", [*MAKERS.values(), all_of_them], ids=[*MAKERS, "all"])
def test_the_answer_is_that_of_transformers(make: Callable[[], Any]) -> None:
    row = some_row()
    expected = make()(torch.tensor([IDS]), torch.tensor(row)[None])[0].numpy()
    assert (expected != row).any()
    for given_row in (row, torch.tensor(row)):
        ids = list(IDS)
        answer = from_transformers(make())(ids, given_row)
        assert type(answer) is type(given_row)
        assert answer.dtype == given_row.dtype
        np.testing.assert_array_equal(np.asarray(answer), expected)
        np.testing.assert_array_equal(np.asarray(given_row), some_row())
        assert ids == IDS


@pytest.mark.gpu("torch")
def test_a_row_on_the_gpu_stays_there() -> None:
    row = torch.tensor(some_row(), device="cuda")
    answer = from_transformers(transformers.NoRepeatNGramLogitsProcessor(3))(IDS, row)
    assert answer.device == row.device
    assert torch.isinf(answer).any()


def test_one_that_writes_into_its_scores_leaves_the_row_alone() -> None:
    def ban_first(ids: Any, scores: Any) -> Any:
        assert ids.dtype == torch.int64
        scores[:, 0] = -torch.inf
        return scores

    row = some_row()
    row.flags.writeable = False
    for given_row in (row, torch.tensor(row)):
        assert from_transformers(ban_first)(IDS, given_row)[0] == -np.inf
        assert given_row[0] == some_row()[0]


def test_what_is_no_processor_is_refused() -> None:
    no_processor: Any = 3
    with pytest.raises(TypeError, match="callable"):
        from_transformers(no_processor)


def repeats(ids: Sequence[int], length: int = 3) -> bool:
    grams = [tuple(ids[i : i + length]) for i in range(len(ids) + 1 - length)]
    return len(set(grams)) < len(grams)


@settings(max_examples=40)
@given(
    st.integers(0, 9),
    st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.8]),
)
def test_a_table_and_any_draft_of_it(
    seed: int, noise: float, num_draft_tokens: int, temperature: float
) -> None:
    target = TableBackend.random(9, seed=seed, eos_ids=[0])
    processors = [
        from_transformers(transformers.NoRepeatNGramLogitsProcessor(3)),
        from_transformers(transformers.MinLengthLogitsProcessor(12, 0, "cpu")),
        from_transformers(transformers.SuppressTokensLogitsProcessor([4], "cpu")),
    ]
    sampling = SamplingParams(temperature=temperature, seed=seed, processors=processors)
    plain = SpeculativeDecoder(target).generate([1, 2], max_new_tokens=40, sampling=sampling)
    assert not repeats([1, 2, *plain.token_ids])
    assert len(plain.token_ids) > 10
    assert 4 not in plain.token_ids
    decoder = SpeculativeDecoder(target, target.sibling(noise), num_draft_tokens=num_draft_tokens)
    result = decoder.generate([1, 2], max_new_tokens=40, sampling=sampling)
    assert result.token_ids == plain.token_ids
    assert result.finish_reason == plain.finish_reason
    if noise == 0:
        assert result.stats.accept_rate == 1


@pytest.fixture(scope="module")
def tiny(tiny_llama: Any, tiny_draft: Any) -> Iterator[dict[str, ModelBackend]]:
    llama_cpp = pytest.importorskip("specdec_llama_cpp")
    with (
        llama_cpp.LlamaCppBackend(tiny_llama.gguf, n_threads=1) as target,
        llama_cpp.LlamaCppBackend(tiny_draft.gguf, n_threads=1) as draft,
    ):
        yield {
            "hf target": HFBackend(tiny_llama.folder),
            "hf draft": HFBackend(tiny_draft.folder),
            "gguf target": target,
            "gguf draft": draft,
        }


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("draft", ["hf draft", "gguf draft"])
@pytest.mark.parametrize("target", ["hf target", "gguf target"])
def test_tiny_llamas_in_every_mix(
    tiny: dict[str, ModelBackend], target: str, draft: str, temperature: float
) -> None:
    backend = tiny[target]
    assert backend.vocab.encode is not None
    prompt = backend.vocab.encode("the sea and the sea")
    free = SpeculativeDecoder(backend).generate(prompt, max_new_tokens=40)
    bias = transformers.SequenceBiasLogitsProcessor({(token,): 3.0 for token in prompt})
    processors = [
        from_transformers(bias),
        from_transformers(transformers.NoRepeatNGramLogitsProcessor(2)),
    ]
    sampling = SamplingParams(temperature=temperature, seed=5, processors=processors)
    plain = SpeculativeDecoder(backend).generate(prompt, max_new_tokens=40, sampling=sampling)
    assert plain.token_ids != free.token_ids
    assert not repeats(plain.token_ids, 2)
    rates = []
    for num_draft_tokens in (1, 3, 8):
        decoder = SpeculativeDecoder(backend, tiny[draft], num_draft_tokens=num_draft_tokens)
        result = decoder.generate(prompt, max_new_tokens=40, sampling=sampling)
        assert result.token_ids == plain.token_ids
        rates.append(result.stats.accept_rate or 0.0)
    assert 0.2 < sum(rates) / len(rates) < 1


def test_a_processor_may_name_ids_that_the_draft_lacks() -> None:
    """Processors see rows of the target's width, whoever's rows they are."""

    def forbids_the_last(_ids: Sequence[int], row: Any) -> Any:
        assert row.shape == (9,)
        return np.where(np.arange(9) == 8, -np.inf, row)

    target = TableBackend.random(9, seed=2)
    narrow = TableBackend(target.table[:6, :6, :6])
    sampling = SamplingParams(temperature=1.0, seed=4, processors=[forbids_the_last])
    plain = SpeculativeDecoder(target).generate([1], max_new_tokens=20, sampling=sampling)
    result = SpeculativeDecoder(target, narrow).generate([1], max_new_tokens=20, sampling=sampling)
    assert result.token_ids == plain.token_ids
    assert 8 not in plain.token_ids
