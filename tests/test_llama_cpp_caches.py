"""The way back in every kind of memory that llama.cpp has, on tiny random models of each."""

import functools
import itertools
import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from specdec import SpeculativeDecoder, UnsupportedModelError
from specdec.backend import Span
from specdec.errors import RuntimeFailure
from specdec.testing import CHECKS, Check
from specdec.vocab import Vocabulary

pytest.importorskip("gguf")
pytest.importorskip("llama_cpp")

import gguf
from llama_cpp import llama_cpp as lib

from specdec_llama_cpp import LlamaCppBackend
from specdec_llama_cpp import backend as backend_module
from specdec_llama_cpp import context as context_module
from specdec_llama_cpp import rollback as rollback_module

SIZE, HIDDEN, LAYERS, FEED_FORWARD = 64, 32, 4, 48
HEADS, KV_HEADS, HEAD = 4, 2, 8
INNER, STATE, RANK, KERNEL, GROUPS = 64, 8, 4, 4, 2
EXPERTS, WINDOW = 4, 16
KEYS, VALUES = STATE * GROUPS, STATE * RANK  # of linear attention

VOCAB = Vocabulary(size=SIZE, tokens=[bytes([32 + i]) for i in range(SIZE)], eos_ids=frozenset())

Shapes: TypeAlias = dict[str, tuple[int, ...]]

