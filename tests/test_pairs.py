"""Real pairs: whatever drafts for whatever, the output is the target's own."""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from specdec import (
    BatchItem,
    GenerationResult,
    ModelBackend,
    SamplingParams,
    SpeculativeDecoder,
)

pytestmark = pytest.mark.usefixtures("one_thread")

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("llama_cpp")

from specdec.backends import HFBackend, LlamaCppBackend  # noqa: E402 - needs both runtimes

PROMPTS = ["the theatre and the sea", "in", "a b c d e f g h i j k l m n o p q r s t u v w x y z"]


@pytest.fixture(scope="module")
def tiny(tiny_llama: Any, tiny_draft: Any) -> Iterator[dict[str, ModelBackend]]:
    with (
        LlamaCppBackend(tiny_llama.gguf, n_threads=1) as target,
        LlamaCppBackend(tiny_draft.gguf, n_threads=1) as draft,
    ):
        yield {
            "hf target": HFBackend(tiny_llama.folder),
            "hf draft": HFBackend(tiny_draft.folder),
            "gguf target": target,
            "gguf draft": draft,
        }


def outcome(result: GenerationResult) -> tuple[list[int], str, str]:
    return result.token_ids, result.text, result.finish_reason


@pytest.mark.parametrize("draft", ["hf draft", "gguf draft", "hf target", "gguf target"])
@pytest.mark.parametrize("target", ["hf target", "gguf target"])
def test_every_mix_gives_the_targets_own_output(
    tiny: dict[str, ModelBackend], target: str, draft: str
) -> None:
    """The last two drafts are the target's twin in either runtime, once the very same object."""
    plain = SpeculativeDecoder(tiny[target])
    expected = [outcome(plain.generate(prompt, max_new_tokens=40)) for prompt in PROMPTS]
    assert len({tuple(ids) for ids, _, _ in expected}) == len(PROMPTS)
    rates: list[float] = []
    for num_draft_tokens in range(1, 17):
        decoder = SpeculativeDecoder(tiny[target], tiny[draft], num_draft_tokens=num_draft_tokens)
        which = num_draft_tokens % len(PROMPTS)
        result = decoder.generate(PROMPTS[which], max_new_tokens=40)
        assert outcome(result) == expected[which]
        rates.append(result.stats.accept_rate or 0.0)
    if "target" in draft:
        assert set(rates) == {1.0}
    else:
        assert 0 < sum(rates) / len(rates) < 1


@pytest.mark.parametrize("target", ["hf target", "gguf target"])
def test_a_batch_is_its_single_runs(tiny: dict[str, ModelBackend], target: str) -> None:
    for draft in ("hf draft", "gguf draft", target):
        decoder = SpeculativeDecoder(tiny[target], tiny[draft], num_draft_tokens=3)
        alone = [decoder.generate(prompt, max_new_tokens=30) for prompt in PROMPTS]
        together = decoder.generate_batch(PROMPTS, max_new_tokens=30, max_batch=2)
        assert [outcome(r) for r in together] == [outcome(r) for r in alone]
        assert [r.stats.accept_histogram for r in together] == [
            r.stats.accept_histogram for r in alone
        ]


def mixed_batch(count: int) -> list[BatchItem]:
    """Prompts, budgets, stops and ways to choose, each other than its neighbours'."""
    each = [None, *SAMPLING.values()]
    return [
        BatchItem(
            f"{PROMPTS[number % 3]} {number}",
            max_new_tokens=8 + 5 * (number % 4),
            sampling=each[number % len(each)],
            stop=["e"] if number % 3 == 2 else [],
        )
        for number in range(count)
    ]


def whole(result: GenerationResult) -> tuple[object, ...]:
    return *outcome(result), result.stats.accept_histogram, result.stats.target_forward_ct


@pytest.mark.parametrize("max_batch", [2, 5, 8])
@pytest.mark.parametrize("target", ["hf target", "gguf target"])
def test_a_mixed_batch_is_its_single_runs(
    tiny: dict[str, ModelBackend], target: str, max_batch: int
) -> None:
    decoder = SpeculativeDecoder(tiny[target], tiny["hf draft"], num_draft_tokens=3, keep_caches=0)
    items = mixed_batch(11)
    alone = [whole(decoder.generate(item.prompt, **item.options)) for item in items]
    assert all(alone.count(each) == 1 for each in alone)
    together = dict(decoder.as_completed(items, max_batch=max_batch))
    assert [whole(together[number]) for number in range(len(items))] == alone


