"""A model in torch and the GGUF that is written of it compute the same."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec import SpeculativeDecoder
from specdec.backend import ModelBackend, Span
from specdec.errors import UnsupportedModelError
from specdec.vocab import Vocabulary

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
pytest.importorskip("llama_cpp")

from specdec_hf import HFBackend  # noqa: E402 - after the skips
from specdec_hf.export import write_gguf  # noqa: E402
from specdec_hf.families import FAMILIES  # noqa: E402
from specdec_llama_cpp import LlamaCppBackend  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "vocab_size": 99,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 10 for i in range(8)],
    "long_factor": [2.0 + i / 10 for i in range(8)],
    "original_max_position_embeddings": 512,
}
SCALES = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.1,
}
ALTERNATING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
TIED: dict[str, Any] = {"tie_word_embeddings": True}


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biases-tied": ("Llama", {"attention_bias": True, "mlp_bias": True, **TIED}),
    "llama-wide-heads": ("Llama", {"head_dim": 32}),
    "llama-linear": ("Llama", rope(rope_type="linear", factor=4.0)),
    "llama-llama3": ("Llama", rope(**LLAMA3)),
    "llama-yarn": ("Llama", rope(**YARN)),
    "llama-yarn-scaled": ("Llama", rope(**YARN, attention_factor=1.5)),
    "mistral-window": ("Mistral", {"sliding_window": 128, "head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": None, **TIED}),
    "qwen2": ("Qwen2", {"vocab_size": 103}),
    "qwen2-tied-yarn": ("Qwen2", {**TIED, **rope(**YARN)}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 2},
    ),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 48}),
    "qwen2-moe-tied": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 48, **TIED}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-tied": ("Qwen3", {"head_dim": 16, **TIED}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "gemma2": ("Gemma2", {**ALTERNATING, "head_dim": 32, "query_pre_attn_scalar": 24}),
    "gemma3": ("Gemma3", {**ALTERNATING, "head_dim": 32, "query_pre_attn_scalar": 24}),
    "gemma3-all-windowed": ("Gemma3", {"head_dim": 32, "sliding_window": 16}),
    "gemma3-linear": (
        "Gemma3",
        {
            **ALTERNATING,
            "head_dim": 32,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    "gemma3-yarn": (
        "Gemma3",
        {
            **ALTERNATING,
            "head_dim": 32,
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("Phi3", {}),
    "phi3-partial-tied": ("Phi3", {**rope(rope_type="default", partial_rotary_factor=0.5), **TIED}),
    "phi3-longrope": (
        "Phi3",
        {
            "max_position_embeddings": 2048,
            "original_max_position_embeddings": 512,
            **rope(**LONGROPE),
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2-tied": ("Olmo2", TIED),
    "granite": ("Granite", SCALES),
    "granite-llama3-bias": ("Granite", {**SCALES, "attention_bias": True, **rope(**LLAMA3)}),
}


def make_config(family: str, **settings: Any) -> Any:
    kind = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    return getattr(transformers, kind)(**{**SIZES, **settings})


def make_model(family: str, **settings: Any) -> Any:
    """A random model whose biases and norms are not what they are initialised to."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(make_config(family, **settings)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.2)
            if "norm" in name:
                weight.add_(0.1 * torch.randn_like(weight))
    return model


def vocabulary(size: int) -> Vocabulary:
    return Vocabulary(
        size=size,
        tokens=[b"%d " % i for i in range(size)],
        eos_ids=frozenset(),
        special_ids=frozenset(),
        bos_id=None,
        encode=lambda text: [int(word) for word in text.split()],
    )


def both(model: Any, path: Path) -> tuple[HFBackend, LlamaCppBackend]:
    """A model and what is written of it, in float32 throughout."""
    vocab = vocabulary(model.config.vocab_size)
    target = HFBackend(model=model, vocab=vocab)
    write_gguf(model, path)
    trained = header(path, "context_length")
    copy = LlamaCppBackend(
        path,
        vocab=vocab,
        n_ctx=min(target.max_context, trained),
        n_threads=1,
        flash_attention=False,
        cache_dtype="f32",
    )
    return target, copy


def header(path: Path, key: str) -> Any:
    reader = gguf.GGUFReader(path)
    arch = reader.get_field("general.architecture").contents()
    return reader.get_field(f"{arch}.{key}").contents()


def rows(backend: ModelBackend, ids: list[int]) -> np.ndarray[Any, Any]:
    cache = backend.new_cache()
    (logits,) = backend.forward([Span(cache, ids, len(ids))])
    cache.close()
    return np.asarray(logits)