NORM: Shapes = {"attn_norm.weight": (HIDDEN,)}
POST_NORM: Shapes = {"post_attention_norm.weight": (HIDDEN,)}
ATTENTION: Shapes = {
    "attn_q.weight": (HEADS * HEAD, HIDDEN),
    "attn_k.weight": (KV_HEADS * HEAD, HIDDEN),
    "attn_v.weight": (KV_HEADS * HEAD, HIDDEN),
    "attn_output.weight": (HIDDEN, HEADS * HEAD),
}
QK_NORMS: Shapes = {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}
ATTENTION_BIASES: Shapes = {
    "attn_q.bias": (HEADS * HEAD,),
    "attn_k.bias": (KV_HEADS * HEAD,),
    "attn_v.bias": (KV_HEADS * HEAD,),
    "attn_output.bias": (HIDDEN,),
    "attn_sinks.weight": (HEADS,),
}
GATED_ATTENTION = ATTENTION | QK_NORMS | {"attn_q.weight": (2 * HEADS * HEAD, HIDDEN)}
PLAIN_MLP: Shapes = {
    "ffn_gate.weight": (FEED_FORWARD, HIDDEN),
    "ffn_up.weight": (FEED_FORWARD, HIDDEN),
    "ffn_down.weight": (HIDDEN, FEED_FORWARD),
}
MLP = PLAIN_MLP | {"ffn_norm.weight": (HIDDEN,)}
EXPERT_MLP: Shapes = {
    "ffn_gate_inp.weight": (EXPERTS, HIDDEN),
    "ffn_gate_exps.weight": (EXPERTS, FEED_FORWARD, HIDDEN),
    "ffn_up_exps.weight": (EXPERTS, FEED_FORWARD, HIDDEN),
    "ffn_down_exps.weight": (EXPERTS, HIDDEN, FEED_FORWARD),
}
SHARED_EXPERT: Shapes = {
    "ffn_gate_inp_shexp.weight": (HIDDEN,),
    "ffn_gate_shexp.weight": (FEED_FORWARD, HIDDEN),
    "ffn_up_shexp.weight": (FEED_FORWARD, HIDDEN),
    "ffn_down_shexp.weight": (HIDDEN, FEED_FORWARD),
}
EXPERT_BIASES: Shapes = {
    "ffn_gate_inp.bias": (EXPERTS,),
    "ffn_gate_exps.bias": (EXPERTS, FEED_FORWARD),
    "ffn_up_exps.bias": (EXPERTS, FEED_FORWARD),
    "ffn_down_exps.bias": (EXPERTS, HIDDEN),
}
SSM: Shapes = {
    "ssm_in.weight": (2 * INNER, HIDDEN),
    "ssm_conv1d.weight": (INNER, KERNEL),
    "ssm_conv1d.bias": (INNER,),
    "ssm_x.weight": (RANK + 2 * STATE, INNER),
    "ssm_dt.weight": (INNER, RANK),
    "ssm_dt.bias": (INNER,),
    "ssm_a": (INNER, STATE),
    "ssm_d": (INNER,),
    "ssm_out.weight": (HIDDEN, INNER),
}
SSM_NORMS: Shapes = {
    "ssm_dt_norm.weight": (RANK,),
    "ssm_b_norm.weight": (STATE,),
    "ssm_c_norm.weight": (STATE,),
}
SSM2_CHANNELS = INNER + 2 * GROUPS * STATE
SSM2: Shapes = {
    "ssm_in.weight": (INNER + SSM2_CHANNELS + RANK, HIDDEN),
    "ssm_conv1d.weight": (SSM2_CHANNELS, KERNEL),
    "ssm_conv1d.bias": (SSM2_CHANNELS,),
    "ssm_dt.bias": (RANK,),
    "ssm_a": (RANK, 1),
    "ssm_d": (RANK, 1),
    "ssm_norm.weight": (GROUPS, INNER // GROUPS),
    "ssm_out.weight": (HIDDEN, INNER),
}
SHORT_CONV: Shapes = {
    "shortconv.conv.weight": (HIDDEN, KERNEL),
    "shortconv.in_proj.weight": (3 * HIDDEN, HIDDEN),
    "shortconv.out_proj.weight": (HIDDEN, HIDDEN),
}
DELTA_NET: Shapes = {
    "attn_qkv.weight": (2 * KEYS + VALUES, HIDDEN),
    "attn_gate.weight": (VALUES, HIDDEN),
    "ssm_conv1d.weight": (2 * KEYS + VALUES, KERNEL),
    "ssm_dt.bias": (RANK,),
    "ssm_a": (RANK,),
    "ssm_norm.weight": (STATE,),
    "ssm_out.weight": (HIDDEN, VALUES),
}
BETA_ALPHA: Shapes = {"ssm_ba.weight": (2 * RANK, HIDDEN)}
BETA_AND_ALPHA: Shapes = {"ssm_beta.weight": (RANK, HIDDEN), "ssm_alpha.weight": (RANK, HIDDEN)}
GEMMA = NORM | ATTENTION | POST_NORM | MLP | {"post_ffw_norm.weight": (HIDDEN,)}

# Of each architecture the layers that take turns.
FAMILIES: dict[str, tuple[Shapes, Shapes]] = {
    "llama": (NORM | ATTENTION | MLP,) * 2,
    "gemma2": (GEMMA,) * 2,
    "gemma3": (GEMMA | QK_NORMS,) * 2,
    "gpt-oss": (NORM | ATTENTION | ATTENTION_BIASES | POST_NORM | EXPERT_MLP | EXPERT_BIASES,) * 2,
    "mamba": (NORM | SSM,) * 2,
    "mamba2": (NORM | SSM2,) * 2,
    "jamba": (NORM | SSM | SSM_NORMS | MLP, NORM | ATTENTION | MLP),
    "falcon-h1": (NORM | SSM2 | ATTENTION | PLAIN_MLP | {"ffn_norm": (HIDDEN,)},) * 2,
    "lfm2": (NORM | SHORT_CONV | MLP, NORM | ATTENTION | QK_NORMS | MLP),
    "qwen3next": (
        NORM | DELTA_NET | BETA_ALPHA | POST_NORM | EXPERT_MLP | SHARED_EXPERT,
        NORM | GATED_ATTENTION | POST_NORM | EXPERT_MLP | SHARED_EXPERT,
    ),
    "qwen35": (
        NORM | DELTA_NET | BETA_AND_ALPHA | POST_NORM | PLAIN_MLP,
        NORM | GATED_ATTENTION | POST_NORM | PLAIN_MLP,
    ),
}
WINDOWED = ("gemma2", "gemma3", "gpt-oss")
CROPPABLE = ("llama", *WINDOWED)
REPLAYING = ("mamba", "mamba2", "jamba", "falcon-h1", "lfm2", "lfm2+window", "qwen3next", "qwen35")
KINDS = (*CROPPABLE, *REPLAYING)
ONE_OF_EACH = ("llama", "gemma3", "mamba2", "falcon-h1")


def write_model(path: Path, kind: str, *, noise: float, max_context: int) -> None:
    """A random model in float32; of one kind and different noise they are siblings."""
    family, _, windowed = kind.partition("+")
    layers = FAMILIES[family]
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(max_context)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_vocab_size(SIZE)
    writer.add_tokenizer_model("none")
    writer.add_layer_norm_rms_eps(1e-5)
    attends = ["attn_k.weight" in shapes for shapes in layers]
    writer.add_feed_forward_length(FEED_FORWARD if any(attends) else 0)
    writer.add_head_count(HEADS if any(attends) else 0)
    if any(attends):
        by_layer = [KV_HEADS * attends[i % 2] for i in range(LAYERS)]
        writer.add_head_count_kv(by_layer if family in ("jamba", "lfm2") else KV_HEADS)
        writer.add_key_length(HEAD)
        writer.add_value_length(HEAD)
        writer.add_rope_dimension_count(HEAD)
    if family in WINDOWED or windowed:
        writer.add_sliding_window(WINDOW)
    if windowed:
        writer.add_sliding_window_pattern([False, False, False, True])
    if any("ssm_a" in shapes for shapes in layers):
        writer.add_ssm_conv_kernel(KERNEL)
        writer.add_ssm_inner_size(VALUES if family.startswith("qwen") else INNER)
        writer.add_ssm_state_size(STATE)
        writer.add_ssm_time_step_rank(RANK)
        writer.add_ssm_group_count(GROUPS)
    if family == "lfm2":
        writer.add_shortconv_l_cache(KERNEL)
    if family.startswith("qwen"):
        writer.add_full_attention_interval(2)
        writer.add_rope_dimension_sections([2, 1, 1, 0])
    if any("ffn_gate_exps.weight" in shapes for shapes in layers):
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(FEED_FORWARD)
    if family == "qwen3next":
        writer.add_expert_shared_feed_forward_length(FEED_FORWARD)

    weights, noises = np.random.default_rng(0), np.random.default_rng(1)

    embedding = HIDDEN**-0.5 if family.startswith("gemma") else 1.0  # which Gemma scales up

    def add(name: str, shape: tuple[int, ...]) -> None:
        if "norm" in name:
            weight = np.ones(shape)
        elif name.endswith("ssm_a"):
            weight = -weights.uniform(0.05, 0.6, shape)  # slow to forget
        elif name.endswith("ssm_dt.bias"):
            weight = weights.uniform(-2, 0, shape)
        else:
            weight = weights.normal(size=shape) + noise * noises.normal(size=shape)
            weight *= embedding if name == "token_embd.weight" else 1.5 / shape[-1] ** 0.5
        writer.add_tensor(name, weight.astype(np.float32))

    add("token_embd.weight", (SIZE, HIDDEN))
    add("token_embd_norm.weight" if family == "lfm2" else "output_norm.weight", (HIDDEN,))
    if family != "gemma2":
        add("output.weight", (SIZE, HIDDEN))
    for i in range(LAYERS):
        for name, shape in layers[i % 2].items():
            add(f"blk.{i}.{name}", shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


Load: TypeAlias = Callable[..., LlamaCppBackend]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Load a tiny model, in exact mode, so that rows are equal up to float32's rounding."""
    folder = tmp_path_factory.mktemp("caches")

    @functools.cache
    def written(kind: str, noise: float, max_context: int) -> Path:
        path = folder / f"{kind}-{noise}-{max_context}.gguf"
        write_model(path, kind, noise=noise, max_context=max_context)
        return path

    def load(
        kind: str, *, noise: float = 0.0, max_context: int = 512, **options: Any
    ) -> LlamaCppBackend:
        path = written(kind, noise, max_context)
        exact: dict[str, Any] = {
            "flash_attention": False,
            "cache_dtype": "f32",
            "n_threads": 1,
            "vocab": VOCAB,
        }
        return LlamaCppBackend(path, **exact | options)

    return load


@pytest.fixture(scope="module", params=KINDS)
def backend(request: pytest.FixtureRequest, load: Load) -> Iterator[LlamaCppBackend]:
    with load(request.param) as backend:
        yield backend


@pytest.fixture(params=ONE_OF_EACH)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def some_ids(count: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, SIZE, count)]


def fed(backend: LlamaCppBackend, ids: Sequence[int]) -> Any:
    cache = backend.new_cache()
    if ids:
        backend.forward([Span(cache, ids, 0)])
    return cache


def rows_after(backend: LlamaCppBackend, cache: Any, ids: Sequence[int]) -> Any:
    (rows,) = backend.forward([Span(cache, ids, len(ids))])
    return rows


def fresh_rows(backend: LlamaCppBackend, ids: Sequence[int], count: int) -> Any:
    cache = backend.new_cache()
    (rows,) = backend.forward([Span(cache, ids, count)])
    cache.close()
    return rows


def assert_same(rows: Any, expected: Any) -> None:
    np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-3 * float(expected.std()))


