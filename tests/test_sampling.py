"""Sampling: the transforms, the law, and that no draft can change what is drawn."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specdec import (
    Draft,
    Drafter,
    DraftRequest,
    GenerationResult,
    LogitsError,
    SamplingParams,
    SpeculativeDecoder,
    Verification,
)
from specdec.sampling import Sampler
from specdec.testing import TableBackend
from specdec.vocab import Vocabulary

Rows = NDArray[np.floating[Any]]


def sampler(
    params: SamplingParams, size: int = 50, prompt_length: int = 0, **options: Any
) -> Sampler:
    stop_token_ids = options.pop("stop_token_ids", ())
    vocab = Vocabulary(size, [b"x"] * size, **{"eos_ids": frozenset(), **options})
    return Sampler(params, vocab, prompt_length, stop_token_ids)


def random_rows(seed: int, count: int = 3, size: int = 50) -> NDArray[np.float32]:
    return (3 * np.random.default_rng(seed).standard_normal((count, size))).astype(np.float32)


def as_numpy(rows: Any) -> Rows:
    return rows if isinstance(rows, np.ndarray) else np.asarray(rows.numpy())


# Values


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"temperature": -0.1}, ValueError, "temperature must be finite and at least 0, not -0.1"),
        ({"temperature": math.nan}, ValueError, "temperature must be .*, not nan"),
        ({"temperature": math.inf}, ValueError, "temperature must be .*, not inf"),
        ({"temperature": "1"}, TypeError, "temperature must be a number, not '1'"),
        ({"temperature": True}, TypeError, "temperature must be a number, not True"),
        ({"temperature": None}, TypeError, "temperature must be a number, not None"),
        ({"top_p": 0}, ValueError, "top_p must be above 0 and at most 1, not 0"),
        ({"top_p": 1.1}, ValueError, "top_p must be above 0 and at most 1, not 1.1"),
        ({"top_p": math.nan}, ValueError, "top_p must be .*, not nan"),
        ({"top_k": -1}, ValueError, "top_k must be at least 0, not -1"),
        ({"top_k": 1.5}, TypeError, "top_k must be a whole number, not 1.5"),
        ({"min_p": -0.1}, ValueError, "min_p must be at least 0 and at most 1, not -0.1"),
        ({"min_p": 1.01}, ValueError, "min_p must be at least 0 and at most 1, not 1.01"),
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty must be finite and above"),
        ({"presence_penalty": math.inf}, ValueError, "presence_penalty must be finite, not inf"),
        ({"frequency_penalty": -math.inf}, ValueError, "frequency_penalty must be finite"),
        ({"min_tokens": -1}, ValueError, "min_tokens must be at least 0, not -1"),
        ({"seed": 0.5}, TypeError, "seed must be a whole number, not 0.5"),
        ({"processors": [3]}, TypeError, r"processors must be a list of callables .*, not \[3\]"),
        ({"logit_bias": {-1: 1.0}}, ValueError, "an id of logit_bias must be at least 0, not -1"),
        ({"logit_bias": {"a": 1.0}}, TypeError, "an id of logit_bias must be a whole number"),
        ({"logit_bias": {2: math.nan}}, ValueError, r"logit_bias\[2\] must be .*, not nan"),
        ({"logit_bias": {2: math.inf}}, ValueError, r"logit_bias\[2\] must be .*, not inf"),
        ({"logit_bias": [1]}, TypeError, r"logit_bias must be .*, not \[1\]"),
        ({"heat": 1}, TypeError, "unexpected keyword argument 'heat'"),
    ],
)
def test_bad_values_are_named(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        SamplingParams(**options)


def test_a_bias_past_the_vocabulary_is_an_error_before_any_work() -> None:
    target = TableBackend.random(6, padding=2)
    decoder = SpeculativeDecoder(target, target.sibling(0.1))
    params = SamplingParams(logit_bias={1: 1.0, 8: 2.0})
    for call in (decoder.generate, decoder.stream):
        with pytest.raises(ValueError, match=r"logit_bias names id 8, .* ids 0 to 7"):
            call([1], sampling=params)
    with pytest.raises(ValueError, match="logit_bias names id 8"):
        decoder.generate_batch([[1], [2]], sampling=[SamplingParams(), params])
    assert target.call_ct == 0


@pytest.mark.parametrize("sampling", ["hot", 0.7, {"temperature": 1}])
def test_sampling_must_be_params(sampling: Any) -> None:
    decoder = SpeculativeDecoder(TableBackend.random(6))
    with pytest.raises(TypeError, match="sampling must be SamplingParams, not"):
        decoder.generate([1], sampling=sampling)


# Transforms

TEMPERATURES = st.sampled_from([0.3, 0.7, 1.0, 1.5])
FILTERS = {
    "top_k": st.sampled_from([1, 2, 7, 49, 50, 99]),
    "top_p": st.sampled_from([0.01, 0.3, 0.77, 0.95, 0.999]),
    "min_p": st.sampled_from([1e-4, 0.05, 0.5, 1.0]),
}


@given(
    seed=st.integers(0, 2**32),
    filters=st.fixed_dictionaries({"temperature": TEMPERATURES}, optional=FILTERS),
)
def test_filters_are_those_of_transformers(seed: int, filters: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rows = random_rows(seed)
    warpers = {
        "temperature": transformers.TemperatureLogitsWarper,
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
        "min_p": transformers.MinPLogitsWarper,
    }
    expected = torch.from_numpy(rows.copy())
    for name, warper in warpers.items():
        if name in filters:
            expected = warper(filters[name])(None, expected)
    ours = sampler(SamplingParams(**filters))
    before = rows.copy()
    got = ours.filtered(rows)
    np.testing.assert_array_equal(rows, before)
    np.testing.assert_array_equal(np.isfinite(got), torch.isfinite(expected).numpy())
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-6)
    np.testing.assert_allclose(ours.filtered(torch.from_numpy(rows)).numpy(), got, rtol=1e-6)


@given(
    seed=st.integers(0, 2**32),
    penalty=st.sampled_from([0.5, 1.1, 2.0]),
    ids=st.lists(st.integers(0, 49), min_size=1, max_size=20),
)
def test_the_repetition_penalty_is_that_of_transformers(
    seed: int, penalty: float, ids: list[int]
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    row = random_rows(seed, 1)
    theirs = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    expected = theirs(torch.tensor([ids]), torch.from_numpy(row.copy())).numpy()
    got = sampler(SamplingParams(repetition_penalty=penalty)).adjusted(row, ids)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def penalised(row: Rows, params: SamplingParams, ids: Sequence[int], output: Sequence[int]) -> Rows:
    """The transforms of logits, token by token."""
    result, counts = np.array(row, np.float64), Counter(output)
    for token in range(len(row)):
        score = result[token] + params.logit_bias.get(token, 0)
        if token in ids:
            penalty = params.repetition_penalty
            score = score / penalty if score > 0 else score * penalty
        score -= params.presence_penalty * (token in counts)
        result[token] = score - params.frequency_penalty * counts[token]
    return result


PENALTIES: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.sampled_from([1.0, 0.7, 1.3]),
    "presence_penalty": st.sampled_from([0.0, -0.5, 0.8]),
    "frequency_penalty": st.sampled_from([0.0, -0.2, 0.4]),
}


@given(
    seed=st.integers(0, 2**32),
    penalties=st.fixed_dictionaries({}, optional=PENALTIES),
    bias=st.dictionaries(st.integers(0, 5), st.floats(-3, 3), max_size=3),
    prompt=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    output=st.lists(st.integers(0, 5), max_size=8),
    drafts=st.lists(st.integers(0, 5), max_size=4),
    in_torch=st.booleans(),
)
def test_penalties_and_bias_do_what_they_say(
    seed: int,
    penalties: dict[str, Any],
    bias: dict[int, float],
    prompt: list[int],
    output: list[int],
    drafts: list[int],
    in_torch: bool,
) -> None:
    """Every row by the ids before it, those of the draft too; also where rows are not numpy's."""
    params = SamplingParams(logit_bias=bias, **penalties)
    logits: Any = random_rows(seed, len(drafts) + 1, 6)
    expected = [
        penalised(row, params, [*prompt, *output, *drafts[:i]], [*output, *drafts[:i]])
        for i, row in enumerate(logits)
    ]
    with pytest.MonkeyPatch.context() as patch:
        if in_torch:
            logits = pytest.importorskip("torch").from_numpy(logits)
            patch.setattr("specdec.sampling.on_host", lambda rows: rows)
        before = as_numpy(logits).copy()
        ids = [*prompt, *output]
        got = sampler(params, 6, len(prompt)).adjusted(logits, ids, drafts)
        last = sampler(params, 6, len(prompt)).adjusted(logits[-1:], ids, drafts)
    assert type(got) is type(logits)
    np.testing.assert_array_equal(as_numpy(logits), before)
    assert ids == [*prompt, *output]
    np.testing.assert_allclose(as_numpy(got), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(as_numpy(last), as_numpy(got)[-1:])


@given(seed=st.integers(0, 2**32), filters=st.fixed_dictionaries({}, optional=FILTERS))
def test_torch_rows_give_the_scores_of_numpy_rows(seed: int, filters: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    rows = random_rows(seed)
    ours = sampler(SamplingParams(temperature=0.8, seed=seed, **filters))
    expected = ours.scores(rows, [1, 2], [3, 4])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.sampling.on_host", lambda rows: rows)
        got = ours.scores(torch.from_numpy(rows), [1, 2], [3, 4])
    assert isinstance(got, torch.Tensor)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 4, "top_p": 0.9, "min_p": 0.1}],
)
@pytest.mark.parametrize("temperature", [1e-30, 1.0])
def test_a_row_without_a_token_stays_one(options: dict[str, Any], temperature: float) -> None:
    """No warning either: warnings are errors here."""
    rows = np.full((2, 50), -np.inf, np.float32)
    rows[1, 7:9] = 1, 2
    scores = sampler(SamplingParams(temperature=temperature, seed=0, **options)).scores(
        rows, [1, 2], [3]
    )
    assert np.isneginf(scores[0]).all()
    assert scores[1].argmax() in (7, 8)
    assert not np.isnan(scores).any()