def relative_error(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


class TableGelu(torch.nn.Module):  # type: ignore[misc, name-defined]
    """GELU as llama.cpp has it on a CPU: looked up in a table of halves."""

    def forward(self, values: Any) -> Any:
        looked_up = torch.nn.functional.gelu(values.half().float(), approximate="tanh")
        inside = looked_up.half().float()
        return torch.where(values <= -10, 0.0, torch.where(values >= 10, values, inside))


@pytest.mark.parametrize("case", CASES)
def test_file_computes_what_the_model_does(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    model = make_model(family, **settings)
    if family.startswith("Gemma"):
        for layer in model.model.layers:
            layer.mlp.act_fn = TableGelu()
    target, copy = both(model, tmp_path / "model.gguf")
    ids = np.random.default_rng(0).integers(0, target.vocab.size, 90).tolist()
    assert relative_error(rows(copy, ids), rows(target, ids)) < 1e-4
    texts = [
        SpeculativeDecoder(backend).generate(ids[:8], max_new_tokens=64).token_ids
        for backend in (target, copy)
    ]
    assert texts[0] == texts[1]


def test_every_family_is_tried() -> None:
    kinds = {family for family, _ in CASES.values()}
    assert {make_config(family).model_type for family in kinds} == set(FAMILIES)


@pytest.mark.parametrize(
    ("family", "num_hidden_layers"), [("Gemma2", 4), ("Gemma2", 46), ("Gemma3", 4), ("Gemma3", 62)]
)
def test_gemma_is_near_with_its_own_gelu(
    family: str, num_hidden_layers: int, tmp_path: Path
) -> None:
    """llama.cpp knows the models of 27 billion by the number of their layers."""
    settings = {"head_dim": 32, "sliding_window": 16, "num_hidden_layers": num_hidden_layers}
    target, copy = both(make_model(family, **settings), tmp_path / "model.gguf")
    ids = list(range(3, 93))
    assert 1e-5 < relative_error(rows(copy, ids), rows(target, ids)) < 1e-3


@pytest.mark.parametrize(("dtype", "limit"), [("float16", 1e-2), ("bfloat16", 5e-2)])
def test_low_precision_is_kept(dtype: str, limit: float, tmp_path: Path) -> None:
    model = make_model("Llama").to(getattr(torch, dtype))
    target, copy = both(model, tmp_path / "model.gguf")
    ids = list(range(3, 93))
    assert relative_error(rows(copy, ids), rows(target, ids)) < limit
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert kinds["blk.0.attn_q.weight"] == {"float16": "F16", "bfloat16": "BF16"}[dtype]
    assert kinds["blk.0.attn_norm.weight"] == "F32"


def test_text_model_inside_a_larger_one(tmp_path: Path) -> None:
    text = {**SIZES, **CASES["gemma3"][1]}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**text).to_dict(),
        vision_config={**vision, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.config.vocab_size = SIZES["vocab_size"]
    target, copy = both(model, tmp_path / "model.gguf")
    ids = list(range(3, 93))
    assert relative_error(rows(copy, ids), rows(target, ids)) < 1e-3


@pytest.mark.parametrize(
    ("family", "settings", "context"),
    [
        ("Mistral", {"sliding_window": 50, "layer_types": ["full_attention"] * 4}, 50),
        (
            "Qwen3Moe",
            {**CASES["qwen3-moe"][1], "use_sliding_window": True, "sliding_window": 50},
            50,
        ),
        ("Llama", {"sliding_window": 50}, 256),
        ("Llama", {"max_position_embeddings": 10**12}, 2**31 - 1),
        ("Phi3", CASES["phi3-longrope"][1], 512),
    ],
)
def test_context_is_what_both_compute_alike(
    family: str, settings: dict[str, Any], context: int, tmp_path: Path
) -> None:
    write_gguf(make_model(family, **settings), tmp_path / "model.gguf")
    assert header(tmp_path / "model.gguf", "context_length") == context


def test_longrope_has_room_for_many_texts(tmp_path: Path) -> None:
    """Short of the length where the rotary factors change, whatever the texts add up to."""
    _, copy = both(make_model("Phi3", **CASES["phi3-longrope"][1]), tmp_path / "model.gguf")
    caches = [copy.new_cache() for _ in range(3)]
    ids = [3 + i % 90 for i in range(400)]
    rows = copy.forward([Span(cache, ids, 1) for cache in caches])
    assert relative_error(np.asarray(rows[2]), np.asarray(rows[0])) < 1e-4


def with_int8(model: Any) -> Any:
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    return model


def with_adapter(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).base_model.model


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # 2026-11, peft
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: make_model("StableLm"), "stablelm .* those that can are llama, mistral"),
        (lambda: make_model("Llama", hidden_act="gelu"), "hidden_act='gelu'"),
        (lambda: make_model("Qwen3", attention_bias=True), "attention_bias=True"),
        (lambda: make_model("Qwen3Moe", **EXPERTS), "norm_topk_prob=False"),
        (lambda: make_model("Gemma2", final_logit_softcapping=None), "final_logit_softcapping"),
        (
            lambda: make_model(
                "Gemma2", layer_types=["full_attention", *3 * ["sliding_attention"]]
            ),
            "layer_types=.* no period",
        ),
        (lambda: make_model("Qwen2", **rope(**LLAMA3)), "rope_type='llama3'"),
        (lambda: make_model("Llama", **rope(**YARN, beta_fast=16.0)), "beta_fast=16.0"),
        (
            lambda: make_model("Llama", **rope(rope_type="default", partial_rotary_factor=0.5)),
            "partial_rotary_factor=0.5",
        ),
        (lambda: with_int8(make_model("Llama")), "up_proj.weight is of type torch.int8"),
        (lambda: make_model("Llama").to("meta"), "not in memory"),
        (lambda: with_adapter(make_model("Llama")), "merge_and_unload"),
    ],
)
def test_refused_by_name(make: Callable[[], Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        write_gguf(make(), tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


MEMORY = """
import resource, sys, torch, transformers
from pathlib import Path
from specdec_hf.export import write_gguf

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

config = transformers.LlamaConfig(
    vocab_size=8000, hidden_size=512, intermediate_size=4096, num_hidden_layers=8
)
model = transformers.LlamaForCausalLM(config)
write_gguf(transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1
)), Path(sys.argv[1]))  # what imports and the first write take
before = peak()
write_gguf(model, Path(sys.argv[1]))
print(sum(p.nbytes for p in model.parameters()) // 1024, peak() - before)
"""


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    pytest.importorskip("resource", reason="no such figures on this system")
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "model.gguf")],
        capture_output=True,
        text=True,
        check=True,
    )
    model, more = map(int, run.stdout.split())
    assert model > 200_000  # KiB
    assert more < 50_000
