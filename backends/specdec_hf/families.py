"""How transformers' model families are written for llama.cpp: a line of a table each."""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specdec.errors import UnsupportedModelError
from specdec_hf.border import context_limit

__all__ = [
    "FAMILIES",
    "Family",
    "Value",
    "family_of",
    "head_size",
    "hyperparameters",
    "rope",
    "trained_context",
]

Value: TypeAlias = bool | int | float | str

CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
SHARED_EXPERT = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
SCALES = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
SILU: Mapping[str, object] = {"hidden_act": "silu"}
GELU: Mapping[str, object] = {"hidden_activation": "gelu_pytorch_tanh"}
NO_BIAS: Mapping[str, object] = {"attention_bias": False}
ALL_EXPERTS: Mapping[str, object] = {"decoder_sparse_step": 1, "mlp_only_layers": []}


class Family(NamedTuple):
    """What llama.cpp wants to be different, and what it takes for granted.

    Attributes:
        arch: Its name of the architecture.
        in_pairs: The rows of Q and K stand in pairs for the rotary embedding, not in halves.
        norm_offset: Added to the weights of norms.
        windows: The attribute that tells transformers which layers have a sliding window.
        has_windows: It masks them. Elsewhere a text must end where the window does.
        needs_head: It wants the head written out even if it is the embedding's own matrix.
        keys: Attributes of the config to keys of the file's header.
        fixed: Attributes that it has no key for, and the only value that it computes.
        queries: It divides attention scores by the root of the head's size, whatever
            ``query_pre_attn_scalar`` says, so the rest goes into the weights of this module...
        layers_of_27b: ...but in models of so many layers by that of the hidden size per head.
    """

    arch: str
    in_pairs: bool = False
    norm_offset: float = 0.0
    windows: Literal["layer_types", "sliding_window"] | None = None
    has_windows: bool = False
    needs_head: bool = False
    keys: Mapping[str, str] = {}
    fixed: Mapping[str, object] = SILU
    queries: str | None = None
    layers_of_27b: int | None = None


FAMILIES: Mapping[str, Family] = {  # by the config's model_type
    "llama": Family("llama", in_pairs=True),
    "mistral": Family("llama", in_pairs=True, windows="sliding_window"),
    "qwen2": Family("qwen2", windows="layer_types"),
    "qwen2_moe": Family(
        "qwen2moe",
        windows="layer_types",
        needs_head=True,
        keys=EXPERTS | SHARED_EXPERT,
        fixed={**SILU, **ALL_EXPERTS, "norm_topk_prob": False},
    ),
    "qwen3": Family("qwen3", windows="layer_types", fixed={**SILU, **NO_BIAS}),
    "qwen3_moe": Family(
        "qwen3moe",
        windows="sliding_window",
        needs_head=True,
        keys=EXPERTS,
        fixed={**SILU, **NO_BIAS, **ALL_EXPERTS, "norm_topk_prob": True},
    ),
    "gemma2": Family(
        "gemma2",
        norm_offset=1.0,
        windows="layer_types",
        has_windows=True,
        keys=CAPS,
        fixed={**GELU, **NO_BIAS},
        queries="q_proj",
        layers_of_27b=46,
    ),
    "gemma3_text": Family(
        "gemma3",
        norm_offset=1.0,
        windows="layer_types",
        has_windows=True,
        fixed={**GELU, **NO_BIAS, **dict.fromkeys(CAPS), "use_bidirectional_attention": False},
        queries="q_norm",
        layers_of_27b=62,
    ),
    "phi3": Family("phi3", windows="sliding_window"),
    "olmo2": Family("olmo2", needs_head=True, fixed={**SILU, **NO_BIAS}),
    "granite": Family("granite", in_pairs=True, keys=SCALES),
}


