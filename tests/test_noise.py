"""The noise: the right laws, nothing that neighbours share, the same everywhere and for good."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from specdec.noise import Lane, gumbel, gumbel_of, hashed, keyed, uniform

EULER = 0.5772156649015329
IDS = np.arange(64, dtype=np.uint32)
COUNT = 1 << 13


def place(number: int) -> int:
    return keyed(11, number, Lane.TOKEN)


def seed(number: int) -> int:
    return keyed(number, 5, Lane.TOKEN)


def far_seed(number: int) -> int:
    return keyed(number << 40, 5, Lane.TOKEN)


def matrix(key: Callable[[int], int], numbers: Iterable[int]) -> NDArray[np.uint32]:
    return np.stack([hashed(IDS, key(number)) for number in numbers])


def p_value(counts: NDArray[Any]) -> float:
    """Chi-square of equally likely counts, by Wilson and Hilferty's normal approximation."""
    mean, free = counts.mean(), counts.size - 1
    chi_square = ((counts - mean) ** 2).sum() / mean
    z = ((chi_square / free) ** (1 / 3) - 1 + 2 / (9 * free)) / math.sqrt(2 / (9 * free))
    return math.erfc(z / math.sqrt(2)) / 2


def assert_uniform(cells: NDArray[Any], num_cells: int) -> None:
    """Neither too uneven nor too even."""
    assert 1e-4 < p_value(np.bincount(cells.ravel().astype(np.int64), minlength=num_cells)) < 0.9999


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
@pytest.mark.parametrize("number", [0, 1, 1 << 20])
def test_bits_are_uniform_over_tokens(number: int, shift: int) -> None:
    bits = hashed(np.arange(152_000, dtype=np.uint32), place(number))
    assert_uniform(bits >> shift & 255, 256)


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
@pytest.mark.parametrize("key", [place, seed, far_seed])
def test_bits_are_uniform_over_positions_and_seeds(key: Callable[[int], int], shift: int) -> None:
    bits = matrix(key, range(COUNT)) >> shift & 255
    assert_uniform(bits, 256)
    for column in bits.T[:8]:
        assert_uniform(column, 256)


@pytest.mark.parametrize("kind", ["ids", "positions", "seeds", "lanes", "a seed and a position"])
def test_neighbours_know_nothing_of_each_other(kind: str) -> None:
    here = matrix(place, range(COUNT))
    if kind == "ids":
        here, there = here[:, :-1], here[:, 1:]
    elif kind == "positions":
        here, there = here[:-1], here[1:]
    elif kind == "seeds":
        here = matrix(seed, range(COUNT))
        here, there = here[:-1], here[1:]
    elif kind == "lanes":
        there = matrix(lambda number: keyed(11, number, Lane.DRAFT), range(COUNT))
    else:  # seed + 1 must not be the same noise one place on
        there = matrix(lambda number: keyed(12, number - 1, Lane.TOKEN), range(1, COUNT + 1))
    for shift in (0, 14, 28):
        assert_uniform((here >> shift & 15) * 16 + (there >> shift & 15), 256)
    first, second = gumbel_of(here, np).ravel(), gumbel_of(there, np).ravel()
    correlation = np.corrcoef(first, second)[0, 1]
    assert abs(correlation) < 4 / math.sqrt(first.size)


@pytest.mark.parametrize("number", [0, 1, 2**63])
def test_the_law_is_gumbels(number: int) -> None:
    noise = np.sort(gumbel(number, 3, Lane.TOKEN, np.arange(200_000)).astype(np.float64))
    count = noise.size
    assert abs(noise.mean() - EULER) < 4 * math.sqrt(math.pi**2 / 6 / count)
    assert abs(noise.var() - math.pi**2 / 6) < 4 * math.sqrt(4.4 * (math.pi**2 / 6) ** 2 / count)
    law = np.exp(-np.exp(-noise))
    distance = np.abs(law - (np.arange(count) + 0.5) / count).max()  # Kolmogorov and Smirnov
    assert distance < 2.2 / math.sqrt(count)  # exceeded with probability 1e-4


