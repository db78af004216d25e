"""Ids spell the text that they are for, and tokens go with tokens that spell the same."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from specdec import Vocabulary
from specdec.spelling import Speller, common_tokens


def vocabulary(*tokens: bytes | None, size: int = 0, **options: Any) -> Vocabulary:
    return Vocabulary(size or len(tokens), tokens, options.pop("eos_ids", frozenset()), **options)


def test_special_ids_go_with_special_ids() -> None:
    ours = vocabulary(
        b"<s>",
        b"</s>",
        b"<|im_end|>",
        b"a",
        b"<tool>",
        b"<x>",
        bos_id=0,
        eos_ids=frozenset({1, 2}),
        special_ids=frozenset({0, 1, 2, 5}),
    )
    theirs = vocabulary(
        b"a",
        b"<tool>",
        b"<x>",
        b"<|im_end|>",
        b"<bos>",
        bos_id=4,
        eos_ids=frozenset({3}),
        special_ids=frozenset({3, 4}),
    )
    assert common_tokens(Speller(ours), Speller(theirs)) == {0: 4, 1: 3, 2: 3, 3: 0, 4: 1}
    assert common_tokens(Speller(theirs), Speller(ours)) == {0: 3, 1: 4, 3: 2, 4: 0}


def test_a_tokenizer_is_asked_where_it_spells_the_text() -> None:
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        """As sentencepiece: a beginning, and a space before the first word."""
        asked.append(text)
        cut = {"": [], "x y": [1, 2], "y": [2], "xy": [1, 3]}
        return [0, *cut[text]]

    speller = Speller(vocabulary(b"<s>", b"x", b" y", b"y", b"xy", b" ", bos_id=0, encode=encode))
    assert speller.start() == [0]
    assert speller.split(b"x y") == ([1, 2], 3)
    assert speller.split(b" y") == ([2], 2)
    assert asked[-1] == "y"
    assert speller.split(b"xy") == ([1, 3], 2)  # not the fewest, but the tokenizer's
    assert speller.split(b"xyx") == ([4, 1], 3)  # it doesn't know this one
    assert speller.split(b"xy\xc3") == ([1, 3], 2)
    assert speller.split(b"\xffxy") == ([], 0)


@given(tokens=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1), text=st.text("ab"))
def test_the_fewest_tokens_are_found_where_any_are(tokens: list[str], text: str) -> None:
    speller = Speller(vocabulary(*[token.encode() for token in tokens]))
    ids, count = speller.fewest(text.encode())
    assert b"".join(map(speller.spell, ids)) == text[:count].encode()
    best = {0: 0}
    for end in range(1, len(text) + 1):
        ways = [best[i] + 1 for i in best if text[i:end] in tokens]
        if ways:
            best[end] = min(ways)
    assert (max(best), best[max(best)]) == (count, len(ids))


@given(
    text=st.text("xy", min_size=1, max_size=6),
    odd=st.integers(max_value=-1) | st.integers(min_value=4),
    data=st.data(),
)
def test_an_encoder_that_gives_ids_past_the_table_is_not_believed(
    text: str, odd: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(text)))

    def encode(text: str) -> list[int]:
        ids = [b"xy".index(byte) for byte in text.encode()]
        return [*ids[:place], odd, *ids[place:]]

    speller = Speller(vocabulary(b"x", b"y", b"xy", b"", size=6, encode=encode))
    assert speller.split(text.encode()) == speller.fewest(text.encode())
