"""Operators' calls over the session: pause, sleep, resets, profiles, and methods of plugins."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.common.v1 import finish_pb2
from penstock_common.types.outputs import FinishReason
from penstock_common.types.sampling import SamplingParams as Params
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.scheduler.base import PauseState
from tests.fakes.clients.session_client import SessionClient, connected
from tests.fakes.engines.engine_harness import make_config
from tests.fakes.engines.engine_server import EngineServer, wait_until
from tests.fakes.engines.fake_executor import FakeExecutor, oracle_tokens
from tests.fakes.engines.in_process import build_engine, generate
from tests.fakes.models.tiny_models import save_tiny_model

LENGTH = 150


@pytest.fixture
def server() -> Any:
    executor = FakeExecutor(model_max_len=1000, available_memory=2**24, check_kv=False)
    # A step lasts a millisecond, so that calls arrive while requests are running.
    executor.on_execute = lambda: threading.Event().wait(0.001)
    server = EngineServer(make_config(num_blocks=None), executor).start().load()
    yield server
    server.stop()


@pytest.fixture
async def client(server: EngineServer) -> AsyncIterator[SessionClient]:
    async with connected(server.address) as client:
        yield client


def state(server: EngineServer) -> PauseState:
    return server.engine.scheduler.pause_state


async def start(client: SessionClient, request_id: str, *, max_tokens: int = LENGTH) -> None:
    """Start a request and wait for its first token."""
    await client.add(request_id, max_tokens=max_tokens)
    await client.until(lambda: client.tokens.get(request_id))


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_pausing_ends_finishes_or_freezes_what_runs(
    client: SessionClient, server: EngineServer, mode: str
) -> None:
    await start(client, "r")
    await client.utility("pause", mode)
    assert state(server) is PauseState.PAUSED
    tokens = len(client.tokens["r"])
    if mode == "abort":
        await client.until_ended("r")
        assert client.ends["r"].finish_reason == finish_pb2.FINISH_REASON_ABORT
        assert client.ends["r"].error.reason == "PAUSED"
    elif mode == "wait":
        assert tokens == LENGTH
    else:
        assert tokens < LENGTH
        steps = server.engine.scheduler.stats().step_counter
        assert await client.utility("is_paused") is True
        assert server.engine.scheduler.stats().step_counter == steps
    await client.utility("resume")
    await client.until_ended("r")
    if mode != "abort":
        assert client.tokens["r"] == oracle_tokens(0, LENGTH, 1000)


async def test_requests_that_come_while_paused_run_after_resume(client: SessionClient, server: EngineServer) -> None:
    await client.utility("pause", "keep")
    await client.add("late", max_tokens=5)
    assert (await client.utility("engine_info"))["pause_state"] == "paused"
    wait_until(lambda: server.engine.scheduler.stats().num_skipped_reqs == 1)
    wait_until(lambda: server.busy_loop.seconds_since_last_step() == 0.0)  # a paused engine is not wedged
    await client.utility("resume")
    await client.until_ended("late")
    assert client.tokens["late"] == oracle_tokens(0, 5, 1000)


async def test_a_pause_that_waits_does_not_wait_for_later_requests(client: SessionClient, server: EngineServer) -> None:
    await start(client, "early")
    paused = asyncio.ensure_future(client.utility("pause", "wait", True))
    await client.until(lambda: state(server) is not PauseState.RUNNING)
    await client.add("late", max_tokens=3)
    assert await paused is None
    assert len(client.tokens["early"]) == LENGTH
    assert "late" not in client.tokens
    await client.utility("resume")
    await client.until_ended("late")


async def test_resuming_fails_a_pause_that_still_waits(client: SessionClient) -> None:
    await start(client, "r", max_tokens=900)
    paused = asyncio.ensure_future(client.utility("pause", "wait"))
    await asyncio.sleep(0)
    await client.utility("resume")
    with pytest.raises(AssertionError, match="resumed before it had drained"):
        await paused
    await client.until_ended("r")


async def test_shutting_down_ends_what_is_frozen(client: SessionClient, server: EngineServer) -> None:
    await start(client, "r")
    await client.utility("pause", "keep")
    server.busy_loop.request_shutdown()
    await client.until_ended("r")
    assert client.ends["r"].error.reason == "DRAINING"


async def test_sleeping_frees_the_device_and_waking_goes_on(client: SessionClient, server: EngineServer) -> None:
    await start(client, "r")
    await client.utility("sleep", 1, "keep")
    assert await client.utility("is_sleeping") is True
    assert server.executor.rpcs == [("sleep", [1])]
    assert server.engine.scheduler.stats().kv_cache_usage == 0.0
    with pytest.raises(AssertionError, match="call wake_up"):
        await client.utility("resume")
    await client.utility("wake_up", ["weights"])
    assert await client.utility("is_sleeping") is True
    await client.utility("wake_up", ["kv_cache"])
    assert server.executor.rpcs[1:] == [("wake_up", [["weights"]]), ("wake_up", [["kv_cache"]])]
    await client.until_ended("r")
    assert client.tokens["r"] == oracle_tokens(0, LENGTH, 1000)


async def test_a_light_sleep_only_stops_scheduling(client: SessionClient, server: EngineServer) -> None:
    await start(client, "r")
    await client.utility("sleep", 0, "keep")
    assert server.executor.rpcs == []
    assert await client.utility("is_sleeping") is True
    await client.utility("wake_up")
    assert await client.utility("is_sleeping") is False
    await client.until_ended("r")


async def test_an_engine_that_was_paused_stays_so_after_sleep(client: SessionClient, server: EngineServer) -> None:
    await client.utility("pause", "keep")
    await client.utility("sleep", 1)
    await client.utility("wake_up")
    assert state(server) is PauseState.PAUSED


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_a_pause_while_the_engine_sleeps_outlives_the_sleep(
    client: SessionClient, server: EngineServer, level: int, mode: str
) -> None:
    await start(client, "r")
    await client.utility("sleep", level, "keep")
    await client.utility("pause", mode)
    await client.utility("wake_up")
    assert state(server) is PauseState.PAUSED
    await client.utility("resume")
    assert state(server) is PauseState.RUNNING
    await client.until_ended("r")
    assert client.tokens["r"] == oracle_tokens(0, LENGTH, 1000)[: len(client.tokens["r"])]


async def test_one_resume_ends_two_pauses(client: SessionClient, server: EngineServer) -> None:
    await start(client, "r")
    await client.utility("pause", "keep")
    await client.utility("pause", "keep")
    await client.utility("resume")
    await client.until_ended("r")
    assert client.tokens["r"] == oracle_tokens(0, LENGTH, 1000)


async def test_a_pause_that_was_resumed_before_does_not_count_after_a_sleep(
    client: SessionClient, server: EngineServer
) -> None:
    await client.utility("pause", "keep")
    await client.utility("resume")
    await client.utility("sleep", 1)
    await client.utility("sleep", 1)
    await client.utility("wake_up")
    assert state(server) is PauseState.RUNNING


async def test_resetting_the_prefix_cache_can_preempt(client: SessionClient) -> None:
    await start(client, "r", max_tokens=900)
    assert await client.utility("reset_prefix_cache") is False
    assert await client.utility("reset_prefix_cache", True) is True
    await client.until_ended("r")
    assert client.tokens["r"] == oracle_tokens(0, 900, 1000)
    assert [event.type for event in client.events["r"]].count(3) == 1


@pytest.mark.parametrize("name", ["reset_mm_cache", "reset_encoder_cache"])
async def test_caches_of_media_can_be_emptied_where_there_are_none(client: SessionClient, name: str) -> None:
    await start(client, "r")
    assert await client.utility(name) is None
    await client.until_ended("r")
    assert client.tokens["r"] == oracle_tokens(0, LENGTH, 1000)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("pause", "soon"), "argument 'mode' is wrong"),
        (("sleep", 3), "argument 'level' is wrong"),
        (("wake_up", ["engine"]), "argument 'tags' is wrong"),
    ],
)
async def test_wrong_arguments_are_named(client: SessionClient, call: tuple[Any, ...], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        await client.utility(*call)


async def test_a_failing_worker_is_a_message_and_the_engine_goes_on(
    client: SessionClient, server: EngineServer
) -> None:
    server.executor.rpc_results["explode"] = RuntimeError("the worker is confused")
    with pytest.raises(AssertionError, match="INTERNAL: collective_rpc failed: RuntimeError: the worker is confused"):
        await client.utility("collective_rpc", "explode")
    await client.add("r", max_tokens=3)
    await client.until_ended("r")


# Over a real model.


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("llama")
    save_tiny_model("llama", directory)
    return directory


def tokens_of(engine: Any, request_id: str) -> list[int]:
    params = Params(temperature=0.0, max_tokens=12)
    run = generate(engine, [(request_id, [5, 6, 7, 8, 9], params)])
    assert run.finish_reasons == {request_id: FinishReason.LENGTH}
    return run.tokens[request_id]


@pytest.mark.parametrize("level", [1, 2])
def test_weights_and_cache_come_back_as_they_were(path: Path, level: int) -> None:
    engine = build_engine(path)
    control = EngineControl(engine)
    before = tokens_of(engine, "before")
    assert control.sleep(level).result() is None
    [info] = engine.executor.collective_rpc("worker_info")
    assert info["kv_cache_bytes"] == 0
    assert (info["weight_bytes"] == 0) == (level == 2)
    control.wake_up()
    [info] = engine.executor.collective_rpc("worker_info")
    assert info["kv_cache_bytes"] > 0
    assert info["weight_bytes"] > 0
    assert tokens_of(engine, "after") == before
    engine.shutdown()


def test_a_profile_is_a_trace_file_with_the_steps_operators(path: Path, tmp_path: Path) -> None:
    engine = build_engine(path, profiler={"directory": str(tmp_path / "traces")})
    control = EngineControl(engine)
    control.start_profile()
    tokens_of(engine, "r")
    [trace] = control.stop_profile()
    names = {event.get("name") for event in json.loads(Path(trace).read_text())["traceEvents"]}
    assert "penstock::linear" in names
    assert Path(trace).stat().st_mode & 0o777 == 0o600
    assert list((tmp_path / "traces").iterdir()) == [Path(trace)]
    engine.shutdown()


def test_profiling_needs_a_directory_and_a_beginning(path: Path, tmp_path: Path) -> None:
    engine = build_engine(path)
    control = EngineControl(engine)
    with pytest.raises(Exception, match="profiler.directory is not set"):
        control.start_profile()
    with pytest.raises(Exception, match="no profile is running"):
        control.stop_profile()
    engine.shutdown()


def test_only_registered_methods_of_workers_can_be_called(path: Path) -> None:
    engine = build_engine(path)
    with pytest.raises(Exception, match="no utility method 'shutdown'"):
        EngineControl(engine).collective_rpc("shutdown")
    engine.shutdown()
