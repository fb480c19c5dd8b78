"""The coordinator as a real server, with the real clients of engines and frontends, and with raw streams."""

import asyncio
import contextlib

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from penstock.common.v1 import stats_pb2
from penstock.coordinator.v1 import messages_pb2 as pb
from penstock.coordinator.v1 import service_pb2_grpc
from penstock.enginecore.v1 import messages_pb2 as enginecore_pb
from penstock_common.config.sections import ServerConfig
from penstock_common.rpc import handshake
from penstock_common.rpc.server import RpcServer
from penstock_common.rpc.status import from_rpc_error
from penstock_common.types.cluster import DrainCommand, EngineState
from penstock_common.types.outputs import SchedulerStats
from penstock_coordinator.app import SERVICE_NAME
from tests.fakes.systems.cluster_members import (
    HELLO,
    LONG_LEASE,
    TIMEOUT,
    Engine,
    Frontend,
    address_of,
    alive,
    connected,
    eventually,
    gauge,
    register,
    running,
)


async def test_statistics_of_an_engine_reach_every_view():
    async with running() as coordinator:
        engine, frontend = Engine(address_of(coordinator)), Frontend(address_of(coordinator))
        async with alive(engine, frontend):
            view = await frontend.engines("engine-0")
            assert (view.engines[0].index, view.engines[0].state) == (0, EngineState.SERVING)
            assert (view.engines[0].address, view.engines[0].model) == ("engine-0:50052", "demo")
            assert (view.engines[0].pool, view.engines[0].max_num_seqs) == ("default", 4)
            engine.load = SchedulerStats(num_waiting_reqs=3, num_running_reqs=2, kv_cache_usage=0.5, step_counter=1)
            view = await frontend.view_where(lambda view: view.engines[0].num_waiting_reqs == 3)
            assert (view.engines[0].num_running_reqs, view.engines[0].kv_cache_usage) == (2, 0.5)
            assert frontend.client.view == view
            assert frontend.client.connected
            assert engine.client.connected


async def test_an_engine_that_says_so_is_wedged_until_it_says_otherwise():
    async with running() as coordinator:
        engine, frontend = Engine(address_of(coordinator)), Frontend(address_of(coordinator))
        async with alive(engine, frontend):
            engine.load = SchedulerStats(seconds_since_last_step=6.0, wedged=True)
            await frontend.view_where(lambda v: v.engines and v.engines[0].state is EngineState.WEDGED)
            await eventually(lambda: gauge(coordinator, "engines", state="wedged") == 1)
            engine.load = SchedulerStats(seconds_since_last_step=7.0)
            await frontend.view_where(lambda v: v.engines[0].state is EngineState.SERVING)


async def test_a_draining_engine_is_shown_as_such_and_leaves_at_once_when_it_closes():
    async with running() as coordinator:
        leaving, staying = Engine(address_of(coordinator), "a"), Engine(address_of(coordinator), "b")
        frontend = Frontend(address_of(coordinator))
        async with alive(staying, frontend):
            async with alive(leaving):
                await frontend.view_where(lambda view: len(view.engines) == 2)
                leaving.client.draining(30.0)
                await frontend.view_where(
                    lambda view: (
                        {e.engine_id: e.state for e in view.engines}
                        == {"a": EngineState.DRAINING, "b": EngineState.SERVING}
                    )
                )
            await frontend.engines("b")


async def test_an_engine_that_closes_without_draining_leaves_at_once_too():
    async with running() as coordinator:
        frontend = Frontend(address_of(coordinator))
        async with alive(frontend):
            async with alive(Engine(address_of(coordinator))):
                await frontend.engines("engine-0")
            await frontend.engines()


async def test_a_silent_engine_is_gone_when_its_lease_expires_and_its_stream_ends():
    async with running(lease_seconds=0.5) as coordinator, connected(address_of(coordinator)) as stub:
        frontend = Frontend(address_of(coordinator))
        async with alive(frontend), asyncio.timeout(TIMEOUT):
            session = stub.EngineSession()
            await session.write(register())
            registered = (await session.read()).registered
            assert (registered.engine_index, registered.lease_seconds, registered.group_epoch) == (0, 0.5, 0)
            await frontend.engines("engine-0")
            await frontend.engines()
            await session.write(pb.EngineReport(outputs=enginecore_pb.EngineCoreOutputs()))
            with pytest.raises(grpc.aio.AioRpcError, match="register again") as e:
                await session.read()
            assert e.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_an_idle_engine_keeps_its_lease():
    async with running(lease_seconds=0.6) as coordinator:
        idle, frontend = Engine(address_of(coordinator), "idle", stats_interval=60.0), Frontend(address_of(coordinator))
        async with alive(idle, frontend), connected(address_of(coordinator)) as stub:
            for n in range(3):  # each silent engine stays a member until its lease expires
                session = stub.EngineSession()
                await session.write(register(f"silent-{n}"))
                await frontend.view_where(lambda v, n=n: {e.engine_id for e in v.engines} == {"idle", f"silent-{n}"})
                await frontend.engines("idle")
                session.cancel()


