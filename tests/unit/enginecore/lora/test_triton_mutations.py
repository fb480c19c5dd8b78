"""Kernels of adapters with a fault in their source: the tests of these kernels detect the fault."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_enginecore.lora.device_slots import TILE_ROWS, ProductShape
from tests.unit.enginecore.lora.test_triton import Adapted, inputs, kernels, layout, tiles_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

FAULTS = [
    ("if slot >= 0:", "if slot > 0:"),
    ("tl.load(own + 2 * PARTS + 1)", "tl.load(own + 2 * PARTS)"),
    ("if tl.program_id(1) * RANKS < ranks:", "if tl.program_id(1) * RANKS + 16 < ranks:"),
    ("row = tl.load(tile_rows + tile * TILE + at)", "row = tl.load(tile_rows + at)"),
    ("first = tl.program_id(2) * chunk", "first = 0"),
    ("end = tl.minimum(first + chunk, in_features)", "end = first + chunk"),
    ("end = tl.minimum(first + chunk, in_features)", "end = in_features"),
    ("slot * slot_stride + tl.multiple_of(tl.load(own), 16)", "slot * slot_stride"),
    ("* x_stride + k", "* in_features + k"),
    ("r[None, :].to(tl.int64) * in_features", "r[None, :].to(tl.int64) * x_stride"),
    ("mask=(row >= 0)[:, None] & inside[None, :]", "mask=inside[None, :] & (row > 0)[:, None]"),
    ("(tl.program_id(2) * tl.num_programs(0) + tile) * TILE", "tile * TILE"),
    ("begin, end = tl.load(piece + 2), tl.load(piece + 3)", "begin, end = tl.load(piece + 1), tl.load(piece + 3)"),
    ("own + PARTS + 1 + part", "own + PARTS + 1"),
    ("tl.load(own + PARTS + 2 + part).to(tl.int32) - first", "tl.load(own + PARTS + 2 + part).to(tl.int32)"),
    ("tl.cdiv(rank, ROW_ALIGNED) * ROW_ALIGNED", "rank"),
    ("tl.multiple_of(tl.load(own + 1 + part), 16)", "tl.load(own + 1)"),
    ("held = start + r < rank", "held = start + r >= 0"),
    ("for chunk in range(CHUNKS)", "for chunk in range(1)"),
    ("(first + start + r)[None, :]", "(start + r)[None, :]"),
    ("+ (start + r)[:, None]", "+ r[:, None]"),
    ("inside = (row >= 0)[:, None] & (n < end)[None, :]", "inside = (row >= -1)[:, None] & (n < end)[None, :]"),
    (".to(tl.float32) + total * scale", ".to(tl.float32) + total"),
    ("sums = tl.load(place, mask=inside, other=0.0).to(tl.float32) + ", "sums = "),
]


def load(folder: Path, source: str) -> Any:
    """Import ``source`` as a module."""
    path = folder / f"mutated_{folder.name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results(module: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the results of the kernels of ``module`` for some rows in larger memory, and the expected results."""
    for shape, ranks, name in (
        (ProductShape(40, (130, 24, 20)), [(8, 3, 0), (1, 16, 33), (5, 17, 2)], "in several places"),
        (ProductShape(1100, (24,)), [(4,), (9,), (20,)], "among base rows"),
        (ProductShape(24, (24,)), [(4,), (9,), (20,)], "the first row"),
    ):
        adapted = Adapted.of(shape, ranks, torch.float32)
        x, out = inputs(37, shape, torch.float32)
        wide = torch.full((37, shape.in_features + 3), torch.nan)
        wide[:, : shape.in_features] = x
        memory = torch.full((39, out.shape[1] + 5), torch.nan)
        memory[:37, : out.shape[1]] = out
        expected = memory.double()
        expected[:37, : out.shape[1]] = adapted.expected(x, out, layout(name), 0.5)
        laid = tiles_of(layout(name), 5)
        scratch = torch.full((adapted.matrices.scratch_numbers(5, TILE_ROWS),), torch.nan)
        module.add_low_rank(
            wide[:, : shape.in_features], adapted.matrices, laid, scratch, 0.5, memory[:37, : out.shape[1]]
        )
        yield memory.double(), expected


def differs(module: Any) -> bool:
    """Return whether the kernels of ``module`` give other results, or fail."""
    try:
        return not all(torch.allclose(*pair, rtol=1e-4, atol=1e-4, equal_nan=True) for pair in results(module))
    except (IndexError, ValueError):
        return True


@pytest.mark.parametrize(("old", "new"), FAULTS, ids=[new for _, new in FAULTS])
def test_a_fault_is_seen(old: str, new: str, tmp_path: Path) -> None:
    source = Path(kernels.__file__).read_text()
    assert old in source
    assert differs(load(tmp_path, source.replace(old, new)))


def test_nothing_is_seen_where_there_is_no_fault(tmp_path: Path) -> None:
    assert not differs(load(tmp_path, Path(kernels.__file__).read_text()))