# The contract


def test_the_probe_tells_the_way_back(backend: LlamaCppBackend) -> None:
    info = backend.info()
    replays = info["architecture"] in [kind.partition("+")[0] for kind in REPLAYING]
    assert info["rollback"] == ("snapshot and replay" if replays else "crop")


@pytest.mark.parametrize("check", CHECKS)
def test_contract(backend: LlamaCppBackend, check: Check) -> None:
    check(backend)


class Sequences(RuleBasedStateMachine):
    """Random calls, against a prefill of the same ids in a backend that does nothing else."""

    backend: LlamaCppBackend
    oracle: LlamaCppBackend

    @initialize()
    def start(self) -> None:
        self.texts: dict[Any, list[int]] = {}

    def teardown(self) -> None:
        for cache in getattr(self, "texts", {}):
            cache.close()

    @rule()
    def open(self) -> None:
        if len(self.texts) < 6:
            self.texts[self.backend.new_cache()] = []

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        cache = data.draw(st.sampled_from(list(self.texts)))
        cache.close()
        del self.texts[cache]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        cache = data.draw(st.sampled_from(list(self.texts)))
        text = self.texts[cache]
        del text[data.draw(st.integers(0, len(text))) :]
        self.backend.crop(cache, len(text))

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), seed=st.integers(0, 99))
    def forward(self, data: st.DataObject, seed: int) -> None:
        caches = data.draw(st.lists(st.sampled_from(list(self.texts)), unique=True, min_size=1))
        spans = []
        for i, cache in enumerate(caches):
            room = self.backend.max_context - len(cache)
            count = data.draw(st.integers(0, min(room, 30)))
            if count:
                wanted = data.draw(st.integers(0, min(count, 4)))
                spans.append(Span(cache, some_ids(count, 10 * seed + i), wanted))
        found = self.backend.forward(spans)
        for span, rows in zip(spans, found, strict=True):
            self.texts[span.cache] += span.tokens
            if span.num_logits:
                expected = fresh_rows(self.oracle, self.texts[span.cache], span.num_logits)
                assert_same(rows, expected)

    @invariant()
    def caches_have_the_lengths_of_their_texts(self) -> None:
        for cache, text in getattr(self, "texts", {}).items():
            assert len(cache) == len(text)


