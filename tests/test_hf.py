"""HFBackend: the clauses of the contract, transformers' own text, and what is left alone."""

import copy
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.backend import Span
from specdec.errors import ContextFullError, CropError, RuntimeFailure, TokenIdError
from specdec.vocab import Vocabulary

pytestmark = pytest.mark.usefixtures("one_thread")

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from specdec_hf import HFBackend  # noqa: E402
from specdec_hf.border import cache_keyword, context_limit  # noqa: E402
from specdec_hf.gguf import load_gguf  # noqa: E402
from specdec_hf.tokens import STAND_INS, token_table  # noqa: E402

VOCAB = 96
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOW = {"sliding_window": 8}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, **WINDOW}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral-window": ("Mistral", WINDOW),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "phi3-window": ("Phi3", WINDOW),
    "gemma2-softcap": ("Gemma2", {"attn_logit_softcapping": 2.0, **MIXED}),
    "gemma3-mixed": ("Gemma3Text", MIXED),
    "cohere2-window-by-mask-only": ("Cohere2", MIXED),
    "gpt-oss-sinks": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, **MIXED}),
}


def build(name: str, **changes: Any) -> Any:
    """A tiny random model in float32 whose texts are neither constant nor near-ties."""
    family, extra = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **extra, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.5 + 0.3 * noise if parameter.ndim == 1 else 0.4 * noise)
    return model


def plain_vocab(size: int = VOCAB) -> Vocabulary:
    return Vocabulary(size=size, tokens=[bytes([i]) for i in range(size)], eos_ids=frozenset())


def wrap(model: Any, **options: Any) -> HFBackend:
    return HFBackend(model=model, vocab=plain_vocab(model.config.vocab_size), **options)


def rows_of(backend: HFBackend, ids: Sequence[int]) -> Any:
    """All rows of a text, in one forward on a fresh cache."""
    (rows,) = backend.forward([Span(backend.new_cache(), ids, len(ids))])
    return rows


def close(rows: Any, expected: Any) -> None:
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def llama() -> HFBackend:
    return wrap(build("llama"))


@pytest.fixture
def ids() -> list[int]:
    return [int(i) for i in np.random.default_rng(0).integers(0, VOCAB, 40)]


class TestText:
    """The same greedy text as transformers' own, whatever happens on the way."""

    @pytest.mark.parametrize("name", MODELS)
    def test_ragged_rounds_with_wrong_drafts(self, name: str) -> None:
        model = build(name)
        rng = np.random.default_rng(2)
        prompts = [[int(i) for i in rng.integers(0, VOCAB, n)] for n in (21, 2, 9, 14)]
        wanted = [
            model.generate(torch.tensor([p]), max_new_tokens=16, do_sample=False)[0].tolist()
            for p in prompts
        ]
        assert len({tuple(text[-16:]) for text in wanted}) == 4
        assert len({i for text in wanted for i in text[-16:]}) > 4

        backend = wrap(model)
        texts = copy.deepcopy(prompts)
        caches = [backend.new_cache() for _ in prompts]
        backend.forward([Span(c, t[:-1], 0) for c, t in zip(caches, texts, strict=True)])
        for turn in range(16):
            drafts = [[int(i) for i in rng.integers(0, VOCAB, (turn + n) % 4)] for n in range(4)]
            rows = backend.forward(
                [
                    Span(c, [t[-1], *d], len(d) + 1)
                    for c, t, d in zip(caches, texts, drafts, strict=True)
                ]
            )
            for cache, text, row in zip(caches, texts, rows, strict=True):
                text.append(int(row[0].argmax()))
                backend.crop(cache, len(text) - 1)
        assert texts == wanted

    def test_a_real_model(self, smollm2: HFBackend) -> None:
        encode = smollm2.vocab.encode
        assert encode is not None
        text = encode("The three largest cities of France are")
        prompt = len(text)
        wanted = smollm2.model.generate(torch.tensor([text]), max_new_tokens=48, do_sample=False)
        cache = smollm2.new_cache()
        fed = 0
        while len(text) < wanted.shape[1]:
            (row,) = smollm2.forward([Span(cache, text[fed:], 1)])
            fed = len(text)
            text.append(int(row[0].argmax()))
        assert len(text) > prompt + 8
        assert text == wanted[0].tolist()

    def test_bfloat16(self, ids: list[int]) -> None:
        model = build("gemma3-mixed").to(torch.bfloat16)
        backend = wrap(model)
        rows = rows_of(backend, ids)
        assert rows.dtype == torch.float32
        expected = model(torch.tensor([ids])).logits[0].float()
        assert torch.nn.functional.cosine_similarity(rows, expected).min() > 0.999