@given(seed=st.integers(0, 2**32), filters=st.fixed_dictionaries({}, optional=FILTERS))
def test_the_coldest_sampling_is_greedy(seed: int, filters: dict[str, Any]) -> None:
    rows = 30 * random_rows(seed)
    cold = sampler(SamplingParams(temperature=1e-30, seed=seed, **filters))
    scores = cold.scores(rows, [1, 2], [3, 4])
    assert (scores.argmax(1) == rows.argmax(1)).all()
    assert not np.isnan(scores).any()
    assert np.isfinite(scores.max(1)).all()


@pytest.mark.parametrize("top_p", [1e-6, 1e-40, 1e-50, 5e-324])
def test_the_best_token_is_always_left(top_p: float) -> None:
    rows = random_rows(0)
    scores = sampler(SamplingParams(temperature=1, seed=1, top_p=top_p)).scores(
        rows, [1, 2], [3, 4]
    )
    assert (scores.argmax(1) == rows.argmax(1)).all()
    assert np.isfinite(scores.max(1)).all()


@pytest.mark.parametrize("in_torch", [False, True])
def test_min_tokens_holds_back_what_would_end_the_text(in_torch: bool) -> None:
    params = SamplingParams(min_tokens=3)
    ours = sampler(params, 6, 2, eos_ids=frozenset({1}), stop_token_ids={4, 5})
    logits: Any = random_rows(1, 4, 6)
    with pytest.MonkeyPatch.context() as patch:
        if in_torch:
            logits = pytest.importorskip("torch").from_numpy(logits)
            patch.setattr("specdec.sampling.on_host", lambda rows: rows)
        rows = as_numpy(ours.adjusted(logits, [0, 0, 2], [2, 2, 2]))
    held = np.isneginf(rows)
    assert held[:2].nonzero()[1].tolist() == [1, 4, 5] * 2
    assert not held[2:].any()
    for narrow in (1, 3):  # a draft may lack some of them
        ours.adjusted(logits[:1, :narrow], [0, 0, 2])


