"""The loop, on the reference backend: the output is plain decoding's, and nothing is done twice."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec import (
    BackendError,
    ContextFullError,
    Draft,
    Drafter,
    DraftRequest,
    GenerationResult,
    ModelDrafter,
    RuntimeFailure,
    SpeculativeDecoder,
    SuffixDrafter,
)
from specdec.testing import TableBackend


class Case(NamedTuple):
    target: TableBackend
    draft: TableBackend
    prompt: list[int]
    options: dict[str, Any]


@st.composite
def cases(draw: st.DrawFn, max_tokens: int = 24) -> Case:
    """Small alphabets make loops, matches and stops frequent; small contexts make them end."""
    size = draw(st.integers(2, 7))
    target = TableBackend.random(
        size,
        seed=draw(st.integers(0, 999)),
        padding=draw(st.integers(0, 2)),
        eos_ids=draw(st.sets(st.integers(0, size - 1), max_size=2)),
        max_context=draw(st.integers(1, 30)),
    )
    draft = target.sibling(
        draw(st.sampled_from([0.0, 0.2, 0.7, 5.0])), max_context=draw(st.integers(1, 30))
    )
    length = draw(st.integers(1, min(8, target.max_context)))
    prompt = draw(st.lists(st.integers(0, size - 1), min_size=length, max_size=length))
    options = {
        "max_new_tokens": draw(st.integers(0, max_tokens)),
        "stop": draw(st.lists(st.text("abcdefg"[:size], min_size=1, max_size=3), max_size=2)),
        "stop_token_ids": draw(st.sets(st.integers(0, size - 1), max_size=1)),
    }
    return Case(target, draft, prompt, options)


def plainly(case: Case) -> tuple[list[int], str, str]:
    """Plain greedy decoding, written down as simply as can be: the oracle."""
    target, ids = case.target, list(case.prompt)
    vocab, new, text = target.vocab, [], ""
    if case.options["max_new_tokens"] == 0:
        return [], "", "length"
    while True:
        row = target.table[ids[-2] if len(ids) > 1 else ids[-1], ids[-1]]
        token = int(row[: len(vocab.tokens)].argmax())
        ids.append(token)
        new.append(token)
        if token in vocab.eos_ids:
            return new, text, "eos"
        if token in case.options["stop_token_ids"]:
            return new, text, "stop"
        text += vocab.spell(token).decode()
        found = [text.find(stop) for stop in case.options["stop"] if stop in text]
        if found:  # every token is one letter
            return new[: min(found)], text[: min(found)], "stop"
        if len(new) == case.options["max_new_tokens"]:
            return new, text, "length"
        if len(ids) > target.max_context:
            return new, text, "context"


Length: TypeAlias = int | Literal["auto"]
LENGTHS: st.SearchStrategy[Length] = st.integers(0, 16) | st.just("auto")


def outcome(result: GenerationResult) -> tuple[list[int], str, str]:
    return result.token_ids, result.text, result.finish_reason


@given(case=cases(), num_draft_tokens=LENGTHS)
def test_output_is_plain_decodings(case: Case, num_draft_tokens: Length) -> None:
    expected = plainly(case)
    for draft in (case.draft, case.target, None):
        decoder = SpeculativeDecoder(case.target, draft, num_draft_tokens=num_draft_tokens)
        assert outcome(decoder.generate(case.prompt, **case.options)) == expected
        decoder.clear()
        assert case.target.open_caches == case.draft.open_caches == 0


@given(case=cases(), seed=st.integers(0, 999), strict=st.booleans())
def test_no_clock_changes_the_output(case: Case, seed: int, strict: bool) -> None:
    """Whatever the times say, and whatever lengths are chosen by them."""
    ticks = np.random.default_rng(seed).lognormal(0.0, 2.0, 100_000).cumsum()
    decoder = SpeculativeDecoder(
        case.target, case.draft, strict=strict, clock=iter(ticks.tolist()).__next__
    )
    expected = plainly(case)
    for _ in range(3):
        assert outcome(decoder.generate(case.prompt, **case.options)) == expected
    decoder.clear()
    assert case.target.open_caches == case.draft.open_caches == 0


@given(case=cases(), num_draft_tokens=LENGTHS)
def test_a_stream_is_the_same_in_pieces(case: Case, num_draft_tokens: Length) -> None:
    decoder = SpeculativeDecoder(case.target, case.draft, num_draft_tokens=num_draft_tokens)
    stream = decoder.stream(case.prompt, **case.options)
    events = list(stream)
    assert stream.result is not None
    assert outcome(stream.result) == plainly(case)
    assert [event.token_id for event in events] == stream.result.token_ids
    assert "".join(event.text for event in events) == stream.result.text
    if case.options["stop"] == [] and stream.result.finish_reason == "length":
        from_draft = sum(event.from_draft for event in events)
        assert from_draft == stream.result.stats.num_correct_drafts


class Scripted(Drafter):
    """Proposes whatever it is told to."""

    def __init__(self, proposals: Iterator[Sequence[int]]) -> None:
        self.proposals = proposals

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft(list(next(self.proposals))[: r.num_tokens]) for r in requests]


@given(case=cases(), data=st.data())
def test_no_draft_at_all_can_change_the_output(case: Case, data: st.DataObject) -> None:
    ids = st.lists(st.integers(0, case.target.vocab.size - 1), max_size=9)

    def proposals() -> Iterator[list[int]]:
        while True:
            yield data.draw(ids)

    decoder = SpeculativeDecoder(case.target, Scripted(proposals()), num_draft_tokens=9)
    assert outcome(decoder.generate(case.prompt, **case.options)) == plainly(case)


@given(
    case=cases(),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    max_batch=st.integers(1, 6),
    num_draft_tokens=LENGTHS,
)
def test_a_batch_is_its_single_runs(
    case: Case, lengths: list[int], max_batch: int, num_draft_tokens: Length
) -> None:
    size, limit = len(case.target.vocab.tokens), case.target.max_context
    prompts = [[(3 * n + i) % size for i in range(min(n, limit))] for n in lengths]
    decoder = SpeculativeDecoder(
        case.target, case.draft, num_draft_tokens=num_draft_tokens, keep_caches=0
    )
    alone = [decoder.generate(prompt, **case.options) for prompt in prompts]
    together = decoder.generate_batch(prompts, max_batch=max_batch, **case.options)
    assert [outcome(r) for r in together] == [outcome(r) for r in alone]
    if num_draft_tokens != "auto":
        assert [counters(r) for r in together] == [counters(r) for r in alone]
    decoder.clear()
    assert case.target.open_caches == case.draft.open_caches == 0


def counters(result: GenerationResult) -> dict[str, object]:
    """The statistics without the times."""
    return {
        name: value
        for name, value in result.stats.as_dict().items()
        if not name.endswith("seconds") and name != "tokens_per_second"
    }


@given(case=cases(), num_draft_tokens=st.integers(0, 8))
def test_statistics_add_up(case: Case, num_draft_tokens: int) -> None:
    decoder = SpeculativeDecoder(case.target, case.draft, num_draft_tokens=num_draft_tokens)
    result = decoder.generate(case.prompt, **case.options)
    stats = result.stats
    assert stats.prompt_tokens == len(case.prompt)
    assert stats.completion_tokens == len(result.token_ids)
    assert stats.verify_ct == sum(stats.accept_histogram) <= stats.target_forward_ct
    assert stats.num_correct_drafts == sum(n * ct for n, ct in enumerate(stats.accept_histogram))
    assert stats.num_correct_drafts <= stats.num_proposed_drafts
    assert stats.num_proposed_drafts <= num_draft_tokens * stats.verify_ct
    accepted = stats.num_correct_drafts + stats.target_forward_ct
    # A stop string may take tokens back, so more may have been accepted than put out in the end.
    assert stats.completion_tokens <= accepted <= case.options["max_new_tokens"]
    if result.finish_reason in ("length", "context"):
        assert stats.completion_tokens == accepted
    assert stats.num_proposed_drafts == stats.draft_forward_ct
    assert stats.speculative == (stats.verify_ct > 0)
    if stats.speculative:
        assert stats.accept_rate == stats.num_correct_drafts / stats.num_proposed_drafts
        assert stats.accept_length == 1 + stats.num_correct_drafts / stats.verify_ct
        assert len(stats.accept_histogram) <= num_draft_tokens + 1
    else:
        assert stats.accept_rate is stats.accept_length is None
        assert stats.reason
    times = [value for name, value in stats.as_dict().items() if name.endswith("seconds")]
    assert all(value >= 0 for value in times if isinstance(value, float))


class Watched(TableBackend):
    """Remembers what every forward looked like."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.log: list[list[tuple[int, int]]] = []

    def forward(self, batch: Any) -> Any:
        self.log.append([(len(span.tokens), span.num_logits) for span in batch])
        return super().forward(batch)


