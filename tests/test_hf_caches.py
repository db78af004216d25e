"""HFBackend on models that don't forget easily: recurrent, hybrid and windowed ones, all caches."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from specdec import SpeculativeDecoder
from specdec.backend import Span
from specdec.errors import RuntimeFailure, UnsupportedModelError
from specdec.testing import CHECKS, Check
from specdec.vocab import Vocabulary

pytestmark = pytest.mark.usefixtures("one_thread")

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from specdec_hf import HFBackend, native, packed  # noqa: E402

VOCAB = 96
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOW = {"sliding_window": 8}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# Per model its family, its configuration, and the ways that it must go.
PACKED, NATIVE, STEPS = "packed spans", "one by one", "one by one, in single steps"
CROP, PAST, REPLAY = "crop", "recorded past", "snapshot and replay"
MODELS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "mamba": ("Mamba", {"state_size": 8}, STEPS, REPLAY),
    "mamba2": (
        "Mamba2",
        {"state_size": 8, "num_heads": 8, "n_groups": 2, "chunk_size": 8},
        NATIVE,
        REPLAY,
    ),
    "jamba": (
        "Jamba",
        {
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
            **EXPERTS,
        },
        STEPS,
        REPLAY,
    ),
    "falcon-h1": ("FalconH1", {"mamba_d_ssm": 64, **MAMBA2}, NATIVE, REPLAY),
    "bamba": ("Bamba", {"attn_layer_indices": [1], **MAMBA2}, NATIVE, REPLAY),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {"layer_types": ["mamba", "attention"], **MAMBA2},
        NATIVE,
        REPLAY,
    ),
    "qwen3-next": (
        "Qwen3Next",
        {
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            **LINEAR,
            **EXPERTS,
        },
        NATIVE,
        REPLAY,
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}, NATIVE, PAST),
    "bloom": ("Bloom", {"n_head": 4, "n_layer": 2}, NATIVE, CROP),
    "jetmoe": ("JetMoe", {}, NATIVE, CROP),
    "mistral": ("Mistral", WINDOW, PACKED, CROP),
    "gemma2": ("Gemma2", {"attn_logit_softcapping": 2.0, **MIXED}, PACKED, CROP),
    "gemma3": ("Gemma3Text", MIXED, PACKED, CROP),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, **MIXED},
        PACKED,
        CROP,
    ),
}
# Other caches than the model's usual one.
CACHES: dict[str, tuple[str, str, str]] = {
    "llama, dynamic": ("llama", "dynamic", CROP),
    "llama, static": ("llama", "static", CROP),
    "mistral, dynamic": ("mistral", "dynamic", PAST),
    "mistral, static": ("mistral", "static", REPLAY),
    "gemma3, dynamic": ("gemma3", "dynamic", PAST),
    "falcon-h1, static": ("falcon-h1", "static", REPLAY),
    "lfm2, static": ("lfm2", "static", REPLAY),
}
ALL = [*MODELS, *CACHES]


def build(name: str, seed: int = 0, noise: float = 0.0, **changes: Any) -> Any:
    """A random model in float32 whose states matter. ``noise`` makes a sibling, for a draft."""
    family, extra, *_ = MODELS.get(name, ("Llama", {}))
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **extra, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim > 1 and "A_log" not in key:
                weight.mul_(10)
                weight.mul_(1 + noise * torch.randn(weight.shape, generator=generator))
    return model


def wrap(model: Any, **options: Any) -> HFBackend:
    vocab = Vocabulary(size=VOCAB, tokens=[bytes([i]) for i in range(VOCAB)], eos_ids=frozenset())
    return HFBackend(model=model, vocab=vocab, **{"max_context": 96, **options})


@functools.cache
def backend_of(name: str, noise: float = 0.0) -> HFBackend:
    if name in CACHES:
        model, cache, _ = CACHES[name]
        return wrap(build(model, noise=noise), cache=cache)
    return wrap(build(name, noise=noise))


def some_ids(count: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, count)]


def rows_of(backend: HFBackend, ids: Sequence[int]) -> Any:
    """All rows of a text, by the model itself and without a cache."""
    with torch.inference_mode():
        return backend.model(torch.tensor([ids]), use_cache=False).logits[0]


def close(rows: Any, expected: Any) -> None:
    torch.testing.assert_close(rows, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ALL)
class TestEveryModel:
    def test_goes_the_way_that_suits_it(self, name: str) -> None:
        info = backend_of(name).info()
        wanted = (NATIVE, CACHES[name][2]) if name in CACHES else MODELS[name][2:]
        assert (info["attention"], info["rollback"]) == wanted

    @pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
    def test_speculates_to_its_own_text(self, name: str, num_draft_tokens: int) -> None:
        target, draft = backend_of(name), backend_of(name, noise=0.05)
        prompt = some_ids(21)
        text = list(prompt)
        cache = target.new_cache()
        fed = 0
        while len(text) < len(prompt) + 40:
            (row,) = target.forward([Span(cache, text[fed:], 1)])
            fed = len(text)
            text.append(int(row[0].argmax()))
        assert len(set(text[len(prompt) :])) > 4
        decoder = SpeculativeDecoder(target, draft, num_draft_tokens=num_draft_tokens)
        result = decoder.generate(prompt, max_new_tokens=40)
        assert result.token_ids == text[len(prompt) :]
        assert (result.stats.accept_rate or 0) > 0
        if num_draft_tokens == 3:
            stranger = SpeculativeDecoder(target, backend_of("llama"), num_draft_tokens=3)
            result = stranger.generate(prompt, max_new_tokens=40)
            assert result.token_ids == text[len(prompt) :]

    @pytest.mark.parametrize("check", CHECKS)
    def test_keeps_the_contract(self, name: str, check: Check) -> None:
        check(backend_of(name), tolerance=1e-2)


class Machine(RuleBasedStateMachine):
    """Random calls on a few caches, each row compared with the model's own without a cache."""

    name: str

    def __init__(self) -> None:
        super().__init__()
        self.backend = backend_of(self.name)
        self.texts: list[tuple[Any, list[int]]] = []

    @precondition(lambda self: len(self.texts) < 3)
    @rule()
    def new_cache(self) -> None:
        self.texts.append((self.backend.new_cache(), []))

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def forward(self, data: st.DataObject) -> None:
        spans, expected = [], []
        for cache, text in data.draw(
            st.lists(st.sampled_from(self.texts), min_size=1, unique_by=id)
        ):
            new = some_ids(data.draw(st.integers(1, 12)), seed=data.draw(st.integers(0, 99)))
            if len(text) + len(new) <= self.backend.max_context:
                wanted = data.draw(st.integers(0, len(new)))
                text += new
                spans.append(Span(cache, new, wanted))
                expected.append(rows_of(self.backend, text)[len(text) - wanted :])
        for rows, own in zip(self.backend.forward(spans), expected, strict=True):
            close(rows, own)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        cache, text = data.draw(st.sampled_from(self.texts))
        length = len(text) - min(len(text), data.draw(st.integers(0, 20)))
        self.backend.crop(cache, length)
        del text[length:]
        assert len(cache) == length

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        with failing(self.backend, 0), pytest.raises(RuntimeFailure):
            self.backend.forward([Span(cache, [1, 2], 1) for cache, _ in self.texts])
        assert [len(cache) for cache, _ in self.texts] == [len(text) for _, text in self.texts]

    @precondition(lambda self: self.texts)
    @rule()
    def close(self) -> None:
        self.texts.pop(0)[0].close()