def test_min_tokens_is_the_least_number_of_tokens() -> None:
    target = TableBackend.random(5, seed=1, eos_ids=[0])
    decoder = SpeculativeDecoder(target, target.sibling(0.3))
    lengths = {
        least: min(
            len(
                decoder.generate(
                    [1],
                    sampling=SamplingParams(
                        temperature=1, seed=seed, min_tokens=least, logit_bias={0: 2.0}
                    ),
                ).token_ids
            )
            for seed in range(40)
        )
        for least in (0, 4, 9)
    }
    assert lengths == {0: 1, 4: 5, 9: 10}


def test_processors_see_what_stands_before_their_row() -> None:
    seen: list[list[int]] = []

    def watch(ids: Sequence[int], row: Any) -> Any:
        seen.append(list(ids))
        return row

    def only_seven(ids: Sequence[int], row: Any) -> Any:
        row[:7] = row[8:] = -math.inf
        return row

    logits = random_rows(1)
    before = logits.copy()
    ours = sampler(SamplingParams(processors=[watch, only_seven]))
    rows = ours.adjusted(logits, [1, 2], [3, 4])
    assert seen == [[1, 2], [1, 2, 3], [1, 2, 3, 4]]
    assert rows.argmax(1).tolist() == [7, 7, 7]
    np.testing.assert_array_equal(logits, before)