@pytest.mark.parametrize("kind", [*ONE_OF_EACH, "lfm2+window"])
def test_random_calls_equal_fresh_prefills(kind: str, load: Load) -> None:
    with load(kind, n_ctx=80, n_batch=16) as backend, load(kind, n_ctx=80) as oracle:
        machine = type("Machine", (Sequences,), {"backend": backend, "oracle": oracle})
        quick = settings(
            max_examples=25,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow],
        )
        run_state_machine_as_test(machine, settings=quick)


# Speculative decoding


def assert_lossless(
    target: LlamaCppBackend, draft: LlamaCppBackend, lengths: Sequence[int], max_new_tokens: int
) -> None:
    prompt = some_ids(9, seed=3)
    plain = SpeculativeDecoder(target).generate(prompt, max_new_tokens=max_new_tokens)
    for num_draft_tokens in lengths:
        decoder = SpeculativeDecoder(target, draft, num_draft_tokens=num_draft_tokens)
        result = decoder.generate(prompt, max_new_tokens=max_new_tokens)
        assert result.token_ids == plain.token_ids
        assert result.finish_reason == plain.finish_reason
        assert result.stats.num_correct_drafts < result.stats.num_proposed_drafts


@pytest.mark.parametrize("draft_kind", KINDS)
def test_each_kind_drafts_for_its_sibling(draft_kind: str, load: Load) -> None:
    with load(draft_kind) as target, load(draft_kind, noise=0.05) as draft:
        assert_lossless(target, draft, [1, 3, 8], 60)


