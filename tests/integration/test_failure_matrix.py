"""Every failure of an engine, at every step of a request, on every kind of stream: nothing is lost, nothing comes twice.

A cell puts requests of every shape on one engine, which fails when so many tokens of each are out. See ``tests/fakes/matrix``.
``PENSTOCK_MATRIX=full`` (``make matrix``) has every combination of shape, output kind and n in each cell, and more offsets.
"""

import os
import zlib
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

# NOT YET: DetectionConfig
from tests.fakes.matrix.failures import FAILURES, Failure
from tests.fakes.matrix.report import Report
from tests.fakes.matrix.rig import STEPS, Rig, Step
from tests.fakes.matrix.shapes import shapes
from tests.fakes.small_tokenizers import save_model

FULL = os.environ.get("PENSTOCK_MATRIX") == "full"
KINDS = ("delta", "cumulative", "final") if FULL else ("delta", "final")
COUNTS = (1, 3)
DETECTION = None

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def report() -> Iterator[Report]:
    report = Report()
    yield report
    report.write(os.environ.get("PENSTOCK_MATRIX_REPORT", ""))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    model = save_model(tmp_path_factory.mktemp("matrix") / "model")
    async with Rig(model) as rig:
        yield rig


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.name)
async def test_every_stream_is_whole(rig: Rig, report: Report, failure: Failure, step: Step) -> None:
    seed = zlib.crc32(f"{failure.name} {step.name}".encode()) % 100
    cell = await rig.cell(failure, step, list(shapes(step.offset, kinds=KINDS, counts=COUNTS, seed=seed)))
    report.add(cell)
    assert not cell.wrong, "\n".join(cell.wrong[:20])