# Nothing that a draft does can be seen in the output


def leaning(ids: Sequence[int], row: Any) -> Any:
    """A processor that goes by the ids."""
    row = row + 0.0
    row[sum(ids) % len(row)] += 1.5
    if ids[-1] < len(row):
        row[ids[-1]] -= 2.0
    return row


class Case(NamedTuple):
    target: TableBackend
    draft: TableBackend
    prompt: list[int]
    options: dict[str, Any]


def params_for(size: int) -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([1.0, 0.0, 1e-30, 0.3, 0.7, 1.5]),
        top_k=st.integers(0, size),
        top_p=st.sampled_from([1.0, 0.95, 0.6, 0.1]),
        min_p=st.sampled_from([0.0, 0.02, 0.3]),
        logit_bias=st.dictionaries(st.integers(0, size - 1), st.floats(-3, 3), max_size=2),
        min_tokens=st.integers(0, 6),
        seed=st.integers(-5, 2**65),
        processors=st.sampled_from([(), (leaning,)]),
        **PENALTIES,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(2, 7))
    target = TableBackend.random(
        size,
        seed=draw(st.integers(0, 999)),
        padding=draw(st.integers(0, 2)),
        eos_ids=draw(st.sets(st.integers(0, size - 1), max_size=size // 3)),
        max_context=draw(st.integers(4, 30)),
    )
    known, padding = draw(st.integers(2, size)), draw(st.integers(0, 2))
    noisy = target.sibling(draw(st.sampled_from([0.0, 0.2, 0.7, 5.0]))).table
    table = np.pad(noisy[:known, :known, :known], [(0, 0), (0, 0), (0, padding)])
    draft = TableBackend(table, max_context=draw(st.integers(1, 30)))
    prompt = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4))
    options = {
        "max_new_tokens": draw(st.integers(0, 20)),
        "stop": draw(st.lists(st.text("abcdefg"[:size], min_size=1, max_size=3), max_size=2)),
        "stop_token_ids": draw(st.sets(st.integers(0, size - 1), max_size=size // 3)),
        "logprobs": draw(st.integers(0, 3)),
        "sampling": draw(params_for(size)),
    }
    return Case(target, draft, prompt, options)


def outcome(result: GenerationResult) -> tuple[Any, ...]:
    return result.token_ids, result.text, result.finish_reason, result.seed


def assert_alike(got: GenerationResult, expected: GenerationResult) -> None:
    assert outcome(got) == outcome(expected)
    ours, theirs = got.logprobs or [], expected.logprobs or []
    assert len(ours) == len(theirs) == len(expected.token_ids)
    for mine, plain in zip(ours, theirs, strict=True):
        assert mine.logprob == pytest.approx(plain.logprob, abs=1e-5)
        assert list(mine.top) == list(plain.top)
        assert list(mine.top.values()) == pytest.approx(list(plain.top.values()), abs=1e-5)


@settings(max_examples=200)
@given(case=cases(), num_draft_tokens=st.integers(0, 8))
def test_output_is_plain_samplings(case: Case, num_draft_tokens: int) -> None:
    expected = SpeculativeDecoder(case.target).generate(case.prompt, **case.options)
    for draft in (case.draft, case.target, None):
        decoder = SpeculativeDecoder(case.target, draft, num_draft_tokens=num_draft_tokens)
        assert_alike(decoder.generate(case.prompt, **case.options), expected)
    stream = SpeculativeDecoder(case.target, case.draft).stream(case.prompt, **case.options)
    events = list(stream)
    assert stream.result is not None
    assert_alike(stream.result, expected)
    assert [event.token_id for event in events] == expected.token_ids
    assert "".join(event.text for event in events) == expected.text
    assert [event.logprob for event in events] == [
        own.logprob for own in stream.result.logprobs or []
    ]
    del decoder, stream
    assert case.target.open_caches == case.draft.open_caches == 0


@given(case=cases(), num_draft_tokens=st.integers(1, 8))
def test_logprobs_are_the_models_own(case: Case, num_draft_tokens: int) -> None:
    decoder = SpeculativeDecoder(case.target, case.draft, num_draft_tokens=num_draft_tokens)
    result = decoder.generate(case.prompt, **case.options)
    ids, size = list(case.prompt), len(case.target.vocab.tokens)
    for token, own in zip(result.token_ids, result.logprobs or [], strict=True):
        row = case.target.table[ids[-2] if len(ids) > 1 else ids[-1], ids[-1], :size]
        logprobs = np.log(softmax(row.astype(np.float64)))
        best = np.argsort(-logprobs)[: case.options["logprobs"]].tolist()
        assert own.logprob == pytest.approx(logprobs[token], abs=1e-5)
        assert list(own.top) == best
        assert list(own.top.values()) == pytest.approx(logprobs[best].tolist(), abs=1e-5)
        ids.append(token)


@given(
    case=cases(),
    data=st.data(),
    max_batch=st.integers(1, 4),
    num_draft_tokens=st.integers(0, 6),
)
def test_a_batch_with_params_each_is_its_single_runs(
    case: Case, data: st.DataObject, max_batch: int, num_draft_tokens: int
) -> None:
    size = len(case.target.vocab.tokens)
    each = data.draw(st.lists(params_for(size), min_size=1, max_size=4))
    prompts = [[(3 * n + i) % size for i in range(n % 4 + 1)] for n in range(len(each))]
    options = {name: value for name, value in case.options.items() if name != "sampling"}
    decoder = SpeculativeDecoder(case.target, case.draft, num_draft_tokens=num_draft_tokens)
    alone = [
        decoder.generate(prompt, sampling=params, **options)
        for prompt, params in zip(prompts, each, strict=True)
    ]
    together = decoder.generate_batch(prompts, max_batch=max_batch, sampling=each, **options)
    for got, expected in zip(together, alone, strict=True):
        assert_alike(got, expected)
    for_all = decoder.generate_batch(prompts, sampling=each[0], **options)
    assert_alike(for_all[0], alone[0])


def test_a_batch_wants_as_many_params_as_prompts() -> None:
    decoder = SpeculativeDecoder(TableBackend.random(6))
    with pytest.raises(ValueError, match="sampling has 1 entries for 2 prompts"):
        decoder.generate_batch([[1], [2]], sampling=[SamplingParams()])


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"repetition_penalty": 1.2}])
def test_a_model_as_its_own_draft_is_always_right(options: dict[str, Any]) -> None:
    target, draft = TableBackend.random(9, seed=5), TableBackend.random(9, seed=5)
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=4)
    params = SamplingParams(temperature=1.0, seed=3, **options)
    stats = decoder.generate([1, 2, 3], max_new_tokens=200, sampling=params).stats
    assert stats.accept_rate == 1
    assert stats.target_forward_ct == 40