@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
def test_a_model_as_its_own_draft_is_always_right(num_draft_tokens: int) -> None:
    target, draft = TableBackend.random(9, seed=5), TableBackend.random(9, seed=5)
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=num_draft_tokens)
    stats = decoder.generate([1, 2, 3], max_new_tokens=200).stats
    assert stats.accept_rate == 1
    assert stats.target_forward_ct == math.ceil(200 / (num_draft_tokens + 1))
    assert stats.draft_forward_ct == stats.num_proposed_drafts
    # Prompt once, then what was drafted: the last proposal of a round is fed with the next round.
    assert target.fed_ct == 2 + stats.num_proposed_drafts + stats.target_forward_ct
    assert draft.fed_ct <= 2 + stats.num_proposed_drafts + stats.target_forward_ct
    assert target.row_ct == stats.num_proposed_drafts + stats.target_forward_ct
    assert draft.row_ct == stats.num_proposed_drafts


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 16])
def test_an_always_wrong_draft_changes_nothing(num_draft_tokens: int) -> None:
    target = TableBackend.random(9, seed=5)
    wrong = TableBackend(-target.table)
    plain = SpeculativeDecoder(target).generate([1, 2, 3], max_new_tokens=40)
    decoder = SpeculativeDecoder(target, wrong, num_draft_tokens=num_draft_tokens)
    result = decoder.generate([1, 2, 3], max_new_tokens=40)
    assert result.token_ids == plain.token_ids
    assert result.stats.num_correct_drafts == 0
    assert result.stats.accept_rate == 0
    assert result.stats.accept_length == 1
    assert result.stats.target_forward_ct == 40