@pytest.mark.parametrize("name", ["gemma3", "mamba", "falcon-h1", "lfm2", "mistral, dynamic"])
def test_random_calls(name: str) -> None:
    machine = type("Machine", (Machine,), {"name": name})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=12, stateful_step_count=20, deadline=None)
    )


@contextmanager
def failing(backend: HFBackend, at: int, fault: BaseException | None = None) -> Iterator[list[int]]:
    """Raise in a call of the model, counted from 0, when half of its layers have run already."""
    calls: list[int] = []

    def count(*_: Any) -> None:
        calls.append(len(calls))
        if calls[-1] == at:
            raise fault or RuntimeError("out of luck")

    layers = next(m for m in backend.model.modules() if isinstance(m, torch.nn.ModuleList))
    hook = layers[1].register_forward_hook(count)
    try:
        yield calls
    finally:
        hook.remove()


@pytest.mark.parametrize("name", ["gemma3", "jamba", "falcon-h1", "lfm2", "llama, static"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_failure_anywhere_leaves_no_trace(name: str, role: str) -> None:
    target, draft = backend_of(name), backend_of(name, noise=0.05)
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=3)
    prompt = some_ids(9)
    expected = SpeculativeDecoder(target).generate(prompt, max_new_tokens=8).token_ids
    for at in range(100):
        backend = target if role == "target" else draft
        fault = KeyboardInterrupt() if at % 2 else RuntimeError("out of luck")
        given_up = suppress(RuntimeFailure, KeyboardInterrupt)
        with failing(backend, at, fault) as calls, given_up:
            decoder.generate(prompt, max_new_tokens=8)
        if len(calls) <= at:
            break
        assert decoder.generate(prompt, max_new_tokens=8).token_ids == expected
    assert at > 2


class TestBrokenRollback:
    def test_of_a_state(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not restored; not copied, so that it is overwritten; nothing kept at all."""
        for name, broken in (
            ("_restore", lambda *_: None),
            ("_copy", lambda value: value),
            ("_snapshot", lambda cache: [{} for _ in range(3)]),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(native, name, broken)
                with pytest.raises(
                    UnsupportedModelError, match=r"type hybrid: .* one by one: after"
                ):
                    wrap(build("falcon-h1"))

    def test_of_keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packed.PackedEngine, "crop", lambda *_: None)
        assert wrap(build("llama")).info()["attention"] == NATIVE
        with pytest.raises(UnsupportedModelError, match="packed spans: after a rollback"):
            wrap(build("llama"), cache="packed")
        layer = transformers.cache_utils.DynamicLayer
        for crop in (lambda *_: None, lambda self, more, crop=layer.crop: crop(self, more - 1)):
            monkeypatch.setattr(layer, "crop", crop)
            with pytest.raises(UnsupportedModelError, match="one by one: after a rollback"):
                wrap(build("llama"))

    def test_of_a_recorded_past(self, monkeypatch: pytest.MonkeyPatch) -> None:
        layer = transformers.cache_utils.LinearAttentionLayer
        monkeypatch.setattr(layer, "crop", lambda *_: None)
        assert wrap(build("lfm2")).info()["rollback"] == REPLAY


class TestPrices:
    def test_going_back_reads_again_what_is_between(self) -> None:
        for name, price in (("falcon-h1", 2), ("lfm2", 0), ("bloom", 0), ("gemma3", 0)):
            backend = backend_of(name)
            cache = backend.new_cache()
            for span in (some_ids(10), some_ids(4)):
                backend.forward([Span(cache, span, 1)])
            backend.crop(cache, 12)
            assert cache.num_replayed == 0
            with failing(backend, -1) as calls:
                backend.forward([Span(cache, some_ids(3), 1)])
            assert len(calls) == 1
            assert cache.num_replayed == price

    def test_steps_are_for_short_spans(self) -> None:
        """A model that reads one id at a time rereads all, rather than a prompt step by step."""
        backend = backend_of("mamba")
        cache, text = backend.new_cache(), some_ids(80)
        for start, end, price in ((0, 30, 1), (30, 70, 1), (70, 74, 4), (74, 80, 6)):
            with failing(backend, -1) as calls:
                (rows,) = backend.forward([Span(cache, text[start:end], end - start)])
            assert len(calls) == price
            close(rows, rows_of(backend, text[:end])[start:])
        backend.crop(cache, 76)
        with failing(backend, -1) as calls:
            backend.forward([Span(cache, [5], 1)])
        assert len(calls) == 1  # a state is kept at every step


class TestCaches:
    @pytest.mark.parametrize(
        ("name", "cache", "reason"),
        [
            ("llama", "quantized", "QuantizedCache can't serve LlamaForCausalLM: .*cut back"),
            ("mistral", "quantized", "QuantizedCache can't serve MistralForCausalLM"),
            ("llama", "offloaded", r"DynamicCache\(offloading=True\) .* the model is on cpu"),
            ("mamba", "packed", "linear_attention"),
        ],
    )
    def test_that_cannot_be_had(self, name: str, cache: str, reason: str) -> None:
        model = build(name)
        calls: list[int] = []
        model.register_forward_hook(lambda *_: calls.append(1))
        with pytest.raises(TypeError, match=reason):
            wrap(model, cache=cache)
        assert not calls

    def test_that_are_not_there(self) -> None:
        with pytest.raises(ValueError, match="no cache 'ring': choose one of packed, dynamic"):
            wrap(build("llama"), cache="ring")

    def test_of_the_shortest_contexts(self) -> None:
        for name in ("llama", "falcon-h1", "lfm2"):
            for limit in (1, 2, 3):
                backend = wrap(build(name), max_context=limit)
                cache = backend.new_cache()
                (rows,) = backend.forward([Span(cache, [7] * limit, limit)])
                close(rows, rows_of(backend, [7] * limit))

    @pytest.mark.gpu("torch")
    def test_offloaded(self) -> None:
        for name in ("llama", "falcon-h1"):
            backend = wrap(build(name).cuda(), cache="offloaded")
            for check in CHECKS:
                check(backend, tolerance=0.05)
