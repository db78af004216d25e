"""What depends on the version of transformers, and which models come in."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import MODEL_FOR_MASKED_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from specdec.errors import UnsupportedModelError

__all__ = [
    "borrowed",
    "cache_keyword",
    "check_model",
    "context_limit",
    "layer_types",
    "parameters",
    "why_not_packed",
]

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})


def parameters(model: PreTrainedModel) -> frozenset[str]:
    """What a model's forward takes."""
    return frozenset(inspect.signature(type(model).forward).parameters)


def cache_keyword(model: PreTrainedModel) -> str:
    """What a model calls its cache: ``past_key_values`` became ``cache`` on the way to 5.24."""
    return "cache" if "cache" in parameters(model) else "past_key_values"


def layer_types(model: PreTrainedModel) -> list[str]:
    """The kinds of layers that its configuration names."""
    config = model.config.get_text_config(decoder=True)
    layers = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return sorted(set(layers or ()))


def check_model(model: object) -> PreTrainedModel:
    """The model, if it reads from left to right and says what comes next.

    Raises:
        TypeError: It is no transformers model.
        UnsupportedModelError: Naming the model's class and the reason.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{name} is no transformers model: give a plain PreTrainedModel, or a path")
    config = model.config.get_text_config(decoder=True)
    reason = None
    if model.config.is_encoder_decoder:
        reason = "it is an encoder-decoder"
    elif not getattr(config, "is_causal", True) or type(config) in MODEL_FOR_MASKED_LM_MAPPING:
        reason = "its layers of type full_attention look ahead, or its positions aren't plain"
    elif model.get_output_embeddings() is None:
        reason = "it has no language-model head"
    if reason:
        raise UnsupportedModelError(
            f"{name} can't run here: {reason}. Give a decoder that predicts the next token"
        )
    return model


def why_not_packed(model: PreTrainedModel) -> str | None:
    """What is known beforehand to keep a model from packed spans."""
    config = model.config.get_text_config(decoder=True)
    strange = sorted(set(layer_types(model)) - ATTENTION_LAYERS)
    missing = {"position_ids", "logits_to_keep"} - parameters(model)
    if strange:
        return f"it has layers of type {', '.join(strange)}"
    if getattr(model, "_is_stateful", False):
        return "its layers are recurrent"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention layers don't go through AttentionInterface"
    if getattr(config, "attention_chunk_size", None):
        return "it has layers of type chunked_attention"
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "kv_sharing_modes", None):
        return "its layers share keys and values with each other"
    if missing:
        return f"its forward doesn't take {' and '.join(sorted(missing))}"
    return None


def context_limit(config: PreTrainedConfig) -> int:
    """The most positions that the model counts alike.

    Some rotary embeddings ("longrope", "dynamic") change for all positions once a text is longer
    than the training length. Beyond it keys already stored would be wrong, so that is the limit.
    """
    config = config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None) or 1 << 30
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if kind.get("rope_type") in ("longrope", "dynamic"):
            trained = kind.get("original_max_position_embeddings")
            trained = trained or getattr(config, "original_max_position_embeddings", None)
            limit = min(limit, trained or limit)
    return int(limit)


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for key in config.sub_configs:
        sub_config = getattr(config, key, None)
        if sub_config is not None:
            yield from _configs(sub_config)


@contextmanager
def borrowed(model: PreTrainedModel, attention: str | None = None) -> Iterator[None]:
    """Let a model attend in that way, or its own, and in evaluation mode; leave it as it was."""
    # Parents first, since setting one sets its children.
    configs = list(_configs(model.config)) if attention else []
    before = [config._attn_implementation for config in configs]
    training = [module for module in model.modules() if module.training] if model.training else []
    try:
        for module in training:
            module.training = False
        for config in configs:
            config._attn_implementation = attention
        with torch.inference_mode():
            yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation
        for module in training:
            module.training = True
