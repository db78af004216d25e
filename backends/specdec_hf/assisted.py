"""Transformers' own speculation, to compare with."""

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from transformers import GenerationConfig

from specdec_hf.backend import HFBackend

__all__ = ["assisted_generation"]

PROMPT_LOOKUP = 10  # tokens per lookup, as transformers' documentation has it


def assisted_generation(
    target: HFBackend, draft: HFBackend | None
) -> Callable[[Sequence[int], int], list[int]]:
    """Greedy ``generate`` of transformers with an assistant, or with prompt lookup without one.

    Returns:
        A function of (prompt ids, the most new tokens) to the new ids. The models' generation
        settings are as before after each call.
    """
    model = target.model
    vocab = target.vocab
    pad = min(vocab.eos_ids, default=0)  # for transformers, which asks for one

    def generate(ids: Sequence[int], max_new_tokens: int) -> list[int]:
        row = torch.tensor([list(ids)], device=model.get_input_embeddings().weight.device)
        plain = GenerationConfig(
            do_sample=False,
            # Like the decoder: the last token needs no place in the context.
            max_new_tokens=min(max_new_tokens, target.max_context + 1 - len(ids)),
            eos_token_id=sorted(vocab.eos_ids) or None,
            pad_token_id=pad,
        )
        if draft is None:
            plain.prompt_lookup_num_tokens = PROMPT_LOOKUP
        models = [model] if draft is None else [model, draft.model]
        before = [one.generation_config for one in models]
        try:
            # What a model brings along, such as a repetition penalty, would change the text; and
            # an assistant's settings are written to.
            model.generation_config = GenerationConfig()
            if draft is not None:
                draft.model.generation_config = deepcopy(draft.model.generation_config)
            out = model.generate(
                row,
                attention_mask=torch.ones_like(row),
                generation_config=plain,
                assistant_model=draft.model if draft else None,
            )
        finally:
            for one, config in zip(models, before, strict=True):
                one.generation_config = config
        new: list[int] = out[0, len(ids) :].tolist()
        return new

    return generate
