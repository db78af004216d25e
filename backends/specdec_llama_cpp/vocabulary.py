"""A GGUF's tokenizer and chat template as a specdec Vocabulary."""

import ctypes
from collections.abc import Sequence
from functools import cached_property
from itertools import compress, repeat

import jinja2
from llama_cpp import llama_cpp as lib
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from specdec.vocab import Message, Vocabulary
from specdec_llama_cpp.context import Model

__all__ = ["Tokenizer"]

NOT_A_TOKEN = lib.LLAMA_TOKEN_ATTR_UNUSED
NOT_A_TEXT = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN


class Tokenizer:
    """The tokenizer inside a model file. It keeps the model in memory until it is closed."""

    def __init__(self, model: Model) -> None:
        self._model: Model | None = model

    def vocabulary(self) -> Vocabulary:
        """What the file says of its ids.

        Raises:
            ValueError: It has no tokenizer.
        """
        model = self._opened()
        if lib.llama_vocab_type(model.vocab) == lib.LLAMA_VOCAB_TYPE_NONE:
            raise ValueError(
                f"{model.path} has no tokenizer, so nothing says what its ids mean: "
                "pass vocab=, such as the vocab of the model that it works with"
            )
        ids = range(model.vocab_size)
        attributes = list(map(lib.llama_vocab_get_attr, repeat(model.vocab), ids))
        ends = map(lib.llama_vocab_is_eog, repeat(model.vocab), ids)
        has_template = lib.llama_model_chat_template(model.pointer, None) is not None
        return Vocabulary(
            size=model.vocab_size,
            tokens=[
                None if not kind or kind & NOT_A_TOKEN else spelling
                for kind, spelling in zip(attributes, spellings(model), strict=True)
            ],
            eos_ids=frozenset(compress(ids, ends)),
            special_ids=frozenset(i for i, kind in enumerate(attributes) if kind & NOT_A_TEXT),
            bos_id=start_id(model),
            encode=self.encode,
            encode_chat=self.encode_chat if has_template else None,
        )

    def encode(self, text: str) -> list[int]:
        """Text to ids, with BOS where the file asks for one."""
        return tokenize(self._opened(), text, add_special=True)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Messages to ids by the template, which writes BOS itself where it wants one.

        Raises:
            ValueError: The template fails on these messages, or refuses them.
        """
        model = self._opened()
        try:
            prompt = self._formatter(messages=[dict(message) for message in messages]).prompt
        except (jinja2.TemplateError, ValueError) as error:
            raise ValueError(
                f"the chat template of {model.path.name} doesn't take these messages: {error}"
            ) from error
        return tokenize(model, prompt, add_special=False)

    def close(self) -> None:
        """Let go of the model."""
        self._model = None

    @cached_property
    def _formatter(self) -> Jinja2ChatFormatter:
        model = self._opened()
        return Jinja2ChatFormatter(
            lib.llama_model_chat_template(model.pointer, None).decode(),
            bos_token=literal(model, lib.llama_vocab_bos(model.vocab)),
            eos_token=literal(model, lib.llama_vocab_eos(model.vocab)),
        )

    def _opened(self) -> Model:
        if self._model is None:
            raise ValueError("the backend of this vocabulary is closed: load the model again")
        return self._model


def spellings(model: Model) -> list[bytes]:
    """The bytes of every id, special tokens by their literal text."""
    buffer = ctypes.create_string_buffer(64)
    found = []
    for token_id in range(model.vocab_size):
        size = lib.llama_token_to_piece(model.vocab, token_id, buffer, len(buffer), 0, True)
        if size < 0:  # minus the room that it takes
            buffer = ctypes.create_string_buffer(-size)
            size = lib.llama_token_to_piece(model.vocab, token_id, buffer, -size, 0, True)
        found.append(buffer.raw[:size])
    return found


def start_id(model: Model) -> int | None:
    """BOS, where the file names one: llama.cpp makes one up for files that don't."""
    named = model.metadata("tokenizer.ggml.bos_token_id") is not None
    bos: int = lib.llama_vocab_bos(model.vocab)
    if bos < 0 or not (named or lib.llama_vocab_get_add_bos(model.vocab)):
        return None
    return bos


def tokenize(model: Model, text: str, *, add_special: bool) -> list[int]:
    """Text to ids; the literal text of a special token becomes that token."""
    encoded = text.encode()
    room = len(encoded) + 2  # a token has at least a byte, but for BOS and EOS
    while True:
        ids = (ctypes.c_int32 * room)()
        count = lib.llama_tokenize(model.vocab, encoded, len(encoded), ids, room, add_special, True)
        if count >= 0:
            return list(ids[:count])
        room = -count


def literal(model: Model, token_id: int) -> str:
    """The text of a special token, or nothing where the model lacks it."""
    text: bytes = lib.llama_vocab_get_text(model.vocab, token_id) if token_id >= 0 else b""
    return text.decode()
