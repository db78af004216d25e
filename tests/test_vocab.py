"""Prompts to ids, and which models go together."""

from typing import Any

import numpy as np
import pytest

from specdec import ModelDrafter, SpeculativeDecoder, Vocabulary, VocabularyMismatchError
from specdec.testing import TableBackend
from specdec.vocab import encode_prompt, odd_special, shared_ids


def vocabulary(*tokens: bytes | None, size: int = 0, **options: Any) -> Vocabulary:
    return Vocabulary(size or len(tokens), tokens, frozenset(), **options)


LETTERS = [bytes([letter]) for letter in b"abcdefghijklmnopqrstuvwxyz"]


def test_prompts_in_every_form() -> None:
    vocab = vocabulary(
        *LETTERS,
        encode=lambda text: [letter - 97 for letter in text.encode()],
        encode_chat=lambda messages: [len(message["content"]) for message in messages],
    )
    assert encode_prompt(vocab, "cab") == [2, 0, 1]
    assert encode_prompt(vocab, [2, 0]) == [2, 0]
    assert encode_prompt(vocab, (2, 0)) == [2, 0]
    assert encode_prompt(vocab, [{"role": "user", "content": "abc"}]) == [3]


def test_one_bos_is_enough() -> None:
    vocab = vocabulary(*LETTERS, bos_id=0, encode=lambda text: [0, *(ord(c) - 97 for c in text)])
    assert encode_prompt(vocab, "abc") == [0, 1, 2]
    assert encode_prompt(vocab, "bc") == [0, 1, 2]
    assert encode_prompt(vocab, "") == [0]
    assert encode_prompt(vocab, []) == [0]


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_needs_a_bos(prompt: Any) -> None:
    with pytest.raises(ValueError, match="the prompt is empty and the model has no BOS"):
        encode_prompt(vocabulary(*LETTERS, encode=lambda text: []), prompt)


@pytest.mark.parametrize("bad", [26, -1])
def test_ids_are_checked(bad: int) -> None:
    with pytest.raises(ValueError, match=f"prompt id {bad} is outside the vocabulary of 26 ids"):
        encode_prompt(vocabulary(*LETTERS), [3, bad])


def test_ids_are_taken_as_they_are() -> None:
    vocab = vocabulary(*LETTERS, bos_id=0)
    assert encode_prompt(vocab, [0, 0, 3]) == [0, 0, 3]
    others: list[Any] = [np.array([2, 1]), iter([2, 1])]
    assert [encode_prompt(vocab, other) for other in others] == [[2, 1], [2, 1]]


def test_text_that_is_no_unicode_is_refused() -> None:
    vocab = vocabulary(*LETTERS, encode=lambda text: list(text.encode()))
    with pytest.raises(ValueError, match="the prompt isn't valid Unicode"):
        encode_prompt(vocab, "a\udcff")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (7, "not int"),
        (None, "not NoneType"),
        ([1.5], "float"),
        (b"abc", "not bytes"),
        ({"role": "user", "content": "hi"}, "not dict"),
        ("text", "no tokenizer"),
        ([{"role": "user", "content": "hi"}], "no chat template"),
    ],
)
def test_prompts_of_no_known_kind(prompt: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        encode_prompt(vocabulary(*LETTERS), prompt)


def test_equal_tables_share_everything_and_padding_nothing() -> None:
    wide, narrow = vocabulary(*LETTERS, size=40), vocabulary(*LETTERS, size=32)
    for shared in (shared_ids(wide, narrow), shared_ids(narrow, wide)):
        assert [i for i in range(40) if i in shared] == list(range(26))


def test_a_few_different_ids_are_left_out() -> None:
    other = [*LETTERS[:3], b"<odd>", *LETTERS[4:9], None, *LETTERS[10:], b"<new>"]
    for shared in (
        shared_ids(vocabulary(*LETTERS), vocabulary(*other)),
        shared_ids(vocabulary(*other), vocabulary(*LETTERS)),
    ):
        assert [i for i in range(30) if i not in shared] == [3, 9, 26, 27, 28, 29]


def test_different_tokenizers_are_refused_with_sizes_and_the_first_id() -> None:
    target, draft = vocabulary(*LETTERS), vocabulary(*LETTERS[:2], *LETTERS[:1:-1], b"x", size=30)
    message = r"tables of 26 and 27 tokens.* id 2: b'c' in the target, b'z' in the draft"
    with pytest.raises(VocabularyMismatchError, match=message):
        shared_ids(target, draft)


def test_the_pair_is_checked_at_construction() -> None:
    target = TableBackend.random(8)
    draft = TableBackend(target.table, tokens=[b"x%d" % i for i in range(8)])
    with pytest.raises(VocabularyMismatchError):
        SpeculativeDecoder(target, draft)
    with pytest.raises(VocabularyMismatchError):
        ModelDrafter(draft, target.vocab)


def test_a_vocabulary_has_no_more_tokens_than_ids() -> None:
    with pytest.raises(ValueError, match="size 3 can't have 4 tokens"):
        vocabulary(*LETTERS[:4], size=3)
    with pytest.raises(ValueError, match="size 3 can't have 0 tokens"):
        vocabulary(size=3)


def test_what_ids_spell() -> None:
    vocab = vocabulary(b"a", b"<s>", None, size=9, special_ids=frozenset({1}))
    assert [vocab.spell(i) for i in (0, 1, 2, 5)] == [b"a", b"", b"", b""]


def test_special_tokens_that_differ_are_named_in_a_warning() -> None:
    target = vocabulary(*LETTERS, b"<end>", b"<user>", b"<x>", special_ids=frozenset({26, 27, 28}))
    theirs = [*LETTERS, b"<end>", b"<human>", None]
    draft = TableBackend(np.zeros((29, 29, 32)), tokens=theirs)
    message = r"id 27 is b'<user>' in the target and b'<human>' in the draft. They are never"
    with pytest.warns(UserWarning, match=message) as warned:
        drafter = ModelDrafter(draft, target)
    assert len(warned) == 1
    assert drafter.open([27]).reason is None
    same = vocabulary(*LETTERS, b"<end>", b"<user>", special_ids=frozenset({26}))
    assert odd_special(target, same) is None
    assert odd_special(target, draft.vocab) is not None
    others = vocabulary(*(b"<%d>" % i for i in range(29)), special_ids=frozenset(range(29)))
    assert (odd_special(target, others) or "").endswith(", and 25 more")
