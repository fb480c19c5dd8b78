"""The emulated instructions, compared bit by bit with Intel's published definitions."""

import ctypes
import subprocess
import sys

import numpy as np
import numpy.typing as npt
import pytest

from tests.emulation.build import HERE, compiled

TINY = np.finfo(np.float32).tiny
Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]
PATH = str(compiled("instructions", [HERE / "instructions.cpp"]))


@pytest.fixture(scope="module")
def instructions() -> ctypes.CDLL:
    return ctypes.CDLL(PATH)


def config(*shapes: tuple[int, int]) -> bytes:
    """Return a tile configuration with these rows and bytes per row."""
    rows = bytes(row for row, _ in shapes)
    widths = np.array([width for _, width in shapes], dtype="<u2").tobytes()
    return bytes([1, *[0] * 15]) + widths.ljust(32, b"\0") + rows.ljust(16, b"\0")


def flushed(x: Floats) -> Floats:
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


def widened(x: Halves) -> Floats:
    return flushed((x.astype(np.uint32) << 16).view(np.float32))


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """Return a * b + c, rounded once to float32.

    The product is exact in 53 bits. The sum is rounded to odd there, so that the second rounding to 24 bits gives the
    correctly rounded result (Boldo and Melquiond 2008).
    """
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    bits = bits + np.where(inexact, np.where((error > 0) == (total > 0), 1, -1), 0)
    return flushed(bits.view(np.float64).astype(np.float32))


def product(c: Floats, a: Halves, b: Halves) -> Floats:
    """TDPBF16PS: ``c`` [m, n] + ``a`` [m, 2 k] ``b`` [k, 2 n]."""
    sums = np.zeros((2, *c.shape), dtype=np.float32)
    for k in range(b.shape[0]):
        for half in (0, 1):
            left, right = widened(a[:, 2 * k + half]), widened(b[k, half::2])
            sums[half] = fused(*np.broadcast_arrays(left[:, None], right[None, :], sums[half]))
    return flushed(flushed(c) + flushed(sums[0] + sums[1]))


def halves(rng: np.random.Generator, shape: tuple[int, int], lowest: int, highest: int) -> Halves:
    """Any bfloat16 numbers with exponents from ``lowest`` to ``highest``, as their bits."""
    exponents = rng.integers(lowest, highest + 1, shape)
    return (rng.integers(0, 2, shape) << 15 | exponents << 7 | rng.integers(0, 128, shape)).astype(np.uint16)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize(("m", "k", "n"), [(16, 16, 16), (1, 16, 16), (16, 1, 16), (5, 3, 2)])
@pytest.mark.parametrize("exponents", [(120, 130), (100, 150), (0, 120), (55, 75), (180, 200), (0, 255)], ids=str)
def test_a_product_of_tiles_is_that_of_the_manual(
    instructions: ctypes.CDLL, m: int, k: int, n: int, exponents: tuple[int, int]
) -> None:
    rng = np.random.default_rng(m + 17 * k + exponents[0])
    for _ in range(8):
        a, b, c = np.zeros((16, 32), np.uint16), np.zeros((16, 32), np.uint16), np.full((16, 16), 7, np.float32)
        a[:m, : 2 * k], b[:k, : 2 * n] = halves(rng, (m, 2 * k), *exponents), halves(rng, (k, 2 * n), *exponents)
        c[:m, :n] = widened(halves(rng, (m, n), *exponents)) * np.float32(1 + 2**-20)
        expected = c.copy()
        expected[:m, :n] = product(c[:m, :n], a[:m, : 2 * k], b[:k, : 2 * n])
        instructions.multiply(
            config((m, 4 * n), (m, 4 * k), (k, 4 * n)), *(x.ctypes.data_as(ctypes.c_void_p) for x in (c, a, b))
        )
        numbers = ~np.isnan(expected)
        assert np.array_equal(np.isnan(c), ~numbers)
        assert np.array_equal(c.view(np.uint32)[numbers], expected.view(np.uint32)[numbers])


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("exponents", [(120, 130), (100, 150), (0, 120), (55, 75), (0, 255)], ids=str)
def test_a_product_of_pairs_is_that_of_the_manual(instructions: ctypes.CDLL, exponents: tuple[int, int]) -> None:
    """VDPBF16PS."""
    rng = np.random.default_rng(exponents[0])
    for _ in range(50):
        a, b, c = (halves(rng, (1, width), *exponents)[0] for width in (32, 32, 16))
        sums = widened(c) * np.float32(1 + 2**-20)
        expected = flushed(sums)
        for half in (1, 0):
            expected = fused(widened(a[half::2]), widened(b[half::2]), expected)
        instructions.add_pairs(*(x.ctypes.data_as(ctypes.c_void_p) for x in (sums, a, b)))
        numbers = ~np.isnan(expected)
        assert np.array_equal(np.isnan(sums), ~numbers)
        assert np.array_equal(sums.view(np.uint32)[numbers], expected.view(np.uint32)[numbers])


def test_rounding_is_that_of_the_manual(instructions: ctypes.CDLL) -> None:
    """VCVTNE2PS2BF16: any bits; those of numbers that are none stay none, with the sign they have."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        bits = rng.integers(0, 2**32, 32, dtype=np.uint32)
        bits[:4] = (
            0x3F808000,
            0x3F818000,
            0x7F7FFFFF,
            0x00400000,
        )  # halfway to even and to odd, the largest, a tiny one
        x, out = bits.view(np.float32), np.zeros(32, np.uint16)
        instructions.round_both(*(each.ctypes.data_as(ctypes.c_void_p) for each in (out, x[:16], x[16:])))
        kept = flushed(x).view(np.uint32).astype(np.uint64)
        nearest = ((kept + 0x7FFF + (kept >> 16 & 1)) >> 16).astype(np.uint16)
        quiet = (bits >> 16 | 0x40).astype(np.uint16)
        assert np.array_equal(out, np.where(np.isnan(x), quiet, nearest))


def test_a_cleared_tile_is_zeros_in_its_shape_alone(instructions: ctypes.CDLL) -> None:
    c = np.ones((16, 16), np.float32)
    instructions.clear(config((3, 8)), c.ctypes.data_as(ctypes.c_void_p))
    assert not c[:3, :2].any()
    assert c.sum() == 16 * 16 - 3 * 2


@pytest.mark.parametrize(
    ("shapes", "palette", "words"),
    [
        ([(16, 64), (16, 64)], 1, "the tile is not configured"),
        ([(16, 64), (15, 64), (16, 64)], 1, "the shapes of a product's tiles do not fit"),
        ([(16, 64), (16, 60), (16, 64)], 1, "the shapes of a product's tiles do not fit"),
        ([(17, 64)], 1, "a tile is larger than the unit has them"),
        ([(16, 0)], 1, "a tile has rows without bytes"),
        ([(1, 4)] * 9, 1, "a tile that there is not has a shape"),
        ([(16, 64)] * 3, 0, "no configuration is loaded"),
        ([(16, 64)] * 3, 2, "the palette is none that there is"),
    ],
)
def test_what_a_processor_refuses_ends_the_process(shapes: list[tuple[int, int]], palette: int, words: str) -> None:
    told = bytes([palette]) + config(*shapes)[1:]
    program = f"import ctypes; ctypes.CDLL({PATH!r}).multiply({told!r}, *[bytes(1024)] * 3)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert words in done.stderr
    assert done.returncode < 0