def family_of(config: PreTrainedConfig) -> Family:
    """The table's entry for a text model.

    Raises:
        UnsupportedModelError: There is none, or llama.cpp computes another value of some
            hyperparameter than the config's.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UnsupportedModelError(
            f"the architecture {config.model_type} can't be written for llama.cpp here; those that "
            f"can are {', '.join(FAMILIES)}. Convert it with llama.cpp's own tools and give that "
            'file instead, as in draft=LlamaCppBackend("model.gguf")'
        )
    for name, only in family.fixed.items():
        found = getattr(config, name, None)
        if (found or None) != (only or None):  # an empty list and False are as good as nothing
            raise unsupported(config, f"{name}={found!r}, and llama.cpp computes {only!r}")
    return family


def hyperparameters(config: PreTrainedConfig, family: Family) -> dict[str, Value]:
    """The header's keys and values, without the architecture's name in front.

    Raises:
        UnsupportedModelError: One has no counterpart in llama.cpp.
    """
    values: dict[str, Value] = {
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_size(config),
        "attention.value_length": head_size(config),
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "vocab_size": config.vocab_size,
    }
    for name, key in family.keys.items():
        value = getattr(config, name)
        if value is None:
            raise unsupported(config, f"{name}=None, and llama.cpp computes one")
        values[key] = value if name in (*EXPERTS, *SHARED_EXPERT) else float(value)
    windowed = windowed_layers(config, family)
    if family.has_windows and any(windowed):
        values["attention.sliding_window"] = config.sliding_window
        values["attention.sliding_window_pattern"] = window_period(config, windowed)
    return values | {"context_length": trained_context(config)}


def trained_context(config: PreTrainedConfig) -> int:
    """The most tokens of a text that llama.cpp computes as the model does."""
    config = config.get_text_config(decoder=True)
    family, limit = family_of(config), min(context_limit(config), 2**31 - 1)
    if any(windowed_layers(config, family)) and not family.has_windows:
        limit = min(limit, config.sliding_window)
    return int(limit)


def head_size(config: PreTrainedConfig) -> int:
    """Numbers per attention head."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def windowed_layers(config: PreTrainedConfig, family: Family) -> list[bool]:
    """Which layers look at a window only."""
    if family.windows == "layer_types":
        return [kind == "sliding_attention" for kind in config.layer_types]
    everywhere = family.windows == "sliding_window" and bool(config.sliding_window)
    return [everywhere] * config.num_hidden_layers


def window_period(config: PreTrainedConfig, windowed: list[bool]) -> int:
    """Every how many layers one sees everything; 0: none does."""
    period = 0 if all(windowed) else windowed.index(False) + 1
    if windowed != [not period or i % period < period - 1 for i in range(len(windowed))]:
        raise unsupported(config, f"layer_types={config.layer_types}, which have no period")
    return period


def rope_of(config: PreTrainedConfig, kind: str = "full_attention") -> Mapping[str, Any]:
    """The parameters of the rotary embedding, of one kind of layers where they differ."""
    parameters: Mapping[str, Any] = config.rope_parameters
    return parameters.get(kind) or parameters


def rope(
    config: PreTrainedConfig, family: Family
) -> tuple[dict[str, Value], dict[str, torch.Tensor]]:
    """The rotary embedding: keys for the header, and tensors of a factor per pair of numbers.

    Raises:
        UnsupportedModelError: A kind that llama.cpp doesn't compute for this family.
    """
    parameters = rope_of(config)
    kind, base = parameters["rope_type"], float(parameters["rope_theta"])
    part = parameters.get("partial_rotary_factor") or 1.0
    if part != 1.0 and family.arch != "phi3":
        raise unsupported(config, f"partial_rotary_factor={part}")
    size = int(head_size(config) * part)
    layers = "full_attention" if "full_attention" in config.rope_parameters else None
    keys: dict[str, Value] = {"rope.freq_base": base, "rope.dimension_count": size}
    local = rope_of(config, "sliding_attention")
    if local is not parameters:
        if local["rope_type"] != "default":
            raise unsupported(config, f"rope_type={local['rope_type']!r} in windowed layers")
        keys["rope.freq_base_swa"] = float(local["rope_theta"])
    if kind in ("default", "dynamic"):  # dynamic: up to the trained length, where the context ends
        return keys, {}
    if kind == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(parameters["factor"])}
        return keys, {}
    if kind == "llama3" and family.in_pairs:
        scaled, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu", layer_type=layers)
        plain = base ** -(torch.arange(0, size, 2) / size)
        return keys, {"rope_freqs.weight": plain / scaled}
    if kind == "yarn":
        for name, only in {"beta_fast": 32, "beta_slow": 1, "truncate": True}.items():
            if parameters.get(name, only) != only:
                raise unsupported(config, f"{name}={parameters[name]}, and llama.cpp takes {only}")
        _, attention = ROPE_INIT_FUNCTIONS[kind](config, "cpu", layer_type=layers)
        trained = int(parameters["original_max_position_embeddings"])
        factor = float(parameters["factor"] or config.max_position_embeddings / trained)
        return keys | {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": factor,
            "rope.scaling.original_context_length": trained,
            "rope.scaling.attn_factor": attention / (1 + 0.1 * math.log(factor)),
        }, {}
    if kind == "longrope" and family.arch == "phi3":
        _, attention = ROPE_INIT_FUNCTIONS[kind](config, "cpu", layer_type=layers)
        # The context ends where the long factors would begin, as they change what was read before.
        short = torch.tensor(parameters["short_factor"])
        keys |= {"rope.scaling.attn_factor": float(attention)}
        return keys, {f"rope_factors_{length}.weight": short for length in ("long", "short")}
    raise unsupported(config, f"rope_type={kind!r}, which llama.cpp doesn't compute for it")


def unsupported(config: PreTrainedConfig, what: str) -> UnsupportedModelError:
    """An error about one hyperparameter."""
    return UnsupportedModelError(
        f"this {config.model_type} model can't be written for llama.cpp: it has {what}. As a draft "
        "give a smaller model of the same vocabulary instead"
    )