def test_every_forward_is_as_small_as_it_can_be() -> None:
    base = TableBackend.random(9, seed=5)
    target, draft = Watched(base.table), Watched(base.sibling(0.3).table)
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=3)
    stats = decoder.generate([1] * 1100, max_new_tokens=50).stats
    prompt = [[(512, 0)], [(512, 0)], [(75, 0)]]
    assert target.log[:3] == draft.log[:3] == prompt
    assert all(width == rows for ((width, rows),) in target.log[3:])
    assert len(draft.log) == 3 + stats.draft_forward_ct
    assert all(width <= 2 and rows == 1 for ((width, rows),) in draft.log[3:])


def test_repeated_calls_are_alike() -> None:
    target = TableBackend.random(9, seed=5)
    decoder = SpeculativeDecoder(target, target.sibling(0.4), num_draft_tokens=4)
    results = [decoder.generate([1, 2], max_new_tokens=30) for _ in range(20)]
    assert all(outcome(r) == outcome(results[0]) for r in results)
    assert [r.stats.cached_tokens for r in results] == [0] + 19 * [1]
    assert all(counters(r) == counters(results[1]) for r in results[1:])
    decoder.clear()
    assert target.open_caches == 0


@pytest.mark.parametrize("fault", [RuntimeFailure("injected"), KeyboardInterrupt()])
@pytest.mark.parametrize("faulty", ["target", "draft"])
def test_a_fault_at_any_call_leaves_the_decoder_as_new(faulty: str, fault: BaseException) -> None:
    target = TableBackend.random(6, seed=3)
    draft = target.sibling(0.4)
    backend = {"target": target, "draft": draft}[faulty]
    backend.fault = fault
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=3, keep_caches=0)
    prompts = [[1, 2, 3], [4], [0, 5]]
    expected = decoder.generate_batch(prompts, max_new_tokens=8, max_batch=2)
    for call in range(backend.call_ct):
        backend.call_ct, backend.fail_at = 0, call
        with pytest.raises(type(fault)):
            decoder.generate_batch(prompts, max_new_tokens=8, max_batch=2)
        assert target.open_caches == draft.open_caches == 0
        backend.fail_at = None
        again = decoder.generate_batch(prompts, max_new_tokens=8, max_batch=2)
        assert [outcome(r) for r in again] == [outcome(r) for r in expected]
        assert [counters(r) for r in again] == [counters(r) for r in expected]


