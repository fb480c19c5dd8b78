"""Shrink and expand kernels in Triton's interpreter, compared with plain torch; bits of rows alone and in a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_enginecore.lora.adapter import LoraSegment, LowRankUpdate, PlainAddition
from penstock_enginecore.lora.device_slots import (
    TILE_ROWS,
    ProductShape,
    RowTiles,
    SlotMatrices,
    lay_out,
    most_tiles,
    pack,
)
from tests.fakes.models.interpreted_kernels import interpreted, multiply_bfloat16

kernels = interpreted("triton", "penstock_enginecore.lora")

MAX_LORAS, MAX_RANK = 3, 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}
ONE, TWO, THREE = (bytes([i]) * 16 for i in range(3))
SLOTS = {ONE: 2, TWO: 0, THREE: 1}
LAYOUTS = {
    "none": [],
    "one row": [(ONE, 4, 5)],
    "the first row": [(ONE, 0, 1), (TWO, 3, 5)],
    "all of one": [(ONE, 0, 37)],
    "three": [(ONE, 0, 20), (TWO, 20, 36), (THREE, 36, 37)],
    "among base rows": [(ONE, 1, 3), (TWO, 7, 25), (THREE, 30, 36)],
    "in several places": [(TWO, 0, 2), (ONE, 2, 3), (TWO, 5, 23), (ONE, 23, 24), (TWO, 36, 37)],
}
QKV = ProductShape(48, (40, 24, 24))


@pytest.fixture(autouse=True)
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_bfloat16(monkeypatch)


@dataclass(frozen=True)
class Adapted:
    """Random updates of a product in three slots: ``updates`` by digest, one for each projection."""

    shape: ProductShape
    updates: dict[bytes, list[LowRankUpdate | None]]
    matrices: SlotMatrices

    @classmethod
    def of(cls, shape: ProductShape, ranks: Sequence[Sequence[int]], dtype: torch.dtype) -> "Adapted":
        """Build adapters. ``ranks`` has the rank of each adapter's projections, 0 for none. Unwritten memory is NaN."""
        generator = torch.Generator().manual_seed(1)
        updates: dict[bytes, list[LowRankUpdate | None]] = {}
        numbers = torch.full((MAX_LORAS, shape.numbers([MAX_RANK] * len(shape.features)) + 32), torch.nan, dtype=dtype)
        table = np.full((MAX_LORAS, shape.columns), -(10**9), dtype=np.int64)
        for digest, own in zip(SLOTS, ranks, strict=True):
            updates[digest] = [
                LowRankUpdate(*(_random(size, generator, dtype) for size in ((rank, shape.in_features), (out, rank))))
                if rank
                else None
                for rank, out in zip(own, shape.features, strict=True)
            ]
            end = pack(shape, updates[digest], numbers[SLOTS[digest]], 16, table[SLOTS[digest]])
            assert end == 16 + shape.numbers(own)
        pieces = torch.from_numpy(shape.pieces())
        return cls(shape, updates, SlotMatrices(shape, numbers, torch.from_numpy(table), pieces, MAX_RANK))

    def run(
        self, x: torch.Tensor, out: torch.Tensor, segments: Sequence[LoraSegment], scale: float, tiles: int = 0
    ) -> torch.Tensor:
        """Return the kernels' result for ``out``, with ``tiles`` tiles or the maximum number. Memory between tiles is
        NaN.
        """
        laid = tiles_of(segments, tiles or most_tiles(len(x), MAX_LORAS))
        scratch = torch.full((self.matrices.scratch_numbers(len(laid), TILE_ROWS),), torch.nan)
        result = out.clone()
        kernels.add_low_rank(x, self.matrices, laid, scratch, scale, result)
        return result

    def expected(
        self, x: torch.Tensor, out: torch.Tensor, segments: Sequence[LoraSegment], scale: float
    ) -> torch.Tensor:
        """Return the result computed in float64."""
        result: torch.Tensor = out.double()
        starts = np.cumsum([0, *self.shape.features])
        for segment in segments:
            rows = slice(segment.first, segment.end)
            for part, update in enumerate(self.updates[segment.digest]):
                if update is not None:
                    delta = x[rows].double() @ update.a.double().t() @ update.b.double().t()
                    result[rows, starts[part] : starts[part + 1]] += scale * delta
        return result


