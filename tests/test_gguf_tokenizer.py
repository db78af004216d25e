"""What llama.cpp makes of a Hugging Face tokenizer that was written into a GGUF."""

import copy
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.vocab import Vocabulary

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
pytest.importorskip("llama_cpp")

from tokenizers import AddedToken, Regex, decoders, models, normalizers  # noqa: E402
from tokenizers import pre_tokenizers as pre  # noqa: E402
from tokenizers.processors import TemplateProcessing  # noqa: E402
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer  # noqa: E402

from specdec_hf.gguf import gguf_tokenizer  # noqa: E402
from specdec_hf.gguf_tokenizer import BYTE_LEVEL, add_tokenizer  # noqa: E402
from specdec_hf.tokens import token_table  # noqa: E402
from specdec_llama_cpp.context import Model  # noqa: E402
from specdec_llama_cpp.vocabulary import Tokenizer  # noqa: E402

CORPUS = (
    "def add(self, a, b):\n    return a + b  # isn't it?\n\n\nclass HTTPServer:\n\tport = 8080\n"
    "The year 2024, we'll see; WE'LL SEE: 1234567 and 10,000.\r\n... (the end) - of-the line!!\n"
    "Größe und Straße. Привет, мир! 中文字符。 if (x != None) { y -= 12; }\n        deeper\n"
    "'dear, dear'\nO'Reilly's camelCase ./a/b\n/c\n"
) * 3
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre.ByteLevel(add_prefix_space=False)


def split_by(rule: str) -> Any:
    plain = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre.Sequence([pre.Split(Regex(rule), "isolated"), plain])


SPLITS = {
    "gpt-2": BYTES,
    "smollm": pre.Sequence([pre.Digits(individual_digits=True), BYTES]),
    "qwen2": split_by(QWEN2),
    "llama-bpe": split_by(QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")),
    "tekken": split_by(TEKKEN),
}


@cache
def byte_level(split: str = "gpt-2", *, prefix: bool = False, template: str = "$A") -> Any:
    """A tokenizer whose tokens all come from splitting the corpus in that way."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = SPLITS.get(split) or split_by(split)
    if prefix:
        tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=800,
        special_tokens=["<eos>", "<bos>"],
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<eos>", 0), ("<bos>", 1)]
    )
    return wrapped(tokenizer, bos_token="<bos>", eos_token="<eos>")


def sentencepiece(*, prefix: bool = False, unsure_bytes: bool = False) -> Any:
    """Like Llama 2's with ``prefix``, else like Gemma's, runs of spaces being added tokens."""
    spaces = pre.Split(Regex("▁[^▁]*|[^▁]+"), "isolated")
    bytes_ = [f"<0x{byte:02X}>" for byte in range(255 if unsure_bytes else 256)]
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = spaces
    special = ["<unk>", "<s>", "</s>", *bytes_]
    trainer = BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    trained.train_from_iterator([CORPUS], trainer)
    vocab, merges = trained.get_vocab(), merges_of(trained)
    runs = ["▁" * count for count in range(1, 9)]
    if (
        not prefix
    ):  # in Gemma they come first: every way to put a run together, the short ones first
        vocab |= {run: len(vocab) + i for i, run in enumerate(runs[1:])}
        ways = [(runs[i], runs[k - i - 1]) for k in range(1, 8) for i in range(k)]
        merges = [*ways, *merges]
    rules = models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = tokenizers.Tokenizer(rules)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = replace
    if prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.add_tokens([AddedToken(run, normalized=False) for run in runs[1:]])
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return wrapped(tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def merges_of(tokenizer: Any) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def trained(model: Any, trainer: Any) -> Any:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre.Whitespace()
    tokenizer.train_from_iterator([CORPUS], trainer)
    return wrapped(tokenizer, eos_token="<eos>")


def wrapped(tokenizer: Any, **tokens: str) -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **tokens
    )


class Written(NamedTuple):
    reason: str | None
    header: dict[str, Any]
    path: Path

    def vocab(self) -> Vocabulary:
        return Tokenizer(Model(self.path, vocab_only=True)).vocabulary()


Write = Callable[..., Written]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a tokenizer into a model of zeros."""

    def write(
        tokenizer: Any, size: int | None = None, ends: Sequence[int] | None = None
    ) -> Written:
        size = len(tokenizer) if size is None else size
        ends = [tokenizer.eos_token_id] if ends is None else ends
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        reason = add_tokenizer(writer, tokenizer, size, frozenset(ends))
        header = {key: field.value for key, field in writer.kv_data[0].items()}
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return Written(reason, header, path)

    return write


def assert_alike(written: Written, tokenizer: Any, texts: Sequence[str]) -> None:
    assert written.reason is None
    vocab = written.vocab()
    assert vocab.encode is not None
    for text in texts:
        assert vocab.encode(text) == tokenizer(text)["input_ids"]
    assert list(vocab.tokens) == [*token_table(tokenizer), *[None] * vocab.size][: vocab.size]


@pytest.mark.parametrize("split", SPLITS)
def test_the_rule_is_found_that_splits_alike(write: Write, split: str) -> None:
    tokenizer = byte_level(split)
    written = write(tokenizer)
    assert_alike(written, tokenizer, [CORPUS, "<bos>x<eos> x", "they'LL 99 (ok)\n\n\n  10   7"])
    assert written.header["tokenizer.ggml.pre"] == split


def test_a_rule_that_no_name_stands_for_is_refused(write: Write) -> None:
    written = write(byte_level(r"\w\w?|\W"))
    assert written.reason is not None
    assert "in another way" in written.reason
    assert written.header["tokenizer.ggml.model"] == "none"
    assert not any(key.startswith("tokenizer.ggml.t") for key in written.header)


def test_every_rule_that_is_tried_is_known_to_llama_cpp(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting in BYTE_LEVEL:
        monkeypatch.setattr("specdec_hf.gguf_tokenizer.BYTE_LEVEL", [setting])
        assert "read it" not in (write(byte_level()).reason or "")


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(write: Write, prefix: bool) -> None:
    tokenizer = sentencepiece(prefix=prefix)
    written = write(tokenizer)
    texts = ["", " a", "the  line\n    deeper", "<s>of</s> the", "😀 Straße 中\u0303\t12"]
    assert_alike(written, tokenizer, [CORPUS, *texts])
    assert written.header["tokenizer.ggml.model"] == "llama"
    assert written.header["tokenizer.ggml.add_space_prefix"] is prefix


@pytest.mark.parametrize("prefix", [True, False])
def test_any_text_of_a_sentencepiece_tokenizer(write: Write, prefix: bool) -> None:
    tokenizer = sentencepiece(prefix=prefix)
    encode = write(tokenizer).vocab().encode
    assert encode is not None
    parts = st.sampled_from([" ", "  ", "\n", "the", " of", "de", "é", "</s>", "😀", "8", "("])

    @settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(parts).map("".join))
    def check(text: str) -> None:
        assert encode(text) == tokenizer(text)["input_ids"]

    check()


def test_the_tests_own_tokenizer(write: Write, tiny_llama: Any) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_llama.folder)
    ends = [tokenizer.convert_tokens_to_ids(text) for text in ("<|eos|>", "<|im_end|>")]
    written = write(tokenizer, ends=ends)
    assert_alike(written, tokenizer, ["the rest of the ends<|im_end|>", "Ünïcode\n 1  2"])
    vocab = written.vocab()
    assert vocab.eos_ids == set(ends)
    assert vocab.special_ids == {i for i, token in tokenizer.added_tokens_decoder.items()}
    assert vocab.encode_chat is not None
    messages = [{"role": "user", "content": "the <|bos|> end"}]
    assert vocab.encode_chat(messages) == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