class TestClauses:
    def test_c1_rows(self, llama: HFBackend, ids: list[int]) -> None:
        every = rows_of(llama, ids)
        assert every.shape == (40, VOCAB)
        assert every.dtype == torch.float32
        assert not every.requires_grad
        caches = [llama.new_cache() for _ in range(3)]
        spans = [Span(caches[0], ids, 2), Span(caches[1], ids[:5], 0), Span(caches[2], ids[:9], 9)]
        two, none, nine = llama.forward(spans)
        assert [len(cache) for cache in caches] == [40, 5, 9]
        assert none.shape == (0, VOCAB)
        close(two, every[-2:])
        close(nine, every[:9])

    def test_c1_unwanted_rows_are_not_made(self, ids: list[int]) -> None:
        model = build("llama")
        backend = wrap(model)
        made = []
        model.lm_head.register_forward_hook(lambda _m, _i, out: made.append(out.shape[:-1].numel()))
        cache, other = backend.new_cache(), backend.new_cache()
        backend.forward([Span(cache, ids, 0)])
        assert sum(made) == 0
        backend.forward([Span(cache, ids, 3), Span(other, ids, 1)])
        assert sum(made) == 4

    @pytest.mark.parametrize("name", ["llama", "gemma2-softcap", "gpt-oss-sinks", "gemma3-mixed"])
    def test_c2_a_batch_is_its_spans(self, name: str, ids: list[int]) -> None:
        backend = wrap(build(name))
        histories = [ids[:n] for n in (0, 3, 12, 30)]
        news = [ids[20:32], ids[5:6], ids[7:11], ids[1:4]]

        def fed() -> list[Any]:
            caches = [backend.new_cache() for _ in histories]
            for cache, history in zip(caches, histories, strict=True):
                if history:
                    backend.forward([Span(cache, history, 0)])
            return caches

        together = backend.forward([Span(c, n, len(n)) for c, n in zip(fed(), news, strict=True)])
        for cache, new, rows in zip(fed(), news, together, strict=True):
            (alone,) = backend.forward([Span(cache, new, len(new))])
            close(rows, alone)

    def test_an_empty_batch(self, llama: HFBackend) -> None:
        assert llama.forward([]) == []

    @settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    @pytest.mark.parametrize("name", ["llama", "gemma3-mixed"])
    def test_c3_a_crop_leaves_no_trace(self, name: str, data: st.DataObject) -> None:
        backend = built(name)
        cache, text = backend.new_cache(), list[int]()
        for _ in range(data.draw(st.integers(1, 5))):
            new = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40))
            (rows,) = backend.forward([Span(cache, new, len(new))])
            text += new
            close(rows, rows_of(backend, text)[-len(new) :])
            length = data.draw(st.integers(0, len(text)))
            backend.crop(cache, length)
            del text[length:]
            assert len(cache) == length

    def test_c4_nothing_changes(self, ids: list[int]) -> None:
        backend = wrap(build("llama"), max_context=44)
        good, full = backend.new_cache(), backend.new_cache()
        backend.forward([Span(good, ids[:4], 0), Span(full, ids, 0)])
        first = Span(good, ids[4:6], 1)
        with pytest.raises(ContextFullError, match="40 tokens and 5 more"):
            backend.forward([first, Span(full, ids[:5], 1)])
        for wrong in (-1, VOCAB):
            with pytest.raises(TokenIdError, match=str(wrong)):
                backend.forward([first, Span(full, [wrong], 1)])
        with pytest.raises(ValueError, match="asks for 2 rows"):
            backend.forward([first, Span(full, [1], 2)])
        for length in (41, -1):
            with pytest.raises(CropError, match="holds 40"):
                backend.crop(full, length)
        assert (len(good), len(full)) == (4, 40)
        backend.forward([Span(full, ids[:4], 1)])
        assert len(full) == backend.max_context == 44

    def test_caches_that_are_not_to_be_used(self, llama: HFBackend) -> None:
        closed, twice, foreign = llama.new_cache(), llama.new_cache(), wrap(llama.model).new_cache()
        closed.close()
        closed.close()
        assert len(closed) == 0
        for cache, reason in ((closed, "closed"), (foreign, "another backend")):
            with pytest.raises(ValueError, match=reason):
                llama.forward([Span(cache, [1], 1)])
            with pytest.raises(ValueError, match=reason):
                llama.crop(cache, 0)
        with pytest.raises(ValueError, match="twice"):
            llama.forward([Span(twice, [1], 1), Span(twice, [2], 1)])
        assert len(twice) == 0

    @pytest.mark.parametrize("failure", [RuntimeError("out of luck"), KeyboardInterrupt()])
    def test_c7_after_an_exception(self, failure: BaseException, ids: list[int]) -> None:
        model = build("gemma3-mixed")
        backend = wrap(model)
        before = model.config._attn_implementation
        cache, other = backend.new_cache(), backend.new_cache()
        backend.forward([Span(cache, ids[:10], 0)])

        def fail(*_: Any) -> None:
            raise failure

        hook = model.model.layers[2].mlp.register_forward_hook(fail)
        expected = RuntimeFailure if isinstance(failure, Exception) else type(failure)
        with pytest.raises(expected) as caught:
            backend.forward([Span(cache, ids[30:], 1), Span(other, ids, 1)])
        assert failure in (caught.value, caught.value.__cause__)
        assert (len(cache), len(other)) == (10, 0)
        assert model.config._attn_implementation == before
        hook.remove()
        (rows,) = backend.forward([Span(cache, ids[10:], 30)])
        close(rows, rows_of(backend, ids)[10:])

    def test_c8_the_same_again(self, llama: HFBackend, ids: list[int]) -> None:
        assert torch.equal(rows_of(llama, ids), rows_of(llama, ids))


