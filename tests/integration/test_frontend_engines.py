"""Engines that come, go, drain and misbehave, as a frontend's clients see it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.common.v1 import control_pb2, finish_pb2
from penstock.coordinator.v1 import service_pb2_grpc as coordinator_grpc
from penstock_common.errors import Unavailable
from penstock_common.rpc.cluster import view_to_proto
from penstock_common.rpc.server import RpcServer
from penstock_common.types.cluster import ClusterView, EngineState, EngineStatus
from penstock_frontend.config import CoordinatorClientConfig
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.frontend_server import LOOPBACK, FrontendServer, collect, failure, until_states
from tests.fakes.small_tokenizers import byte_level

VOCAB = byte_level().get_vocab_size()


@pytest.fixture
async def engines() -> AsyncIterator[tuple[FakeEngine, FakeEngine]]:
    """Two engines that step when told to."""
    async with FakeEngine("a", vocab_size=VOCAB, manual=True) as a, FakeEngine("b", vocab_size=VOCAB, manual=True) as b:
        yield a, b


@pytest.fixture
async def frontend(engines: tuple[FakeEngine, FakeEngine], model: Path) -> AsyncIterator[FrontendServer]:
    async with FrontendServer(model, engines=[e.address for e in engines], engine_wait_timeout=10.0) as frontend:
        for engine in engines:
            await engine.until(lambda e: e.sessions)
        await until_states(frontend, {"a": control_pb2.ENGINE_STATE_SERVING, "b": control_pb2.ENGINE_STATE_SERVING})
        yield frontend


async def two_requests(frontend: FrontendServer, engines: tuple[FakeEngine, FakeEngine]) -> list[Any]:
    """A running request on each engine."""
    readers = [asyncio.create_task(collect(frontend.generate(max_tokens=1))) for _ in engines]
    for engine in engines:
        await engine.until(lambda e: e.running)
    owner = {r.message.external_request_id: e for e in engines for r in e.running.values()}
    assert len(owner) == 2
    return readers


async def test_requests_are_spread_evenly(frontend: FrontendServer, engines: tuple[FakeEngine, FakeEngine]) -> None:
    calls = [frontend.generate(max_tokens=1) for _ in range(20)]
    for engine in engines:  # a step's report would make an engine look idle to what is not routed yet
        await engine.until(lambda e: len(e.running) == 10)
    for engine in engines:
        engine.step()
    assert all([await collect(call) for call in calls])


@pytest.mark.parametrize("how", ["break_streams", "close_streams", "die", "kill"])
async def test_the_requests_of_a_lost_engine_end_as_unavailable_naming_it_and_others_go_on(
    frontend: FrontendServer, engines: tuple[FakeEngine, FakeEngine], how: str
) -> None:
    a, b = engines
    readers = await two_requests(frontend, engines)
    lose = getattr(a, how)
    result = lose("out of memory") if how == "die" else lose()
    if how == "kill":
        await result
    done, _ = await asyncio.wait(readers, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    [lost] = done
    error = lost.exception()
    assert isinstance(error, Unavailable)
    assert error.reason == "ENGINE_GONE"
    assert f"engine a at {a.address} is gone" in error.message
    assert how != "die" or "out of memory" in error.message
    b.step()
    [kept] = set(readers) - done
    assert await kept


async def test_new_requests_go_to_the_engines_that_are_left(
    frontend: FrontendServer, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    a, b = engines
    await a.kill()
    await until_states(frontend, {"a": control_pb2.ENGINE_STATE_DEAD, "b": control_pb2.ENGINE_STATE_SERVING})
    calls = [frontend.generate(max_tokens=1) for _ in range(4)]
    await b.until(lambda e: len(e.running) == 4)
    b.step()
    assert all([await collect(call) for call in calls])


async def test_an_engine_that_comes_back_is_used_again(
    frontend: FrontendServer, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    a, b = engines
    await a.kill()
    await b.kill()
    await frontend.until_health(serving=False)
    call = frontend.generate(max_tokens=1)
    await a.start(a.port)
    await a.until(lambda e: e.running)
    a.step()
    assert await collect(call)


async def test_a_draining_engine_finishes_what_it_has_and_gets_nothing_new(
    frontend: FrontendServer, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    a, b = engines
    readers = await two_requests(frontend, engines)
    a.drain()
    await until_states(frontend, {"a": control_pb2.ENGINE_STATE_DRAINING, "b": control_pb2.ENGINE_STATE_SERVING})
    more = [asyncio.create_task(collect(frontend.generate(max_tokens=1))) for _ in range(3)]
    await b.until(lambda e: len(e.running) == 4)
    a.step()
    b.step()
    assert all(await asyncio.gather(*readers, *more))
    assert len(a.requests) == 1


async def test_requests_that_a_leaving_engine_aborts_are_unavailable(
    frontend: FrontendServer, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    a, b = engines
    readers = await two_requests(frontend, engines)
    a.finish_all(finish_pb2.FINISH_REASON_ABORT)
    b.finish_all(finish_pb2.FINISH_REASON_ABORT)
    results = await asyncio.gather(*readers, return_exceptions=True)
    assert [type(r) for r in results] == [Unavailable, Unavailable]


async def test_an_engine_that_skips_tokens_is_treated_as_lost(
    frontend: FrontendServer, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    a, _ = engines

    def skip(output: Any) -> Any:
        output.offset += 1
        return output

    readers = await two_requests(frontend, engines)
    a.mangle = skip
    a.step()
    done, pending = await asyncio.wait(readers, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    error = done.pop().exception()
    assert isinstance(error, Unavailable)
    assert "goes on at token 1, not 0" in error.message
    engines[1].step()
    assert await pending.pop()


async def test_repeated_outputs_are_dropped(frontend: FrontendServer, engines: tuple[FakeEngine, FakeEngine]) -> None:
    a, _ = engines
    calls = [frontend.generate(max_tokens=3, seed=5, detokenize=False) for _ in range(2)]
    for engine in engines:
        await engine.until(lambda e: e.running)
    [request] = a.running.values()
    a.step()
    request.num_sent = 0
    for engine in engines:
        while engine.running:
            engine.step()
    tokens = [[t for m in await collect(call) for t in m.token_ids] for call in calls]
    assert tokens[0] == tokens[1]


async def test_an_explicit_rank_picks_the_engine(model: Path) -> None:
    a = FakeEngine("a", vocab_size=VOCAB, rank=0)
    b = FakeEngine("b", vocab_size=VOCAB, rank=1)
    async with a, b, FrontendServer(model, engines=[a.address, b.address]) as frontend:
        for engine in (a, b):
            await engine.until(lambda e: e.sessions)
        serving = control_pb2.ENGINE_STATE_SERVING
        await until_states(frontend, {"a": serving, "b": serving})
        for rank in (1, 1, 0, 1):
            await frontend.outputs(max_tokens=1, routing={"data_parallel_rank": rank})
    assert (len(a.requests), len(b.requests)) == (1, 3)


async def test_without_engines_a_request_waits_and_then_is_unavailable(model: Path) -> None:
    async with FrontendServer(model, engines=["127.0.0.1:1"], engine_wait_timeout=0.1) as frontend:
        error = await failure(frontend.generate())
    assert isinstance(error, Unavailable)
    assert error.message == "no engine took requests within 0.1 s"
    assert error.retry_after == 1.0


async def test_a_wrong_request_is_refused_also_while_there_is_no_engine(model: Path) -> None:
    async with FrontendServer(model, engines=["127.0.0.1:1"]) as frontend:
        assert (await failure(frontend.generate(temperature=-1))).field == "sampling_params.temperature"


@pytest.mark.parametrize("wrong", [{"model": "another"}, {"protocol_revision": 2}])
async def test_an_engine_of_another_model_or_revision_is_not_used(model: Path, wrong: dict[str, Any]) -> None:
    async with FakeEngine("right", vocab_size=VOCAB) as right, FakeEngine("wrong", **wrong) as other:
        async with FrontendServer(model, engines=[other.address, right.address]) as frontend:
            for _ in range(5):
                await frontend.outputs(max_tokens=1)
        assert other.requests == []


async def test_health_follows_the_engines_on_every_name(model: Path) -> None:
    async with FakeEngine(vocab_size=VOCAB) as engine, FrontendServer(model, engines=[engine.address]) as frontend:
        for service in ("", "penstock.inference.v1.InferenceService"):
            await frontend.until_health(serving=True, service=service)
        engine.drain()
        for service in ("", "penstock.inference.v1.InferenceService"):
            await frontend.until_health(serving=False, service=service)
        with pytest.raises(grpc.aio.AioRpcError) as e:
            stub: Any = health_pb2_grpc.HealthStub(frontend.channel)
            await stub.Check(health_pb2.HealthCheckRequest(service="nope"))
        assert e.value.code() == grpc.StatusCode.NOT_FOUND


class FakeCoordinator(coordinator_grpc.CoordinatorServiceServicer):
    """Sends every frontend one view."""

    def __init__(self, view: ClusterView) -> None:
        self.view = view
        self.hellos: list[Any] = []

    async def FrontendSession(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        self.hellos.append(await anext(aiter(request_iterator)))
        yield view_to_proto(self.view)
        await asyncio.Event().wait()


async def test_engines_are_found_through_the_coordinator(engines: tuple[FakeEngine, FakeEngine], model: Path) -> None:
    a, b = engines
    coordinator = FakeCoordinator(view(a, b))  # type: ignore[abstract]
    server = RpcServer(LOOPBACK, service_names=["penstock.coordinator.v1.CoordinatorService"])
    coordinator_grpc.add_CoordinatorServiceServicer_to_server(coordinator, server.server)
    config = CoordinatorClientConfig(address=f"127.0.0.1:{await server.start()}")
    async with FrontendServer(model, coordinator=config) as frontend:
        both = {"a": control_pb2.ENGINE_STATE_SERVING, "b": control_pb2.ENGINE_STATE_SERVING}
        cluster = await until_states(frontend, both)
        assert cluster.coordinator_connected
        await server.server.stop(None)
        calls = [frontend.generate(max_tokens=1) for _ in range(4)]
        for engine in engines:
            await engine.until(lambda e: len(e.running) == 2)
        for engine in engines:
            engine.step()
        assert all([await collect(call) for call in calls])
    assert [h.hello.frontend_id for h in coordinator.hellos][:1] == ["frontend-0"]


def view(*engines: FakeEngine, **states: EngineState) -> ClusterView:
    return ClusterView(
        engines=tuple(
            EngineStatus(
                engine_id=e.ready.engine_id,
                incarnation=e.ready.incarnation,
                address=e.address,
                state=states.get(e.ready.engine_id, EngineState.SERVING),
                index=index,
            )
            for index, e in enumerate(engines)
        )
    )


async def test_views_bring_engines_and_their_states(
    frontend: FrontendServer, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    a, b = engines
    client = frontend.frontend._engines
    client.follow_view(view(a, b, a=EngineState.WEDGED))
    calls = [frontend.generate(max_tokens=1) for _ in range(3)]
    await b.until(lambda e: len(e.running) == 3)
    b.step()
    assert all([await collect(call) for call in calls])
    assert a.requests == []


async def test_an_engine_that_leaves_the_view_keeps_its_streams_until_it_breaks(
    frontend: FrontendServer, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    a, b = engines
    readers = await two_requests(frontend, engines)
    frontend.frontend._engines.follow_view(view(b))
    a.step()
    b.step()
    assert all(await asyncio.gather(*readers))
    a.close_streams()
    await until_states(frontend, {"b": control_pb2.ENGINE_STATE_SERVING})
    frontend.frontend._engines.follow_view(view(a, b))
    both = {"a": control_pb2.ENGINE_STATE_SERVING, "b": control_pb2.ENGINE_STATE_SERVING}
    await until_states(frontend, both)


async def test_counts_of_a_view_steer_requests_away_from_a_loaded_engine(
    frontend: FrontendServer, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    a, b = engines
    loaded = EngineStatus(engine_id="a", incarnation="1", address=a.address, num_waiting_reqs=20, num_running_reqs=50)
    frontend.frontend._engines.follow_view(ClusterView(engines=(loaded, *view(b).engines)))
    calls = [frontend.generate(max_tokens=1) for _ in range(10)]
    await b.until(lambda e: len(e.running) == 10)
    b.step()
    assert all([await collect(call) for call in calls])
    assert a.requests == []
