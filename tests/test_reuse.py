"""Caches that outlive their text: only what is new is fed, and nothing else changes."""

import gc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Event
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from specdec import Draft, Drafter, DraftRequest, ModelDrafter, SamplingParams, SpeculativeDecoder
from specdec.backend import Cache, Logits, Span
from specdec.errors import CropError, RuntimeFailure
from specdec.reuse import KeptCaches, common_prefix
from specdec.stream import TokenStream
from specdec.testing import TableBackend

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@given(
    prompts=st.lists(TEXTS, min_size=1, max_size=8),
    keep_caches=st.integers(0, 3),
    num_draft_tokens=st.sampled_from([0, 1, 4, "auto"]),
    seed=st.none() | st.integers(0, 9),
    together=st.booleans(),
)
def test_nothing_that_was_kept_changes_a_token(
    prompts: list[list[int]],
    keep_caches: int,
    num_draft_tokens: int,
    seed: int | None,
    together: bool,
) -> None:
    target = TableBackend.random(3, seed=2, max_context=24)
    draft = target.sibling(0.3)
    sampling = None if seed is None else SamplingParams(temperature=1, seed=seed)
    plain = SpeculativeDecoder(target, keep_caches=0)
    expected = [plain.generate(p, max_new_tokens=7, sampling=sampling).token_ids for p in prompts]
    decoder = SpeculativeDecoder(
        target, draft, num_draft_tokens=num_draft_tokens, keep_caches=keep_caches
    )
    if together:
        results = decoder.generate_batch(prompts, max_batch=3, max_new_tokens=7, sampling=sampling)
    else:
        results = [decoder.generate(p, max_new_tokens=7, sampling=sampling) for p in prompts]
    assert [result.token_ids for result in results] == expected
    assert target.open_caches <= keep_caches
    assert draft.open_caches <= keep_caches
    decoder.clear()
    assert target.open_caches == draft.open_caches == 0


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_a_turn_of_a_chat_costs_what_is_new_in_it(num_draft_tokens: int) -> None:
    target = TableBackend.random(7, seed=4, max_context=2048)
    draft = target.sibling(0.3)
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=num_draft_tokens)
    text = [1, 2, 3] * 100
    for turn in range(5):
        before = target.fed_ct, draft.fed_ct
        result = decoder.generate(text, max_new_tokens=20)
        stats = result.stats
        fed, drafted = target.fed_ct - before[0], draft.fed_ct - before[1]
        new = len(text) if turn == 0 else 9
        assert stats.cached_tokens == (0 if turn == 0 else len(text) - 10)
        assert fed == new - 1 + stats.target_forward_ct + stats.num_proposed_drafts + (turn > 0)
        if num_draft_tokens:
            assert drafted <= new + stats.num_proposed_drafts + stats.verify_ct + 2
        text = [*text, *result.token_ids, *[turn] * 9]


def test_an_edited_prompt_is_read_from_the_edit_on() -> None:
    target = TableBackend.random(7, seed=4, max_context=512)
    decoder = SpeculativeDecoder(target)
    decoder.generate([1] * 100, max_new_tokens=3)
    assert decoder.generate([1] * 60 + [2] * 40, max_new_tokens=3).stats.cached_tokens == 60


def test_conversations_that_begin_alike_keep_their_own() -> None:
    target = TableBackend.random(9, seed=4, max_context=512)
    decoder = SpeculativeDecoder(target, keep_caches=2)
    texts = [[0] * 10 + [1] * 50, [0] * 10 + [2] * 50]
    for text in texts:
        assert decoder.generate(text, max_new_tokens=1).stats.cached_tokens == 0
    for text in texts:
        assert decoder.generate([*text, 3], max_new_tokens=1).stats.cached_tokens == 60
    third = decoder.generate([0] * 10 + [4] * 50, max_new_tokens=1)  # takes the oldest
    assert third.stats.cached_tokens == 10
    assert target.open_caches == 2