class TestTheUsersModel:
    def test_is_left_alone(self, ids: list[int]) -> None:
        model = build("llama", attention_dropout=0.5)
        model.train()
        model.model.layers[1].eval()
        before = snapshot(model)
        backend = wrap(model)
        rows = rows_of(backend, ids)
        assert torch.equal(rows, rows_of(backend, ids))  # no dropout
        hook = model.model.norm.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(RuntimeFailure, match="ZeroDivisionError"):
            rows_of(backend, ids)
        hook.remove()
        assert snapshot(model) == before
        model.eval()
        close(rows, model(torch.tensor([ids])).logits[0])

    def test_may_have_sub_configs(self, ids: list[int]) -> None:
        text = transformers.Gemma3TextConfig(**{**SHAPE, **MIXED})
        config = transformers.Gemma3Config(
            text_config=text.to_dict(),
            vision_config={
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            mm_tokens_per_image=4,
            image_token_index=3,
        )
        config.vision_config._attn_implementation = "eager"
        model = transformers.Gemma3ForConditionalGeneration(config).eval()
        before = [
            c._attn_implementation for c in (config, config.text_config, config.vision_config)
        ]
        backend = HFBackend(model=model, vocab=plain_vocab())
        close(rows_of(backend, ids), model(torch.tensor([ids])).logits[0])
        after = [c._attn_implementation for c in (config, config.text_config, config.vision_config)]
        assert after == before
        assert before[-1] == "eager"


class FormerLlama(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
    """Spelled as before transformers renamed the cache."""

    def forward(
        self,
        input_ids: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        logits_to_keep: Any = 0,
        return_dict: bool = True,
    ) -> Any:
        return super().forward(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **{cache_keyword(build("llama")): past_key_values},
        )


def test_both_names_of_the_cache(llama: HFBackend, ids: list[int]) -> None:
    former = FormerLlama(llama.model.config)
    former.load_state_dict(llama.model.state_dict())
    assert cache_keyword(former) == "past_key_values"
    close(rows_of(wrap(former.eval()), ids), rows_of(llama, ids))


def snapshot(model: Any) -> Any:
    return (
        model.config.to_dict(),
        model.config._attn_implementation,
        model.generation_config.to_dict(),
        [(module.training, dict(module._forward_hooks)) for module in model.modules()],
        sorted(vars(model)),
        [parameter.requires_grad for parameter in model.parameters()],
    )


class TestRefusals:
    @pytest.mark.parametrize(
        ("family", "changes", "reason"),
        [
            ("Roberta", {"is_decoder": True}, "RobertaForCausalLM .*positions"),
            (
                "RecurrentGemma",
                {"lru_width": 32, "block_types": ["recurrent", "attention"]},
                "linear_attention, sliding_attention: .* one by one: after a rollback",
            ),
            ("Rwkv", {"attention_hidden_size": 32}, "RwkvForCausalLM .*'cache'"),
        ],
    )
    def test_models(self, family: str, changes: dict[str, Any], reason: str) -> None:
        config = getattr(transformers, f"{family}Config")(**{**SHAPE, "pad_token_id": 0, **changes})
        model = transformers.AutoModelForCausalLM.from_config(config)
        with pytest.raises(TypeError, match=reason):
            HFBackend(model=model, vocab=plain_vocab())

    def test_what_is_no_model(self) -> None:
        model: Any = torch.nn.Linear(2, 2)
        with pytest.raises(TypeError, match="Linear is no transformers model"):
            HFBackend(model=model, vocab=plain_vocab())

    def test_arguments(self, llama: HFBackend, tiny_llama: Any) -> None:
        folder = str(tiny_llama.folder)
        wrong: list[tuple[dict[str, Any], str]] = [
            ({}, "what its ids spell|give"),
            ({"model": llama.model}, "what its ids spell"),
            ({"path_or_hub_id": folder, "model": llama.model}, "not both"),
            ({"model": llama.model, "vocab": plain_vocab(), "dtype": "float32"}, "for loading"),
            ({"model": llama.model, "vocab": plain_vocab(9)}, "9, but the model's rows are 96"),
            ({"path_or_hub_id": folder, "dtype": "float31"}, "float31"),
            ({"path_or_hub_id": folder, "dtype": "int8"}, "int8"),
            ({"path_or_hub_id": folder, "device": "cuda:99"}, "isn't there"),
            ({"path_or_hub_id": folder, "device": "toaster"}, "isn't there"),
            ({"path_or_hub_id": folder, "device": "cpu", "max_context": 0}, "1 to 512"),
            ({"path_or_hub_id": folder, "device": "cpu", "max_context": 513}, "1 to 512"),
        ]
        for arguments, reason in wrong:
            with pytest.raises(ValueError, match=reason):
                HFBackend(**arguments)

    def test_models_that_are_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match=r"'no/such-model' is no folder here[^\n]*$"):
            HFBackend("no/such-model", local_files_only=True)
        for path in (str(tmp_path / "absent"), str(tmp_path / "absent.gguf")):
            with pytest.raises(FileNotFoundError, match="absent"):
                HFBackend(path)
        (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 40)
        with pytest.raises(ValueError, match=r"can't read 'broken\.gguf'"):
            HFBackend(str(tmp_path / "broken.gguf"))

    def test_a_rope_that_changes_with_length_ends_the_context(self) -> None:
        config = transformers.Phi3Config(
            **SHAPE,
            original_max_position_embeddings=64,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
                "original_max_position_embeddings": 64,
            },
        )
        assert config.max_position_embeddings == 256
        assert context_limit(config) == 64


