"""Ids, text and events end at the same place, whatever ends them."""

from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from specdec.stopping import Output, TokenEvent
from specdec.vocab import Vocabulary

PIECES = ["a", "b", "ab", "ba", "é", "😀", "e\u0301", ""]
BYTES = [piece.encode() for piece in PIECES] + [
    b"\xf0",
    b"\x9f",
    b"\x98",
    b"\x80",
    b"\xc3",
    b"\xa9",
]
EOS, HIDDEN = len(BYTES), len(BYTES) + 1
VOCAB = Vocabulary(
    size=len(BYTES) + 4,
    tokens=[*BYTES, b"<eos>", b"<hidden>", None],
    eos_ids=frozenset({EOS}),
    special_ids=frozenset({EOS, HIDDEN}),
)

token_lists = st.lists(st.integers(0, HIDDEN), max_size=12)
stop_lists = st.lists(st.text("abé😀\ufffd", min_size=1, max_size=4), max_size=3)


def run(
    tokens: Sequence[int], stop: Sequence[str] = (), patience: int = 1
) -> tuple[Output, list[TokenEvent]]:
    """Put out all the tokens there are, or fewer if a stop comes first."""
    output, events = Output(VOCAB, len(tokens), stop=stop), []
    for number, token in enumerate(tokens):
        if not output.add(token, from_draft=False):
            break
        if number % patience == 0:
            events += output.take()
    return output, events + output.take()


@given(tokens=token_lists, stop=stop_lists, patience=st.integers(1, 4))
@example(tokens=[8, 9, 10, 11], stop=["😀"], patience=1)
def test_text_ids_and_events_end_together(
    tokens: list[int], stop: list[str], patience: int
) -> None:
    output, events = run(tokens, stop=stop, patience=patience)
    assert "".join(event.text for event in events) == output.text
    assert [event.token_id for event in events] == output.token_ids
    assert output.token_ids == tokens[: len(output.token_ids)]
    whole = b"".join(map(VOCAB.spell, output.token_ids)).decode(errors="replace")
    assert whole.startswith(output.text)
    if not stop:
        assert whole == output.text
    if output.text != whole:  # the last token holds the stop's beginning, those before it don't
        before = b"".join(map(VOCAB.spell, output.token_ids[:-1])).decode(errors="ignore")
        assert len(before) <= len(output.text)


@given(tokens=token_lists, stop=stop_lists)
def test_the_earliest_stop_string_wins_in_any_order(tokens: list[int], stop: list[str]) -> None:
    output, _ = run(tokens, stop=stop)
    backwards, _ = run(tokens, stop=stop[::-1])
    assert (output.text, output.token_ids) == (backwards.text, backwards.token_ids)
    assert not any(text in output.text for text in stop)
    if output.finish_reason == "stop":
        seen = b"".join(map(VOCAB.spell, tokens)).decode(errors="replace")
        assert any(seen.startswith(output.text + text) for text in stop)


@given(tokens=token_lists, stop=stop_lists)
def test_holds_back_only_what_may_become_a_stop(tokens: list[int], stop: list[str]) -> None:
    output, shown = Output(VOCAB, 50, stop=stop), ""
    for token in tokens:
        if not output.add(token, from_draft=True):
            break
        shown += "".join(event.text for event in output.take())
        held = output.text[len(shown) :]
        # Events are whole tokens, so what is held starts at most a token before the suspicious end.
        assert not held or any(
            text.startswith(held[at:]) for text in stop for at in range(min(len(held), 3))
        )


def test_without_stop_strings_every_token_is_an_event_at_once() -> None:
    output = Output(VOCAB, 50)
    for token in (0, HIDDEN, 8, 9, 10, 11, 7):
        output.add(token, from_draft=False)
        assert [event.token_id for event in output.take()] == [token]
    assert output.text == "a😀"


def test_a_stop_before_the_limit_is_the_reason() -> None:
    assert run([0, EOS])[0].finish_reason == "eos"
    assert run([0, 1], stop=["b"])[0].finish_reason == "stop"
    assert run([0, 1], stop=["c"])[0].finish_reason == "length"


def test_a_stop_inside_a_token_cuts_the_text_and_keeps_the_token() -> None:
    output, events = run([1, 2, 0], stop=["bb"])
    assert (output.text, output.token_ids, output.finish_reason) == ("baba", [1, 2, 0], "length")
    output, events = run([0, 3, 0], stop=["aa"])
    assert (output.text, output.token_ids, output.finish_reason) == ("ab", [0, 3], "stop")
    assert [event.text for event in events] == ["a", "b"]


def test_eos_leaves_no_text() -> None:
    output, events = run([0, EOS, 1])
    assert (output.text, output.token_ids) == ("a", [0, EOS])
    assert [event.text for event in events] == ["a", ""]


def test_an_unfinished_character_is_replaced_at_the_end_only() -> None:
    output, events = run([0, 8, 9])
    assert output.text == "a\ufffd"
    assert [event.text for event in events] == ["a", "", "\ufffd"]