def _random(size: tuple[int, int], generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Return random float32 numbers that ``dtype`` can represent."""
    return (torch.randn(*size, generator=generator) / size[1] ** 0.5).to(dtype).float()


def tiles_of(segments: Sequence[LoraSegment], count: int) -> RowTiles:
    """Return the tiles as they are laid out on the device."""
    slots, rows = np.zeros(count, dtype=np.int32), np.zeros((count, TILE_ROWS), dtype=np.int32)
    lay_out(segments, SLOTS, slots, rows)
    return RowTiles(torch.from_numpy(slots), torch.from_numpy(rows))


def layout(name: str) -> list[LoraSegment]:
    """Return the segments of the named layout."""
    return [LoraSegment(*each) for each in LAYOUTS[name]]


def inputs(rows: int, shape: ProductShape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x`` and the product of the base layer."""
    generator = torch.Generator().manual_seed(rows)
    sizes = (shape.in_features, sum(shape.features))
    one, other = (torch.randn(rows, size, generator=generator).to(dtype) for size in sizes)
    return one, other


def check(adapted: Adapted, rows: int, segments: Sequence[LoraSegment], dtype: torch.dtype, scale: float = 1.0) -> None:
    """Compare rows with an adapter with float64, and other rows bit by bit with their input."""
    x, out = inputs(rows, adapted.shape, dtype)
    got = adapted.run(x, out, segments, scale)
    expected = adapted.expected(x, out, segments, scale)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=4 * tolerance)
    for row in set(range(rows)) - {row for each in segments for row in range(each.first, each.end)}:
        assert torch.equal(got[row], out[row])


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_projections_of_one_input_get_their_own_updates(name: str, dtype: torch.dtype) -> None:
    check(Adapted.of(QKV, [(8, 3, 0), (1, 16, 33), (0, 0, 64)], dtype), 37, layout(name), dtype, 0.5)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [(1, 2, 7), (8, 15, 16), (17, 31, 32), (33, 63, 64)], ids=str)
def test_any_rank(ranks: tuple[int, ...], dtype: torch.dtype) -> None:
    check(Adapted.of(ProductShape(40, (24,)), [(rank,) for rank in ranks], dtype), 37, layout("three"), dtype)


def test_many_columns_and_features() -> None:
    """The sum covers several chunks of columns, and the features are in several pieces."""
    shape = ProductShape(2100, (300, 130))
    assert shape.chunks == 3
    check(Adapted.of(shape, [(5, 8), (16, 0), (0, 2)], torch.float32), 5, [LoraSegment(ONE, 1, 5)], torch.float32)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_any_shape(data: st.DataObject, dtype: torch.dtype) -> None:
    features = tuple(data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=3)))
    shape = ProductShape(data.draw(st.integers(1, 1100)), features)
    ranks = data.draw(st.lists(st.tuples(*[st.integers(0, MAX_RANK) for _ in features]), min_size=3, max_size=3))
    rows = data.draw(st.integers(1, 50))
    cuts = sorted(data.draw(st.sets(st.integers(0, rows), max_size=8)))
    segments = [
        LoraSegment(digest, first, end)
        for first, end in pairwise(cuts)
        if (digest := data.draw(st.sampled_from([None, *SLOTS]))) is not None
    ]
    check(Adapted.of(shape, ranks, dtype), rows, segments, dtype, data.draw(st.sampled_from([1.0, 0.22])))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_in_a_crowd(dtype: torch.dtype) -> None:
    adapted = Adapted.of(QKV, [(8, 3, 0), (1, 16, 33), (0, 0, 64)], dtype)
    x, out = inputs(37, QKV, dtype)
    for name in ("all of one", "among base rows", "in several places"):
        crowd = adapted.run(x, out, layout(name), 0.5)
        for segment in layout(name):
            for row in {segment.first, segment.end - 1}:
                alone = adapted.run(x[row : row + 1], out[row : row + 1], [LoraSegment(segment.digest, 0, 1)], 0.5)
                assert torch.equal(alone[0], crowd[row])