@pytest.mark.parametrize("kind", ["gemma3", "mamba", "jamba", "qwen35"])
def test_each_kind_with_another(kind: str, load: Load) -> None:
    with load(kind) as one, load("llama") as other:
        assert_lossless(one, other, [3], 40)
        assert_lossless(other, one, [3], 40)


def test_small_batches_and_the_last_slot_of_the_context(kind: str, load: Load) -> None:
    small = {"n_ctx": 40, "n_batch": 3}
    with load(kind, **small) as target, load(kind, noise=0.05, **small) as draft:
        assert_lossless(target, draft, [1, 8], 60)
        plain = SpeculativeDecoder(target).generate(some_ids(9, seed=3), max_new_tokens=60)
        assert plain.finish_reason == "context"


def test_the_next_turn_and_an_edited_prompt(kind: str, load: Load) -> None:
    with load(kind) as target, load(kind, noise=0.05) as draft:
        decoder = SpeculativeDecoder(target, draft, num_draft_tokens=3)
        prompt = some_ids(50)
        first = decoder.generate(prompt, max_new_tokens=20).token_ids
        turns = [prompt + first + some_ids(5, 1), prompt[:30] + some_ids(10, 2), prompt]
        for turn in turns:
            found = decoder.generate(turn, max_new_tokens=20)
            fresh = SpeculativeDecoder(target, keep_caches=0).generate(turn, max_new_tokens=20)
            assert found.token_ids == fresh.token_ids


# What it costs


def test_a_crop_to_where_a_forward_began_costs_nothing(load: Load) -> None:
    with load("mamba2") as backend:
        cache = fed(backend, some_ids(20))
        assert cache.num_replayed == 0
        rows_after(backend, cache, some_ids(6, 1))
        backend.crop(cache, 20)
        rows_after(backend, cache, some_ids(6, 1))
        assert cache.num_replayed == 0
        backend.crop(cache, 23)
        rows_after(backend, cache, [1])
        assert (len(cache), cache.num_replayed) == (24, 3)
        cache.close()
        assert cache.num_replayed == 0


