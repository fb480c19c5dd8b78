"""Cluster views between coordinators and frontends of this release and of the previous release.

Also the report intervals between coordinators and engines.
"""

import asyncio

import grpc
import pytest

from penstock.common.v1 import control_pb2
from penstock.coordinator.v1 import messages_pb2 as pb
from penstock.coordinator.v1 import service_pb2_grpc
from penstock_common.config.sections import ServerConfig
from penstock_common.rpc.server import RpcServer
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
    register,
    running,
)


def hello(**views):
    subscription = pb.ViewSubscription(**views)
    return pb.FrontendReport(hello=pb.FrontendHello(frontend_id="f", incarnation="1", views=subscription))


def counter(coordinator, kind):
    return coordinator.registry.get_sample_value("penstock:view_bytes_total", {"kind": kind})


async def test_a_frontend_of_the_last_release_gets_whole_views():
    async with running() as coordinator, connected(address_of(coordinator)) as stub, asyncio.timeout(TIMEOUT):
        old, new = stub.FrontendSession(), Frontend(address_of(coordinator))
        async with alive(Engine(address_of(coordinator)), new) as (engine, _):
            await new.engines("engine-0")
            await old.write(HELLO)
            assert [e.num_running_reqs for e in (await old.read()).engines] == [0]
            engine.load = SchedulerStats(num_running_reqs=5)
            view = await old.read()
            assert [e.num_running_reqs for e in view.engines] == [5]
            assert not view.HasField("delta")
            await new.view_where(lambda v: v.engines[0].num_running_reqs == 5)
            assert counter(coordinator, "delta") > 0
        old.cancel()


async def test_a_frontend_that_supports_deltas_gets_a_whole_view_and_then_deltas():
    async with running() as coordinator, connected(address_of(coordinator)) as stub, asyncio.timeout(TIMEOUT):
        async with alive(Engine(address_of(coordinator))) as (engine,):
            await eventually(lambda: engine.client.connected)
            session = stub.FrontendSession()
            await session.write(hello(deltas=True))
            first = await session.read()
            assert [e.engine_id for e in first.engines] == ["engine-0"]
            engine.load = SchedulerStats(num_running_reqs=5, kv_cache_usage=0.5)
            second = await session.read()
            assert (second.version, second.delta.base_version) == (first.version + 1, first.version)
            assert (list(second.engines), list(second.delta.changed)) == ([], [])
            assert list(second.delta.loads.num_running_reqs) == [5]
            engine.client.draining(30.0)
            third = await session.read()
            assert [e.state for e in third.delta.changed] == [control_pb2.ENGINE_STATE_DRAINING]
            session.cancel()
        await eventually(lambda: not coordinator._cluster._views._channels)


async def test_frontends_see_only_engines_of_their_model_and_pools():
    async with running() as coordinator:
        engines = [Engine(address_of(coordinator), name, pool=name) for name in "abc"]
        some = Frontend(address_of(coordinator), "some", model="demo", pools=["a", "c"])
        none = Frontend(address_of(coordinator), "none", model="another")
        async with alive(*engines, some, none):
            await some.view_where(lambda v: {e.engine_id for e in v.engines} == {"a", "c"})
            engines[2].load = SchedulerStats(num_waiting_reqs=1)
            await some.view_where(lambda v: sum(e.num_waiting_reqs for e in v.engines) == 1)
            assert all(view.engines == () for view in none.views)


@pytest.mark.parametrize(
    ("views", "field"),
    [
        ({"pools": [str(n) for n in range(65)]}, "hello.views.pools"),
        ({"pools": [""]}, "hello.views.pools"),
        ({"model": "m" * 257}, "hello.views.model"),
    ],
)
async def test_a_wrong_subscription_is_refused(views, field):
    async with running() as coordinator, connected(address_of(coordinator)) as stub:
        session = stub.FrontendSession()
        await session.write(hello(**views))
        with pytest.raises(grpc.aio.AioRpcError, match=field) as error:
            await session.read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


class Scripted(service_pb2_grpc.CoordinatorServiceServicer):
    """Coordinator that sends these views to every frontend that connects."""

    def __init__(self, *views):
        self.views = views
        self.hellos = []

    async def FrontendSession(self, request_iterator, context):
        self.hellos.append(await anext(aiter(request_iterator)))
        for view in self.views:
            yield view
        await asyncio.Event().wait()


async def scripted(servicer, frontend_of):
    rpc = RpcServer(ServerConfig(host="127.0.0.1", port=0), service_names=[SERVICE_NAME])
    service_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, rpc.server)
    frontend = Frontend(f"127.0.0.1:{await rpc.start()}")
    try:
        async with alive(frontend):
            await frontend_of(frontend)
    finally:
        await rpc.stop(0)