def test_what_is_alike_is_used_where_that_costs_the_other_little() -> None:
    target = TableBackend.random(9, seed=4, max_context=512)
    decoder = SpeculativeDecoder(target, keep_caches=3)
    decoder.generate_batch([[0] * 10 + [1] * 90, [0] * 10 + [2] * 4], max_new_tokens=1)
    third = decoder.generate([0] * 10 + [3] * 50, max_new_tokens=1)
    assert third.stats.cached_tokens == 10
    again = decoder.generate([0] * 10 + [1] * 91, max_new_tokens=1)
    assert again.stats.cached_tokens == 100


@given(
    st.integers(0, 1100), TEXTS, TEXTS, st.sampled_from([list, tuple]), st.sampled_from([0, 512])
)
def test_the_common_beginning_of_two_texts(
    length: int, one: list[int], other: list[int], kind: Any, more: int
) -> None:
    texts = [0] * length + one + [1] * more, [0] * length + other
    unequal = (at for at, (a, b) in enumerate(zip(*texts, strict=False)) if a != b)
    expected = next(unequal, min(map(len, texts)))
    assert common_prefix(*texts) == common_prefix(kind(texts[0]), texts[1]) == expected
    assert common_prefix(texts[1], kind(texts[0])) == expected


def test_a_stream_that_is_closed_early_leaves_its_cache_to_the_next() -> None:
    target = TableBackend.random(7, seed=4)
    decoder = SpeculativeDecoder(target, target.sibling(0.2), num_draft_tokens=3)
    stream = decoder.stream([1, 2, 3], max_new_tokens=30)
    said = [next(stream).token_id for _ in range(6)]
    stream.close()
    text = [1, 2, 3, *said]
    assert decoder.generate(text, max_new_tokens=5).stats.cached_tokens == len(text) - 1


def test_a_decoder_that_is_dropped_closes_them() -> None:
    target = TableBackend.random(7)
    decoder = SpeculativeDecoder(target)
    decoder.generate([1, 2, 3], max_new_tokens=5)
    assert target.open_caches == 1
    del decoder
    gc.collect()
    assert target.open_caches == 0


def test_after_a_fault_no_cache_of_that_call_is_kept() -> None:
    target = TableBackend.random(7)
    decoder = SpeculativeDecoder(target)
    target.fault, target.fail_at = KeyboardInterrupt(), 3
    with pytest.raises(KeyboardInterrupt):
        decoder.generate([1, 2, 3], max_new_tokens=9)
    assert target.open_caches == 0


def test_streams_that_the_garbage_collector_ends_at_any_moment_change_nothing() -> None:
    target = TableBackend.random(8, seed=7, max_context=64)
    text, other = [1, 2, 3, 4, 1, 2], [5, 6, 7, 0, 5, 6]
    expected = SpeculativeDecoder(target).generate([*text, 2], max_new_tokens=8).token_ids
    before = gc.get_threshold()
    try:
        for threshold in range(1, 400):
            decoder = SpeculativeDecoder(target)
            decoder.generate(text, max_new_tokens=1)
            stream = decoder.stream(other, max_new_tokens=30)
            next(stream)
            cycle: list[object] = [stream]
            cycle.append(cycle)
            del stream, cycle
            gc.set_threshold(threshold)
            found = decoder.generate([*text, 2], max_new_tokens=8).token_ids
            gc.set_threshold(*before)
            assert found == expected
    finally:
        gc.set_threshold(*before)
    gc.collect()
    del decoder
    assert target.open_caches == 0


def test_a_stream_that_ends_while_another_thread_decodes_waits_for_nobody() -> None:
    target = TableBackend.random(7, seed=4)
    decoder = SpeculativeDecoder(target)
    stream = decoder.stream([1, 2, 3], max_new_tokens=30)
    text = [1, 2, 3, next(stream).token_id]
    holding, done = Event(), Event()

    def busy(*_: object) -> list[Logits]:
        holding.set()
        assert done.wait(20)
        raise RuntimeFailure("over")

    with ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "forward", busy)
        other = pool.submit(decoder.generate, [4, 5], max_new_tokens=3)
        assert holding.wait(20)
        stream.close()  # on the way of the finaliser
        done.set()
        with pytest.raises(RuntimeFailure, match="over"):
            other.result(20)
    assert decoder.generate(text, max_new_tokens=5).stats.cached_tokens == 3