def test_a_stream_closed_at_any_token_leaves_the_decoder_as_new() -> None:
    target = TableBackend.random(6, seed=3)
    decoder = SpeculativeDecoder(target, target.sibling(0.4), num_draft_tokens=3)
    expected = outcome(decoder.generate([1, 2], max_new_tokens=12))
    for number in range(12):
        stream = decoder.stream([1, 2], max_new_tokens=12)
        for _ in range(number):
            next(stream)
        stream.close()
        decoder.clear()
        assert target.open_caches == 0
        assert stream.result is None
        assert list(stream) == []
        assert outcome(decoder.generate([1, 2], max_new_tokens=12)) == expected


def test_streams_may_be_interleaved() -> None:
    target = TableBackend.random(6, seed=3)
    decoder = SpeculativeDecoder(target, target.sibling(0.4), num_draft_tokens=3)
    prompts = [[1, 2], [3, 4, 5]]
    streams = [decoder.stream(prompt, max_new_tokens=12) for prompt in prompts]
    events = list(zip(*streams, strict=True))
    for index, prompt in enumerate(prompts):
        expected = decoder.generate(prompt, max_new_tokens=12).token_ids
        assert [pair[index].token_id for pair in events] == expected


def test_a_short_draft_context_stops_drafting_and_says_so() -> None:
    target = TableBackend.random(6, seed=3)
    draft = target.sibling(0.0, max_context=10)
    result = SpeculativeDecoder(target, draft, num_draft_tokens=5).generate(
        [1, 2, 3], max_new_tokens=40
    )
    assert len(result.token_ids) == 40
    assert result.stats.speculative
    assert "draft's context of 10 tokens is full" in str(result.stats.reason)
    assert draft.fed_ct <= 10

    result = SpeculativeDecoder(target, draft, num_draft_tokens=5).generate(
        [1] * 11, max_new_tokens=9
    )
    assert not result.stats.speculative
    assert "draft's context of 10 tokens is full" in str(result.stats.reason)


def test_a_draft_that_lacks_an_id_of_the_text_stands_back() -> None:
    target = TableBackend.random(8, seed=3)
    draft = TableBackend(target.table[:5, :5, :5])
    result = SpeculativeDecoder(target, draft).generate([7, 1, 2], max_new_tokens=9)
    assert (
        result.token_ids
        == SpeculativeDecoder(target).generate([7, 1, 2], max_new_tokens=9).token_ids
    )
    assert result.stats.reason == "the text holds id 7 and the draft knows 5 ids only"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"draft": None}, "no draft was given"),
        ({"num_draft_tokens": 0}, "num_draft_tokens is 0"),
        ({}, None),
    ],
)
def test_results_say_why_nothing_was_drafted(options: dict[str, Any], reason: str | None) -> None:
    target = TableBackend.random(6, seed=3)
    decoder = SpeculativeDecoder(target, **{"draft": target, "num_draft_tokens": 5, **options})
    assert decoder.generate([1], max_new_tokens=5).stats.reason == reason
    assert decoder.generate([1], max_new_tokens=1).stats.reason


@pytest.mark.parametrize("budget", [0, 1, 2])
def test_small_budgets(budget: int) -> None:
    target = TableBackend.random(6, seed=3)
    draft = target.sibling(0.0)
    result = SpeculativeDecoder(target, draft).generate([1, 2], max_new_tokens=budget)
    assert (len(result.token_ids), result.finish_reason) == (budget, "length")
    assert target.fed_ct == {0: 0, 1: 2, 2: 3}[budget]
    assert draft.fed_ct == {0: 0, 1: 0, 2: 2}[budget]


