"""The suffix automaton counts what a scan counts, and the memory forgets."""

import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specdec import Drafter, DraftRequest, SamplingParams, SpeculativeDecoder, SuffixDrafter
from specdec.sampling import Sampler
from specdec.suffix import DEPTH, SuffixIndex
from specdec.testing import TableBackend

SAMPLER = Sampler(SamplingParams(), TableBackend.random(4).vocab, 1)
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=32)


def ask(
    drafter: Drafter, state: Any, ids: Sequence[int], num_tokens: int = 8, go_on: Any = None
) -> list[int]:
    (draft,) = drafter.propose([DraftRequest(state, ids, num_tokens, SAMPLER, go_on)])
    return list(draft.token_ids)


def places(ids: Sequence[int], part: Sequence[int]) -> list[int]:
    """Where a part of a text ends, by looking everywhere."""
    size = len(part)
    return [end for end in range(size, len(ids) + 1) if list(ids[end - size : end]) == list(part)]


def longest_match(ids: Sequence[int]) -> int:
    return next(n for n in range(len(ids) - 1, -1, -1) if n == 0 or len(places(ids, ids[-n:])) > 1)


@given(ids=TEXTS)
@example(ids=[0] * 32)
def test_every_substring_is_counted_as_a_scan_counts_it(ids: list[int]) -> None:
    """In a loop a short one may be left out, once it came often."""
    index = SuffixIndex()
    for end in range(1, len(ids) + 1):
        index.extend(ids[end - 1 : end])
        assert index.match.length == longest_match(ids[:end])
    for begin in range(len(ids)):
        for end in range(begin + 1, len(ids) + 1):
            part = ids[begin:end]
            count = len(places(ids, part))
            assert min(count, DEPTH) <= index.num_seen(part) <= count
    assert index.num_seen([9]) == index.num_seen([*ids, 0]) == 0


@given(ids=TEXTS)
def test_what_followed_most_often_is_proposed_first_the_latest_of_equals(ids: list[int]) -> None:
    drafter = SuffixDrafter(min_chance=1e-9)
    first, size = ask(drafter, drafter.open([]), ids, 1), longest_match(ids)
    if size == 0:
        assert first == []
        return
    ends = [end for end in places(ids, ids[-size:]) if end < len(ids)]
    followed = Counter(ids[end] for end in ends)
    latest = {ids[end]: end for end in ends}
    assert first == [max(followed, key=lambda token: (followed[token], latest[token]))]


@given(ids=TEXTS, num_tokens=st.integers(1, 9))
def test_a_draft_follows_the_text(ids: list[int], num_tokens: int) -> None:
    """Every id of it has followed the one before; a loop goes on beyond the end of the text."""
    drafter = SuffixDrafter(min_chance=1e-9)
    draft = ask(drafter, drafter.open([]), ids, num_tokens)
    whole = [ids[-1], *draft]
    assert len(draft) <= num_tokens
    assert all(places(ids, pair) for pair in pairwise(whole))
    looped = ids * 3
    assert ask(drafter, drafter.open([]), looped, num_tokens) == (looped * 9)[:num_tokens]


@given(ids=TEXTS, cuts=st.lists(st.integers(1, 32), max_size=5))
def test_growing_in_pieces_is_the_same(ids: list[int], cuts: list[int]) -> None:
    drafter = SuffixDrafter()
    state = drafter.open([])
    for cut in sorted(cut for cut in cuts if cut < len(ids)):
        ask(drafter, state, ids[:cut])
        drafter.commit(state, ids[:cut])
        assert drafter.lag(state, ids) == len(ids) - cut
    assert ask(drafter, state, ids) == ask(drafter, drafter.open([]), ids)


def test_the_length_follows_the_match_and_the_frequencies() -> None:
    drafter = SuffixDrafter(min_chance=0.3)
    long, short = list(range(20, 40)), [1, 2]
    sure = ask(drafter, drafter.open([]), [*long, 50, 51, 52, 53, *long])
    unsure = ask(drafter, drafter.open([]), [*short, 50, 51, 52, 53, 7, 2])
    assert sure[:4] == [50, 51, 52, 53]
    assert len(unsure) < 4 <= len(sure)
    heard: list[float] = []
    text = [1, 2, 5, 1, 2, 5, 1, 2, 6, 1, 2]

    def hear(confidence: float) -> bool:
        heard.append(confidence)
        return False

    assert ask(drafter, drafter.open([]), text, 1, hear) == [5]
    assert 0.4 < heard[0] < 2 / 3