class Ending(Drafter):
    """Ends other streams in the middle of a round, and fails where their texts begin with 1."""

    ends: Sequence[TokenStream] = ()

    @override
    def open(self, prompt_ids: Sequence[int]) -> int:
        return prompt_ids[0]

    @override
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        for stream in self.ends:
            stream.close()
        return [Draft(()) for _ in requests]

    @override
    def close(self, state: int) -> None:
        if state == 1:
            raise RuntimeFailure("the draft's memory is gone")


def test_a_stream_that_cant_be_closed_ends_no_other_call() -> None:
    target, drafter = TableBackend.random(7, seed=4), Ending()
    decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=2, keep_caches=9)
    streams = [decoder.stream([first, 2, 3], max_new_tokens=30) for first in (1, 1, 2)]
    for stream in streams:
        next(stream)
    expected = SpeculativeDecoder(target).generate([4, 5], max_new_tokens=9).token_ids
    drafter.ends = streams
    with pytest.warns(RuntimeWarning, match="could not be kept: the draft's memory is gone"):
        assert decoder.generate([4, 5], max_new_tokens=9).token_ids == expected
    assert decoder.generate([2, 2, 3], max_new_tokens=9).stats.cached_tokens == 2
    decoder.clear()
    assert target.open_caches == 0


class HalfDone(TableBackend):
    """Feeds, and fails then."""

    failing = False

    @override
    def forward(self, batch: Sequence[Span]) -> list[Logits]:
        rows = super().forward(batch)
        if self.failing:
            raise RuntimeFailure("half done")
        return rows


def test_a_forward_that_failed_half_way_is_not_tried_again() -> None:
    target = HalfDone(TableBackend.random(7, seed=1).table)
    decoder = SpeculativeDecoder(target, keep_caches=2)
    decoder.generate([1, 2, 3], max_new_tokens=4)
    target.failing = True
    forwards = target.forward_ct
    with pytest.raises(RuntimeFailure, match="half done"):
        decoder.generate([4, 5, 6], max_new_tokens=4)
    assert target.forward_ct == forwards + 1


class Twice(TableBackend):
    """Feeds one token more than it was given."""

    @override
    def forward(self, batch: Sequence[Span]) -> list[Logits]:
        return super().forward([s._replace(tokens=[*s.tokens, s.tokens[-1]]) for s in batch])


def test_a_forward_that_feeds_something_else_ends_the_generation() -> None:
    target = Twice(TableBackend.random(7, seed=1).table)
    with pytest.raises(RuntimeFailure, match="was fed 2 tokens behind 0 and holds 3"):
        SpeculativeDecoder(target).generate([1, 2, 3], max_new_tokens=4)


class FewSlots(TableBackend):
    """Has room for three open caches."""

    @override
    def new_cache(self) -> Any:
        if self.open_caches == 3:
            raise RuntimeFailure("three caches are open")
        return super().new_cache()


def test_kept_caches_give_way_where_slots_are_few() -> None:
    target = FewSlots(TableBackend.random(7, seed=1).table)
    decoder = SpeculativeDecoder(target, keep_caches=9)
    for token in range(7):
        decoder.generate([token] * 9, max_new_tokens=2)
    with pytest.raises(RuntimeFailure, match="three caches"):
        decoder.generate_batch([[1], [2], [3], [4]], max_new_tokens=4)


def test_the_latest_of_a_batch_is_kept() -> None:
    target = TableBackend.random(7, seed=4)
    decoder = SpeculativeDecoder(target)
    prompts = [[1, 2, 3, 4], [5, 6, 0, 1]]
    decoder.generate_batch(prompts, max_new_tokens=2)
    assert decoder.generate(prompts[1], max_new_tokens=1).stats.cached_tokens == 3