def test_the_seed_of_a_result_gives_it_again() -> None:
    target = TableBackend.random(9, seed=5)
    decoder = SpeculativeDecoder(target, target.sibling(0.5))
    texts = set()
    for _ in range(10):
        result = decoder.generate([1], max_new_tokens=30, sampling=SamplingParams(temperature=1))
        again = SamplingParams(temperature=1, seed=result.seed)
        for other in (decoder, SpeculativeDecoder(target)):
            repeated = other.generate([1], max_new_tokens=30, sampling=again)
            assert outcome(repeated) == outcome(result)
        texts.add(result.text)
    assert len(texts) == 10
    assert decoder.generate([1], max_new_tokens=3).seed is None


@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
def test_global_random_state_is_left_alone(verification: Any) -> None:
    torch = pytest.importorskip("torch")
    target = TableBackend.random(9, seed=5)
    draft = target.sibling(0.5)
    decoder = SpeculativeDecoder(target, draft, verification=verification)
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    for seed in (None, 1):
        decoder.generate([1], max_new_tokens=20, sampling=SamplingParams(temperature=1, seed=seed))
    assert random.getstate() == before[0]
    np.testing.assert_equal(np.random.get_state(), before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


# The law


def softmax(row: Rows) -> Rows:
    mass = np.exp(row - row.max())
    return np.asarray(mass / mass.sum())


def probabilities(row: Rows, params: SamplingParams, ids: Sequence[int], num_new: int) -> Rows:
    """One token's distribution, filter by filter."""
    row = penalised(row, params, ids, ids[len(ids) - num_new :])
    probs = softmax(row / params.temperature)
    if params.top_k:
        probs[np.argsort(-probs)[params.top_k :]] = 0
        probs /= probs.sum()
    order = np.argsort(-probs)
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= params.top_p]] = 0
    probs[probs < params.min_p * probs.max()] = 0
    return np.asarray(probs / probs.sum())


