"""The coordinator as KEDA's external scaler: results of its RPCs while engines join, run requests and leave."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest

from penstock.keda import externalscaler_pb2 as pb
from penstock.keda import externalscaler_pb2_grpc
from penstock_common.types.outputs import SchedulerStats
from tests.fakes.systems.cluster_members import (
    TIMEOUT,
    Engine,
    Frontend,
    address_of,
    alive,
    eventually,
    gauge,
    running,
)


class Scaler:
    """Makes the calls of KEDA for one ScaledObject."""

    def __init__(self, address: str, **metadata: str) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self.stub = externalscaler_pb2_grpc.ExternalScalerStub(self.channel)
        self.ref = pb.ScaledObjectRef(
            name="engines", namespace="serving", scalerMetadata={"scalerAddress": address, **metadata}
        )

    async def metric(self, name: str) -> float:
        request = pb.GetMetricsRequest(scaledObjectRef=self.ref, metricName=name)
        [value] = (await self.stub.GetMetrics(request)).metricValues
        assert value.metricName == name
        return round(value.metricValueFloat, 6)

    async def metrics(self) -> tuple[float, float]:
        return await self.metric("load"), await self.metric("kv_cache_usage")

    async def active(self) -> bool:
        return (await self.stub.IsActive(self.ref)).result

    async def until(self, load: float, kv: float) -> None:
        async with asyncio.timeout(TIMEOUT):
            while await self.metrics() != (load, kv):
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def scaler(address: str, **metadata: str) -> AsyncIterator[Scaler]:
    client = Scaler(address, **metadata)
    async with client.channel:
        yield client


def busy(running: int, waiting: int = 0, kv: float = 0.0, step: int = 1) -> SchedulerStats:
    return SchedulerStats(num_running_reqs=running, num_waiting_reqs=waiting, kv_cache_usage=kv, step_counter=step)


async def test_the_numbers_are_right_up_steady_down_and_at_zero() -> None:
    async with running() as coordinator, scaler(address_of(coordinator), slots="4", idleSeconds="0") as keda:
        frontend = Frontend(address_of(coordinator))
        first, second = (Engine(address_of(coordinator), name, max_num_seqs=4) for name in "ab")
        async with alive(frontend):
            await eventually(lambda: gauge(coordinator, "frontends") == 1)
            await keda.until(0.0, 0.0)
            assert not await keda.active()
            frontend.client.demand(6)
            await keda.until(1.5, 0.0)
            assert await keda.active()
            async with alive(first):
                frontend.client.demand(0)
                first.load = busy(4, 2, 0.5)
                await keda.until(1.5, 0.5)
                assert await keda.active()
                async with alive(second):
                    second.load = busy(3, 0, 0.25)
                    first.load = busy(4, 0, 0.5, step=2)
                    await keda.until(1.75, 0.75)
                    first.load = second.load = SchedulerStats(step_counter=3)
                    await keda.until(0.0, 0.0)
                    assert not await keda.active()
                    first.load = busy(2, step=4)
                    await keda.until(0.5, 0.0)
                await frontend.engines("a")
                assert await keda.metrics() == (0.5, 0.0)
            await frontend.engines()
            await keda.until(0.0, 0.0)
            assert not await keda.active()


async def test_the_targets_are_those_of_the_scaled_object() -> None:
    async with running() as coordinator, scaler(address_of(coordinator), targetLoad="0.6", targetKvUsage="0.9") as keda:
        specs = (await keda.stub.GetMetricSpec(keda.ref)).metricSpecs
        assert [(spec.metricName, spec.targetSizeFloat) for spec in specs] == [("load", 0.6), ("kv_cache_usage", 0.9)]


async def test_pools_are_scaled_each_by_its_own_engines() -> None:
    async with running() as coordinator, scaler(address_of(coordinator), pool="spot") as keda:
        big = Engine(address_of(coordinator), "big", max_num_seqs=4)
        spot = Engine(address_of(coordinator), "spot", pool="spot", max_num_seqs=2)
        async with alive(big, spot):
            big.load, spot.load = busy(4, kv=0.9), busy(1, kv=0.1)
            async with asyncio.timeout(TIMEOUT):
                while True:
                    with contextlib.suppress(grpc.aio.AioRpcError):  # fails until the pool's first engine has joined
                        if await keda.metrics() == (0.5, 0.1):
                            break
                    await asyncio.sleep(0.01)


async def test_a_restarted_coordinator_tells_nothing_until_it_knows_the_cluster() -> None:
    async with running(restart_grace=3600.0) as coordinator, alive(Engine(address_of(coordinator))):
        await eventually(lambda: gauge(coordinator, "engines", state="serving") == 1)
        async with scaler(address_of(coordinator)) as keda:
            for call in (keda.metric("load"), keda.metric("kv_cache_usage"), keda.active()):
                with pytest.raises(grpc.aio.AioRpcError, match="the load of the engines is unknown") as e:
                    await call
                assert e.value.code() is grpc.StatusCode.UNAVAILABLE
            assert gauge(coordinator, "pool_load", pool="default") is None
            assert len((await keda.stub.GetMetricSpec(keda.ref)).metricSpecs) == 2


async def test_an_old_engine_that_reports_no_slots_makes_the_load_unavailable_not_zero() -> None:
    async with running() as coordinator, scaler(address_of(coordinator)) as keda:
        old = Engine(address_of(coordinator), max_num_seqs=0)
        async with alive(old):
            old.load = busy(1, kv=0.5)
            await eventually(lambda: gauge(coordinator, "pool_kv_cache_usage", pool="default") == 0.5)
            with pytest.raises(grpc.aio.AioRpcError, match="its release is too old") as e:
                await keda.metric("load")
            assert e.value.code() is grpc.StatusCode.UNAVAILABLE
            assert await keda.active()
            assert gauge(coordinator, "pool_load", pool="default") is None


async def test_the_stream_tells_at_once_and_at_every_change_and_ends_with_ok() -> None:
    async with running() as coordinator, scaler(address_of(coordinator), idleSeconds="0.05") as keda:
        engine = Engine(address_of(coordinator))
        frontend = Frontend(address_of(coordinator))
        async with asyncio.timeout(TIMEOUT):
            stream = keda.stub.StreamIsActive(keda.ref)
            assert not (await stream.read()).result
            async with alive(frontend):
                await eventually(lambda: gauge(coordinator, "frontends") == 1)
                frontend.client.demand(1)
                assert (await stream.read()).result
                async with alive(engine):
                    engine.load = busy(1)
                    await eventually(lambda: gauge(coordinator, "pool_load", pool="default") != 0)
                    frontend.client.demand(0)
                    await eventually(lambda: gauge(coordinator, "held_requests") == 0)
                    engine.load = SchedulerStats(step_counter=2)
                    assert not (await stream.read()).result
        ending = asyncio.create_task(stream.read())
        coordinator._scaler.stop()
        assert await ending is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK


async def test_a_stream_waits_for_a_coordinator_that_does_not_know_the_cluster_yet() -> None:
    async with running(restart_grace=0.3) as coordinator, scaler(address_of(coordinator)) as keda:
        async with asyncio.timeout(TIMEOUT):
            stream = keda.stub.StreamIsActive(keda.ref)
            assert not (await stream.read()).result


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"targetLoad": "0"}, "scalerMetadata.targetLoad is '0'; it must be a number from 0.01 to 100"),
        ({"pool": "defualt"}, "scalerMetadata.pool is 'defualt'; existing pools: default; did you mean 'default'?"),
    ],
)
async def test_wrong_metadata_is_refused_by_every_method(metadata: dict[str, str], text: str) -> None:
    async with running() as coordinator, scaler(address_of(coordinator), **metadata) as keda:
        await eventually(lambda: gauge(coordinator, "pool_load", pool="default") == 0)
        for call in (keda.metric("load"), keda.active(), keda.stub.StreamIsActive(keda.ref).read()):
            with pytest.raises(grpc.aio.AioRpcError) as e:
                await call
            assert (e.value.code(), e.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, text)


async def test_targets_are_streamed_too() -> None:
    async with running() as coordinator, scaler(address_of(coordinator), targetLoad="0.6") as keda:
        stream = keda.stub.StreamMetricSpec(keda.ref)
        assert await stream.read() == await keda.stub.GetMetricSpec(keda.ref)
        coordinator._scaler.stop()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK


async def test_an_unknown_metric_is_refused() -> None:
    async with running() as coordinator, scaler(address_of(coordinator)) as keda:
        await eventually(lambda: gauge(coordinator, "pool_load", pool="default") == 0)
        with pytest.raises(grpc.aio.AioRpcError, match="metricName is 'x'; known: load, kv_cache_usage"):
            await keda.metric("x")


async def test_prometheus_has_what_is_told_to_keda() -> None:
    async with running() as coordinator:
        engine, frontend = Engine(address_of(coordinator), max_num_seqs=4), Frontend(address_of(coordinator))
        async with alive(engine, frontend):
            engine.load = busy(6, kv=0.5)
            frontend.client.demand(2)
            await eventually(lambda: gauge(coordinator, "pool_load", pool="default") == 2.0)
            assert gauge(coordinator, "pool_kv_cache_usage", pool="default") == 0.5
            assert gauge(coordinator, "pool_wanted_replicas", pool="default") == 3
            assert gauge(coordinator, "pool_engines", pool="default") == 1
