"""Selected rows of the failure matrix with transfers (``tests/integration/test_kv_kills.py``), with the demo model."""

import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from penstock_common.types.sampling import SamplingParams
from tests.fakes.engines.in_process import build_engine, generate
from tests.fakes.systems.kv_rig import LENGTH, Cell, Rig

DEMO_MODEL = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"
CELLS = [
    Cell("nobody", "left alone", "grant", "delta", 3),
    Cell("source", "killed", "middle block", "delta", 1),
    Cell("source", "stopped", "grant", "final", 3),
    Cell("destination", "killed", "last block", "delta", 3),
    Cell("destination", "restarted", "copy", "final", 1),
    Cell("destination", "black-holed", "first token", "delta", 1),
    Cell("frontend", "killed", "open", "delta", 3),
    Cell("frontend", "stopped", "first block", "final", 1),
    Cell("network", "cut off", "middle block", "delta", 3),
    Cell("network", "black-holed", "first block", "delta", 1),
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("PENSTOCK_KV_KILLS") != "full", reason="make kv-kills runs it"),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(scope="module")
def expected() -> Iterator[Callable[[Sequence[int], int], list[int]]]:
    """Return the tokens of one undisturbed engine."""
    engine = build_engine(DEMO_MODEL)

    def tokens(prompt: Sequence[int], seed: int) -> list[int]:
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=LENGTH, ignore_eos=True)
        return generate(engine, [("r", list(prompt), params)]).tokens["r"]

    yield tokens
    engine.shutdown()


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["grpc", "shared_memory"])
async def rig(
    request: pytest.FixtureRequest,
    expected: Callable[[Sequence[int], int], list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("kv")
    async with Rig(DEMO_MODEL, folder, request.param, engine="penstock_enginecore", expected=expected) as rig:
        yield rig


@pytest.mark.parametrize("cell", CELLS, ids=str)
async def test_every_stream_is_whole(rig: Rig, cell: Cell) -> None:
    rig.problems.clear()
    count = await rig.cell(cell)
    assert count.is_good, "\n".join(rig.problems)