def test_a_drafter_that_is_told_to_stop_stops() -> None:
    drafter = SuffixDrafter()
    heard: list[float] = []

    def go_on(chance: float) -> bool:
        heard.append(chance)
        return len(heard) < 3

    text = [*range(20), *range(20)]
    assert ask(drafter, drafter.open([]), text, 8, go_on) == [0, 1, 2]
    assert all(0 < chance < 1 for chance in heard)


def finish(drafter: SuffixDrafter, prompt: list[int], output: list[int]) -> None:
    """A whole text, as a decoder tells it."""
    state = drafter.open(prompt)
    ask(drafter, state, prompt)
    for end in range(1, len(output) + 1):
        drafter.commit(state, [*prompt, *output[:end]])
    drafter.close(state)


def asked_anew(drafter: SuffixDrafter, prompt: list[int]) -> list[int]:
    return ask(drafter, drafter.open(prompt), prompt)


def test_nothing_is_kept_of_a_text_unless_it_was_asked_for() -> None:
    drafter = SuffixDrafter()
    finish(drafter, [1, 2, 3], [4, 5, 6, 7, 8])
    assert asked_anew(drafter, [4, 5, 6]) == []


def test_outputs_are_remembered_and_prompts_are_not() -> None:
    drafter = SuffixDrafter(memory_tokens=100)
    finish(drafter, [1, 2, 3], [4, 5, 6, 7, 8])
    assert asked_anew(drafter, [4, 5, 6]) == [7, 8]
    assert asked_anew(drafter, [1, 2]) == []
    assert asked_anew(drafter, [7, 8]) == []  # an output ended there
    drafter.clear()
    assert asked_anew(drafter, [4, 5, 6]) == []


def test_the_oldest_is_forgotten_first() -> None:
    drafter = SuffixDrafter(memory_tokens=30)
    texts = [list(range(10 * n, 10 * n + 9)) for n in range(1, 6)]
    for number, text in enumerate(texts):
        finish(drafter, [1], text)
        known = [asked_anew(drafter, other[:3]) == other[3:] for other in texts]
        assert known == sorted(known[: number + 1]) + [False] * (4 - number)
        assert known[number]
    assert not asked_anew(drafter, texts[0][:3])


@given(
    outputs=st.lists(st.lists(st.integers(0, 9), max_size=30), max_size=9), room=st.integers(1, 40)
)
def test_the_memory_is_bounded_and_holds_the_latest(outputs: list[list[int]], room: int) -> None:
    drafter = SuffixDrafter(memory_tokens=room)
    everything: list[int] = []
    for output in outputs:
        finish(drafter, [0], output)
        everything += [*output, -1] if output else []
        kept = drafter.remembered
        assert len(kept) <= room
        assert list(kept) == everything[len(everything) - len(kept) :]
        assert len(kept) >= min(len(everything), room // 2)


def test_a_text_that_is_open_while_the_memory_changes_is_matched_right() -> None:
    drafter = SuffixDrafter(memory_tokens=12)
    rng = np.random.default_rng(0)
    open_text = [int(i) for i in rng.integers(0, 3, 5)]
    state = drafter.open(open_text)
    for _ in range(40):
        ask(drafter, state, open_text)
        finish(drafter, [0], [int(i) for i in rng.integers(0, 3, rng.integers(1, 6))])
        open_text.append(int(rng.integers(0, 3)))
        assert ask(drafter, state, open_text) == ask(drafter, drafter.open([]), open_text)


def test_a_match_is_of_what_is_remembered_by_now() -> None:
    drafter = SuffixDrafter(memory_tokens=100)
    finish(drafter, [0], [1, 2, 3, 5])
    state = drafter.open([2, 3])
    assert ask(drafter, state, [2, 3]) == [5]
    finish(drafter, [0], [2, 3, 6, 2, 3, 6])
    assert ask(drafter, state, [2, 3], 1) == [6]


def assert_whole(drafter: SuffixDrafter) -> None:
    """What it remembers proposes what the same outputs do in a drafter that heard them in turn."""
    remembered = list(drafter.remembered)
    other = SuffixDrafter(memory_tokens=len(remembered))
    outputs = " ".join(map(str, remembered)).split(" -1")
    assert outputs.pop() == ""
    for output in outputs:
        finish(other, [], [int(i) for i in output.split()])
    assert list(other.remembered) == remembered
    for begin in range(0, len(remembered) - 3, 2):
        text = [i for i in remembered[begin : begin + 3] if i >= 0]
        assert asked_anew(drafter, text) == asked_anew(other, text)


def test_an_output_that_is_closed_while_another_is_remembered_comes_after_it() -> None:
    """As the garbage collector does it at any moment."""
    drafter = SuffixDrafter(memory_tokens=100)
    finish(drafter, [], [1, 2, 3, 1, 2, 4])
    one, other = drafter.open([]), drafter.open([])

    class Ending(int):
        def __eq__(self, value: object) -> bool:
            drafter.close(other)
            other.output = []
            return int(self) == value

        __hash__ = int.__hash__

    drafter.commit(one, [1, 2, Ending(4), 1, 3, 2])
    drafter.commit(other, [2, 4, 1, 2, 4, 3])
    drafter.close(one)
    assert drafter.remembered[7:] == (1, 2, 4, 1, 3, 2, -1, 2, 4, 1, 2, 4, 3, -1)
    assert_whole(drafter)


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_threads")
def test_decoders_in_threads_share_a_memory() -> None:
    drafter = SuffixDrafter(memory_tokens=100_000)

    def decode(number: int) -> None:
        target = TableBackend.random(5, seed=3)
        decoder, plain = SpeculativeDecoder(target, drafter), SpeculativeDecoder(target)
        for seed in range(number, 200 + number, 20):
            options: dict[str, Any] = {
                "max_new_tokens": 40,
                "sampling": SamplingParams(temperature=1.0, seed=seed),
            }
            found = decoder.generate([1, seed % 5], **options)
            assert found.token_ids == plain.generate([1, seed % 5], **options).token_ids

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(decode, range(4)))
    assert drafter.remembered.count(-1) == 40
    assert_whole(drafter)


