"""Requests without any engine left, requests that crash engines, and clients that cancel."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import DeadlineExceeded, RequestFailed, Unavailable
from penstock_frontend.config import DetectionConfig, RetriesConfig
from tests.fakes.engines.oracle_engine import outputs
from tests.fakes.engines.oracle_process import OracleProcess
from tests.fakes.frontends.frontend_server import eventually
from tests.fakes.patience import PATIENCE
from tests.fakes.systems.matrix.shapes import PROMPT, Shape, plain
from tests.fakes.systems.oracle_cluster import TIMEOUT, OracleCluster, wrong

LENGTH = 30
STEP: dict[str, Any] = {"step_seconds": 0.01}


def engines(count: int = 2, **knobs: Any) -> list[OracleProcess]:
    return [OracleProcess(f"oracle-{number}", **(STEP | knobs)) for number in range(count)]


async def lose_all(cluster: OracleCluster, asked: Sequence[Shape], **options: Any) -> "list[asyncio.Task[Any]]":
    """Start requests, and kill all their engines once the requests have a few tokens."""
    await cluster.until_connected()
    for engine in cluster.engines:
        await engine.set(held=True)
    running = [cluster.start(shape, **options) for shape in asked]
    async with asyncio.timeout(TIMEOUT):
        while sum([(await engine.state())["num_running"] for engine in cluster.engines]) < len(asked):
            await asyncio.sleep(0.01)
    for engine in cluster.engines:
        if (await engine.state())["num_running"]:
            await engine.set(held=False, faults=[{"at": "mid_stream", "count": 5, "action": "hold"}])
            await engine.until(reached=1)
    await asyncio.gather(*(engine.kill() for engine in cluster.engines))
    return running


async def test_requests_are_held_until_an_engine_returns(model: Path) -> None:
    async with OracleCluster(model, engines()) as cluster:
        asked = [plain(number, LENGTH) for number in range(6)]
        running = await lose_all(cluster, asked)
        await cluster.until_held(len(asked))
        late = plain(99, LENGTH)
        running.append(cluster.start(late))
        await cluster.engines[0].start()
        assert wrong([*asked, late], await asyncio.gather(*running)) == []
        resumed = [attempt for _, attempt, prior in (await cluster.engines[0].state())["attempts"] if prior]
        assert len(resumed) == len(asked)
        assert set(resumed) <= {1, 2}, "both engines may have been lost, one after the other"


async def test_what_an_older_attempt_still_says_to_its_engines_new_session_does_not_count(model: Path) -> None:
    detection = DetectionConfig(silence=0.1)
    async with OracleCluster(model, engines(1), detection=detection) as cluster:
        await cluster.until_connected()
        [engine] = cluster.engines
        asked = [plain(number, LENGTH) for number in range(4)]
        await engine.set(
            packets="held_back", step_age=3600.0, faults=[{"at": "mid_stream", "count": 5, "action": "hold"}]
        )
        running = [cluster.start(shape) for shape in asked]
        await engine.until(num_running=len(asked), reached=1)
        await cluster.until_held(len(asked))
        await engine.set(step_age=-1.0)
        await engine.until(num_running=len(asked), attempts=2 * len(asked))
        await engine.set(packets="as_they_are")
        await engine.set(held=False)
        assert wrong(asked, await asyncio.gather(*running)) == []


async def test_requests_that_no_engine_takes_in_time_are_unavailable_and_may_be_retried(model: Path) -> None:
    async with OracleCluster(model, engines(), engine_wait_timeout=0.5) as cluster:
        running = await lose_all(cluster, [plain(number, LENGTH) for number in range(6)])
        for error in await asyncio.gather(*running):
            assert isinstance(error, Unavailable)
            assert error.retry_after is not None
            assert "0.5 s" in error.message
        await eventually(lambda: cluster.frontend.frontend._models[0].assembly.llm.num_live == 0)


async def test_what_was_delivered_before_an_unavailable_end_is_right(model: Path) -> None:
    async with OracleCluster(model, engines(1), engine_wait_timeout=0.2) as cluster:
        await cluster.until_connected()
        call = cluster.frontend.stub.Generate(plain(4, LENGTH * 10).request, timeout=PATIENCE)
        got: list[int] = []
        while len(got) < 5:
            got += (await call.read()).token_ids
        await cluster.engines[0].kill()
        with pytest.raises(grpc.aio.AioRpcError, match="no engine"):
            while True:
                got += (await call.read()).token_ids
        assert got == [outputs.token(4, index) for index in range(len(got))]


@pytest.mark.quick("in its first step")
@pytest.mark.parametrize(
    ("fault", "most_deaths"),
    [({"at": "on_add"}, 3), ({"at": "in_step", "count": 1}, 3), ({"at": "in_step", "count": 4}, 3 + 3)],
    ids=["on add", "in its first step", "at its fourth token"],
)
async def test_a_request_that_engines_die_of_is_quarantined_and_its_neighbours_finish(
    model: Path, fault: dict[str, Any], most_deaths: int
) -> None:
    """Crashes three engines before they produce a token. Before those engines, one engine dies for each token that the
    request produced.
    """
    async with OracleCluster(model, engines(3, faults=[fault | {"salt": "poison"}])) as cluster:
        await cluster.until_connected()
        asked = [plain(number, 2 * LENGTH) for number in range(9)]
        async with cluster.kept_alive():
            running = [cluster.start(shape) for shape in asked]
            for engine in cluster.engines:
                await engine.until(num_steps=2)
            poison = plain(50, LENGTH)
            poison.request.cache_salt = "poison"
            error = await cluster.start(poison)
            assert isinstance(error, RequestFailed)
            assert error.reason == "QUARANTINED"
            assert "engines in a row failed" in error.message
            assert wrong(asked, await asyncio.gather(*running)) == []
            after = plain(60, LENGTH)
            assert wrong([after], [await cluster.start(after)]) == []
        assert cluster.num_deaths <= most_deaths


async def test_a_request_that_moves_too_often_ends(model: Path) -> None:
    """Lets each engine produce a token before it dies.

    The request is not quarantined, but reaches its limit of moves.
    """
    retries = RetriesConfig(max_moves=3)
    knobs = {"faults": [{"at": "after_first_token", "salt": "costly"}]}
    async with OracleCluster(model, engines(2, **knobs), retries=retries) as cluster:
        await cluster.until_connected()
        costly = plain(50, LENGTH)
        costly.request.cache_salt = "costly"
        async with cluster.kept_alive():
            error = await cluster.start(costly)
            assert isinstance(error, Unavailable)
            assert error.reason == "RETRIES_EXHAUSTED"
            assert cluster.num_deaths <= 4


async def test_the_deadline_of_a_held_request_is_kept(model: Path) -> None:
    async with OracleCluster(model, engines(1)) as cluster:
        [running] = await lose_all(cluster, [plain(1, LENGTH)], timeout=3.0)
        await cluster.until_held(1)
        assert isinstance(await running, DeadlineExceeded)
        await cluster.until_held(0)
        await cluster.engines[0].start()
        await cluster.until_connected()
        assert (await cluster.engines[0].state())["attempts"] == []


async def test_a_held_request_whose_client_goes_is_forgotten(model: Path) -> None:
    async with OracleCluster(model, engines(1)) as cluster:
        [running] = await lose_all(cluster, [plain(1, LENGTH)])
        await cluster.until_held(1)
        running.cancel()
        await cluster.until_held(0)
        await eventually(lambda: cluster.frontend.frontend._models[0].assembly.llm.num_live == 0)
        await cluster.engines[0].start()
        await cluster.until_connected()
        assert (await cluster.engines[0].state())["attempts"] == []


async def test_the_deadline_goes_with_a_request_to_its_next_engine(model: Path) -> None:
    async with OracleCluster(model, engines(2)) as cluster:
        await cluster.until_connected()
        running = cluster.start(plain(1, LENGTH * 10), timeout=5.0)
        states = [await engine.state() for engine in cluster.engines]
        while not any(state["num_running"] for state in states):
            states = [await engine.state() for engine in cluster.engines]
        first = next(engine for engine, state in zip(cluster.engines, states, strict=True) if state["num_running"])
        [second] = [engine for engine in cluster.engines if engine is not first]
        await second.set(held=True)
        await first.kill()
        await second.until(num_running=1)
        assert 0 < (await second.state())["times_left"][0] <= 5.0
        assert isinstance(await running, DeadlineExceeded)


async def test_an_aborted_stream_is_aborted_on_the_engine_that_has_it_now(model: Path) -> None:
    async with OracleCluster(model, engines(2)) as cluster:
        await cluster.until_connected()
        request = pb.GenerateRequest(text=PROMPT, request_id="mine")
        request.sampling_params.max_tokens = LENGTH * 10
        call = cluster.frontend.stub.Generate(request)
        await call.read()
        states = [(await engine.state())["num_running"] for engine in cluster.engines]
        first, second = cluster.engines if states[0] else reversed(cluster.engines)
        await first.kill()
        await second.until(num_running=1)
        call.cancel()
        [aborted] = (await second.until(aborted=1))["aborted"]
        assert aborted.startswith("mine")
