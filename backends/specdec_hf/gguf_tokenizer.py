"""Hugging Face tokenizers as llama.cpp reads them, and none where the two would part.

A GGUF header doesn't spell out how text is split before the merges: it names a rule, and llama.cpp
knows the rules. Which one is a tokenizer's isn't looked up but tried: llama.cpp reads the header
under one name after another, and the first that gives the tokenizer's own ids is written.
"""

import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias, cast

import gguf
from gguf import Keys, TokenType
from transformers import PreTrainedTokenizerBase

from specdec.errors import RuntimeFailure
from specdec.vocab import Vocabulary
from specdec_hf.tokens import BYTE_TOKEN, token_table

__all__ = ["add_tokenizer"]

Setting: TypeAlias = tuple[str, str | bool]

# Where two fit, the vocabulary has no token that tells them apart.
PRE_TOKENIZERS = (
    *("smollm", "gpt-2", "qwen2", "llama-bpe", "dbrx", "tekken", "gpt-4o", "deepseek-v3"),
    *("deepseek-llm", "deepseek-coder", "falcon", "qwen35", "seed-coder", "bloom", "default"),
)
BYTE_LEVEL: Sequence[Setting] = [(Keys.Tokenizer.PRE, name) for name in PRE_TOKENIZERS]
SENTENCEPIECE: Sequence[Setting] = [(Keys.Tokenizer.ADD_PREFIX, flag) for flag in (True, False)]

TEXTS = (
    *("", " ", " a", "\n", "a  b   c    d     e\t\tf \t g\n h \n\n i\u00a0j\u3000k\u200bl     "),
    "\n\n\tdef add(a, b=0x1F):\n\t\treturn a+b  # it's\r\n\r\n    if (x!=None):\n        y-=1}\n\n",
    "I'm, you'RE, we'll, THEY'D, O'Brien's, don't; HTTPServer camelCase snake_case 'one' \"two\"",
    "7 42 365 2024 31415 1234567890 1,000,000.50 v1.2.3   9    10 a1b22c333 \u0663\u0664 ½ ²",
    "...!?!? ---- ==== ((([[[{{{<<<>>>}}}]]]))) $$ ~~ ``` \\\\ // /* */ #!@%^&*| a.b:c;d,e «é» …—",
    "Größe naïve ÇA Straße Ελλάδα Привет, МИР! שלום مرحبا हिन्दी ไทย 한국어 中文字符。日本語です",
    "x\u030c q\u0307\u0323 🙂👩\u200d💻🇫🇷❤\ufe0f \U0001d518\U0001d52b \ufffd \U00010348 \u2028",
)
BETWEEN_WORDS = ("", " ", "1", "(")
MAX_WORDS, WORDS_OF_A_LINE = 4096, 8  # lines, since llama.cpp's regular expressions are recursive


class _UnlikeError(Exception):
    """Why llama.cpp would read a tokenizer otherwise, and how many ids were right before."""

    def __init__(self, why: str, agreed: int = 0) -> None:
        super().__init__(why)
        self.agreed = agreed


def add_tokenizer(
    writer: gguf.GGUFWriter,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    eos_ids: frozenset[int],
) -> str | None:
    """Write a tokenizer and its chat template into the header of a GGUF file.

    llama.cpp has to give the same ids for texts of many kinds, every added token and thousands of
    words, the same bytes for every id, and to stop where the model does. Else the header says that
    there is no tokenizer. The texts are in Unicode's NFC: some tokenizers bring a text into it
    first, which llama.cpp never does.

    Args:
        writer: Its architecture has to be one that llama.cpp knows.
        tokenizer: Byte-level BPE, or BPE over characters with a token for each byte.
        vocab_size: Width of a row of logits. Rows without a token become unused ``[PAD123]``.
        eos_ids: Every id that ends a text.

    Returns:
        Why no tokenizer was written, or None where it was.
    """
    try:
        header = _tried_header(writer, tokenizer, vocab_size, eos_ids)
    except _UnlikeError as error:
        writer.add_tokenizer_model("none")
        return str(error)
    writer.kv_data[0].update(header)
    return None