def test_the_real_model(write: Write, smollm2_gguf: Path) -> None:
    tokenizer = gguf_tokenizer(smollm2_gguf, transformers.PreTrainedTokenizerFast)
    written = write(tokenizer)
    assert_alike(written, tokenizer, ["Hello,  world!\n\n\t2024   12", "<|im_start|>x<|im_end|>"])
    again = gguf_tokenizer(written.path, transformers.PreTrainedTokenizerFast)
    text = "naïve 😀\t1+1   2\r\n<|im_end|> don't"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.chat_template == tokenizer.chat_template
    assert again.get_vocab() == tokenizer.get_vocab()


def test_rows_without_a_token(write: Write) -> None:
    tokenizer = byte_level()
    count = len(tokenizer)
    written = write(tokenizer, size=count + 5)
    assert_alike(written, tokenizer, ["[PAD900] the line"])
    assert written.vocab().size == count + 5
    assert written.vocab().num_tokens == count


def test_more_tokens_than_rows(write: Write) -> None:
    tokenizer = copy.deepcopy(byte_level())
    size = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<later>"]})
    assert_alike(write(tokenizer, size=size), tokenizer, ["the line"])


def test_a_padding_row_whose_name_is_taken(write: Write) -> None:
    tokenizer = copy.deepcopy(byte_level())
    taken = len(tokenizer) + 2
    tokenizer.add_tokens([f"[PAD{taken}]"])
    assert write(tokenizer, size=taken).reason is None
    assert "same text" in str(write(tokenizer, size=taken + 1).reason)


@pytest.mark.parametrize("template", ["$A", "<bos> $A", "$A <eos>", "<bos> $A <eos>"])
def test_what_is_put_around_a_text(write: Write, template: str) -> None:
    tokenizer = byte_level(template=template)
    assert_alike(write(tokenizer), tokenizer, ["", "the line"])


def test_ends_that_a_header_cannot_name(write: Write) -> None:
    tokenizer = byte_level()
    assert write(tokenizer, ends=[0, 5, 7]).vocab().eos_ids == {0, 5, 7}
    written = write(tokenizer, ends=[0, 5, 7, 9])
    assert written.reason == "llama.cpp doesn't end a text at id 9"
    assert "no id ends a text" in str(write(tokenizer, ends=[]).reason)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: None, "no tokenizer"),
        (lambda: trained(models.WordPiece(), WordPieceTrainer(show_progress=False)), "WordPiece"),
        (
            lambda: trained(
                models.Unigram(), UnigramTrainer(show_progress=False, special_tokens=["<eos>"])
            ),
            "Unigram",
        ),
        (lambda: sentencepiece(unsure_bytes=True), "every byte"),
        (lambda: byte_level(prefix=True), "in another way"),
    ],
    ids=["none", "wordpiece", "unigram", "255 bytes", "space before a text"],
)
def test_other_kinds_are_refused(write: Write, make: Callable[[], Any], reason: str) -> None:
    tokenizer = make()
    written = (
        write(tokenizer, size=300, ends=[0]) if tokenizer is None else write(tokenizer, ends=[0])
    )
    assert reason in str(written.reason)
    assert written.header["tokenizer.ggml.model"] == "none"


def test_several_chat_templates(write: Write) -> None:
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "tools"}
    header = write(tokenizer).header
    assert header["tokenizer.chat_template"] == "{{ messages[0].content }}"
    assert header["tokenizer.chat_template.tool_use"] == "tools"
