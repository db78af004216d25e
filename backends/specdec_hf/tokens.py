"""What a Hugging Face tokenizer's ids spell, byte by byte."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import jinja2
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.vocab import Message, Vocabulary

__all__ = ["eos_ids", "logits_width", "token_table", "vocabulary"]

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def logits_width(model: PreTrainedModel) -> int:
    """How many ids a row of logits has, padding included."""
    head = model.get_output_embeddings()
    size = getattr(head, "out_features", None)
    return int(size or model.config.get_text_config(decoder=True).vocab_size)


def vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    """The ids of a model, as its tokenizer spells them and its generation config ends them."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.update(tokenizer.all_special_ids)
    size = logits_width(model)
    return Vocabulary(
        size=size,
        tokens=token_table(tokenizer)[:size],  # some tokenizers know more than their models
        eos_ids=eos_ids(model, tokenizer),
        special_ids=frozenset(i for i in special if i < size),
        bos_id=tokenizer.bos_token_id,
        encode=lambda text: list(tokenizer(text)["input_ids"]),
        encode_chat=_chat_encoder(tokenizer),
    )


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """The ids that end a text, by the generation config and the tokenizer together."""
    generation = getattr(model, "generation_config", None)
    named = (getattr(thing, "eos_token_id", None) for thing in (generation, tokenizer))
    size = logits_width(model)
    return frozenset(i for value in named for i in _ids(value) if 0 <= i < size)


def _ids(value: int | Iterable[int] | None) -> Iterable[int]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else value


def _chat_encoder(tokenizer: PreTrainedTokenizerBase) -> Any:
    if not tokenizer.chat_template:
        return None

    def encode_chat(messages: Sequence[Message]) -> list[int]:
        try:
            ids = tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template doesn't take these messages: {error}") from error
        return list(ids)

    return encode_chat


def token_table(tokenizer: PreTrainedTokenizerBase) -> list[bytes | None]:
    """The bytes of every id, None where the tokenizer has no token.

    Added tokens spell their literal text (in which sentencepiece's decoder puts spaces for ``▁``,
    as for Gemma's runs of them). The others are spelled as the tokenizer's decoder would: GPT-2's
    printable stand-ins for bytes, sentencepiece's ``▁`` and ``<0x0A>``, or, for any other kind of
    tokenizer, whatever it decodes an id to.
    """
    added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
    spelled = tokenizer.get_vocab()
    table: list[bytes | None] = [None] * (max([*spelled.values(), *added], default=-1) + 1)
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    rules = decoder.__getstate__().decode() if decoder is not None else ""
    byte_level = '"ByteLevel"' in rules
    pieces = not byte_level and "▁" in rules
    for text, i in spelled.items():
        if byte_level:
            table[i] = _from_stand_ins(text)
        elif pieces:
            byte = BYTE_TOKEN.fullmatch(text) if '"ByteFallback"' in rules else None
            table[i] = bytes.fromhex(byte[1]) if byte else text.replace("▁", " ").encode()
        else:
            table[i] = tokenizer.decode([i], clean_up_tokenization_spaces=False).encode()
    for i, content in added.items():
        table[i] = (content.replace("▁", " ") if pieces else content).encode()
    return table


def _stand_ins() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


STAND_INS = _stand_ins()  # GPT-2's printable character of every byte


def _from_stand_ins(text: str) -> bytes:
    try:
        return bytes([STAND_INS[character] for character in text])
    except KeyError:  # not written in the alphabet: it stands for itself
        return text.encode()
