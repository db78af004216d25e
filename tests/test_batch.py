"""Many sequences at once: each as if it were alone, whatever becomes of its neighbours."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec import (
    BatchItem,
    GenerationResult,
    Logits,
    RuntimeFailure,
    SamplingParams,
    Span,
    SpeculativeDecoder,
)
from specdec.testing import TableBackend, VirtualClock

SIZE = 7


def outcome(result: GenerationResult) -> tuple[object, ...]:
    """All but the times."""
    counters = {
        name: value
        for name, value in result.stats.as_dict().items()
        if not name.endswith("seconds") and name != "tokens_per_second"
    }
    return (*whole_text(result), result.seed, str(result.error), counters)


def whole_text(result: GenerationResult) -> tuple[object, ...]:
    return result.token_ids, result.text, result.finish_reason, result.logprobs


class Refusing:
    """A processor that raises where the text, prompt included, holds a certain id."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, ids: Sequence[int], row: Logits) -> Logits:
        if self.token in ids:
            raise ValueError(f"no text with {self.token}")
        return row


SAMPLING = st.none() | st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.integers(0, 4),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    seed=st.integers(0, 99),
    processors=st.just(()) | st.integers(0, SIZE - 1).map(lambda token: (Refusing(token),)),
)
PROMPTS = st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=16)
ITEMS = st.builds(
    BatchItem,
    PROMPTS,
    sampling=SAMPLING,
    max_new_tokens=st.integers(0, 12),
    stop=st.lists(st.text("abcdefg", min_size=1, max_size=2), max_size=1),
    stop_token_ids=st.sets(st.integers(0, SIZE - 1), max_size=1),
    logprobs=st.none() | st.integers(0, 2),
)


def alone(decoder: SpeculativeDecoder, item: BatchItem) -> GenerationResult:
    """What a call of its own gives, its error taken for a result."""
    (result,) = decoder.generate_batch([item])
    return result


@pytest.fixture(params=[(512, 128, 16), (3, 2, 2)], ids=["whole", "in chunks"])
def small_chunks(request: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(
            ("reading.CHUNK", "reading.BESIDE", "proposer.READ_TOKENS"),
            request.param,
            strict=True,
        ):
            patch.setattr(f"specdec.{name}", value)
        yield


@pytest.mark.usefixtures("small_chunks")
class TestEachIsAsIfAlone:
    @given(
        items=st.lists(ITEMS, min_size=1, max_size=10),
        max_batch=st.integers(1, 8),
        noise=st.sampled_from([0.0, 0.3, 2.0]),
        num_draft_tokens=st.integers(0, 5),
        draft_context=st.sampled_from([8, 40]),
    )
    def test_with_its_own_options(
        self,
        items: list[BatchItem],
        max_batch: int,
        noise: float,
        num_draft_tokens: int,
        draft_context: int,
    ) -> None:
        target = TableBackend.random(SIZE, seed=3, eos_ids=[5], max_context=24)
        draft = target.sibling(noise, max_context=draft_context)
        decoder = SpeculativeDecoder(
            target, draft, num_draft_tokens=num_draft_tokens, keep_caches=0
        )
        expected = [outcome(alone(decoder, item)) for item in items]
        together = decoder.generate_batch(items, max_batch=max_batch)
        assert [outcome(result) for result in together] == expected
        completed = dict(decoder.as_completed(iter(items), max_batch=max_batch))
        assert [outcome(completed.pop(number)) for number in range(len(items))] == expected
        assert not completed
        assert target.open_caches == draft.open_caches == 0

    @given(
        items=st.lists(ITEMS, min_size=1, max_size=10),
        max_batch=st.integers(1, 8),
        keep_caches=st.integers(0, 2),
        seed=st.integers(0, 999),
    )
    def test_whatever_the_clock_says(
        self, items: list[BatchItem], max_batch: int, keep_caches: int, seed: int
    ) -> None:
        target = TableBackend.random(SIZE, seed=3, eos_ids=[5], max_context=24)
        ticks = np.random.default_rng(seed).lognormal(0.0, 2.0, 100_000).cumsum()
        plain = SpeculativeDecoder(target, keep_caches=0)
        decoder = SpeculativeDecoder(
            target,
            ["suffix", target.sibling(0.3)],
            keep_caches=keep_caches,
            clock=iter(ticks.tolist()).__next__,
        )
        together = decoder.generate_batch(items, max_batch=max_batch)
        assert [whole_text(r) for r in together] == [whole_text(alone(plain, i)) for i in items]


class Watched(TableBackend):
    """Keeps what was fed, forward by forward: tokens and rows of every span."""

    log: list[list[tuple[int, int]]]

    def forward(self, batch: Sequence[Span]) -> Any:
        self.log = [*getattr(self, "log", ()), [(len(s.tokens), s.num_logits) for s in batch]]
        return super().forward(batch)


def test_a_long_prompt_is_read_between_the_rounds_of_the_others() -> None:
    base = TableBackend.random(9, seed=5)
    target, draft = Watched(base.table), Watched(base.sibling(0.3).table)
    target.clock = draft.clock = clock = VirtualClock()
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=3, clock=clock)
    results = list(
        decoder.as_completed(
            [
                BatchItem([1, 2], max_new_tokens=80),
                BatchItem([2, 3], max_new_tokens=1),
                BatchItem([1] * 1100, max_new_tokens=2),
            ],
            max_batch=2,
        )
    )
    assert [number for number, _ in results] == [1, 2, 0]
    for log in (target.log, draft.log):
        chunks = [at for at, spans in enumerate(log) if sum(tokens for tokens, _ in spans) > 16]
        assert [log[at] for at in chunks] == 8 * [[(128, 0)]] + [[(1099 - 8 * 128, 0)]]
        # After each of them the first sequence has its round.
        assert all(log[at + 1][0][1] > 0 for at in chunks)


