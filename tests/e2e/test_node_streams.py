"""Each node of an engine is killed during 64 streams on two engines. Clients get the tokens of an undisturbed run.

All tests here belong to ``make worker-failures``. A node is a group of processes with its own loopback address.
"""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.conftest import DEMO_MODEL
from tests.e2e.test_worker_streams import read_all, streams
from tests.fakes.patience import PATIENCE
from tests.fakes.systems.cluster import Answer
from tests.fakes.systems.spread_cluster import SpreadCluster

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.environ.get("PENSTOCK_WORKER_FAILURES") != "full", reason="make worker-failures runs it"),
]


class Spread:
    """Two engines, each of which has a second node, and the undisturbed answers of all streams."""

    def __init__(self, cluster: SpreadCluster, expected: list[Answer]) -> None:
        self.cluster, self.expected = cluster, expected


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=[1, 2], ids=["TP1xPP2", "TP2xPP2"])
async def spread(request: pytest.FixtureRequest) -> AsyncIterator[Spread]:
    async with SpreadCluster(DEMO_MODEL, engines=2, tensor_parallel_size=request.param) as cluster:
        yield Spread(cluster, await read_all(streams(cluster)))


@pytest.mark.parametrize("killed", ["engine", "node"])
async def test_every_stream_is_what_it_would_have_been(spread: Spread, killed: str) -> None:
    cluster, engine, node = spread.cluster, spread.cluster.engines[1], spread.cluster.nodes[1]
    calls = streams(cluster)
    firsts = await asyncio.gather(*(call.read() for call in calls))
    await (engine if killed == "engine" else node).kill()
    answers = await read_all(calls)
    for answer, first in zip(answers, firsts, strict=True):
        answer.text, answer.token_ids = first.text + answer.text, [*first.token_ids, *answer.token_ids]
    assert [(a.text, a.token_ids, a.finish_reason) for a in answers] == [
        (a.text, a.token_ids, a.finish_reason) for a in spread.expected
    ]
    async with asyncio.timeout(PATIENCE):
        code = await (node if killed == "engine" else engine).ended()
    assert code == 1, engine.log()[-4000:] + node.log()[-4000:]
    await node.start()
    await engine.start()
    await engine.serving()
    await cluster.until_engines_are_seen(2)
    assert (await cluster.stats())[1].num_running_reqs == 0