@pytest.mark.parametrize("fault", [CropError("no"), RuntimeFailure("worse"), KeyboardInterrupt()])
def test_a_cache_whose_crop_fails_is_closed(fault: BaseException) -> None:
    target = TableBackend.random(7, seed=1)
    kept = KeptCaches(target, 2)
    cache = target.new_cache()
    target.forward([Span(cache, [1, 2, 3, 4], 0)])
    kept.give(cache, [1, 2, 3, 4, 5])
    target.fault, target.fail_at = fault, target.call_ct
    with nullcontext() if isinstance(fault, CropError) else pytest.raises(type(fault)):
        kept.take([1, 2, 3, 5]).close()
    assert target.open_caches == 0


class Crowded(TableBackend):
    """Has no memory for more than one open cache."""

    @override
    def forward(self, batch: Sequence[Span]) -> list[Logits]:
        if self.open_caches > 1:
            raise RuntimeFailure("out of memory")
        return super().forward(batch)


def test_kept_caches_give_way_where_memory_is_short() -> None:
    target = Crowded(TableBackend.random(7, seed=1).table)
    decoder = SpeculativeDecoder(target)
    for token in range(4):
        assert decoder.generate([token] * 9, max_new_tokens=4).stats.cached_tokens == 0
    with pytest.raises(RuntimeFailure, match="out of memory"):
        decoder.generate_batch([[1], [2]], max_new_tokens=4)


class Stubborn(TableBackend):
    """Cuts nothing."""

    @override
    def crop(self, cache: Cache, length: int) -> None:
        if length < len(cache):
            raise CropError("no")


def test_what_cant_be_cut_back_is_read_anew() -> None:
    target = Stubborn(TableBackend.random(7, seed=1).table)
    kept = KeptCaches(target, 2)
    cache = target.new_cache()
    target.forward([Span(cache, [1, 2, 3, 4], 0)])
    kept.give(cache, [1, 2, 3, 4, 5])
    assert len(kept.take([1, 2, 3, 5])) == 0
    assert target.open_caches == 1


class Interrupted(TableBackend):
    """Fails at a crop after the first few."""

    num_crops = 10**9

    @override
    def crop(self, cache: Cache, length: int) -> None:
        self.num_crops -= 1
        if self.num_crops < 0:
            raise RuntimeFailure("interrupted")
        super().crop(cache, length)


def test_a_draft_that_was_not_told_what_stood_is_not_taken_for_the_text() -> None:
    target = Interrupted(TableBackend.random(7, seed=4).table)
    sampling, num_kept = SamplingParams(temperature=1, seed=1), []
    for num_crops in range(12):
        draft = TableBackend(target.table).sibling(0.4)
        drafter = ModelDrafter(draft, target.vocab, keep_caches=1)
        decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=4)
        target.num_crops = num_crops
        with pytest.raises(RuntimeFailure, match="interrupted"):
            decoder.generate([1, 2, 3], max_new_tokens=90, sampling=sampling)
        kept: Any = list(drafter._kept._kept.values())
        assert all(held == cache.ids for held, cache in kept)
        assert draft.open_caches == len(kept)
        num_kept.append(len(kept))
    assert {*num_kept} == {0, 1}


class Lazy(TableBackend):
    """Says nothing and does nothing, or too much."""

    off = 0

    @override
    def crop(self, cache: Cache, length: int) -> None:
        if self.off and length > 1:
            super().crop(cache, length - self.off)


@pytest.mark.parametrize("off", [0, 1])
@pytest.mark.parametrize("side", ["target", "draft"])
def test_a_crop_that_isnt_done_ends_the_generation(off: int, side: str) -> None:
    target = TableBackend.random(7, seed=1)
    lazy = Lazy(target.table if side == "target" else target.sibling(0.5).table)
    lazy.off = off
    pair = (lazy, target.sibling(0.5)) if side == "target" else (target, lazy)
    with pytest.raises(CropError, match=r"asked to cut a cache to \d+ tokens and left \d+"):
        SpeculativeDecoder(*pair, num_draft_tokens=4).generate([1, 2], max_new_tokens=60)