def test_several_short_prompts_are_read_in_one_forward() -> None:
    target = Watched(TableBackend.random(9, seed=5).table)
    SpeculativeDecoder(target).generate_batch([[1] * 100] * 8, max_new_tokens=1)
    assert target.log[0] == [(99, 0)] * 5 + [(17, 0)]
    assert target.log[1] == [(1, 1)] * 5
    assert target.log[2] == [(82, 0), (99, 0), (99, 0)]


@pytest.mark.parametrize(
    "kind",
    [{}, {"verification": "rejection"}, {"verification": "block"}, {"strict": True}],
    ids=str,
)
def test_one_that_raises_ends_alone(kind: dict[str, Any]) -> None:
    target = TableBackend.random(6, seed=3)
    decoder = SpeculativeDecoder(target, target.sibling(0.3), num_draft_tokens=3, **kind)
    params = SamplingParams(processors=(Refusing(4),))
    items = [BatchItem([n % 4], max_new_tokens=20) for n in range(8)]
    expected = decoder.generate_batch(items)
    items[3] = BatchItem([3], max_new_tokens=20, sampling=params)
    results = decoder.generate_batch(items)
    assert [r.finish_reason for r in results] == ["length"] * 3 + ["error"] + ["length"] * 4
    assert str(results[3].error) == "no text with 4"
    before = expected[3].token_ids[: expected[3].token_ids.index(4) + 1]
    assert results[3].token_ids == before
    for number in {*range(8)} - {3}:
        assert whole_text(results[number]) == whole_text(expected[number])
    with pytest.raises(ValueError, match="no text with 4"):
        decoder.generate([3], max_new_tokens=20, sampling=params)
    assert whole_text(decoder.generate([3], max_new_tokens=20)) == whole_text(expected[3])


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_one_that_raises_while_drafts_are_drawn_ends_alone(verification: Any) -> None:
    target = TableBackend.random(6, seed=3)
    decoder = SpeculativeDecoder(
        target, target.sibling(0.3), num_draft_tokens=3, verification=verification
    )
    items = [
        BatchItem([n % 4], max_new_tokens=20, sampling=SamplingParams(temperature=1, seed=n))
        for n in range(8)
    ]
    expected = decoder.generate_batch(items)
    items[2].options["sampling"] = SamplingParams(
        temperature=1, seed=2, processors=(Refusing(expected[2].token_ids[5]),)
    )
    results = decoder.generate_batch(items)
    assert [n for n in range(8) if results[n].finish_reason == "error"] == [2]
    for number in {*range(8)} - {2}:
        assert whole_text(results[number]) == whole_text(expected[number])


@given(seed=st.integers(0, 99), token=st.integers(0, 5), num_draft_tokens=st.integers(1, 5))
def test_a_processor_may_raise_behind_a_wrong_draft(
    seed: int, token: int, num_draft_tokens: int
) -> None:
    target = TableBackend.random(6, seed=seed)
    params = SamplingParams(processors=(Refusing(token),))
    item = BatchItem([0], max_new_tokens=9, sampling=params)
    expected = alone(SpeculativeDecoder(target), item)
    for draft in (target.sibling(3.0), "lookup"):
        decoder = SpeculativeDecoder(target, draft, num_draft_tokens=num_draft_tokens)
        assert whole_text(alone(decoder, item)) == whole_text(expected)