class TestLoading:
    def test_a_folder(self, tiny_llama: Any) -> None:
        backend = HFBackend(str(tiny_llama.folder), dtype="bfloat16", device="cpu")
        info = backend.info()
        assert info["dtype"] == "bfloat16"
        assert info["device"] == "cpu"
        assert info["architecture"] == "LlamaForCausalLM"
        assert info["context"] == backend.max_context == 512
        whole = HFBackend(str(tiny_llama.folder), device="cpu")
        assert whole.info()["dtype"] == "float32"
        count = whole.model.num_parameters()
        assert (whole.info()["weight_bytes"], info["weight_bytes"]) == (4 * count, 2 * count)

    def test_tied_weights_count_once(self) -> None:
        models = [build("llama", tie_word_embeddings=tie) for tie in (True, False)]
        sizes: list[Any] = [wrap(model).info()["weight_bytes"] for model in models]
        assert sizes[1] - sizes[0] == 4 * VOCAB * 32

    def test_pickled_weights_only_where_there_is_nothing_else(
        self, tiny_llama: Any, tmp_path: Path
    ) -> None:
        safe = HFBackend(str(tiny_llama.folder), device="cpu")
        for file in tiny_llama.folder.glob("*.json"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
        torch.save(safe.model.state_dict(), tmp_path / "pytorch_model.bin")
        with pytest.warns(UserWarning, match="a pickle can run code"):
            pickled = HFBackend(str(tmp_path), device="cpu")
        assert torch.equal(rows_of(pickled, [1, 2, 3]), rows_of(safe, [1, 2, 3]))

    def test_a_folder_and_its_gguf_are_one_model(self, tiny_llama: Any) -> None:
        folder = HFBackend(str(tiny_llama.folder), device="cpu")
        by_path = HFBackend(str(tiny_llama.gguf), device="cpu")
        by_name = HFBackend(
            str(tiny_llama.gguf.parent), gguf_file=tiny_llama.gguf.name, device="cpu"
        )
        text = list(range(0, 280, 7))
        for backend in (by_path, by_name):
            assert torch.equal(rows_of(backend, text), rows_of(folder, text))
            assert backend.vocab.tokens == folder.vocab.tokens
            assert backend.vocab.special_ids == folder.vocab.special_ids
            assert backend.vocab.bos_id == folder.vocab.bos_id
            assert backend.vocab.encode_chat is not None

    @pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3-mixed", "gemma2-softcap"])
    def test_a_gguf_is_what_transformers_reads(self, name: str, tmp_path: Path) -> None:
        gguf = pytest.importorskip("gguf")
        path = tmp_path / "model.gguf"
        head = {"head_dim": 128} if name == "qwen3" else {}  # transformers doesn't read it
        write_gguf(gguf, path, build(name, tie_word_embeddings=name != "qwen2", **head))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            str(tmp_path), gguf_file=path.name, dtype=torch.float32
        )
        fast = load_gguf(path, torch.float32)
        assert (fast is None) == (name == "gemma2-softcap")  # left to transformers
        ours = HFBackend(str(path), device="cpu").model if fast is None else fast[0]
        expected, loaded = theirs.state_dict(), ours.state_dict()
        assert expected.keys() == loaded.keys()
        assert all(torch.equal(expected[key], loaded[key]) for key in expected)
        for (key, theirs_buffer), (_, ours_buffer) in zip(
            theirs.named_buffers(), ours.named_buffers(), strict=True
        ):
            assert torch.equal(theirs_buffer, ours_buffer), key
        config, expected_config = ours.config.to_dict(), theirs.config.to_dict()
        for key in ("quantization_config", "_name_or_path"):
            expected_config.pop(key, None)
            config.pop(key, None)
        assert config == expected_config
        assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()


