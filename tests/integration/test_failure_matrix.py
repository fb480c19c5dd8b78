"""Every engine failure, after each number of tokens, on every kind of stream: no token is lost or sent twice.

A cell (``tests/fakes/systems/matrix``) sends requests of all shapes to an engine. The engine fails after a given number
of tokens of each request. With ``PENSTOCK_MATRIX=full`` (``make matrix``) each cell combines every shape with every
output kind and n, with one token per step and with several tokens per step. Otherwise each shape has one combination
per cell, and the next cell uses a different combination.
"""

import itertools
import os
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from penstock_frontend.config import DetectionConfig
from tests.fakes.models.small_tokenizers import save_model
from tests.fakes.patience import PATIENCE
from tests.fakes.systems.matrix.failures import FAILURES, Failure
from tests.fakes.systems.matrix.report import Report
from tests.fakes.systems.matrix.rig import STEPS, WIDE_STEPS, Rig, Step
from tests.fakes.systems.matrix.shapes import KINDS, shapes

FULL = os.environ.get("PENSTOCK_MATRIX") == "full"
VARIANTS = list(itertools.product(KINDS, (1, 3)))
PATIENT = DetectionConfig(silence=0.2, probe_timeout=PATIENCE)
"""Detection with a probe timeout so long that an engine without processor time does not count as lost."""
IMPATIENT = DetectionConfig(silence=0.2, probe_timeout=2.0)
"""Detection for failures in which the engine only stops sending."""

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def report() -> Iterator[Report]:
    report = Report()
    yield report
    report.write(os.environ.get("PENSTOCK_MATRIX_REPORT", ""))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def rigs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[bool, Rig]]:
    """Yield the rigs by whether their failures are silent."""
    model = save_model(tmp_path_factory.mktemp("matrix") / "model")
    async with Rig(model, detection=PATIENT) as patient, Rig(model, detection=IMPATIENT, engines=3) as impatient:
        yield {False: patient, True: impatient}


@pytest.mark.parametrize("step", STEPS + WIDE_STEPS if FULL else STEPS, ids=str)
@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.name)
async def test_every_stream_is_whole(rigs: dict[bool, Rig], report: Report, failure: Failure, step: Step) -> None:
    number = FAILURES.index(failure) * len(STEPS) + step.offset
    variants = VARIANTS if FULL else itertools.islice(itertools.cycle(VARIANTS), number, number + len(VARIANTS))
    cell = await rigs[failure.silent].cell(failure, step, list(shapes(step.offset, variants, every=FULL, seed=number)))
    report.add(cell)
    assert not cell.wrong, "\n".join(cell.wrong[:20])
