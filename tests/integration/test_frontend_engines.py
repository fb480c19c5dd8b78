"""Effects on a frontend's clients when engines join, leave, drain or misbehave."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.common.v1 import control_pb2, finish_pb2
from penstock.coordinator.v1 import service_pb2_grpc as coordinator_grpc
from penstock_common.errors import Internal, ResourceExhausted, Unavailable
from penstock_common.rpc.cluster import view_to_proto
from penstock_common.rpc.handshake import PROTOCOL_REVISION
from penstock_common.rpc.server import RpcServer
from penstock_common.types.cluster import ClusterView, EngineState, EngineStatus
from penstock_frontend.config import CoordinatorClientConfig, DetectionConfig, HttpConfig
from tests.fakes.engines.fake_engine import FakeEngine, token_at
from tests.fakes.frontends.frontend_server import (
    LOOPBACK,
    FrontendServer,
    collect,
    eventually,
    failure,
    make_request,
    until_states,
)
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.network.tcp_proxy import TcpProxy

VOCAB = byte_level().get_vocab_size()


@pytest.fixture
async def engines() -> AsyncIterator[tuple[FakeEngine, FakeEngine]]:
    """Yield two engines that run a step only on command."""
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
    """Start a request on each engine and return the tasks that read the outputs."""
    readers = [asyncio.create_task(collect(frontend.generate(max_tokens=1))) for _ in engines]
    for engine in engines:
        await engine.until(lambda e: e.running)
    owner = {r.message.external_request_id: e for e in engines for r in e.running.values()}
    assert len(owner) == 2
    return readers


async def two_begun(frontend: FrontendServer, engines: tuple[FakeEngine, FakeEngine]) -> list[Any]:
    """Start calls for six tokens with the seeds 1 and 2, one on each engine. Each call has received two tokens."""
    calls = [frontend.generate(max_tokens=6, seed=seed, detokenize=False) for seed in (1, 2)]
    for engine in engines:
        await engine.until(lambda e: e.running)
        engine.step()
        engine.step()
    return calls


async def test_a_lost_engine_is_told_with_the_sequences_that_moved_and_logged_once(
    frontend: FrontendServer, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    a, b = engines
    calls = [frontend.generate(max_tokens=1, n=3) for _ in range(2)]
    for engine in engines:
        await engine.until(lambda e: len(e.running) == 3)
    with capture_logs() as lines:
        await a.kill()
        await b.until(lambda e: len(e.running) == 6)
    cluster = await until_states(frontend, {"a": control_pb2.ENGINE_STATE_DEAD, "b": control_pb2.ENGINE_STATE_SERVING})
    [lost] = cluster.lost_engines
    assert (lost.engine_id, lost.address, lost.num_moved) == ("a", a.address, 3)
    [line] = [line for line in lines if a.address in str(line)]
    assert (line["event"], line["moved"], len(line["requests"])) == ("engine lost", 3, 1)
    value = frontend.frontend._models[0].assembly.metrics.registry.get_sample_value
    labels = {"model_name": frontend.frontend._models[0].assembly.metrics.model}
    assert value("penstock:engines_connected", labels) == 1
    assert value("penstock:engines_lost_total", {**labels, "cause": "disconnected"}) == 1
    assert value("penstock:engines_lost_total", {**labels, "cause": "failed"}) == 0
    b.step()
    for call in calls:
        assert len([output for output in await collect(call) if output.finish_reason]) == 3
    cluster = await frontend.admin.GetCluster(admin_pb.GetClusterRequest())
    assert [each.num_moved for each in cluster.lost_engines] == [3]


async def test_requests_are_spread_evenly(frontend: FrontendServer, engines: tuple[FakeEngine, FakeEngine]) -> None:
    calls = [frontend.generate(max_tokens=1) for _ in range(20)]
    for engine in engines:  # the report of a step would show an idle engine before the requests are routed
        await engine.until(lambda e: len(e.running) == 10)
    for engine in engines:
        engine.step()
    assert all([await collect(call) for call in calls])


@pytest.mark.parametrize("how", ["break_streams", "close_streams", "die", "kill"])
async def test_the_requests_of_a_lost_engine_go_on_on_another_from_where_they_were(
    frontend: FrontendServer, engines: tuple[FakeEngine, FakeEngine], how: str
) -> None:
    a, b = engines
    calls = await two_begun(frontend, engines)
    lose = getattr(a, how)
    result = lose("out of memory") if how == "die" else lose()
    if how == "kill":
        await result
    await b.until(lambda e: len(e.running) == 2)
    moved = b.requests[-1]
    assert (moved.attempt, len(moved.prior_output_token_ids)) == (1, 2)
    while b.running:
        b.step()
    for seed, call in zip((1, 2), calls, strict=True):
        messages = await collect(call)
        tokens = [token for message in messages for token in message.token_ids]
        assert tokens == [token_at(seed, i, vocab_size=VOCAB) for i in range(6)]
        assert messages[-1].usage.completion_tokens == 6


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
    await frontend.until_engines(0)
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


async def test_requests_that_a_leaving_engine_ends_go_on_on_another(
    frontend: FrontendServer, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    a, b = engines
    readers = await two_requests(frontend, engines)
    a.drain()
    await until_states(frontend, {"a": control_pb2.ENGINE_STATE_DRAINING, "b": control_pb2.ENGINE_STATE_SERVING})
    a.finish_all(finish_pb2.FINISH_REASON_ABORT)
    await b.until(lambda e: len(e.running) == 2)
    b.step()
    assert all(await asyncio.gather(*readers))


async def test_requests_leave_an_engine_that_drains_before_it_ends_them(
    frontend: FrontendServer, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    a, b = engines
    calls = await two_begun(frontend, engines)
    on_a = a.requests[0].request_id
    a.drain(time_left=0.0)
    await b.until(lambda e: len(e.running) == 2)
    await a.until(lambda e: on_a in e.aborted)
    moved = b.requests[-1]
    assert (moved.request_id, moved.attempt, len(moved.prior_output_token_ids)) == (on_a, 1, 2)
    while b.running:
        b.step()
    for seed, call in zip((1, 2), calls, strict=True):
        tokens = [token for message in await collect(call) for token in message.token_ids]
        assert tokens == [token_at(seed, i, vocab_size=VOCAB) for i in range(6)]


async def test_an_engine_that_skips_tokens_is_treated_as_lost(
    frontend: FrontendServer, engines: tuple[FakeEngine, FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = engines

    def skip(output: Any) -> Any:
        output.offset += 1
        return output

    readers = await two_requests(frontend, engines)
    a.mangle = skip
    a.step()
    await b.until(lambda e: len(e.running) == 2)
    b.step()
    assert all(await asyncio.gather(*readers))
    assert "continues at token 1, expected 0" in capsys.readouterr().out


async def test_requests_wait_while_no_engine_is_left_and_go_on_with_the_next(model: Path) -> None:
    engine = FakeEngine("a", vocab_size=VOCAB, manual=True)
    async with engine, FrontendServer(model, engines=[engine.address], engine_wait_timeout=10.0) as frontend:
        call = frontend.generate(max_tokens=2, seed=3, detokenize=False)
        await engine.until(lambda e: e.running)
        engine.step()
        port = engine.port
        await engine.kill()
        await frontend.until_engines(0)
        assert frontend.frontend._models[0].assembly.engines.num_held == 1
        await engine.start(port)
        await engine.until(lambda e: e.running)
        while engine.running:  # one step, or two if the engine died before it sent the first step's frame
            engine.step()
        tokens = [token for message in await collect(call) for token in message.token_ids]
    assert tokens == [token_at(3, i, vocab_size=VOCAB) for i in range(2)]


async def test_requests_that_lose_the_last_engine_end_as_unavailable_when_the_wait_is_over(model: Path) -> None:
    engine = FakeEngine("a", vocab_size=VOCAB, manual=True)
    async with engine, FrontendServer(model, engines=[engine.address], engine_wait_timeout=0.2) as frontend:
        await frontend.until_health(serving=True)
        call = frontend.generate(max_tokens=2)
        await engine.until(lambda e: e.running)
        await engine.kill()
        error = await failure(call)
    assert isinstance(error, Unavailable)
    assert (error.message, error.retry_after) == ("no engine accepted the request within 0.2 s", 1.0)


async def test_a_request_that_is_cancelled_while_it_waits_for_an_engine_is_not_sent_again(model: Path) -> None:
    engine = FakeEngine("a", vocab_size=VOCAB, manual=True)
    async with engine, FrontendServer(model, engines=[engine.address], engine_wait_timeout=10.0) as frontend:
        call = frontend.generate(max_tokens=2)
        await engine.until(lambda e: e.running)
        port = engine.port
        await engine.kill()
        await frontend.until_engines(0)
        call.cancel()
        await eventually(lambda: frontend.frontend._models[0].assembly.engines.num_held == 0)
        await engine.start(port)
        await engine.until(lambda e: e.sessions)
        await frontend.until_engines(1)
        assert len(engine.requests) == 1


async def test_more_requests_than_may_wait_for_an_engine_are_refused(model: Path) -> None:
    async with FrontendServer(model, engines=["127.0.0.1:1"], max_held_requests=1) as frontend:
        first = asyncio.create_task(collect(frontend.generate()))
        await eventually(lambda: frontend.frontend._models[0].assembly.engines.num_held == 1)
        error = await failure(frontend.generate())
        first.cancel()
    assert isinstance(error, ResourceExhausted)
    assert error.message == "1 requests wait for an engine; the limit max_held_requests is 1"


async def test_an_engine_whose_queue_is_full_passes_the_request_on(
    frontend: FrontendServer, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    a, b = engines
    full = finish_pb2.RequestError(code="RESOURCE_EXHAUSTED", message="the queue is full", reason="QUEUE_FULL")
    a.refusal = full
    calls = [frontend.generate(max_tokens=1) for _ in range(4)]
    await b.until(lambda e: len(e.running) == 4)
    b.step()
    assert all([await collect(call) for call in calls])
    b.refusal = full
    assert isinstance(await failure(frontend.generate()), ResourceExhausted)


async def test_a_request_that_engines_die_of_is_quarantined_and_its_neighbours_finish(model: Path) -> None:
    engines = [FakeEngine(name, vocab_size=VOCAB, manual=True) for name in "abcd"]
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        frontend = await stack.enter_async_context(FrontendServer(model, engines=[e.address for e in engines]))
        await until_states(frontend, dict.fromkeys("abcd", control_pb2.ENGINE_STATE_SERVING))
        poison = asyncio.create_task(collect(frontend.generate(request_id="poison", max_tokens=2)))
        neighbours = [asyncio.create_task(collect(frontend.generate(max_tokens=2))) for _ in range(8)]
        died = 0
        while not poison.done():
            for engine in engines:
                if any(r.message.external_request_id == "poison" for r in engine.running.values()):
                    await engine.kill()
                    died += 1
                elif engine.running:
                    engine.step()
            await asyncio.sleep(0.001)
        assert 2 <= died <= 3
        error = poison.exception()
        assert isinstance(error, Internal)
        assert error.reason == "QUARANTINED"
        # Two deaths suffice if the request was alone on both engines. The first engine may also have run other
        # requests.
        expected = (
            f"{died} engines in a row failed",
            "2 engines in a row failed while this request was the only request on the engine",
        )
        assert error.message.startswith(expected)
        while not all(task.done() for task in neighbours):
            for engine in engines:
                if engine.running:
                    engine.step()
            await asyncio.sleep(0.001)
        assert all(await asyncio.gather(*neighbours))


@pytest.mark.parametrize("dies", [False, True])
async def test_whose_engines_lost_their_connections_is_what_they_died_of_only_if_they_did(
    engines: tuple[FakeEngine, FakeEngine], frontend: FrontendServer, dies: bool
) -> None:
    """Breaks both connections while a request is alone on each engine in turn.

    If ``dies`` is set, each engine reconnects with a new incarnation. Otherwise the engine is still the same process.
    """
    request = asyncio.create_task(collect(frontend.generate(max_tokens=1)))
    for number in range(2):
        while not (having := [engine for engine in engines if engine.running]):
            assert not request.done()
            await asyncio.sleep(0.001)
        if dies:
            having[0].ready.incarnation = f"another {number}"
        having[0].break_streams()
        await having[0].until(lambda engine: not engine.running)
    if dies:
        await eventually(request.done)
        error = request.exception()
        assert isinstance(error, Internal)
        assert error.reason == "QUARANTINED"
        assert "the stream broke" in error.message
        return
    while not request.done():
        for engine in engines:
            if engine.running:
                engine.step()
        await asyncio.sleep(0.001)
    assert request.result()


async def test_engines_that_are_listed_no_more_count_as_dead(
    engines: tuple[FakeEngine, FakeEngine], model: Path
) -> None:
    """Cuts the connections of both engines while a request is alone on each of them in turn.

    The request waits without an engine until the list of engines is empty. Then the frontend quarantines the request.
    """
    async with contextlib.AsyncExitStack() as stack:
        cables = [TcpProxy(engine.port) for engine in engines]
        for cable in cables:
            await cable.start()
            stack.push_async_callback(cable.close)
        addresses = [f"127.0.0.1:{cable.port}" for cable in cables]
        frontend = await stack.enter_async_context(FrontendServer(model, engines=addresses))
        await frontend.until_engines(2)
        request = asyncio.create_task(collect(frontend.generate(max_tokens=1)))
        for _ in cables:
            await eventually(lambda: sum(bool(engine.running) for engine in engines) == 1)
            [number] = [number for number, engine in enumerate(engines) if engine.running]
            cables[number].unplug()
            cables[number].cut()
            await engines[number].until(lambda engine: not engine.running)
        await eventually(lambda: frontend.frontend._models[0].assembly.engines.num_held == 1)
        assert not request.done()
        frontend.frontend._models[0].assembly.engines.follow([])
        await eventually(request.done)
        error = request.exception()
        assert isinstance(error, Internal)
        assert error.reason == "QUARANTINED"


async def test_an_engine_that_is_stopped_is_found_out_and_its_requests_go_on(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Freezes an engine: its connection stays open, but the engine sends nothing."""
    a = FakeEngine("a", vocab_size=VOCAB, manual=True)
    b = FakeEngine("b", vocab_size=VOCAB, manual=True)
    detection = DetectionConfig(silence=0.1, probe_timeout=1.0)
    async with a, b, FrontendServer(model, engines=[a.address, b.address], detection=detection) as frontend:
        await until_states(frontend, dict.fromkeys("ab", control_pb2.ENGINE_STATE_SERVING))
        readers = await two_requests(frontend, (a, b))
        a.frozen = True
        await b.until(lambda e: len(e.running) == 2)
        while not all(reader.done() for reader in readers):  # on a busy machine, b may also count as lost
            b.step()
            await asyncio.sleep(0.001)
        assert all(await asyncio.gather(*readers))
    assert "did not answer a probe within 1 s" in capsys.readouterr().out