def status(index, **values):
    return control_pb2.EngineStatus(engine_id=f"e{index}", address="h:1", index=index, **values)


async def test_a_coordinator_of_the_last_release_sends_whole_views_and_that_is_enough():
    views = [pb.ClusterView(engines=[status(0)]), pb.ClusterView(engines=[status(0), status(1)]), pb.ClusterView()]

    async def check(frontend):
        await frontend.view_where(lambda _: len(frontend.views) == 3)
        assert [len(view.engines) for view in frontend.views] == [1, 2, 0]

    await scripted(Scripted(*views), check)


async def test_a_frontend_connects_anew_where_a_delta_does_not_follow():
    coordinator = Scripted(
        pb.ClusterView(version=1, engines=[status(0)]),
        pb.ClusterView(version=3, delta=pb.ViewDelta(base_version=2, removed=[0])),
    )

    async def check(frontend):
        await eventually(lambda: len(coordinator.hellos) >= 2)
        assert all(len(view.engines) == 1 for view in frontend.views)

    await scripted(coordinator, check)


async def test_engines_of_a_pool_are_told_how_often_to_report_as_it_grows_and_shrinks():
    async with running(max_reports_per_second=10) as coordinator, connected(address_of(coordinator)) as stub:
        async with asyncio.timeout(TIMEOUT):
            first = stub.EngineSession()
            await first.write(register("a"))
            assert (await first.read()).HasField("registered")
            alone = (await first.read()).report_interval.seconds
            assert 0.1 <= alone <= 0.125
            second = stub.EngineSession()
            await second.write(register("b"))
            assert (await second.read()).HasField("registered")
            both = (await second.read()).report_interval.seconds
            assert 0.2 <= both <= 0.25
            assert (await first.read()).report_interval.seconds == both
            other = stub.EngineSession()
            await other.write(register("c", pool="other"))
            await other.read()
            assert (await other.read()).report_interval.seconds == alone
            await second.write(pb.EngineReport(notification=pb.NOTIFICATION_SHUTDOWN_COMPLETE))
            assert (await first.read()).report_interval.seconds == alone
            for session in (first, other):
                session.cancel()


async def test_an_engine_reports_as_rarely_as_it_is_told_and_still_keeps_its_lease():
    interval = pb.EngineCommand(report_interval=pb.ReportInterval(seconds=3600.0))
    registered = pb.EngineCommand(registered=pb.Registered(lease_seconds=0.3))
    reports = []

    class Coordinator(service_pb2_grpc.CoordinatorServiceServicer):
        async def EngineSession(self, request_iterator, context):
            messages = aiter(request_iterator)
            await anext(messages)
            yield registered
            yield interval
            async for message in messages:
                reports.append(message)

    rpc = RpcServer(ServerConfig(host="127.0.0.1", port=0), service_names=[SERVICE_NAME])
    service_pb2_grpc.add_CoordinatorServiceServicer_to_server(Coordinator(), rpc.server)
    engine = Engine(f"127.0.0.1:{await rpc.start()}", stats_interval=0.01)
    try:
        async with alive(engine):
            await eventually(lambda: engine.client._told_interval == 3600.0)
            await eventually(lambda: len(reports) >= 3)
    finally:
        await rpc.stop(0)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
async def test_an_interval_that_is_none_ends_the_engines_session(seconds):
    sessions = []

    class Coordinator(service_pb2_grpc.CoordinatorServiceServicer):
        async def EngineSession(self, request_iterator, context):
            sessions.append(1)
            await anext(aiter(request_iterator))
            yield pb.EngineCommand(registered=pb.Registered(lease_seconds=LONG_LEASE))
            yield pb.EngineCommand(report_interval=pb.ReportInterval(seconds=seconds))
            await asyncio.Event().wait()

    rpc = RpcServer(ServerConfig(host="127.0.0.1", port=0), service_names=[SERVICE_NAME])
    service_pb2_grpc.add_CoordinatorServiceServicer_to_server(Coordinator(), rpc.server)
    try:
        async with alive(Engine(f"127.0.0.1:{await rpc.start()}")):
            await eventually(lambda: len(sessions) >= 2)
    finally:
        await rpc.stop(0)


async def test_many_engines_that_join_at_once_are_all_seen():
    async with running(max_reports_per_second=100) as coordinator, connected(address_of(coordinator)) as stub:
        frontend = Frontend(address_of(coordinator))
        async with alive(frontend), asyncio.timeout(TIMEOUT):
            sessions = [stub.EngineSession() for _ in range(40)]
            for number, session in enumerate(sessions):
                await session.write(register(f"e{number}"))
            await frontend.view_where(lambda v: len(v.engines) == 40)
            for session in sessions:
                session.cancel()