@pytest.mark.parametrize("options", [{"memory_tokens": -1}, {"min_chance": 0}, {"min_chance": 2}])
def test_bad_values_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        SuffixDrafter(**options)


def test_memory_is_linear_and_a_loop_costs_no_more() -> None:
    rng = np.random.default_rng(0)
    loop, left = [7] * 4_000, ([7] * 1_999 + [8]) * 2
    for text in (
        loop,
        left,
        rng.integers(0, 2, 4_000).tolist(),
        rng.zipf(1.3, 4_000).clip(max=50_000).tolist(),
    ):
        sizes = []
        for count in (2_000, 4_000):
            tracemalloc.start()
            index = SuffixIndex()
            index.extend(text[:count])
            sizes.append(tracemalloc.get_traced_memory()[0] / count)
            tracemalloc.stop()
        assert max(sizes) < 400
        assert index.match.length > 0


def test_models_of_other_vocabularies_share_a_memory() -> None:
    drafter = SuffixDrafter(memory_tokens=1000)
    for size in (26, 4, 26, 9):
        target = TableBackend.random(size, seed=1)
        decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=4)
        for prompt in ([1, 2, 3], [3, 2], [0, 1, 2, 3, 0, 1]):
            result = decoder.generate(prompt, max_new_tokens=100)
            plain = SpeculativeDecoder(target).generate(prompt, max_new_tokens=100)
            assert result.token_ids == plain.token_ids
            assert result.stats.num_proposed_drafts > 0


def test_a_draft_ends_before_an_id_that_the_target_lacks() -> None:
    drafter = SuffixDrafter(memory_tokens=100)
    finish(drafter, [], [1, 2, 3, 9, 4])
    state = drafter.open([])
    request = DraftRequest(state, [1, 2], 8, SAMPLER)
    for num_ids, draft in ((10, [3, 9, 4]), (9, [3]), (3, [])):
        assert drafter.propose([request._replace(num_ids=num_ids)])[0].token_ids == draft


def test_a_repeated_prompt_is_remembered_by_the_decoder() -> None:
    target = TableBackend.random(26, seed=4)
    decoder = SpeculativeDecoder(target, SuffixDrafter(memory_tokens=500), num_draft_tokens=8)
    first, again = (decoder.generate([1, 2], max_new_tokens=60) for _ in range(2))
    assert again.token_ids == first.token_ids
    assert again.stats.target_forward_ct < first.stats.target_forward_ct
    decoder.clear()
    assert decoder.generate([1, 2], max_new_tokens=60).stats.target_forward_ct == (
        first.stats.target_forward_ct
    )