def law_of_strings(target: TableBackend, prompt: list[int], params: SamplingParams) -> Rows:
    """The exact probability of every string of three tokens."""
    size = len(target.vocab.tokens)
    total = np.ones((size,) * 3)
    for text in product(range(size), repeat=3):
        for count, token in enumerate(text):
            ids = [*prompt, *text[:count]]
            row = target.table[ids[-2] if len(ids) > 1 else ids[-1], ids[-1]]
            total[text] *= probabilities(row, params, ids, count)[token]
    return total


def p_value(counts: Rows, law: Rows) -> float:
    """Chi-square, by Wilson and Hilferty's normal approximation; rare strings count as one."""
    expected = law * counts.sum()
    common = expected >= 5
    if counts[expected == 0].any():
        return 0.0
    got = np.append(counts[common], counts[~common].sum())
    mean = np.append(expected[common], expected[~common].sum())
    got, mean = got[mean > 0], mean[mean > 0]
    chi_square, free = ((got - mean) ** 2 / mean).sum(), len(got) - 1
    z = ((chi_square / free) ** (1 / 3) - 1 + 2 / (9 * free)) / math.sqrt(2 / (9 * free))
    return math.erfc(z / math.sqrt(2)) / 2


def counts_of_strings(
    decoder: SpeculativeDecoder, prompt: list[int], options: dict[str, Any], num_seeds: int
) -> Rows:
    counts = np.zeros((len(decoder.target.vocab.tokens),) * 3)
    for seed in range(num_seeds):
        params = SamplingParams(seed=seed, **options)
        result = decoder.generate(prompt, max_new_tokens=3, sampling=params)
        counts[tuple(result.token_ids)] += 1
    return counts


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "filters": {"temperature": 1.3, "top_k": 4, "top_p": 0.9, "min_p": 0.08},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.5,
        "logit_bias": {2: 0.7},
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_strings_follow_the_models_law(name: str) -> None:
    target, options = TableBackend.random(5, seed=8), SETTINGS[name]
    counts = counts_of_strings(SpeculativeDecoder(target), [3, 1], options, 20_000)
    assert p_value(counts, law_of_strings(target, [3, 1], SamplingParams(**options))) > 1e-4
    wrong = law_of_strings(target, [3, 1], SamplingParams(**{**options, "temperature": 1.1}))
    assert p_value(counts, wrong) < 1e-4  # the check would have seen it


