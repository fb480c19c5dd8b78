"""An oracle engine fails at the configured points, and refuses requests that break the contract between frontend and
engine.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args

import pytest

from penstock.common.v1 import finish_pb2, sampling_pb2
from penstock_frontend.config import CoordinatorClientConfig, DetectionConfig
from tests.fakes.clients.session_client import SessionClient, connected
from tests.fakes.engines.oracle_engine import outputs
from tests.fakes.engines.oracle_engine.control import ControlError
from tests.fakes.engines.oracle_engine.knobs import Action, Point
from tests.fakes.engines.oracle_process import OracleProcess
from tests.fakes.frontends.frontend_server import FrontendServer
from tests.fakes.systems import cluster_members
from tests.fakes.systems.matrix.rig import BUSY
from tests.fakes.systems.matrix.shapes import plain, shapes
from tests.fakes.systems.oracle_cluster import OracleCluster, wrong

pytestmark = pytest.mark.slow


@pytest.fixture
async def engine() -> AsyncIterator[OracleProcess]:
    async with OracleProcess("oracle-0") as engine:
        yield await engine.serving()  # type: ignore[misc]


@pytest.fixture
async def session(engine: OracleProcess) -> AsyncIterator[SessionClient]:
    async with connected(engine.address) as session:
        yield session


@pytest.mark.parametrize("point", [point for point in get_args(Point) if point != "draining"])
async def test_an_engine_dies_at_every_point_of_the_protocol_and_every_stream_is_whole(model: Path, point: str) -> None:
    doomed = OracleProcess("doomed", faults=[{"at": point, "count": 3}], step_seconds=0.002)
    spare = OracleProcess("spare", extra_waiting=BUSY)
    async with OracleCluster(model, [doomed, spare]) as cluster:
        await cluster.until_connected(1 if point.endswith("ready") else 2)
        asked = list(shapes(3, [("delta", 1), ("final", 3)], every=False))
        outcomes = await asyncio.gather(*map(cluster.start, asked))
        assert wrong(asked, outcomes) == []
        assert await doomed.ended() == -9


@pytest.mark.parametrize("action", [action for action in get_args(Action) if action != "hold"])
async def test_however_an_engine_fails_every_stream_is_whole(model: Path, action: str) -> None:
    fault = {"at": "mid_stream", "count": 3, "action": action, "seconds": 0.3}
    doomed = OracleProcess("doomed", faults=[fault], step_seconds=0.005, drain_timeout=0.05)
    spare = OracleProcess("spare", extra_waiting=BUSY)
    detection = DetectionConfig(silence=0.1, probe_timeout=1.0)
    async with OracleCluster(model, [doomed, spare], detection=detection) as cluster:
        await cluster.until_connected()
        asked = [plain(number, 30) for number in range(4)]
        assert wrong(asked, await asyncio.gather(*map(cluster.start, asked))) == []


async def test_an_engine_that_dies_as_it_drains_loses_nothing(model: Path) -> None:
    doomed = OracleProcess("doomed", faults=[{"at": "draining"}], step_seconds=0.01)
    spare = OracleProcess("spare", extra_waiting=BUSY)
    async with OracleCluster(model, [doomed, spare]) as cluster:
        await cluster.until_connected()
        asked = [plain(number, 20) for number in range(4)]
        running = [cluster.start(shape) for shape in asked]
        await doomed.until(num_running=4, num_steps=3)
        assert await doomed.stop() == -9
        assert wrong(asked, await asyncio.gather(*running)) == []


async def test_a_drained_engine_finishes_what_it_has_and_ends(model: Path) -> None:
    first = OracleProcess("first", step_seconds=0.005)
    spare = OracleProcess("spare", extra_waiting=BUSY)
    async with OracleCluster(model, [first, spare]) as cluster:
        await cluster.until_connected()
        asked = [plain(number, 20) for number in range(4)]
        running = [cluster.start(shape) for shape in asked]
        await first.until(num_running=4)
        assert await first.stop() == 0
        assert wrong(asked, await asyncio.gather(*running)) == []
        assert (await spare.state())["attempts"] == []


async def test_prior_output_counts_as_output(session: SessionClient) -> None:
    prior = [outputs.token(5, index) for index in range(3)]
    params = sampling_pb2.SamplingParams(seed=5, max_tokens=5, min_tokens=5, stop_token_ids=[outputs.token(5, 3)])
    request: dict[str, Any] = {"attempt": 1, "prior_output_token_ids": prior, "sampling_params": params}
    session.tokens["a"] = list(prior)
    await session.add("a", **request)
    await session.until_ended("a")
    assert session.tokens["a"] == [outputs.token(5, index) for index in range(5)]
    assert {output.attempt for output in session.outputs["a"]} == {1}
    assert session.ends["a"].finish_reason == finish_pb2.FINISH_REASON_LENGTH


async def test_prior_output_that_has_ended_the_request_ends_it_at_once(session: SessionClient) -> None:
    prior = [outputs.token(5, index) for index in range(3)]
    params = sampling_pb2.SamplingParams(seed=5, max_tokens=9, stop_token_ids=prior[-1:])
    session.tokens["a"] = list(prior)
    await session.add("a", attempt=1, prior_output_token_ids=prior, sampling_params=params)
    await session.until_ended("a")
    assert session.tokens["a"] == prior
    assert session.ends["a"].stop_reason.token_id == prior[-1]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"attempt": 1, "prior_output_token_ids": [1, 2]}, "the oracle's output is"),
        ({"prior_output_token_ids": [1]}, "a first attempt has 1 prior_output_token_ids"),
        ({"sampling_params": sampling_pb2.SamplingParams(structured_output={"regex": "a*"})}, "none of an oracle's"),
    ],
)
async def test_invalid_frontend_requests_are_refused(
    session: SessionClient, fields: dict[str, Any], problem: str
) -> None:
    session.tokens["a"] = list(fields.get("prior_output_token_ids", []))
    await session.add("a", **fields)
    await session.until_ended("a")
    assert problem in session.ends["a"].error.message


async def test_a_request_past_its_deadline_ends(engine: OracleProcess, session: SessionClient) -> None:
    await engine.set(held=True)
    await session.add("a", deadline=1.0)
    await session.until_ended("a")
    assert session.ends["a"].error.code == "DEADLINE_EXCEEDED"


async def test_a_stalled_engine_says_how_old_its_last_step_is(engine: OracleProcess, session: SessionClient) -> None:
    async def step_age() -> float:
        age: float = (await session.info()).scheduler_stats.seconds_since_last_step
        return age

    await engine.set(stalled=True)
    assert await step_age() == 0.0
    await session.add("a")
    await engine.until(num_running=1)
    assert await step_age() > 0.0
    await engine.set(stalled=False)
    await session.until_ended("a")


async def test_knobs_that_there_are_not_are_refused(engine: OracleProcess) -> None:
    with pytest.raises(ControlError, match="speed"):
        await engine.set(speed=1)


async def test_an_engine_is_found_through_the_coordinator(model: Path) -> None:
    async with cluster_members.running() as coordinator:
        address = cluster_members.address_of(coordinator)
        engine = OracleProcess("oracle-0")
        engine.add_flag("coordinator.address", address)
        async with engine, FrontendServer(model, coordinator=CoordinatorClientConfig(address=address)) as frontend:
            await frontend.until_health(serving=True)
            shape = plain(3, 12)
            assert wrong([shape], [await frontend.outputs(shape.request.text, seed=3, max_tokens=12)]) == []