def test_every_hash_gives_a_finite_number() -> None:
    bits = np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    noise = gumbel_of(bits, np)
    assert noise.dtype == np.float32
    assert np.isfinite(noise).all()
    assert (np.diff(noise) <= 0).all()
    assert noise[0] > 22
    assert noise[-1] < -2.7


@given(
    seed=st.integers(-(2**70), 2**70),
    place=st.integers(0, 2**40),
    ids=st.lists(st.integers(0, 2**32 - 1), max_size=40),
)
def test_a_part_is_the_same_as_in_the_whole(seed: int, place: int, ids: list[int]) -> None:
    whole = gumbel(seed, place, Lane.TOKEN, np.array(ids, np.int64))
    assert np.isfinite(whole).all()
    np.testing.assert_array_equal(whole, gumbel(seed, place, Lane.TOKEN, np.array(ids, np.uint32)))
    for index, token in enumerate(ids):
        alone = gumbel(seed, place, Lane.TOKEN, np.array([token], np.int64))
        np.testing.assert_allclose(alone, whole[index : index + 1], rtol=1e-5)


def test_a_part_of_a_vocabulary_is_the_same_as_in_the_whole() -> None:
    whole = gumbel(1, 2, Lane.TOKEN, np.arange(152_000))
    part = np.random.default_rng(0).choice(152_000, 500, replace=False)
    np.testing.assert_allclose(gumbel(1, 2, Lane.TOKEN, part), whole[part], rtol=1e-5)


def test_torch_and_numpy_have_the_same_noise() -> None:
    torch = pytest.importorskip("torch")
    ids = np.concatenate([np.arange(152_000), [2**31, 2**32 - 1]])
    ours = gumbel(-7, 123_456, Lane.TOKEN, ids)
    theirs = gumbel(-7, 123_456, Lane.TOKEN, torch.from_numpy(ids))
    assert theirs.dtype == torch.float32
    np.testing.assert_allclose(theirs.numpy(), ours, rtol=1e-5, atol=1e-5)


@given(
    seed=st.integers(-(2**70), 2**70),
    place=st.integers(0, 2**40),
    lane=st.sampled_from(Lane),
    index=st.integers(0, 99),
)
def test_uniform_numbers_lie_strictly_between_0_and_1(
    seed: int, place: int, lane: Lane, index: int
) -> None:
    assert 0 < uniform(seed, place, lane, index) < 1


@pytest.mark.parametrize("over", ["seed", "place", "index"])
def test_uniform_numbers_are_uniform(over: str) -> None:
    first = {"seed": 3, "place": 4, "lane": Lane.ACCEPT, "index": 0}
    numbers = np.array([uniform(**{**first, over: i}) for i in range(20_000)])  # type: ignore[arg-type]
    assert_uniform((numbers * 100).astype(int), 100)
    cells = (numbers * 10).astype(int)
    assert_uniform(cells[:-1] * 10 + cells[1:], 100)


def test_the_noise_never_changes() -> None:
    """Known answers: with other numbers a seed would no longer give the text that it gave."""
    ids = np.array([0, 1, 2, 49_151, 151_999])
    assert hashed(ids.astype(np.uint32), keyed(0, 0, Lane.TOKEN)).tolist() == [
        3_352_871_070,
        4_123_103_251,
        888_130_518,
        70_041_810,
        1_470_960_784,
    ]
    np.testing.assert_allclose(
        gumbel(0, 0, Lane.TOKEN, ids),
        [-0.4167949, -1.168913, 1.462486, 4.107897, 0.869199],
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        gumbel(2**64 - 1, 4095, Lane.DRAFT, ids),
        [-0.8338189, 1.69576, -1.085945, 0.3653206, 0.2529215],
        rtol=1e-5,
    )
    assert uniform(1, 2, Lane.ACCEPT) == 0.551003768556561
    assert uniform(1, 2, Lane.NEXT, 3) == 0.4066847891451358


def test_seeds_count_by_their_low_64_bits() -> None:
    ids = np.arange(9)
    noise = gumbel(5, 1, Lane.TOKEN, ids)
    np.testing.assert_array_equal(noise, gumbel(5 + 2**64, 1, Lane.TOKEN, ids))
    assert (noise != gumbel(5 + 2**63, 1, Lane.TOKEN, ids)).all()