@pytest.mark.parametrize("runtime", ["torch", "llama.cpp"])
def test_a_mixed_batch_of_a_real_model(smollm2_gguf: Path, tmp_path: Path, runtime: str) -> None:
    """In fp32: what a draft in 4 bits proposes may depend on its neighbours."""
    torch_target = HFBackend(smollm2_gguf, dtype="float32")
    target: ModelBackend = torch_target
    with ExitStack() as stack:
        if runtime == "llama.cpp":
            torch_target.write_quantized(tmp_path / "f32.gguf", "f32")
            target = stack.enter_context(
                LlamaCppBackend(tmp_path / "f32.gguf", n_threads=1, cache_dtype="f32")
            )
        draft = stack.enter_context(LlamaCppBackend(smollm2_gguf, n_threads=1))
        decoder = SpeculativeDecoder(target, draft, num_draft_tokens=3, keep_caches=0)
        items = mixed_batch(8)
        alone = [outcome(decoder.generate(item.prompt, **item.options)) for item in items]
        together = decoder.generate_batch(items, max_batch=8)
        assert [outcome(result) for result in together] == alone


SAMPLING = {
    "warm": SamplingParams(temperature=1.0, seed=1),
    "filtered": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=2),
    "penalised": SamplingParams(
        temperature=1.2,
        repetition_penalty=1.3,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        logit_bias={5: 2.0, 7: -math.inf},
        min_tokens=10,
        seed=3,
    ),
    "greedy, penalised": SamplingParams(repetition_penalty=1.3, min_tokens=10),
}


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("target", ["hf target", "gguf target"])
def test_every_mix_samples_the_targets_own_tokens(
    tiny: dict[str, ModelBackend], target: str, sampling: SamplingParams
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "sampling": sampling, "logprobs": 2}
    plain = SpeculativeDecoder(tiny[target]).generate(PROMPTS[0], **options)
    assert plain.logprobs is not None
    for draft in ("hf draft", "gguf draft", target):
        for num_draft_tokens in (1, 3, 8):
            decoder = SpeculativeDecoder(
                tiny[target], tiny[draft], num_draft_tokens=num_draft_tokens
            )
            result = decoder.generate(PROMPTS[0], **options)
            assert outcome(result) == outcome(plain)
            assert result.seed == plain.seed == sampling.seed
            assert result.logprobs is not None
            # llama.cpp's wide forwards round differently from its narrow ones.
            tolerance = 1e-4 if target == "hf target" else 0.05
            assert [s.logprob for s in result.logprobs] == pytest.approx(
                [s.logprob for s in plain.logprobs], abs=tolerance
            )
            if draft == target:
                assert result.stats.accept_rate == 1.0


def test_both_runtimes_put_out_the_same(tiny: dict[str, ModelBackend]) -> None:
    for prompt in PROMPTS:
        hf, gguf = (
            SpeculativeDecoder(tiny[name]).generate(prompt, max_new_tokens=60)
            for name in ("hf target", "gguf target")
        )
        assert outcome(hf) == outcome(gguf)


@pytest.mark.parametrize("target", ["hf target", "gguf target"])
def test_the_context_ends_for_both_at_their_last_slot(
    make_tiny_llama: Any, tiny: dict[str, ModelBackend], target: str
) -> None:
    short = make_tiny_llama(max_context=40)
    backend: Any = HFBackend(short.folder) if "hf" in target else LlamaCppBackend(short.gguf)
    plain = SpeculativeDecoder(backend).generate("the sea")
    assert plain.finish_reason == "context"
    assert len(plain.token_ids) + plain.stats.prompt_tokens == 41
    for draft in (tiny["hf draft"], tiny["gguf draft"], backend):
        result = SpeculativeDecoder(backend, draft, num_draft_tokens=4).generate("the sea")
        assert outcome(result) == outcome(plain)
    long = tiny["hf target"]
    decoder = SpeculativeDecoder(long, backend, num_draft_tokens=4)
    result = decoder.generate("the sea", max_new_tokens=80)
    assert outcome(result) == outcome(
        SpeculativeDecoder(long).generate("the sea", max_new_tokens=80)
    )
    assert "draft's context of 40 tokens is full" in str(result.stats.reason)