def test_bad_prompts_are_results_and_the_others_go_on() -> None:
    target = TableBackend.random(6, seed=3, max_context=4)
    decoder = SpeculativeDecoder(target)
    prompts: list[Any] = [[1], [], [9], [1] * 5, 3.5, BatchItem([2], stop=""), [2]]
    results = dict(decoder.as_completed(prompts, max_new_tokens=2))
    good = decoder.generate_batch([[1], [2]], max_new_tokens=2)
    assert [whole_text(results[n]) for n in (0, 6)] == [whole_text(r) for r in good]
    for number, words in enumerate(
        ["empty", "id 9", "5 tokens", "float", "at least one character"], start=1
    ):
        assert results[number].finish_reason == "error"
        assert words in str(results[number].error)
        assert results[number].token_ids == []


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"max_batch": 0}, ValueError, "max_batch must be at least 1"),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens"),
        ({"temperature": 1}, TypeError, "there is no option 'temperature'"),
    ],
)
def test_bad_arguments_raise_at_once(arguments: Any, error: type[Exception], words: str) -> None:
    target = TableBackend.random(6)
    with pytest.raises(error, match=words):
        SpeculativeDecoder(target).as_completed([[1]], **arguments)
    with pytest.raises(TypeError, match="one text"):
        SpeculativeDecoder(target).as_completed("abc")
    assert target.call_ct == 0


def test_prompts_are_taken_as_there_is_room() -> None:
    target = TableBackend.random(6, seed=3)
    taken = 0

    def prompts() -> Iterator[list[int]]:
        nonlocal taken
        while True:
            taken += 1
            yield [taken % 6]

    results = SpeculativeDecoder(target, keep_caches=0).as_completed(
        prompts(), max_batch=3, max_new_tokens=5
    )
    assert taken == 0
    for number in range(1, 12):
        next(results)
        assert taken <= number + 5
    results.close()
    assert target.open_caches == 0


def test_bad_prompts_come_out_one_by_one() -> None:
    decoder = SpeculativeDecoder(TableBackend.random(6))
    endless = decoder.as_completed([] for _ in count())
    assert [next(endless)[0] for _ in range(20)] == list(range(20))


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_whatever_line_is_interrupted_no_cache_stays_open(num_draft_tokens: int) -> None:
    """By a clock that raises: it is asked between all steps."""
    target = TableBackend.random(6, seed=3)
    for stop in range(60):
        countdown = iter(range(stop))

        def clock(ticks: Iterator[int] = countdown) -> float:
            try:
                return float(next(ticks))
            except StopIteration:
                raise KeyboardInterrupt from None

        decoder = SpeculativeDecoder(
            target, target.sibling(0.3), num_draft_tokens=num_draft_tokens, clock=clock
        )
        with suppress(KeyboardInterrupt):
            decoder.generate_batch([[1, 2], [3], [4, 5, 1]], max_new_tokens=6, max_batch=2)
        decoder.clear()
        assert target.open_caches == 0


def test_times_and_progress_of_prompts_that_are_read_together() -> None:
    clock = VirtualClock()
    target = TableBackend.random(6, seed=3)
    target.clock = clock
    told: list[tuple[int, int]] = []
    decoder = SpeculativeDecoder(target, clock=clock, progress=lambda *at: told.append(at))
    lengths = (101, 301, 701)
    results = decoder.generate_batch([[1] * length for length in lengths], max_new_tokens=1)
    assert [r.stats.prefill_seconds for r in results] == pytest.approx([n - 1 for n in lengths])
    assert told == [(100, 100), (300, 300), (112, 700), (624, 700), (700, 700)]
    told.clear()
    decoder.generate([1] * 800, max_new_tokens=1)
    assert told == [(98, 98)]  # behind what is kept of the last


def test_lookups_dont_keep_a_newcomer_waiting() -> None:
    target = Watched(TableBackend.random(9, seed=5).table)
    for draft in (None, "suffix"):
        target.log = []
        SpeculativeDecoder(target, draft, num_draft_tokens=3, clock=ticking()).generate_batch(
            [BatchItem([1, 2], max_new_tokens=200), BatchItem([1] * 2000, max_new_tokens=1)],
            max_batch=2,
        )
        joined = next(at for at, spans in enumerate(target.log) if len(spans) == 2)
        assert joined <= 2 * (1999 // 128 + 1) + 3


def ticking() -> Callable[[], float]:
    """A clock by which every step takes about the same."""
    return map(float, count()).__next__


def test_a_fault_of_the_runtime_ends_all() -> None:
    target = TableBackend.random(6, seed=3)
    decoder = SpeculativeDecoder(target, keep_caches=0)
    expected = [whole_text(r) for r in decoder.generate_batch([[1], [2], [3]], max_new_tokens=9)]
    target.call_ct = 0
    results = decoder.as_completed([[1], [2], [3]], max_new_tokens=9, max_batch=2)
    target.fail_at = 8
    with pytest.raises(RuntimeFailure):
        list(results)
    assert target.open_caches == 0
    target.fail_at = None
    again = decoder.generate_batch([[1], [2], [3]], max_new_tokens=9)
    assert [whole_text(result) for result in again] == expected
