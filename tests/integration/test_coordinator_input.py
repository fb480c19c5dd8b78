"""Wrong messages end a stream with an error that names the field, and nothing else."""

import asyncio

import grpc
import pytest

from penstock.common.v1 import stats_pb2
from penstock.coordinator.v1 import messages_pb2 as pb
from penstock.enginecore.v1 import messages_pb2 as enginecore_pb
from penstock_common.rpc import handshake
from tests.fakes.systems.cluster_members import (
    HELLO,
    TIMEOUT,
    address_of,
    connected,
    eventually,
    gauge,
    register,
    running,
)

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
        with pytest.raises(grpc.aio.AioRpcError, match=r"kubernetes\.deployments is empty") as e:
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
        assert "did not come within 0.05 s" in str(ended.value.details())