def test_memories_that_can_be_cut_read_nothing_again(load: Load) -> None:
    for kind in CROPPABLE:
        with load(kind) as backend:
            cache = fed(backend, some_ids(50))
            for length in (49, 45, 30, 7):
                backend.crop(cache, length)
                rows_after(backend, cache, [1, 2, 3])
            assert cache.num_replayed == 0


def test_caches_that_were_never_fed_are_nothing_to_llama_cpp(
    load: Load, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    backend = load(kind)
    for cache in [backend.new_cache() for _ in range(9)]:  # more than its context has room for
        cache.close()
    fed(backend, some_ids(5))
    assert capfd.readouterr() == ("", "")


def test_kept_states_are_few(load: Load) -> None:
    with load("jamba") as backend:
        cache = fed(backend, [1])
        for token in some_ids(100):
            backend.forward([Span(cache, [token], 0)])
        assert len(backend._sequences[cache._slot]._kept) <= 4


# Windows


@pytest.mark.parametrize("kind", WINDOWED)
@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW])
def test_crops_around_the_windows_end(kind: str, length: int, load: Load) -> None:
    ids, new = some_ids(length), some_ids(3, 1)
    with load(kind) as backend:
        expected = fresh_rows(backend, ids + new, 3)
        for beyond in (1, 2, WINDOW, 2 * WINDOW):
            cache = fed(backend, ids)
            for token in some_ids(beyond, 2):
                rows_after(backend, cache, [token])
            backend.crop(cache, length)
            assert_same(rows_after(backend, cache, new), expected)


@pytest.mark.parametrize("kind", ["gemma3", "lfm2+window"])
def test_a_window_that_another_sequence_wrote_over(kind: str, load: Load) -> None:
    """llama.cpp gives cells away that have left the window, also where it keeps them all."""
    ids, new = some_ids(70, 1), some_ids(3, 2)
    with load(kind) as backend:
        first, second = fed(backend, some_ids(20)), backend.new_cache()
        for start in range(0, 70, 14):
            rows_after(backend, second, ids[start : start + 14])
        first.close()
        fed(backend, some_ids(40, 3))  # into the first one's room and over the second's
        for length in (66, 43, 30):
            backend.crop(second, length)
            expected = fresh_rows(backend, ids[:length] + new, 3)
            assert_same(rows_after(backend, second, new), expected)
            backend.crop(second, length)
        assert second.num_replayed > 0


# Growth and faults


@pytest.mark.parametrize("kind", REPLAYING)
def test_growth_moves_the_recurrent_state_too(kind: str, load: Load) -> None:
    texts = [some_ids(30 + i, i) for i in range(3)]
    new = some_ids(4, 9)
    with load(kind) as backend:
        caches = [fed(backend, text) for text in texts]
        backend.crop(caches[1], 20)
        before = backend._context
        more = [backend.new_cache() for _ in range(20)]
        backend.forward([Span(cache, some_ids(25), 0) for cache in more])
        assert backend._context is not before
        backend.crop(caches[2], 32)  # read in one go, so that all of it is read again
        for cache, text in zip(caches, (texts[0], texts[1][:20], texts[2]), strict=True):
            rows = rows_after(backend, cache, new)
            assert_same(rows, fresh_rows(backend, [*text, *new], 4))


@pytest.mark.parametrize("kind", ["mamba2", "falcon-h1"])
def test_a_growth_that_fails_rewinds_nobody(
    kind: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_args: object, **_options: object) -> None:
        raise RuntimeFailure("no memory")

    texts = [some_ids(200, 1), some_ids(200, 2)]
    with load(kind) as backend:
        caches = [fed(backend, text) for text in texts]
        with monkeypatch.context() as patch:
            patch.setattr(backend_module, "Context", no_memory)
            with pytest.raises(RuntimeFailure, match="no memory"):
                backend.forward([Span(caches[0], some_ids(300), 0)])
        for cache, text in zip(caches, texts, strict=True):
            rows = rows_after(backend, cache, [7])
            assert cache.num_replayed == 0
            assert_same(rows, fresh_rows(backend, [*text, 7], 1))