def _tried_header(
    writer: gguf.GGUFWriter,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    eos_ids: frozenset[int],
) -> Mapping[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if tokenizer is None or backend is None:
        raise _UnlikeError("there is no tokenizer of the tokenizers library")
    if not eos_ids:
        raise _UnlikeError("no id ends a text, and llama.cpp would choose one")
    rules = json.loads(backend.to_str())
    if rules["model"]["type"] != "BPE":
        raise _UnlikeError(f"its model is {rules['model']['type']}, not BPE")
    header = gguf.GGUFWriter(None, writer.arch)
    settings = _add_tokens(header, tokenizer, rules, vocab_size)
    _add_special_ids(header, tokenizer, eos_ids)
    samples, spelled = _samples(tokenizer, vocab_size), token_table(tokenizer)[:vocab_size]
    errors = []
    for key, value in settings:
        header.kv_data[0].pop(key, None)
        (header.add_string if isinstance(value, str) else header.add_bool)(key, value)
        try:
            _compare(_as_read(header), samples, spelled, eos_ids)
            found: Mapping[str, Any] = header.kv_data[0]
            return found
        except _UnlikeError as error:
            errors.append(error)
    raise max(errors, key=lambda error: error.agreed)


def _add_tokens(
    writer: gguf.GGUFWriter,
    tokenizer: PreTrainedTokenizerBase,
    rules: Mapping[str, Any],
    vocab_size: int,
) -> Sequence[Setting]:
    """Write tokens and merges; returns the settings that are left to try."""
    texts = {i: text for text, i in tokenizer.get_vocab().items() if i < vocab_size}
    kinds = dict.fromkeys(texts, TokenType.NORMAL)
    merges = rules["model"]["merges"]
    byte_level = '"ByteLevel"' in json.dumps(rules["decoder"])
    if byte_level:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_merges([" ".join(pair) for pair in merges])
    else:
        kinds |= {i: TokenType.BYTE for i, text in texts.items() if BYTE_TOKEN.fullmatch(text)}
        if list(kinds.values()).count(TokenType.BYTE) < 256:  # without them llama.cpp crashes
            raise _UnlikeError("it is neither byte-level nor has it a token for every byte")
        ranks: dict[str, int] = {}
        for left, right in merges:
            ranks.setdefault(left + right, len(ranks))
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(
            [-float(ranks.get(texts.get(i, ""), len(ranks))) for i in range(vocab_size)]
        )
    special_ids = set(tokenizer.all_special_ids)
    for i, token in tokenizer.added_tokens_decoder.items():
        if token.special or i in special_ids:
            kinds[i] = TokenType.CONTROL
        elif byte_level or "▁" not in token.content:  # in Gemma's runs of spaces ▁ stands for one
            kinds[i] = TokenType.USER_DEFINED
    tokens = [texts.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    if len({text.partition("\0")[0] for text in tokens}) < vocab_size:  # here it crashes, too
        raise _UnlikeError("two of its ids have the same text")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(i, TokenType.UNUSED) for i in range(vocab_size)])
    return BYTE_LEVEL if byte_level else SENTENCEPIECE


def _add_special_ids(
    writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, eos_ids: frozenset[int]
) -> None:
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    ends = sorted(eos_ids, key=lambda i: (i != eos, i))
    around = tokenizer("")["input_ids"]
    adds_bos = bos is not None and around[:1] == [bos]
    writer.add_add_bos_token(adds_bos)
    writer.add_add_eos_token(around[adds_bos:] == ends[:1])
    ids = {"bos": bos, "unk": tokenizer.unk_token_id, "pad": tokenizer.pad_token_id}
    ids |= zip(("eos", "eot", "eom"), ends, strict=False)
    for name, i in ids.items():
        if i is not None:
            getattr(writer, f"add_{name}_token_id")(i)
    templates = tokenizer.chat_template
    if isinstance(templates, dict):
        templates = [{"name": name, "template": text} for name, text in templates.items()]
    if templates:
        writer.add_chat_template(templates)


def _samples(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Mapping[str, Sequence[int]]:
    """Texts that split in as many ways as the tokenizer's own tokens do, and their ids."""
    ids = sorted(i for i in tokenizer.get_vocab().values() if i < vocab_size)
    words = [tokenizer.decode(i) for i in ids[:: 1 + len(ids) // MAX_WORDS]]
    lines = [words[i : i + WORDS_OF_A_LINE] for i in range(0, len(words), WORDS_OF_A_LINE)]
    joined = [".\n".join(map(between.join, lines)) for between in BETWEEN_WORDS]
    added = [tokenizer.decode(i) for i in tokenizer.added_tokens_decoder if i < vocab_size]
    around = "".join(f"a{text} b {text}\nc" for text in added)
    texts = [unicodedata.normalize("NFC", text) for text in (*TEXTS, around, *joined)]
    return {text: tokenizer(text, verbose=False)["input_ids"] for text in texts}


def _as_read(header: gguf.GGUFWriter) -> Vocabulary:
    """What llama.cpp makes of a header."""
    from specdec_llama_cpp.context import Model
    from specdec_llama_cpp.vocabulary import Tokenizer

    with TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder, "tokenizer.gguf"), header.arch)
        writer.kv_data = header.kv_data
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        try:
            return Tokenizer(Model(writer.path, vocab_only=True)).vocabulary()
        except RuntimeFailure as error:
            raise _UnlikeError(str(error)) from error


def _compare(
    read: Vocabulary,
    samples: Mapping[str, Sequence[int]],
    spelled: Sequence[bytes | None],
    eos_ids: frozenset[int],
) -> None:
    agreed, encode = 0, cast("Callable[[str], Sequence[int]]", read.encode)  # of its tokenizer
    for text, ours in samples.items():
        theirs = encode(text)
        if theirs != ours:
            pairs = zip_longest(ours, theirs)
            i = next(i for i, (our, their) in enumerate(pairs) if our != their)
            known = (spelled[k] for k in ours[i : i + 4] if k < len(spelled))
            where = b"".join(filter(None, known)).decode("utf-8", "replace")
            raise _UnlikeError(f"llama.cpp splits {where!r} in another way", agreed + i)
        agreed += len(ours)
    for i, (our, their) in enumerate(zip(spelled, read.tokens, strict=False)):
        if our is not None and our != their:
            raise _UnlikeError(f"llama.cpp spells id {i} as {their!r}, not {our!r}", agreed)
    for i in sorted(eos_ids - read.eos_ids):
        raise _UnlikeError(f"llama.cpp doesn't end a text at id {i}", agreed)