def test_rows_padded_to_different_widths_go_together(
    make_tiny_llama: Any, tiny: dict[str, ModelBackend]
) -> None:
    padded = make_tiny_llama(vocab_padding=24)
    plain = SpeculativeDecoder(tiny["hf target"])
    expected = [outcome(plain.generate(p, max_new_tokens=30)) for p in PROMPTS]
    with LlamaCppBackend(padded.gguf, n_threads=1) as wide_gguf:
        wide_hf = HFBackend(padded.folder)
        for wide in (wide_hf, wide_gguf):
            assert wide.vocab.size == tiny["hf target"].vocab.size + 24
            results = [
                SpeculativeDecoder(tiny["hf target"], wide).generate(p, max_new_tokens=30)
                for p in PROMPTS
            ]
            assert [outcome(result) for result in results] == expected
        for target in (wide_hf, wide_gguf):
            for draft in (tiny["hf draft"], tiny["gguf draft"]):
                result = SpeculativeDecoder(target, draft).generate(PROMPTS[0], max_new_tokens=30)
                assert outcome(result) == outcome(
                    SpeculativeDecoder(target).generate(PROMPTS[0], max_new_tokens=30)
                )


def test_a_stream_closed_early_leaves_both_runtimes_as_new(tiny: dict[str, ModelBackend]) -> None:
    for target, draft in (("hf target", "gguf draft"), ("gguf target", "hf draft")):
        decoder = SpeculativeDecoder(tiny[target], tiny[draft])
        expected = outcome(decoder.generate(PROMPTS[0], max_new_tokens=20))
        for number in range(6):
            stream = decoder.stream(PROMPTS[0], max_new_tokens=20)
            for _ in range(number):
                next(stream)
            stream.close()
            assert outcome(decoder.generate(PROMPTS[0], max_new_tokens=20)) == expected


def test_chat_messages_go_through_the_targets_template_once(tiny: dict[str, ModelBackend]) -> None:
    messages = [{"role": "user", "content": "the sea?"}]
    text = "<|im_start|>user\nthe sea?<|im_end|>\n<|im_start|>assistant\n"
    for target in ("hf target", "gguf target"):
        decoder = SpeculativeDecoder(tiny[target], tiny["gguf draft"])
        result = decoder.generate(messages, max_new_tokens=9)
        assert result.token_ids == decoder.generate(text, max_new_tokens=9).token_ids


SMOL_PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
]


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Any) -> HFBackend:
    return HFBackend(smollm2_gguf, dtype="float32")


def test_smollm2_equals_transformers_own_decoding(smollm2: HFBackend, smollm2_gguf: Any) -> None:
    """Greedy and assisted ``generate`` of transformers, and every kind of draft of ours."""
    model, tokenizer = smollm2.model, smollm2.tokenizer
    assert tokenizer is not None
    with LlamaCppBackend(smollm2_gguf) as draft:
        decoders = [
            SpeculativeDecoder(smollm2, draft, num_draft_tokens=7),
            SpeculativeDecoder(smollm2, draft, num_draft_tokens=2),
            SpeculativeDecoder(smollm2),
        ]
        for prompt in SMOL_PROMPTS:
            ids = torch.tensor([tokenizer(prompt)["input_ids"]])
            options: dict[str, Any] = {
                "attention_mask": torch.ones_like(ids),
                "max_new_tokens": 32,
                "do_sample": False,
                "pad_token_id": 2,
            }
            (expected,) = model.generate(ids, **options)[:, ids.shape[1] :].tolist()
            assisted = model.generate(ids, assistant_model=model, **options)
            assert assisted[0, ids.shape[1] :].tolist() == expected
            for decoder in decoders:
                result = decoder.generate(prompt, max_new_tokens=32)
                assert result.token_ids == expected
            assert result.text == tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