def test_the_last_slot_of_the_context() -> None:
    target = TableBackend.random(6, seed=3, max_context=8)
    for draft in (None, target):
        decoder = SpeculativeDecoder(target, draft)
        result = decoder.generate([1] * 8)
        assert (len(result.token_ids), result.finish_reason) == (1, "context")
        result = decoder.generate([1] * 5)
        assert (len(result.token_ids), result.finish_reason) == (4, "context")
        with pytest.raises(ContextFullError, match=r"has 9 tokens and the target's context is 8"):
            decoder.generate([1] * 9)
        decoder.clear()
    assert target.open_caches == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens must be at least 0, not -1"),
        ({"max_new_tokens": 1.5}, TypeError, "max_new_tokens must be a whole number, not 1.5"),
        ({"stop": ""}, ValueError, "at least one character"),
        ({"stop": ["a", ""]}, ValueError, "at least one character"),
        ({"stop_token_ids": [6]}, ValueError, "stop id 6 is outside the vocabulary of 6 ids"),
        ({"stop_token_ids": iter([2])}, TypeError, "stop_token_ids a list of ids, not .*iterator"),
        ({"stop": (s for s in "ab")}, TypeError, "a text or a list of texts"),
        ({"stop": None}, TypeError, "a text or a list of texts"),
        (
            {"max_tokens": 3},
            TypeError,
            "no option 'max_tokens'; there are logprobs, max_new_tokens",
        ),
    ],
)
def test_bad_values_are_refused_before_any_work(
    options: Any, error: type[Exception], message: str
) -> None:
    target = TableBackend.random(6, seed=3)
    decoder = SpeculativeDecoder(target, target)
    for call in (decoder.generate, decoder.stream):
        with pytest.raises(error, match=message):
            call([1], **options)
    with pytest.raises(error, match=message):
        decoder.generate_batch([[1], [2]], **options)
    assert target.call_ct == 0


def test_one_bad_prompt_of_a_batch_is_refused_before_any_work() -> None:
    target = TableBackend.random(6, seed=3)
    with pytest.raises(ValueError, match="prompt id 6"):
        SpeculativeDecoder(target).generate_batch([[1], [6]])
    assert target.call_ct == 0


def test_bad_parts_are_refused_at_construction() -> None:
    target = TableBackend.random(6)
    bad: list[Any] = [7, ModelDrafter]
    for thing in bad:
        with pytest.raises(TypeError, match="target must be a ModelBackend"):
            SpeculativeDecoder(thing)
        for draft in (thing, ["suffix", thing]):
            with pytest.raises(TypeError, match='draft must be "self", "lookup", "suffix", a back'):
                SpeculativeDecoder(target, draft)
    with pytest.raises(TypeError, match="but SuffixDrafter is a class: make an instance of it"):
        SpeculativeDecoder(target, cast(Any, SuffixDrafter))
    with pytest.raises(
        ValueError, match=r'called \'q8.gguf\': .* a list, such as \["suffix", Llama'
    ):
        SpeculativeDecoder(target, "suffix+q8.gguf")
    for name in ("gpt2", "self:", ""):
        with pytest.raises(ValueError, match=f"no draft is called '{name}'"):
            SpeculativeDecoder(target, name)
    with pytest.raises(ValueError, match="TableBackend can't make a draft of itself"):
        SpeculativeDecoder(target, "self")
    with pytest.raises(ValueError, match="num_draft_tokens must be at least 0, not -1"):
        SpeculativeDecoder(target, target, num_draft_tokens=-1)
    with pytest.raises(TypeError, match="prompts is one text"):
        SpeculativeDecoder(target).generate_batch("abc")
    with pytest.raises(ValueError, match="max_batch must be at least 1, not 0"):
        SpeculativeDecoder(target).generate_batch([[1]], max_batch=0)


def test_self_asks_the_target_for_its_own_draft() -> None:
    asked = []

    class Twin(TableBackend):
        def self_draft(self, quantization: str = "its own choice") -> TableBackend:
            asked.append(quantization)
            return self

    target = Twin.random(6)
    for name in ("self", "self:q8_0"):
        result = SpeculativeDecoder(target, name).generate([1], max_new_tokens=12)
        assert result.stats.accept_rate == 1.0
    assert asked == ["its own choice", "q8_0"]


def test_a_drafter_that_proposes_too_much_is_named() -> None:
    class Greedy(Drafter):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            return [Draft([0] * (request.num_tokens + 1)) for request in requests]

    target = TableBackend.random(6)
    decoder = SpeculativeDecoder(target, Greedy(), num_draft_tokens=5)
    with pytest.raises(ValueError, match="Greedy proposed 6 tokens where at most 5"):
        decoder.generate([1])
    assert target.open_caches == 0