async def test_a_wedged_engine_loses_its_requests_and_gets_no_more_until_it_steps_again(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = FakeEngine("a", vocab_size=VOCAB, manual=True)
    b = FakeEngine("b", vocab_size=VOCAB, manual=True)
    detection = DetectionConfig(silence=0.1, probe_timeout=5.0)
    async with a, b, FrontendServer(model, engines=[a.address, b.address], detection=detection) as frontend:
        both = dict.fromkeys("ab", control_pb2.ENGINE_STATE_SERVING)
        await until_states(frontend, both)
        readers = await two_requests(frontend, (a, b))
        a.step_age, a.wedged = 11.0, True
        await b.until(lambda e: len(e.running) == 2)
        more = [asyncio.create_task(collect(frontend.generate(max_tokens=1))) for _ in range(4)]
        await b.until(lambda e: len(e.running) == 6)
        b.step()
        assert all(await asyncio.gather(*readers, *more))
        a.step_age, a.wedged = 0.0, False
        await until_states(frontend, both)
    assert "finished no step for 11.0 s" in capsys.readouterr().out


async def test_an_engine_with_a_slow_step_keeps_its_requests_unless_it_reports_wedged(model: Path) -> None:
    engine = FakeEngine("a", vocab_size=VOCAB, manual=True)
    detection = DetectionConfig(silence=0.05, probe_timeout=5.0)
    async with engine, FrontendServer(model, engines=[engine.address], detection=detection) as frontend:
        engine.step_age = 86_400.0
        call = frontend.generate(max_tokens=1)
        await engine.until(lambda e: e.num_asked >= 3)
        engine.step()
        assert await collect(call)
    assert len(engine.requests) == 1


async def test_an_idle_frontend_sends_no_requests_to_a_wedged_engine(
    frontend: FrontendServer, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    a, b = engines
    a.wedged = True
    a.tell()
    await until_states(frontend, {"a": control_pb2.ENGINE_STATE_WEDGED, "b": control_pb2.ENGINE_STATE_SERVING})
    calls = [frontend.generate(max_tokens=1) for _ in range(3)]
    await b.until(lambda e: len(e.running) == 3)
    a.wedged = False
    a.tell()
    await until_states(frontend, dict.fromkeys("ab", control_pb2.ENGINE_STATE_SERVING))
    b.step()
    assert all([await collect(call) for call in calls])


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


@pytest.fixture
async def pinned(model: Path) -> AsyncIterator[tuple[FrontendServer, FakeEngine, FakeEngine]]:
    """Yield a frontend whose list has engine b before engine a.

    Both engines report rank 0, like all engines without a data-parallel group.
    """
    async with (
        FakeEngine("a", vocab_size=VOCAB) as a,
        FakeEngine("b", vocab_size=VOCAB) as b,
        FrontendServer(model, engines=[b.address, a.address], http=HttpConfig(host="127.0.0.1", port=0)) as f,
    ):
        await until_states(f, dict.fromkeys("ab", control_pb2.ENGINE_STATE_SERVING))
        yield f, a, b


async def test_the_rank_of_an_engine_of_a_list_is_its_place(
    pinned: tuple[FrontendServer, FakeEngine, FakeEngine],
) -> None:
    frontend, a, b = pinned
    for rank in (1, 1, 0, 1):
        await frontend.outputs(max_tokens=1, routing={"data_parallel_rank": rank})
    assert (len(a.requests), len(b.requests)) == (3, 1)
    cluster = await frontend.admin.GetCluster(admin_pb.GetClusterRequest())
    assert {engine.engine_id: engine.index for engine in cluster.engines} == {"a": 1, "b": 0}


@pytest.mark.parametrize("header", ["x-penstock-data-parallel-rank", "X-data-parallel-rank"])
async def test_a_rank_may_come_by_our_header_or_vllm_s(
    pinned: tuple[FrontendServer, FakeEngine, FakeEngine], header: str
) -> None:
    frontend, a, b = pinned
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{frontend.frontend.http_port}") as http:
        body = {"model": "model", "prompt": "hi", "max_tokens": 1}
        for _ in range(3):
            answer = await http.post("/v1/completions", json=body, headers={header: "1"})
            assert answer.status_code == 200
        wrong = await http.post("/v1/completions", json=body, headers={header: "2"})
    call = frontend.stub.Generate(make_request(max_tokens=1), metadata=((header.lower(), "1"),))
    await collect(call)
    assert (len(a.requests), len(b.requests)) == (4, 0)
    assert wrong.status_code == 400
    assert (
        wrong.json()["error"]["message"]
        == "routing.data_parallel_rank is 2, but no engine has this rank; known ranks: 0, 1"
    )


async def test_a_rank_that_is_not_connected_is_waited_for(
    pinned: tuple[FrontendServer, FakeEngine, FakeEngine],
) -> None:
    frontend, a, b = pinned
    port = a.port
    await a.kill()
    await until_states(frontend, {"a": control_pb2.ENGINE_STATE_DEAD, "b": control_pb2.ENGINE_STATE_SERVING})
    call = asyncio.create_task(frontend.outputs(max_tokens=1, routing={"data_parallel_rank": 1}))
    await eventually(lambda: frontend.frontend._models[0].assembly.engines.num_held == 1)
    await a.start(port)
    assert await call
    assert (len(a.requests), len(b.requests)) == (1, 0)


async def test_an_engine_that_lost_its_index_to_another_has_no_rank(
    frontend: FrontendServer, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    a, b = engines
    frontend.frontend._models[0].assembly.engines.follow_view(view(a))
    # b has a's index, because a's lease has expired, while a's session is still open.
    frontend.frontend._models[0].assembly.engines.follow_view(view(b))
    calls = [frontend.generate(max_tokens=1, routing={"data_parallel_rank": 0}) for _ in range(4)]
    await b.until(lambda e: len(e.running) == 4)
    b.step()
    assert all([await collect(call) for call in calls])
    error = await failure(frontend.generate(routing={"data_parallel_rank": 1}))
    assert error.message == "routing.data_parallel_rank is 1, but no engine has this rank; known ranks: 0"


async def test_without_engines_a_request_waits_and_then_is_unavailable(model: Path) -> None:
    async with FrontendServer(model, engines=["127.0.0.1:1"], engine_wait_timeout=0.1) as frontend:
        error = await failure(frontend.generate())
    assert isinstance(error, Unavailable)
    assert error.message == "no engine accepted requests within 0.1 s"
    assert error.retry_after == 1.0


async def test_a_wrong_request_is_refused_also_while_there_is_no_engine(model: Path) -> None:
    async with FrontendServer(model, engines=["127.0.0.1:1"]) as frontend:
        assert (await failure(frontend.generate(temperature=-1))).field == "sampling_params.temperature"


@pytest.mark.parametrize("wrong", [{"model": "another"}, {"protocol_revision": PROTOCOL_REVISION + 1}])
async def test_an_engine_of_another_model_or_revision_is_not_used(model: Path, wrong: dict[str, Any]) -> None:
    async with FakeEngine("right", vocab_size=VOCAB) as right, FakeEngine("wrong", **wrong) as other:
        async with FrontendServer(model, engines=[other.address, right.address]) as frontend:
            for _ in range(5):
                await frontend.outputs(max_tokens=1)
        assert other.requests == []


class FakeCoordinator(coordinator_grpc.CoordinatorServiceServicer):
    """Coordinator that sends one view to every frontend."""

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
    client = frontend.frontend._models[0].assembly.engines
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
    frontend.frontend._models[0].assembly.engines.follow_view(view(b))
    a.step()
    b.step()
    assert all(await asyncio.gather(*readers))
    a.close_streams()
    await until_states(frontend, {"b": control_pb2.ENGINE_STATE_SERVING})
    frontend.frontend._models[0].assembly.engines.follow_view(view(a, b))
    both = {"a": control_pb2.ENGINE_STATE_SERVING, "b": control_pb2.ENGINE_STATE_SERVING}
    await until_states(frontend, both)


async def test_an_engine_past_max_engines_gets_nothing_new_and_is_given_up_when_it_is_idle(
    engines: tuple[FakeEngine, FakeEngine], model: Path
) -> None:
    a, b = engines
    few = CoordinatorClientConfig(max_engines=1)
    async with FrontendServer(model, engines=[a.address, b.address], coordinator=few) as frontend:
        await until_states(frontend, dict.fromkeys("ab", control_pb2.ENGINE_STATE_SERVING))
        readers = await two_requests(frontend, engines)
        client = frontend.frontend._models[0].assembly.engines
        client.follow_view(view(a, b))
        calls = [frontend.generate(max_tokens=1) for _ in range(4)]
        while len(a.running) + len(b.running) < 6:
            await asyncio.sleep(0)
        kept, spare = (a, b) if len(a.running) == 5 else (b, a)
        assert len(spare.running) == 1
        kept.step()
        spare.step()
        assert all(await asyncio.gather(*readers, *map(collect, calls)))
        client.follow_view(view(a, b))
        await spare.until(lambda e: not e.sessions)
        assert kept.sessions
        client.follow_view(view(a, b, **{kept.ready.engine_id: EngineState.DRAINING}))
        await spare.until(lambda e: e.sessions)


async def test_an_idle_engine_whose_lease_expired_and_that_does_not_answer_is_lost(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = FakeEngine("a", vocab_size=VOCAB), FakeEngine("b", vocab_size=VOCAB)
    detection = DetectionConfig(silence=0.05, probe_timeout=1.0)
    async with a, b, FrontendServer(model, engines=[a.address, b.address], detection=detection) as frontend:
        await until_states(frontend, dict.fromkeys("ab", control_pb2.ENGINE_STATE_SERVING))
        a.frozen = True
        frontend.frontend._models[0].assembly.engines.follow_view(view(b))
        await until_states(frontend, {"b": control_pb2.ENGINE_STATE_SERVING})
    said = capsys.readouterr().out
    assert (
        "the coordinator does not list an engine; the frontend uses the engine until a probe of the engine fails"
        in said
    )
    assert "the coordinator did not list the engine, and the engine did not answer a probe within 1 s" in said


async def test_counts_of_a_view_steer_requests_away_from_a_loaded_engine(
    frontend: FrontendServer, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    a, b = engines
    loaded = EngineStatus(engine_id="a", incarnation="1", address=a.address, num_waiting_reqs=20, num_running_reqs=50)
    frontend.frontend._models[0].assembly.engines.follow_view(ClusterView(engines=(loaded, *view(b).engines)))
    calls = [frontend.generate(max_tokens=1) for _ in range(10)]
    await b.until(lambda e: len(e.running) == 10)
    b.step()
    assert all([await collect(call) for call in calls])
    assert a.requests == []
