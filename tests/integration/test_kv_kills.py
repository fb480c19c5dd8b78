"""Failures of an engine, a frontend or the network at each point of a pull of KV blocks.

Prefill and decode run on different engines. No token is lost, and all memory is freed. With ``PENSTOCK_KV_KILLS=full``
(``make kv-kills``), every failure is tested at every point with every kind of output and n. Otherwise a few
combinations are tested.
"""

import itertools
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fakes.systems.kv_rig import KINDS, POINTS, ROWS, Cell, Count, Rig

FULL = os.environ.get("PENSTOCK_KV_KILLS") == "full"
DEMO_MODEL = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"
VARIANTS = list(itertools.product(KINDS, (1, 3)))
SOME = {("destination", "killed"), ("frontend", "killed"), ("network", "cut off")}
"""Failures whose tests take a few seconds even on a busy machine."""

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


def cells() -> list[Cell]:
    """Return all cells in a full run. Otherwise return one variant for each combination of some rows and points."""
    if FULL:
        return [
            Cell(victim, how, point, kind, n)
            for victim, how in ROWS
            for point in (POINTS if victim != "nobody" else POINTS[:1])
            for kind, n in VARIANTS
        ]
    variants = itertools.cycle(VARIANTS)
    some = [(*row, point) for row in ROWS if row in SOME for point in POINTS[3::3]]
    return [Cell("nobody", "left alone", "grant", "delta", 3), *(Cell(*each, *next(variants)) for each in some)]


@pytest.fixture(scope="module")
def total() -> Iterator[Count]:
    total = Count()
    yield total
    print(f"\n{total}")


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["grpc", "shared_memory"] if FULL else ["grpc"])
async def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with Rig(DEMO_MODEL, tmp_path_factory.mktemp("kv"), request.param) as rig:
        yield rig


@pytest.mark.parametrize("cell", cells(), ids=str)
async def test_every_stream_is_whole(rig: Rig, total: Count, cell: Cell) -> None:
    rig.problems.clear()
    count = await rig.cell(cell)
    total.add(count)
    assert count.is_good, "\n".join(rig.problems)