def write_gguf(gguf: Any, path: Path, model: Any) -> None:
    """Tensors as they are, quantised where that is possible: only two readers are compared."""
    config = model.config
    architecture = {"gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(5000.0)
    writer.add_sliding_window(8)
    tokens = [*sorted(STAND_INS)[: VOCAB - 2], "<eos>", "!!"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (VOCAB - 2) + [3, 1])
    writer.add_token_merges(["! !"])
    writer.add_eos_token_id(VOCAB - 2)
    for name, tensor in model.state_dict().items():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if values.ndim == 2 and values.shape[1] % 32 == 0:
            quantised = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(gguf_name, quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(gguf_name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class TestVocabulary:
    def test_of_a_folder(self, make_tiny_llama: Callable[..., Any]) -> None:
        model = make_tiny_llama(vocab_padding=5, add_bos=True)
        vocab = HFBackend(str(model.folder), device="cpu").vocab
        assert vocab.encode is not None
        assert vocab.encode_chat is not None
        assert vocab.size == model.vocab_size == len(vocab.tokens) + 5
        names = [b"<|bos|>", b"<|eos|>", b"<|im_start|>", b"<|im_end|>"]
        ids = {name: vocab.tokens.index(name) for name in names}
        assert vocab.bos_id == ids[b"<|bos|>"]
        assert vocab.eos_ids == {ids[b"<|eos|>"], ids[b"<|im_end|>"]}
        assert vocab.special_ids == set(ids.values())
        text = vocab.encode("the cat\n")
        assert text[0] == vocab.bos_id
        assert b"".join(map(vocab.spell, text)) == b"the cat\n"
        chat = vocab.encode_chat([{"role": "user", "content": "hé"}])
        assert all(type(i) is int for i in chat)
        spelled = b"".join(vocab.tokens[i] or b"" for i in chat)
        assert spelled.decode().endswith("user\nhé<|im_end|>\n<|im_start|>assistant\n")
        assert vocab.spell(vocab.size - 1) == b""

    @settings(max_examples=200)
    @given(st.text())
    def test_byte_level_tables_spell_what_was_said(self, text: str) -> None:
        tokenizer, table = make_tokenizer("bytes")
        assert b"".join(table[i] or b"" for i in tokenizer(text)["input_ids"]) == text.encode()

    @settings(max_examples=200)
    @given(st.text())
    def test_sentencepiece_tables_spell_what_was_said(self, text: str) -> None:
        tokenizer, table = make_tokenizer("pieces")
        text = text.replace("▁", "_").replace("<add▁ed>", "")
        assert b"".join(table[i] or b"" for i in tokenizer(text)["input_ids"]) == text.encode()

    def test_the_odd_tokens(self) -> None:
        _, table = make_tokenizer("pieces")
        assert {b" the", b"\n", b"\xff", b"<add ed>", b"<0x0G>"} <= set(table)
        _, table = make_tokenizer("bytes")
        assert {b" the", b"\n", b"\xff", "a b€".encode()} <= set(table)
        assert None in table

    def test_of_the_real_model(self, smollm2: HFBackend) -> None:
        vocab = smollm2.vocab
        assert vocab.encode is not None
        assert vocab.encode_chat is not None
        assert (vocab.size, len(vocab.tokens), vocab.bos_id) == (49152, 49152, 1)
        assert vocab.eos_ids == {2}
        assert vocab.special_ids == set(range(17))
        text = "naïve 😀\t1+1\r\n"
        assert b"".join(map(vocab.spell, vocab.encode(text))) == text.encode()
        assert vocab.encode_chat([{"role": "user", "content": "hi"}])[0] == 1


@functools.cache
def make_tokenizer(kind: str) -> tuple[Any, list[bytes | None]]:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if kind == "bytes":
        texts = [*STAND_INS, "th", "the", "Ġthe", "a b€"]
        vocab = {text: i for i, text in enumerate(texts)} | {"later": len(texts) + 1}
        merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        texts = [f"<0x{byte:02X}>" for byte in range(256)]
        texts += ["▁", "t", "h", "e", "th", "the", "▁the", "<0x0G>"]
        vocab = {text: i for i, text in enumerate(texts)}
        merges = [("t", "h"), ("th", "e"), ("▁", "the")]
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        tokenizer.add_tokens([AddedToken("<add▁ed>", normalized=False)])
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    return wrapped, token_table(wrapped)


@functools.cache
def built(name: str) -> HFBackend:
    return wrap(build(name))


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> HFBackend:
    return HFBackend(str(smollm2_gguf), dtype="float32", device="cpu")
