"""generate(..., custom_generate=...) gives what generate gives, only sooner."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specdec import Draft, Drafter, DraftRequest, UnsupportedModelError

pytestmark = pytest.mark.usefixtures("one_thread")

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from specdec_hf import HFBackend, custom_generate  # noqa: E402 - needs both runtimes


@pytest.fixture(scope="module")
def model(tiny_llama: Any) -> Any:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama.folder).eval()
    loaded.generation_config.pad_token_id = 291
    return loaded


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Any) -> Any:
    loaded = transformers.AutoTokenizer.from_pretrained(tiny_llama.folder)
    loaded.pad_token_id, loaded.padding_side = 291, "left"
    return loaded


@pytest.fixture(scope="module")
def draft(tiny_draft: Any) -> HFBackend:
    return HFBackend(tiny_draft.folder, device="cpu")


@pytest.fixture(scope="module")
def fast(draft: HFBackend) -> Any:
    return custom_generate(draft, num_draft_tokens=3)


@pytest.fixture
def one(tokenizer: Any) -> Any:
    return tokenizer("the man and the", return_tensors="pt")


@pytest.fixture
def several(tokenizer: Any) -> Any:
    texts = ["the man", "on and on and on and on", "in the"]
    return tokenizer(texts, return_tensors="pt", padding=True)


def criterion(token: int) -> Any:
    class Saw(transformers.StoppingCriteria):  # type: ignore[misc, name-defined]
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            assert scores is None or len(scores) == 0
            return input_ids[:, -1] == token

    return transformers.StoppingCriteriaList([Saw()])


GREEDY: dict[str, dict[str, Any]] = {
    "plain": {"max_new_tokens": 40},
    "max_length": {"max_length": 30},
    "no end": {"max_new_tokens": 40, "eos_token_id": None},
    "another end": {"max_new_tokens": 40, "eos_token_id": [7, 100, 259]},
    "ends that can't come": {"max_new_tokens": 40, "eos_token_id": [-1, 5000, 100]},
    "an end that can't come": {"max_new_tokens": 20, "eos_token_id": -1},
    "penalty": {"max_new_tokens": 40, "repetition_penalty": 1.3},
    "processors": {"max_new_tokens": 40, "no_repeat_ngram_size": 2, "min_new_tokens": 12},
    "bias first": {
        "max_new_tokens": 30,
        "sequence_bias": [[[100], 3.0], [[32], -2.0]],
        "repetition_penalty": 1.2,
        "renormalize_logits": True,
    },
    "ends": {"max_length": 24, "forced_eos_token_id": 290, "min_length": 20},
    "suppressed": {"max_new_tokens": 20, "suppress_tokens": [1, 2, 32], "bad_words_ids": [[5, 6]]},
}


@pytest.mark.parametrize("options", GREEDY.values(), ids=GREEDY)
def test_greedy_ids_are_those_of_generate(
    model: Any, fast: Any, one: Any, several: Any, options: dict[str, Any]
) -> None:
    for inputs in (one, several):
        expected = model.generate(**inputs, do_sample=False, **options)
        ids = model.generate(**inputs, do_sample=False, custom_generate=fast, **options)
        assert ids.dtype == torch.int64
        assert ids.tolist() == expected.tolist()
        assert len(fast.stats) == len(ids)
        assert sum(stats.num_correct_drafts for stats in fast.stats) > 0


def test_a_dict_if_that_is_wanted(model: Any, fast: Any, one: Any) -> None:
    expected = model.generate(**one, max_new_tokens=9, return_dict_in_generate=True)
    found = model.generate(
        **one, max_new_tokens=9, return_dict_in_generate=True, custom_generate=fast
    )
    assert type(found) is type(expected)
    assert found.sequences.tolist() == expected.sequences.tolist()


def test_criteria_end_a_text_as_in_generate(model: Any, fast: Any, one: Any, several: Any) -> None:
    plain = model.generate(**one, max_new_tokens=30, do_sample=False, eos_token_id=None)
    for place in (0, 3, 11):
        token = int(plain[0, one.input_ids.shape[1] + place])
        for inputs in (one, several):
            for end in ([290], None):  # without an EOS a row goes on until all are done
                options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": end}
                expected = model.generate(**inputs, stopping_criteria=criterion(token), **options)
                found = model.generate(
                    **inputs, stopping_criteria=criterion(token), custom_generate=fast, **options
                )
                assert found.tolist() == expected.tolist()


def test_stop_strings_are_given_as_a_criterion(
    model: Any, fast: Any, tokenizer: Any, one: Any, several: Any
) -> None:
    plain = model.generate(**one, max_new_tokens=30, do_sample=False, eos_token_id=None)
    length = one.input_ids.shape[1]
    strings = [next(text for i in plain[0, length:] if (text := tokenizer.decode(i)).isalpha())]
    criteria = [transformers.StopStringCriteria(tokenizer, strings)]
    for inputs in (one, several):
        options = {"max_new_tokens": 30, "do_sample": False}
        expected = model.generate(
            **inputs, stop_strings=strings, tokenizer=tokenizer, **options
        ).tolist()
        found = model.generate(
            **inputs, stopping_criteria=criteria, custom_generate=fast, **options
        ).tolist()
        assert found == expected
        assert inputs is several or strings[0] in tokenizer.decode(found[0][-1])


class Heard(transformers.generation.streamers.BaseStreamer):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.ended = 0

    def put(self, value: Any) -> None:
        self.parts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_hears_what_it_hears_from_generate(
    model: Any, draft: HFBackend, one: Any, several: Any
) -> None:
    theirs, ours = Heard(), Heard()
    model.generate(**one, max_new_tokens=12, do_sample=False, streamer=theirs)
    fast = custom_generate(draft, streamer=ours, num_draft_tokens=4)
    model.generate(**one, max_new_tokens=12, do_sample=False, custom_generate=fast)
    assert ours.parts == theirs.parts
    assert len(ours.parts) > 5
    assert ours.ended == theirs.ended == 1
    with pytest.raises(ValueError, match="a streamer follows one sequence, and the batch has 3"):
        model.generate(**several, max_new_tokens=2, do_sample=False, custom_generate=fast)
    assert (ours.parts, ours.ended) == (theirs.parts, 1)


def test_a_criterion_that_raises_leaves_nothing_open(model: Any, one: Any, several: Any) -> None:
    class Watched(Drafter):
        open_ct = 0

        def open(self, prompt_ids: Sequence[int]) -> None:
            self.open_ct += 1

        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            return [Draft([]) for _ in requests]

        def close(self, state: None) -> None:
            self.open_ct -= 1

    def fails(input_ids: Any, scores: Any) -> Any:
        assert drafter.open_ct > 0
        raise RuntimeError("a criterion's own")

    drafter = Watched()
    options: dict[str, Any] = {"custom_generate": custom_generate(drafter), "max_new_tokens": 4}
    for inputs in (one, several):
        with pytest.raises(RuntimeError, match="a criterion's own") as caught:
            model.generate(**inputs, stopping_criteria=[fails], **options)
        assert drafter.open_ct == 0, caught  # which holds on to the streams, if anything does


def test_torchs_seed_repeats_a_sample_whatever_drafts(
    model: Any, fast: Any, draft: HFBackend, several: Any
) -> None:
    texts = []
    plain = custom_generate(None)
    for seed, loop in ((5, fast), (5, plain), (5, fast), (6, fast)):
        torch.manual_seed(seed)
        ids = model.generate(
            **several, max_new_tokens=20, do_sample=True, top_k=50, custom_generate=loop
        )
        texts.append(ids.tolist())
    assert texts[0] == texts[1] == texts[2] != texts[3]
    torch.manual_seed(5)
    options = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 8}
    ids = model.generate(several.input_ids[1:2], custom_generate=fast, **options)
    assert len({tuple(row) for row in ids.tolist()}) > 1


SAMPLED: dict[str, dict[str, Any]] = {
    "native": {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
    "penalty": {"repetition_penalty": 1.8, "temperature": 1.3, "top_k": 4},
    "other warpers": {"temperature": 0.8, "top_k": 6, "typical_p": 0.97, "epsilon_cutoff": 0.02},
}


@pytest.mark.parametrize("options", SAMPLED.values(), ids=SAMPLED)
def test_samples_follow_the_law_of_generate(
    model: Any, fast: Any, one: Any, options: dict[str, Any]
) -> None:
    """Counts of the first new token against the probabilities that generate itself draws from."""
    out = model.generate(
        **one,
        max_new_tokens=1,
        do_sample=True,
        output_scores=True,
        return_dict_in_generate=True,
        **{"top_k": 0, **options},
    )
    probs = torch.softmax(out.scores[0][0], dim=-1).numpy()
    count = 400
    ids = model.generate(
        one.input_ids,
        max_new_tokens=2,
        do_sample=True,
        num_return_sequences=count,
        eos_token_id=None,
        custom_generate=fast,
        **{"top_k": 0, **options},
    )
    counts = Counter(ids[:, one.input_ids.shape[1]].tolist())
    kept = np.flatnonzero(probs)
    assert {*counts} <= {*kept.tolist()}
    expected = count * probs[kept]
    squares = sum((counts[i] - e) ** 2 / e for i, e in zip(kept.tolist(), expected, strict=True))
    freedom = len(kept) - 1
    assert 0 < freedom < 10
    assert squares < freedom + 5 * (2 * freedom) ** 0.5


REFUSED: dict[str, dict[str, Any]] = {
    "num_beams=4": {"num_beams": 4},
    "output_scores=True": {"output_scores": True, "return_dict_in_generate": True},
    "output_logits=True": {"output_logits": True},
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": {"guidance_scale": 1.5},
    "prompt_lookup_num_tokens=3": {"prompt_lookup_num_tokens": 3},
    "a cache of your own": {"past_key_values": transformers.DynamicCache()},
    "the model's argument inputs_embeds": {"inputs_embeds": torch.zeros(1, 4, 64)},
}


@pytest.mark.filterwarnings("ignore:.*past_key_values.*")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cant_be_honoured_is_refused_by_name(
    model: Any, fast: Any, one: Any, name: str
) -> None:
    with pytest.raises(ValueError, match=f"specdec can't honour {name}"):
        model.generate(**one, custom_generate=fast, max_new_tokens=4, **REFUSED[name])


def test_masks_and_positions_that_it_cant_follow(model: Any, fast: Any, one: Any) -> None:
    length = one.input_ids.shape[1]
    holes = torch.ones_like(one.input_ids)
    holes[0, 2] = 0
    with pytest.raises(ValueError, match="the attention_mask of row 0 leaves out ids"):
        model.generate(one.input_ids, attention_mask=holes, custom_generate=fast, max_new_tokens=4)
    with pytest.raises(ValueError, match="position_ids say otherwise"):
        model.generate(
            one.input_ids,
            position_ids=torch.arange(3, length + 3)[None],
            custom_generate=fast,
            max_new_tokens=4,
        )


OF_ONE: dict[str, Any] = {
    "prefix_allowed_tokens_fn": lambda _, ids: [97 + len(ids) % 5, 110],
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.5,
}


@pytest.mark.parametrize("name", OF_ONE)
def test_what_holds_all_prompts_is_for_one_sequence(
    model: Any, fast: Any, one: Any, several: Any, name: str
) -> None:
    options = {name: OF_ONE[name], "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**one, **options)
    assert model.generate(**one, custom_generate=fast, **options).tolist() == expected.tolist()
    with pytest.raises(ValueError, match=f"{name} for several sequences"):
        model.generate(**several, custom_generate=fast, **options)


class Repeats(Drafter):
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft(request.ids[-request.num_tokens :]) for request in requests]


def test_any_drafter_and_any_tokenizer(
    model: Any, tokenizer: Any, one: Any, smollm2_gguf: Any
) -> None:
    pytest.importorskip("llama_cpp")
    from specdec.backends import LlamaCppBackend

    expected = model.generate(**one, max_new_tokens=20, do_sample=False).tolist()
    with LlamaCppBackend(smollm2_gguf, n_ctx=256, n_threads=1) as other:
        for loop in (
            custom_generate(Repeats(), num_draft_tokens=2),
            custom_generate("self", num_draft_tokens=2),
            custom_generate(other, tokenizer=tokenizer, num_draft_tokens=2),
        ):
            ids = model.generate(**one, max_new_tokens=20, do_sample=False, custom_generate=loop)
            assert ids.tolist() == expected
            (stats,) = loop.stats
            assert stats is not None
            assert stats.num_proposed_drafts > 0


def test_a_model_that_isnt_for_it(tiny_llama: Any, fast: Any) -> None:
    config = transformers.T5Config(
        vocab_size=40,
        d_model=16,
        d_kv=4,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config)
    with pytest.raises((UnsupportedModelError, ValueError), match="encoder"):
        model.generate(torch.tensor([[1, 2, 3]]), custom_generate=fast, max_new_tokens=3)


def test_resized_embeddings_are_noticed(tiny_llama: Any, one: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama.folder).eval()
    fast = custom_generate("suffix", num_draft_tokens=3)
    for width in (292, 300, 296):
        model.resize_token_embeddings(width)
        ids = torch.cat([one.input_ids, torch.tensor([[width - 1]])], dim=1)
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
        expected = model.generate(ids, **options)
        with torch.no_grad():  # the last id comes out as well
            model.lm_head.weight[width - 1] = model.lm_head.weight[int(expected[0, -1])] * 2
        expected = model.generate(ids, **options)
        assert width - 1 in expected[0, ids.shape[1] :]
        assert model.generate(ids, custom_generate=fast, **options).tolist() == expected.tolist()


def test_new_weights_are_noticed(tiny_llama: Any, fast: Any, one: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama.folder).eval()
    for _ in range(2):
        expected = model.generate(**one, max_new_tokens=12, do_sample=False)
        found = model.generate(**one, max_new_tokens=12, do_sample=False, custom_generate=fast)
        assert found.tolist() == expected.tolist()
        with torch.no_grad():
            for weights in model.parameters():
                weights.mul_(1.1).add_(0.01)