async def test_after_a_broken_stream_the_engine_stays_in_the_view_with_its_index():
    async with running() as coordinator, connected(address_of(coordinator)) as stub:
        frontend = Frontend(address_of(coordinator))
        async with alive(frontend):
            first = stub.EngineSession()
            await first.write(register("a"))
            await first.read()
            async with alive(Engine(address_of(coordinator), "b")):
                await frontend.engines("a", "b")
                first.cancel()
                again = stub.EngineSession()
                await again.write(register("a"))
                assert (await again.read()).registered.engine_index == 0
                seen = len(frontend.views)
                async with alive(Engine(address_of(coordinator), "c")):
                    await frontend.engines("a", "b", "c")
                assert all(view.engines[0].engine_id == "a" for view in frontend.views[seen:])


async def test_an_engine_that_registers_as_draining_is_never_shown_as_serving():
    async with running() as coordinator, connected(address_of(coordinator)) as stub:
        frontend = Frontend(address_of(coordinator))
        async with alive(frontend):
            session = stub.EngineSession()
            await session.write(register(draining=True))
            view = await frontend.engines("engine-0")
            assert view.engines[0].state is EngineState.DRAINING


async def test_a_draining_engine_whose_connection_breaks_stays_for_its_lease():
    async with running(lease_seconds=1.0) as coordinator:
        frontend = Frontend(address_of(coordinator))
        async with alive(frontend), alive(Engine(address_of(coordinator), "witness")):
            await frontend.engines("witness")
            async with connected(address_of(coordinator)) as stub:
                session = stub.EngineSession()
                await session.write(register("broken", draining=True))
                await frontend.engines("witness", "broken")
            # the channel is closed: the stream broke off without a half-close
            async with connected(address_of(coordinator)) as stub:
                await stub.GetCluster(pb.GetClusterRequest())
                response = await stub.GetCluster(pb.GetClusterRequest())
            assert [engine.engine_id for engine in response.view.engines] == ["witness", "broken"]
            await frontend.engines("witness")


async def test_a_new_incarnation_replaces_the_old_which_can_not_come_back():
    async with running() as coordinator:
        frontend, old = Frontend(address_of(coordinator)), Engine(address_of(coordinator), incarnation="old")
        async with alive(frontend, old):
            await frontend.engines("engine-0")
            async with alive(Engine(address_of(coordinator), incarnation="new")) as (new,):
                await frontend.view_where(lambda view: view.engines[0].incarnation == "new")
                old.load = SchedulerStats(num_running_reqs=1)
                await eventually(lambda: not old.client.connected)
                new.load = SchedulerStats(num_running_reqs=4)
                await frontend.view_where(lambda view: view.engines[0].num_running_reqs == 4)
                seen = [view.engines[0].incarnation for view in frontend.views if view.engines]
                assert seen == sorted(seen, reverse=True)  # the view changes from old to new only once


async def test_two_live_engines_with_one_id_are_told_and_the_first_stays():
    async with running() as coordinator, connected(address_of(coordinator)) as stub:
        first, second = (
            pb.EngineReport(
                register=pb.Register(engine_id="twin", incarnation=str(n), address=f"10.0.0.{n}:50052", model="demo")
            )
            for n in (1, 2)
        )
        stream = stub.EngineSession()
        await stream.write(first)
        assert (await stream.read()).HasField("registered")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.EngineSession(iter([second])).read()
        failed = from_rpc_error(error.value)
        assert (failed.code, failed.reason, failed.field) == ("ALREADY_EXISTS", "ENGINE_ID_TAKEN", "register.engine_id")
        assert "10.0.0.1:50052" in failed.message
        assert "10.0.0.2:50052" in failed.message
        response = await stub.GetCluster(pb.GetClusterRequest())
        assert [engine.address for engine in response.view.engines] == ["10.0.0.1:50052"]


