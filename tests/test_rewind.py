"""Rewind: a model whose state is the ids that it has read, so that a wrong state shows at once."""

from hypothesis import given
from hypothesis import strategies as st

from specdec.rewind import Rewind


class Reader:
    """A backend's part in it: reads, fails, and restores what it is told to."""

    def __init__(self, max_kept: int, max_unread: int) -> None:
        self.rewind: Rewind[tuple[int, ...]] = Rewind(max_kept, max_unread)
        self.state: tuple[int, ...] = ()
        self.forwards: list[int] = []

    def forward(self, tokens: list[int]) -> None:
        if self.rewind.apart:
            self.read(self.rewind.unread)
            self.rewind.commit([])
        if self.rewind.wants():
            self.rewind.keep(self.state)
        self.read([*self.rewind.unread, *tokens])
        self.rewind.commit(tokens)

    def read(self, ids: object) -> None:
        assert isinstance(ids, list)
        self.state += tuple(ids)
        self.forwards.append(len(ids))

    def crop(self, length: int) -> None:
        kept = self.rewind.crop(length)
        if kept:
            self.state = kept.state or ()

    def fail(self) -> None:
        if self.rewind.wants():
            self.rewind.keep(self.state)
        self.state = (-1,)
        self.state = self.rewind.undo().state or ()


STEPS = st.lists(
    st.tuples(st.sampled_from(["forward", "crop", "fail", "restart"]), st.integers(0, 40)),
    max_size=40,
)


@given(STEPS, st.integers(1, 5), st.integers(0, 9))
def test_the_state_is_always_that_of_the_ids_read(
    steps: list[tuple[str, int]], max_kept: int, max_unread: int
) -> None:
    reader, twin, fresh = Reader(max_kept, max_unread), list[int](), iter(range(10**6))
    for step, number in steps:
        if step == "forward":
            new = [next(fresh) for _ in range(number + 1)]
            reader.forward(new)
            twin += new
            assert reader.state == tuple(twin)
            assert reader.forwards[-1] <= max_unread + len(new)
        elif step == "crop":
            length = min(number, len(twin)) if number % 2 else len(twin) - len(twin) % 7
            reader.crop(length)
            del twin[length:]
        elif step == "fail":
            reader.fail()
        else:
            reader.state = reader.rewind.restart().state or ()
        assert reader.rewind.ids == twin
        assert reader.state == tuple(twin[: reader.rewind.num_read])
        assert len(reader.rewind._kept) <= max_kept


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60))
def test_ids_are_read_again_a_bounded_number_of_times(accepted: list[int]) -> None:
    """Rounds of five drafts, of which so many stand: the price of each round stays small."""
    reader = Reader(max_kept=4, max_unread=8)
    reader.forward(list(range(100)))
    for count in accepted:
        before, length = reader.rewind.num_replayed, len(reader.rewind.ids)
        reader.forward([0] * 6)
        reader.crop(length + count + 1)
        assert reader.rewind.num_replayed - before <= 8 + 6
    assert len(reader.forwards) <= 1 + len(accepted) + sum(c + 1 for c in accepted) // 8 + 1


def test_old_states_are_kept_far_apart_and_new_ones_close() -> None:
    reader = Reader(max_kept=4, max_unread=8)
    for _ in range(128):
        reader.forward([0])
    ages = [128 - kept.length for kept in reader.rewind._kept]
    assert ages == sorted(ages, reverse=True)
    assert ages[-2:] in ([2, 1], [3, 1])
    assert ages[0] > 8


def test_a_state_that_was_cut_itself_needs_no_other() -> None:
    reader = Reader(max_kept=4, max_unread=8)
    for _ in range(3):
        reader.forward([1, 2, 3])
    reader.rewind.cut(5)
    reader.state = reader.state[:5]
    reader.forward([4])
    assert reader.state == (1, 2, 3, 1, 2, 4)
    assert reader.rewind.num_replayed == 0