def test_a_drafter_that_answers_too_few_requests_is_named() -> None:
    class Mute(Drafter):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            return []

    with pytest.raises(ValueError, match="Mute gave 0 drafts for 1 requests"):
        SpeculativeDecoder(TableBackend.random(6), Mute()).generate([1])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "Odd.propose gave NoneType: it has to return a list with one Draft for each"),
        ([[1, 2]], r"Odd proposed \[1, 2\]: make it a Draft, such as Draft\(\[1, 2\]\)"),
        ([Draft(cast(Any, "abc"))], "Odd proposed 'abc', but ids are integers"),
        ([Draft(cast(Any, None))], "Odd proposed None, but ids are integers"),
    ],
)
def test_an_answer_that_is_no_draft_is_named(answer: Any, message: str) -> None:
    class Odd(Drafter):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            found: list[Draft] = answer
            return found

    target = TableBackend.random(6)
    drafter: Any
    for drafter in (Odd(), [Odd(), target]):
        with pytest.raises(TypeError, match=message):
            SpeculativeDecoder(target, drafter, num_draft_tokens=3).generate([1])


def test_a_target_of_nan_is_an_error_and_a_draft_of_nan_is_none() -> None:
    target = TableBackend.random(6, seed=3)
    broken = TableBackend(np.where(np.arange(6) == 2, np.nan, target.table))
    with pytest.raises(BackendError, match="holds a NaN"):
        SpeculativeDecoder(broken, target).generate([1, 2], max_new_tokens=9)
    result = SpeculativeDecoder(target, broken).generate([1, 2], max_new_tokens=9)
    plain = SpeculativeDecoder(target).generate([1, 2], max_new_tokens=9)
    assert outcome(result) == outcome(plain)
    assert result.stats.reason == "the drafter proposed nothing"
    assert target.open_caches == broken.open_caches == 0


def test_ids_that_are_no_tokens_are_neither_proposed_nor_put_out() -> None:
    table = np.random.default_rng(0).standard_normal((6, 6, 8)).astype(np.float32)
    table[..., [2, 5, 6, 7]] += 10
    tokens = [b"a", b"b", None, b"d", b"e", None]
    target, draft = TableBackend(table, tokens=tokens), TableBackend(-table, tokens=tokens)
    for model in (None, draft, target):
        result = SpeculativeDecoder(target, model).generate([0], max_new_tokens=30)
        assert set(result.token_ids) <= {0, 1, 3, 4}


@pytest.mark.parametrize("ids", [[-1], [6], np.array([0, 99])])
def test_a_drafter_that_proposes_what_is_no_id_is_named(ids: Any) -> None:
    with pytest.raises(ValueError, match=r"Scripted proposed \[.*\], but ids are 0 to 5"):
        SpeculativeDecoder(TableBackend.random(6), Scripted(iter([ids]))).generate([1])


def test_a_drafter_may_give_any_kind_of_whole_numbers() -> None:
    target = TableBackend.random(6, seed=3)
    plain = SpeculativeDecoder(target).generate([1], max_new_tokens=3)
    guess: Any = np.array(plain.token_ids[:2])
    result = SpeculativeDecoder(target, Scripted(iter([guess]))).generate([1], max_new_tokens=3)
    assert outcome(result) == outcome(plain)
    assert all(type(token) is int for token in result.token_ids)
    assert result.stats.num_correct_drafts == 2


def test_every_sequence_is_closed_once_even_if_closing_fails() -> None:
    class Sticky(Drafter):
        def __init__(self) -> None:
            self.closed: list[int] = []

        def open(self, prompt_ids: Sequence[int]) -> int:
            return prompt_ids[0]

        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            return [Draft([]) for _ in requests]

        def close(self, state: int) -> None:
            self.closed.append(state)
            raise RuntimeError("stuck")

    target, drafter = TableBackend.random(6, seed=3), Sticky()
    with pytest.raises(RuntimeError, match="stuck"):
        SpeculativeDecoder(target, drafter, keep_caches=0).generate_batch(
            [[1], [2], [3]], max_new_tokens=5
        )
    assert sorted(drafter.closed) == [1, 2, 3]
    assert target.open_caches == 0


def test_progress_is_reported_while_the_prompt_is_read() -> None:
    target, seen = TableBackend.random(6), []
    decoder = SpeculativeDecoder(
        target, target, progress=lambda done, total: seen.append((done, total))
    )
    decoder.generate([1] * 1101, max_new_tokens=2)
    assert seen == [(512, 1100), (1024, 1100), (1100, 1100)]