async def test_a_restarted_coordinator_rebuilds_its_state_and_no_frontend_sees_less():
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(running())
        engines = [Engine(address_of(first), f"engine-{n}") for n in range(5)]
        frontends = [Frontend(address_of(first), f"frontend-{n}") for n in range(3)]
        await stack.enter_async_context(alive(*engines, *frontends))
        names = sorted(f"engine-{n}" for n in range(5))
        everyone = lambda view: sorted(e.engine_id for e in view.engines) == names  # noqa: E731
        for frontend in frontends:
            await frontend.view_where(everyone)
        engines[4].client.draining(30.0)
        engines[3].load = SchedulerStats(num_running_reqs=7, step_counter=3)
        await frontends[0].view_where(lambda v: any(e.state is EngineState.DRAINING for e in v.engines))

        seen = [len(frontend.views) for frontend in frontends]
        await first.stop()
        await eventually(lambda: not any(side.client.connected for side in (*engines, *frontends)))
        for frontend in frontends:
            assert everyone(frontend.client.view)  # the frontend keeps its last view

        server = ServerConfig(host="127.0.0.1", port=first.port)
        # The lease is also the restart grace. Within four seconds, all members can reconnect on a busy machine. The
        # test also waits four seconds.
        await stack.enter_async_context(running(lease_seconds=4.0, restart_grace=None, server=server))
        for frontend in frontends:
            await eventually(lambda frontend=frontend: frontend.client.connected)
        view = await frontends[0].view_where(
            lambda v: {e.engine_id: e.num_running_reqs for e in v.engines}.get("engine-3") == 7
        )
        assert {e.engine_id for e in view.engines if e.state is EngineState.DRAINING} == {"engine-4"}
        for frontend, count in zip(frontends, seen, strict=True):
            assert all(everyone(view) for view in frontend.views[count:])


async def test_no_view_is_sent_in_the_grace_after_a_start_but_get_cluster_answers():
    async with running(restart_grace=600.0) as coordinator, connected(address_of(coordinator)) as stub:
        engine, frontend = Engine(address_of(coordinator)), Frontend(address_of(coordinator))
        async with alive(engine, frontend), asyncio.timeout(TIMEOUT):
            await eventually(lambda: gauge(coordinator, "engines", state="serving") == 1)
            await eventually(lambda: gauge(coordinator, "frontends") == 1)
            response = await stub.GetCluster(pb.GetClusterRequest())
            assert [e.engine_id for e in response.view.engines] == ["engine-0"]
            assert frontend.views == []


async def test_engines_and_frontends_started_first_connect_once_the_coordinator_starts():
    async with running() as gone:
        address, port = address_of(gone), gone.port
    engine, frontend = Engine(address), Frontend(address)
    async with alive(engine, frontend), running(server=ServerConfig(host="127.0.0.1", port=port)):
        await frontend.engines("engine-0")


async def test_many_frontends_see_the_same_and_are_counted():
    async with running() as coordinator:
        frontends = [Frontend(address_of(coordinator), f"frontend-{n}") for n in range(50)]
        async with alive(Engine(address_of(coordinator))) as (engine,):
            async with alive(*frontends):
                engine.load = SchedulerStats(num_running_reqs=9, step_counter=1)
                for frontend in frontends:
                    await frontend.view_where(lambda v: v.engines and v.engines[0].num_running_reqs == 9)
                await eventually(lambda: gauge(coordinator, "frontends") == 50)
            await eventually(lambda: gauge(coordinator, "frontends") == 0)


async def test_demand_of_the_frontends_is_a_metric():
    async with running() as coordinator:
        frontends = [Frontend(address_of(coordinator), f"frontend-{n}") for n in range(2)]
        async with alive(*frontends):
            frontends[0].client.demand(3)
            frontends[1].client.demand(4)
            await eventually(lambda: gauge(coordinator, "held_requests") == 7)
            frontends[0].client.demand(0)
            await eventually(lambda: gauge(coordinator, "held_requests") == 4)
        await eventually(lambda: gauge(coordinator, "held_requests") == 0)


async def test_demand_survives_a_restart_of_the_coordinator():
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(running())
        frontend = Frontend(address_of(first))
        await stack.enter_async_context(alive(frontend))
        frontend.client.demand(5)
        await eventually(lambda: gauge(first, "held_requests") == 5)
        await first.stop()
        server = ServerConfig(host="127.0.0.1", port=first.port)
        second = await stack.enter_async_context(running(server=server))
        await eventually(lambda: gauge(second, "held_requests") == 5)