@contextmanager
def failing_decode(patch: pytest.MonkeyPatch, at: int, fault: BaseException | None) -> Any:
    """llama_decode does its work and then fails, at its ``at``-th call."""
    real, calls = lib.llama_decode, itertools.count()

    def decode(context: Any, batch: Any) -> int:
        code = int(real(context, batch))
        if next(calls) != at:
            return code
        if fault is not None:
            raise fault
        return -3

    with patch.context() as inner:
        inner.setattr(lib, "llama_decode", decode)
        yield


@pytest.mark.parametrize("fault", [None, KeyboardInterrupt()])
def test_a_fault_at_any_decode_leaves_every_cache_as_before(
    kind: str, load: Load, fault: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [some_ids(20, 1), some_ids(4, 2), some_ids(9, 3)]
    new = [some_ids(9, 4), some_ids(6, 5)]
    with load(kind, n_batch=8) as backend:
        caches = [fed(backend, text) for text in texts]
        backend.crop(caches[0], 18)
        texts[0] = texts[0][:18]
        spans = [Span(cache, ids, 2) for cache, ids in zip(caches, new, strict=False)]
        for at in itertools.count():
            try:
                with failing_decode(monkeypatch, at, fault):
                    backend.forward(spans)
            except (KeyboardInterrupt, RuntimeFailure):
                assert [len(cache) for cache in caches] == [18, 4, 9]
            else:
                break
            for cache, text in zip(caches, texts, strict=True):
                rows = rows_after(backend, cache, [7, 8])
                assert_same(rows, fresh_rows(backend, [*text, 7, 8], 2))
                backend.crop(cache, len(text))
        assert at > 1


@pytest.mark.parametrize("kind", ["mamba2", "falcon-h1"])
def test_an_interrupt_at_any_line_of_a_round(kind: str, load: Load) -> None:
    text, other = some_ids(20, 1), some_ids(6, 2)
    with load(kind) as backend:
        cache, bystander = fed(backend, text), fed(backend, other)
        after = fresh_rows(backend, [*text, 7], 1), fresh_rows(backend, [*other, 7], 1)
        for line in itertools.count(1):
            try:
                with interrupted(line):
                    backend.forward([Span(cache, [1, 2, 3], 3)])
                    backend.crop(cache, 22)
                    backend.crop(cache, 20)
            except KeyboardInterrupt:
                assert len(cache) in (20, 22, 23)
                backend.crop(cache, 20)
            else:
                break
            for each, expected in zip((cache, bystander), after, strict=True):
                assert_same(rows_after(backend, each, [7]), expected)
                backend.crop(each, len(each) - 1)
        assert line > 50


@contextmanager
def interrupted(at_line: int) -> Iterator[None]:
    """Ctrl-C before the n-th line that runs in the backend, but for those that take the lock."""
    files = {module.__file__ for module in (backend_module, context_module, rollback_module)}
    lines = itertools.count(1)

    def trace(frame: FrameType, event: str, _arg: object) -> Any:
        file = frame.f_code.co_filename
        if file not in files:
            return None
        line = linecache.getline(file, frame.f_lineno)
        counts = event == "line" and "_lock" not in line and line.strip() != "try:"
        if counts and next(lines) == at_line:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


# Broken runtimes


def does_nothing(*_args: Any) -> bool:
    return True


def takes_and_ignores(_context: Any, _data: Any, size: int, *_args: Any) -> int:
    return size


def crops_one_too_many(memory: Any, slot: int, start: int, end: int) -> bool:
    return bool(REAL_RM(memory, slot, max(0, start - 1), end))


def crops_only_the_whole(memory: Any, slot: int, start: int, end: int) -> bool:
    return bool(REAL_RM(memory, slot, start, end)) if start <= 0 else True


def refuses_a_part(memory: Any, slot: int, start: int, end: int) -> bool:
    past = start > lib.llama_memory_seq_pos_max(memory, slot)
    return bool(REAL_RM(memory, slot, start, end)) if start <= 0 or past else False


def reads_another_state(context: Any, data: Any, size: int, slot: int, part: int) -> int:
    size = int(REAL_GET(context, data, size, slot, part))
    state = np.ctypeslib.as_array(data, (size,))[-256:].view(np.float32)
    state[:] = 1 - 2 * state
    return size


REAL_RM, REAL_GET = lib.llama_memory_seq_rm, lib.llama_state_seq_get_data_ext
REMOVE, GET, SET = (
    "llama_memory_seq_rm",
    "llama_state_seq_get_data_ext",
    "llama_state_seq_set_data_ext",
)


@pytest.mark.parametrize(
    ("kind", "name", "broken", "memory"),
    [
        ("llama", REMOVE, does_nothing, "llama model.*attention memory"),
        ("gemma3", REMOVE, crops_one_too_many, "gemma3 model.*attention memory"),
        ("mamba", SET, takes_and_ignores, "mamba model.*recurrent memory"),
        ("mamba2", GET, reads_another_state, "mamba2 model.*recurrent memory"),
        ("jamba", SET, takes_and_ignores, "jamba model.*hybrid memory"),
        ("qwen3next", GET, reads_another_state, "qwen3next model.*hybrid memory"),
    ],
)
def test_the_probe_refuses_memories_that_go_back_in_no_way(
    kind: str,
    name: str,
    broken: Any,
    memory: str,
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lib, name, broken)
    with pytest.raises(UnsupportedModelError, match=memory):
        load(kind)


@pytest.mark.parametrize("kind", CROPPABLE)
def test_attention_that_cannot_be_cut_goes_back_by_its_states(
    kind: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lib, REMOVE, refuses_a_part)
    with load(kind) as backend:
        assert backend.info()["rollback"] == "snapshot and replay"
        for check in CHECKS:
            check(backend)


@pytest.mark.parametrize(
    ("kind", "name", "broken"),
    [
        ("mamba", SET, takes_and_ignores),
        ("falcon-h1", SET, takes_and_ignores),
        ("jamba", SET, lambda *_args: 0),
        ("llama", REMOVE, crops_only_the_whole),
        ("gemma3", REMOVE, crops_one_too_many),
    ],
)
def test_what_breaks_later_costs_time_but_changes_nothing(
    kind: str, name: str, broken: Any, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, new = some_ids(30), some_ids(3, 1)
    with load(kind) as backend:
        expected = fresh_rows(backend, [*text, *new], 3)
        cache = fed(backend, text)
        rows_after(backend, cache, some_ids(4, 2))
        monkeypatch.setattr(lib, name, broken)
        backend.crop(cache, 30)
        assert_same(rows_after(backend, cache, new), expected)
        assert cache.num_replayed == 30


def test_loading_costs_three_small_decodes(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    real, sizes = lib.llama_decode, []

    def decode(context: Any, batch: Any) -> int:
        sizes.append(batch.n_tokens)
        return int(real(context, batch))

    monkeypatch.setattr(lib, "llama_decode", decode)
    with load("llama") as backend:
        assert sizes == [2, 2, 2]
        made = backend._context
        fed(backend, some_ids(9))
        assert backend._context is made


@pytest.mark.parametrize("n_ctx", [1, 2, 3])
def test_the_probe_fits_into_any_context(n_ctx: int, kind: str, load: Load) -> None:
    with load(kind, n_ctx=n_ctx) as backend:
        cache = fed(backend, [3] * n_ctx)
        backend.crop(cache, n_ctx - 1)
        assert_same(
            rows_after(backend, cache, [5]), fresh_rows(backend, [3] * (n_ctx - 1) + [5], 1)
        )