def test_more_tiles_than_are_filled_change_nothing() -> None:
    adapted = Adapted.of(QKV, [(8, 3, 0), (1, 16, 33), (0, 0, 64)], torch.float32)
    x, out = inputs(37, QKV, torch.float32)
    few, many = (adapted.run(x, out, layout("three"), 1.0, tiles) for tiles in (0, 40))
    assert torch.equal(few, many)


def test_rows_may_lie_apart() -> None:
    adapted = Adapted.of(ProductShape(40, (24,)), [(4,)] * 3, torch.float32)
    x, out = inputs(37, adapted.shape, torch.float32)
    wide, wider = torch.randn(37, 60), torch.full((37, 31), torch.nan)
    wide[:, 7:47], wider[:, 3:27] = x, out
    laid = tiles_of(layout("three"), 5)
    scratch = torch.empty(adapted.matrices.scratch_numbers(5, TILE_ROWS))
    kernels.add_low_rank(wide[:, 7:47], adapted.matrices, laid, scratch, 1.0, wider[:, 3:27])
    assert torch.equal(wider[:, 3:27], adapted.run(x, out, layout("three"), 1.0, 5))
    assert bool(wider[:, :3].isnan().all() and wider[:, 27:].isnan().all())


def test_they_agree_with_the_addition_in_plain_torch() -> None:
    adapted = Adapted.of(ProductShape(40, (24,)), [(9,)] * 3, torch.float32)
    x, out = inputs(37, adapted.shape, torch.float32)
    expected = out.clone()
    for segment in layout("among base rows"):
        [update] = adapted.updates[segment.digest]
        assert update is not None
        rows = slice(segment.first, segment.end)
        PlainAddition(update.a, update.b)(x[rows], expected[rows])
    torch.testing.assert_close(adapted.run(x, out, layout("among base rows"), 1.0), expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": torch.zeros(5, 41)}, r"input has shape \[5, 41\] and output has shape \[5, 24\]"),
        ({"out": torch.zeros(4, 24)}, r"input has shape \[5, 40\] and output has shape \[4, 24\]"),
        ({"out": torch.zeros(24, 5).t()}, "must be contiguous"),
        (
            {"x": torch.zeros(5, 40).half()},
            "input is torch.float16 and output is torch.float32; both must be torch.float32",
        ),
        ({"scratch": torch.zeros(7)}, "scratch has 7 elements, too few for 5 tiles"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], said: str) -> None:
    adapted = Adapted.of(ProductShape(40, (24,)), [(4,)] * 3, torch.float32)
    arguments: dict[str, Any] = {
        "x": torch.zeros(5, 40),
        "matrices": adapted.matrices,
        "tiles": tiles_of([], 5),
        "scratch": torch.empty(adapted.matrices.scratch_numbers(5, TILE_ROWS)),
        "scale": 1.0,
        "out": torch.zeros(5, 24),
    }
    with pytest.raises(ValueError, match=said):
        kernels.add_low_rank(**{**arguments, **change})


def test_rows_of_an_adapter_share_tiles_wherever_they_are() -> None:
    laid = tiles_of(layout("in several places"), 5)
    assert laid.slots.tolist() == [0, 0, 2, -1, -1]
    assert laid.rows[:2].reshape(-1)[:21].tolist() == [0, 1, *range(5, 23), 36]
    assert laid.rows[2].tolist() == [2, 23, *[-1] * 14]
    assert bool((laid.rows[3:] == -1).all() and (laid.rows[1, 5:] == -1).all())


def test_there_are_never_more_tiles_than_are_counted() -> None:
    for rows in range(1, 60):
        worst = [LoraSegment(digest, i, i + 1) for i, digest in zip(range(rows), [*SLOTS] * rows, strict=False)]
        tiles_of(worst, most_tiles(rows, MAX_LORAS))
        tiles_of([LoraSegment(ONE, 0, rows)], most_tiles(rows, MAX_LORAS))
    with pytest.raises(ValueError, match="need more than 2 tiles"):
        tiles_of([LoraSegment(ONE, 0, 33)], 2)