@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
def test_strings_follow_the_models_law_with_a_draft(verification: Any) -> None:
    target, options = (
        TableBackend.random(5, seed=8),
        {**SETTINGS["filters"], "presence_penalty": 0.5},
    )
    draft = TableBackend(target.sibling(1.0).table[:4, :4, :4])  # which lacks a token
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=2, verification=verification)
    counts = counts_of_strings(decoder, [3, 1], options, 4_000)
    assert p_value(counts, law_of_strings(target, [3, 1], SamplingParams(**options))) > 1e-4


@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
def test_a_draft_with_an_odd_id_keeps_the_law(verification: Any) -> None:
    """An id that the models spell differently is never proposed, and must not lean the text."""
    target, tokens = TableBackend.random(10, seed=8), [bytes([97 + i]) for i in range(10)]
    table = target.sibling(1.0).table
    table[..., 4] += 3.0
    draft = TableBackend(table, tokens=[*tokens[:4], b"?", *tokens[5:]])
    params: dict[str, Any] = {
        "temperature": 1.0,
        "logit_bias": dict.fromkeys(range(5, 10), -9.0),
    }
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=2, verification=verification)
    counts = counts_of_strings(decoder, [3, 1], params, 4_000)
    assert p_value(counts, law_of_strings(target, [3, 1], SamplingParams(**params))) > 1e-4


@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_a_nan_is_found_out_behind_every_filter(filters: dict[str, Any]) -> None:
    model = TableBackend.random(6, seed=1)
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1, **filters), model.vocab, 1)
    row = np.array([[0.0, 1.0, np.nan, 3.0, 2.0, 1.0]], np.float32)
    assert sampler.guess(row, [0], []) is None
    with pytest.raises(LogitsError, match="holds a NaN"):
        sampler.verify([], row, [0])


def test_values_are_kept_as_plain_python() -> None:
    bias = {np.int64(1): np.float32(2)}
    params = SamplingParams(temperature=np.float64(0.5), seed=np.int64(5), logit_bias=bias)  # type: ignore[arg-type]
    bias.clear()
    assert (type(params.temperature), type(params.seed)) == (float, int)
    assert params.logit_bias == {1: 2.0}
    with pytest.raises(ValueError, match="temperature must be"):
        SamplingParams(temperature=10**400)


class Guesses(Drafter):
    """Looks its first token up, so to say, and draws the second from a distribution."""

    def __init__(self, first: int, row: Any = None) -> None:
        self.first, self.row = first, row

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        for request in requests:
            tokens = [self.first]
            if self.row is not None and request.num_tokens > 1:
                guess = request.sampler.guess(self.row, request.ids, tokens)
                tokens += [] if guess is None else [guess]
            drafts.append(Draft(tokens[: request.num_tokens]))
        return drafts


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_the_papers_rules_take_drafts_of_any_kind(verification: Verification) -> None:
    """Padding ids, ids that can't stand, and guesses behind a lookup."""
    target = TableBackend.random(6, seed=1, padding=2)
    row = np.linspace(0, 1, 6, dtype=np.float32)[None]

    def ends_behind_zero(ids: Sequence[int], scores: Any) -> Any:
        scores = np.where(np.arange(6) == 0, -np.inf, scores)
        return np.full_like(scores, -np.inf) if 0 in ids[1:] else scores

    sampling = SamplingParams(temperature=1.0, seed=3, processors=[ends_behind_zero])
    for drafter in (Guesses(7), Guesses(0), Guesses(0, row), Guesses(2, row)):
        decoder = SpeculativeDecoder(target, drafter, verification=verification)
        result = decoder.generate([1], max_new_tokens=12, sampling=sampling)
        assert len(result.token_ids) == 12
        assert set(result.token_ids) <= {1, 2, 3, 4, 5}