async def test_a_frontend_that_only_says_hello_still_gets_views():
    async with running() as coordinator, connected(address_of(coordinator)) as stub, asyncio.timeout(TIMEOUT):
        session = stub.FrontendSession()
        await session.write(HELLO)
        await session.done_writing()
        assert (await session.read()).engines == []
        async with alive(Engine(address_of(coordinator))):
            assert [engine.engine_id for engine in (await session.read()).engines] == ["engine-0"]
        session.cancel()


async def test_a_frontend_that_stops_leaves_and_one_that_vanishes_is_lost():
    with capture_logs() as lines:
        async with running() as coordinator, connected(address_of(coordinator)) as stub, asyncio.timeout(TIMEOUT):
            frontend = Frontend(address_of(coordinator))
            async with alive(frontend):
                await frontend.engines()
            await eventually(lambda: any(line["event"] == "frontend left" for line in lines))
            session = stub.FrontendSession()
            await session.write(HELLO)
            await session.read()
            session.cancel()
            await eventually(lambda: any(line["event"] == "frontend lost" for line in lines))
    [lost] = [line for line in lines if line["event"] == "frontend lost"]
    assert (lost["log_level"], lost["frontend"], lost["reason"]) == (
        "warning",
        "f",
        "the stream ended without a goodbye message",
    )
    assert lost["peer"].startswith("ipv4:127.0.0.1:")
    assert [line["log_level"] for line in lines if line["event"] == "frontend left"] == ["info"]


async def test_a_frontend_whose_report_is_refused_is_lost_for_that_reason():
    with capture_logs() as lines:
        async with running() as coordinator, connected(address_of(coordinator)) as stub, asyncio.timeout(TIMEOUT):
            session = stub.FrontendSession()
            await session.write(HELLO)
            await session.write(HELLO)
            await eventually(lambda: any(line["event"] == "frontend lost" for line in lines))
    [lost] = [line for line in lines if line["event"] == "frontend lost"]
    assert lost["reason"] == "report refused: hello was sent twice on this stream; it must be only the first message"


async def test_a_coordinator_that_stops_has_lost_no_frontend():
    with capture_logs() as lines:
        async with running() as coordinator, connected(address_of(coordinator)) as stub, asyncio.timeout(TIMEOUT):
            session = stub.FrontendSession()
            await session.write(HELLO)
            await session.read()
    assert not [line for line in lines if line["event"] == "frontend lost"]


@pytest.mark.parametrize("service", ["", SERVICE_NAME])
async def test_health_is_serving(service):
    async with running() as coordinator, grpc.aio.insecure_channel(address_of(coordinator)) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


# The engine's coordinator client against a coordinator that misbehaves or is not served yet.


class ScriptedCoordinator(service_pb2_grpc.CoordinatorServiceServicer):
    """Accepts an engine and then sends the messages that the test provides."""

    def __init__(self, *answers):
        self.answers = answers
        self.num_sessions = 0

    async def EngineSession(self, request_iterator, context):
        self.num_sessions += 1
        await anext(aiter(request_iterator))
        for answer in self.answers:
            yield answer
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def scripted(*answers):
    rpc = RpcServer(ServerConfig(host="127.0.0.1", port=0), service_names=[SERVICE_NAME])
    servicer = ScriptedCoordinator(*answers)
    service_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, rpc.server)
    port = await rpc.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await rpc.stop(0)


REGISTERED = pb.EngineCommand(registered=pb.Registered(lease_seconds=LONG_LEASE))


async def test_a_drain_command_reaches_the_engine():
    async with scripted(REGISTERED, pb.EngineCommand(drain=pb.Drain(timeout_seconds=12.5))) as (_, address):
        engine = Engine(address)
        async with alive(engine):
            await eventually(lambda: engine.commands == [DrainCommand(12.5)])


@pytest.mark.parametrize(
    "answers",
    [
        [REGISTERED, pb.EngineCommand(start_dp_wave=pb.StartDpWave(wave=1))],
        [REGISTERED, pb.EngineCommand(reconfigure=pb.Reconfigure())],
        [pb.EngineCommand(drain=pb.Drain())],
        [pb.EngineCommand(registered=pb.Registered())],
    ],
)
async def test_an_engine_ends_a_session_with_unsupported_commands_and_reconnects(answers):
    async with scripted(*answers) as (coordinator, address), alive(Engine(address)) as (engine,):
        await eventually(lambda: coordinator.num_sessions >= 3)
        assert engine.commands == []


async def test_an_engine_can_close_while_the_coordinator_does_not_answer():
    async with scripted() as (coordinator, address), alive(Engine(address)):
        await eventually(lambda: coordinator.num_sessions == 1)