def test_smollm2_samples_the_same_with_and_without_a_draft(
    smollm2: HFBackend, smollm2_gguf: Any, temperature: float
) -> None:
    filters: dict[str, Any] = {"top_k": 40, "top_p": 0.95, "min_p": 0.02}
    filters = filters if temperature > 0.5 else {}
    plain = SpeculativeDecoder(smollm2)
    with LlamaCppBackend(smollm2_gguf) as draft:
        decoder = SpeculativeDecoder(smollm2, draft, num_draft_tokens=5)
        for seed in (1, 2):
            options: dict[str, Any] = {
                "max_new_tokens": 24,
                "sampling": SamplingParams(temperature=temperature, seed=seed, **filters),
            }
            expected = plain.generate(SMOL_PROMPTS[2], **options)
            result = decoder.generate(SMOL_PROMPTS[2], **options)
            assert outcome(result) == outcome(expected)
            assert (result.stats.accept_rate or 0) > 0.4


def test_smollm2_drafted_by_its_own_quantisation(smollm2: HFBackend, smollm2_gguf: Any) -> None:
    with LlamaCppBackend(smollm2_gguf) as draft:
        decoder = SpeculativeDecoder(smollm2, draft, num_draft_tokens=7)
        stats = decoder.generate(SMOL_PROMPTS[2], max_new_tokens=48).stats
    assert stats.accept_length is not None
    assert stats.accept_length > 3
    assert stats.target_forward_ct < 16


@pytest.mark.parametrize("draft", ["hf draft", "gguf draft"])
@pytest.mark.parametrize("target", ["hf target", "gguf target"])
def test_a_stream_closed_at_any_token_leaves_the_decoder_as_new(
    tiny: dict[str, ModelBackend], target: str, draft: str
) -> None:
    decoder = SpeculativeDecoder(tiny[target], tiny[draft], num_draft_tokens=3)
    expected = outcome(decoder.generate(PROMPTS[0], max_new_tokens=20))
    for number in range(20):
        stream = decoder.stream(PROMPTS[0], max_new_tokens=20)
        for _ in range(number):
            next(stream)
        stream.close()
        assert outcome(decoder.generate(PROMPTS[0], max_new_tokens=20)) == expected


@pytest.mark.parametrize("error", [RuntimeError("injected"), KeyboardInterrupt()])
@pytest.mark.parametrize("side", ["target", "draft"])
@pytest.mark.parametrize("runtime", ["hf", "gguf"])
def test_a_fault_at_any_forward_leaves_the_decoder_as_new(
    tiny: dict[str, ModelBackend],
    runtime: str,
    side: str,
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = SpeculativeDecoder(
        tiny[f"{runtime} target"], tiny[f"{runtime} draft"], num_draft_tokens=3
    )
    expected = outcome(decoder.generate(PROMPTS[0], max_new_tokens=12))
    backend = tiny[f"{runtime} {side}"]
    forward, calls, fail_at = backend.forward, 0, -1

    def faulty(batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls - 1 == fail_at:
            raise error
        return forward(batch)

    monkeypatch.setattr(backend, "forward", faulty)
    decoder.generate(PROMPTS[0], max_new_tokens=12)
    for call in range(calls):
        calls, fail_at = 0, call
        with pytest.raises(type(error), match="injected" if str(error) else None):
            decoder.generate(PROMPTS[0], max_new_tokens=12)
        calls, fail_at = 0, -1
        assert outcome(decoder.generate(PROMPTS[0], max_new_tokens=12)) == expected
        decoder.clear()


@pytest.mark.parametrize("draft", ["hf draft", "gguf draft"])
@pytest.mark.parametrize("target", ["hf target", "gguf target"])
def test_a_turn_of_a_conversation_feeds_what_is_new(
    tiny: dict[str, ModelBackend], target: str, draft: str
) -> None:
    decoder = SpeculativeDecoder(tiny[target], tiny[draft], num_draft_tokens=3)
    fresh = SpeculativeDecoder(tiny[target], keep_caches=0)
    text = list(range(5, 45))
    for turn in range(4):
        result = decoder.generate(text, max_new_tokens=20)
        assert result.token_ids == fresh.generate(text, max_new_tokens=20).token_ids
        assert result.stats.cached_tokens == (len(text) - 7 if turn else 0)
        text = [*text, *result.token_ids, *range(10 + turn, 16 + turn)]
