"""Processes of a data-parallel group are killed at every named point of a size change (make rank-failures).

Each of 32 concurrent streams has transformers' tokens. The group continues with its remaining ranks. The group reaches
the new size once the killed process has been restarted.
"""

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.test_group_sizes import FEWEST, PROMPTS, SHARED, STREAMS, model
from tests.fakes.engines.rank_faults import CHANGING, LEAVING
from tests.fakes.models.expert_model import Expected
from tests.fakes.processes import Service
from tests.fakes.systems.faulty_ranks import FaultyRanks
from tests.fakes.systems.rank_group import metric, until
from tests.fakes.systems.streams import Load

__all__ = ["model"]
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.environ.get("PENSTOCK_RANK_FAILURES") != "full", reason="make rank-failures runs it"),
]
RANKS = 4
GROWING, SHRINKING = (2, 4), (4, 3)
FIRST, STAYS, COMES, LEAVES, COORDINATOR = "rank 0", "rank 1", "one that comes", "one that leaves", "the coordinator"
Case = tuple[tuple[int, int], str, str]
CASES: list[Case] = [
    *itertools.product([GROWING], [FIRST, STAYS, COMES, COORDINATOR], CHANGING),
    *itertools.product([SHRINKING], [FIRST, STAYS, COORDINATOR], CHANGING),
    *itertools.product([SHRINKING], [LEAVES], LEAVING),
]
"""Cases: the numbers of ranks before and after the change, the killed process, and the point. The coordinator is
killed when rank 0 reaches the point.
"""


def _name(case: Case) -> str:
    (before, after), who, point = case
    return f"{before} to {after}, {who}, {point}"


class Report:
    """Collects the rows of the table that is printed at the end."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.num_answers = 0

    def __str__(self) -> str:
        head = ["| ranks | killed | at | ranks seen | steps stood still, s | streams, s |", "|---|---|---|---|--:|--:|"]
        return "\n".join(["", *head, *self.lines, f"{self.num_answers} answers, all right"])


@pytest.fixture(scope="module")
def report() -> Iterator[Report]:
    made = Report()
    yield made
    print(made)


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[{}, SHARED], ids=["whole models", "shared experts"]
)
async def ranks(
    request: pytest.FixtureRequest, model: tuple[Path, Expected], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[FaultyRanks]:
    """Yield four engines, of which two are ranks at the beginning."""
    directory = tmp_path_factory.mktemp("faults")
    options = {"size": FEWEST, "spares": RANKS - FEWEST, **request.param}
    async with FaultyRanks(model[0], directory, **options) as group:
        yield group


class Sizes:
    """Records the sizes of a group in order, as its frontend sees them while the block runs."""

    def __init__(self, ranks: FaultyRanks) -> None:
        self._ranks = ranks
        self.seen: list[int] = []

    async def __aenter__(self) -> "Sizes":
        self._task = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _look(self) -> None:
        while True:
            size = len(await self._ranks.members())
            if [size] != self.seen[-1:]:
                self.seen.append(size)
            await asyncio.sleep(0.02)


async def whom(ranks: FaultyRanks, who: str) -> Service:
    """Return the engine that ``who`` means. A rank that leaves or joins is the last engine by name."""
    inside = [engine for engine, _ in await ranks.members()]
    match who:
        case "one that comes" | "one that leaves":
            assert (ranks.engines[-1] in inside) == (who == LEAVES)
            return ranks.engines[-1]
        case "rank 1":
            return inside[1]
        case _:
            return inside[0]


def recovered(engine: Service) -> float:
    return metric(engine, "penstock:group_recovery_seconds_sum")


@pytest.mark.parametrize("case", CASES, ids=_name)
async def test_no_stream_fails_and_the_group_comes_to_its_size(
    ranks: FaultyRanks, model: tuple[Path, Expected], report: Report, case: Case
) -> None:
    (before, after), who, point = case
    for size in (RANKS, FEWEST, before):  # processes that earlier cases killed have been restarted
        await ranks.scale(size)
    comes = await whom(ranks, who)
    victim = ranks.coordinator if who == COORDINATOR else comes
    others = [engine for engine, _ in await ranks.members() if engine is not victim]
    stood = [recovered(engine) for engine in others]
    async with Load(ranks, PROMPTS, model[1], STREAMS) as load, Sizes(ranks) as sizes:
        await load.answered(STREAMS)
        began = asyncio.get_running_loop().time()
        ranks.arm(comes, point, victim)
        asked = asyncio.create_task(ranks.ask_for(after))
        await until(ranks.fired, comes)
        await victim.ended()
        if victim is not ranks.coordinator:
            await ranks.whole(RANKS - 1)
        await victim.restart()
        await asked
        await ranks.whole(after)
        await load.answered(STREAMS)
        gap = load.longest_gap(began)
    longest = max(recovered(engine) - then for engine, then in zip(others, stood, strict=True))
    shown = ", ".join(map(str, sizes.seen))
    report.lines.append(f"| {before} to {after} | {who} | {point} | {shown} | {longest:.3f} | {gap:.2f} |")
    report.num_answers += load.num_answers