async def test_a_defect_in_the_engine_s_statistics_does_not_end_the_client():
    async with running() as coordinator:
        engine, frontend = Engine(address_of(coordinator)), Frontend(address_of(coordinator))
        engine.load = "not statistics"
        async with alive(engine, frontend):
            await frontend.engines("engine-0")
            engine.load = SchedulerStats(num_running_reqs=1)
            await frontend.view_where(lambda v: v.engines[0].num_running_reqs == 1)


# Wrong messages end a stream with an error that names the field, and nothing else.

OUTPUTS = enginecore_pb.EngineCoreOutputs


@pytest.mark.parametrize(
    ("messages", "code", "field"),
    [
        ([], "INVALID_ARGUMENT", "register"),
        ([pb.EngineReport()], "INVALID_ARGUMENT", "register"),
        ([pb.EngineReport(outputs=OUTPUTS())], "INVALID_ARGUMENT", "register"),
        ([register(engine_id="")], "INVALID_ARGUMENT", "register.engine_id"),
        ([register(), register()], "INVALID_ARGUMENT", "register"),
        ([register(), pb.EngineReport()], "INVALID_ARGUMENT", "message"),
        (
            [register(), pb.EngineReport(outputs=OUTPUTS(scheduler_stats=stats_pb2.SchedulerStats(kv_cache_usage=2)))],
            "INVALID_ARGUMENT",
            "outputs.scheduler_stats.kv_cache_usage",
        ),
        ([register(), pb.EngineReport(notification=3)], "INVALID_ARGUMENT", "notification"),
        ([register(), pb.EngineReport(notification=0)], "INVALID_ARGUMENT", "notification"),
        (
            [register(), pb.EngineReport(draining=enginecore_pb.Draining(deadline=float("nan")))],
            "INVALID_ARGUMENT",
            "draining.deadline",
        ),
    ],
)
async def test_wrong_engine_reports_end_the_stream_by_name(messages, code, field):
    async with running() as coordinator, connected(address_of(coordinator)) as stub, asyncio.timeout(TIMEOUT):
        with pytest.raises(grpc.aio.AioRpcError) as e:
            async for _ in stub.EngineSession(iter(messages)):
                pass
        assert e.value.code().name == code
        assert field in e.value.details()
        assert (await stub.GetCluster(pb.GetClusterRequest())).HasField("view")


@pytest.mark.parametrize(
    ("messages", "code", "field"),
    [
        ([], "INVALID_ARGUMENT", "hello"),
        ([pb.FrontendReport(demand=pb.Demand(num_held_requests=1))], "INVALID_ARGUMENT", "hello"),
        ([pb.FrontendReport(hello=pb.FrontendHello())], "INVALID_ARGUMENT", "hello.frontend_id"),
        ([pb.FrontendReport(hello=pb.FrontendHello(frontend_id="f"))], "INVALID_ARGUMENT", "hello.incarnation"),
        ([HELLO, HELLO], "INVALID_ARGUMENT", "hello"),
        ([HELLO, pb.FrontendReport()], "INVALID_ARGUMENT", "message"),
        ([HELLO, pb.FrontendReport(first_request=pb.FirstRequest(wave=1))], "INVALID_ARGUMENT", "first_request.rank"),
    ],
)
async def test_wrong_frontend_reports_end_the_stream_by_name(messages, code, field):
    async with running() as coordinator, connected(address_of(coordinator)) as stub, asyncio.timeout(TIMEOUT):
        with pytest.raises(grpc.aio.AioRpcError) as e:
            async for _ in stub.FrontendSession(iter(messages)):
                pass
        assert e.value.code().name == code
        assert field in e.value.details()
        await eventually(lambda: gauge(coordinator, "frontends") == 0)


async def test_scale_without_a_cluster_to_change_is_refused_by_the_settings_name():
    async with running() as coordinator, connected(address_of(coordinator)) as stub:
        with pytest.raises(
            grpc.aio.AioRpcError, match=r"kubernetes\.deployments and kubernetes\.leader_worker_sets are empty"
        ) as e:
            await stub.Scale(pb.ScaleRequest(replicas=3))
        assert e.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("method", ["FrontendSession", "EngineSession"])
async def test_a_stream_without_a_first_message_ends(method, monkeypatch):
    monkeypatch.setattr(handshake, "FIRST_MESSAGE_TIMEOUT", 0.05)
    async with running() as coordinator, connected(address_of(coordinator)) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            call = getattr(stub, method)()
            while await call.read() is not grpc.aio.EOF:
                pass
            await call
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "did not arrive within 0.05 s" in str(ended.value.details())
