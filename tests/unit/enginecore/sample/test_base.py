"""The stateless generator: known answers, purity, uniformity."""

import numpy as np
import pytest

from penstock_enginecore.sample.base import UniformsAhead, philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # The known-answer vectors that the authors' Random123 library publishes for philox4x32-10.
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox4x32(np.array([counter], dtype=np.uint64), np.array([key], dtype=np.uint64))
    assert words.tolist() == [expected]


def test_a_draw_depends_on_its_seed_and_index_alone() -> None:
    seeds = np.array([0, 1, 2**63, 2**64 - 1] * 8, dtype=np.uint64)
    indices = np.arange(32) // 4
    together = uniforms(seeds, indices)
    apart = [uniforms(seeds[i : i + 1], indices[i : i + 1])[0] for i in range(32)]
    assert together.tolist() == apart
    assert len(set(apart)) == 32


def test_all_64_bits_of_a_seed_matter() -> None:
    seeds = np.array([1 << bit for bit in range(64)] + [0], dtype=np.uint64)
    assert len(set(uniforms(seeds, np.zeros(65, dtype=np.int64)))) == 65


def test_draws_are_uniform_over_indices_and_over_seeds() -> None:
    many = np.arange(20_000)
    over_indices = uniforms(np.full(20_000, 1234, dtype=np.uint64), many)
    over_seeds = uniforms(many.astype(np.uint64), np.zeros(20_000, dtype=np.int64))
    for draws in (over_indices, over_seeds):
        assert draws.min() >= 0
        assert draws.max() < 1
        counts, _ = np.histogram(draws, bins=50, range=(0, 1))
        chi_square = ((counts - 400) ** 2 / 400).sum()
        assert chi_square < 94.5  # 49 degrees of freedom, p = 1e-4; the draws are fixed, so this never flakes


def test_numbers_made_ahead_are_those_of_each_step() -> None:
    seeds = np.array([7, 2**64 - 1, 7, 0], dtype=np.uint64)
    ahead = UniformsAhead(seeds)
    index = np.array([0, 5, 2**40, 1], dtype=np.int64)
    jumps = [*[1] * 40, 0, 3, 1, -2, 1, 100]
    for jump in jumps:
        index = index + jump
        assert np.array_equal(ahead.at(index), uniforms(seeds, index))
    for row in range(4):  # rows that belong to different requests
        index[row] += 1 + row
        assert np.array_equal(ahead.at(index), uniforms(seeds, index))


def test_numbers_made_ahead_are_the_callers_own() -> None:
    ahead = UniformsAhead(np.array([1, 2], dtype=np.uint64))
    first = ahead.at(np.array([3, 4]))
    expected = first.copy()
    first[:] = 0.0
    assert np.array_equal(ahead.at(np.array([3, 4])), expected)
    assert ahead.at(np.array([4, 5])).shape == (2,)


def test_no_rows_have_no_numbers() -> None:
    assert UniformsAhead(np.zeros(0, dtype=np.uint64)).at(np.zeros(0, dtype=np.int64)).shape == (0,)
