"""Faults of a system, and the alerts that each fault must cause."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

import grpc

from penstock.keda import externalscaler_pb2 as pb
from penstock.keda import externalscaler_pb2_grpc
from penstock_common.rpc.channel import make_channel
from tests.monitoring.system import DRAFTS, ENGINES, LIMIT, RENEWED, System

Fault = Callable[[System], AbstractAsyncContextManager[None]]


class Case(NamedTuple):
    """A fault and its alerts.

    Attributes:
        fault: Context manager that causes the fault, and repairs the system at the end of the block.
        alerts: Alerts that must fire inside the block.
    """

    fault: Fault
    alerts: set[str]


@contextlib.asynccontextmanager
async def no_frontend(system: System) -> AsyncIterator[None]:
    await system.frontend.kill()
    yield
    await system.again(system.frontend)


@contextlib.asynccontextmanager
async def no_coordinator(system: System) -> AsyncIterator[None]:
    await system.coordinator.kill()
    yield
    await system.again(system.coordinator)


@contextlib.asynccontextmanager
async def no_engines(system: System) -> AsyncIterator[None]:
    async with system.asked(clients=8):
        for engine in system.engines:
            await engine.kill()
        yield
        await system.again(*system.engines)


@contextlib.asynccontextmanager
async def wedged_engine(system: System) -> AsyncIterator[None]:
    async with system.asked(clients=8):
        system.engines[0].set(hold=True)
        yield
        system.engines[0].set()


@contextlib.asynccontextmanager
async def small_cache(system: System) -> AsyncIterator[None]:
    """Run more concurrent requests than the KV cache has blocks for."""
    async with system.asked(clients=8 * ENGINES, max_tokens=600):
        yield


@contextlib.asynccontextmanager
async def nan(system: System) -> AsyncIterator[None]:
    async with system.asked(clients=4):
        for engine in system.engines:
            engine.set(nan=True)
        yield
        for engine in system.engines:
            engine.set()


@contextlib.asynccontextmanager
async def failing_drafter(system: System) -> AsyncIterator[None]:
    """Make the drafter fail once. The engine then drafts no more tokens until it is restarted."""
    engine = system.engines[DRAFTS]
    async with system.asked(clients=4):
        engine.set(drafter_fails=True)
        yield
        engine.set()
    await engine.stop()
    await system.again(engine)


@contextlib.asynccontextmanager
async def overload(system: System) -> AsyncIterator[None]:
    async with system.asked(clients=LIMIT + 20, max_tokens=200):
        yield


@contextlib.asynccontextmanager
async def slow_steps(system: System) -> AsyncIterator[None]:
    async with system.asked(clients=6 * ENGINES, max_tokens=4):
        for engine in system.engines:
            engine.set(step_seconds=3)
        yield
        for engine in system.engines:
            engine.set()


@contextlib.asynccontextmanager
async def another_engine(system: System) -> AsyncIterator[None]:
    """Restart an engine with another version and revision, so that its results may differ."""
    engine = system.engines[1]
    engine.environment["FAULTY_VERSION"] = "0.0.1"
    engine.add_flag("model.revision", "other")
    await engine.stop()
    await system.again(engine)
    yield
    del engine.environment["FAULTY_VERSION"]
    engine.add_flag("model.revision", "")
    await engine.stop()
    await system.again(engine)


@contextlib.asynccontextmanager
async def restarts(system: System) -> AsyncIterator[None]:
    engine = system.engines[1]
    for _ in range(3):
        await engine.kill()
        await system.again(engine)
        await asyncio.sleep(1)
    yield


@contextlib.asynccontextmanager
async def forgotten_certificate(system: System) -> AsyncIterator[None]:
    system.issue(days=1)
    yield
    system.issue(days=RENEWED)


@contextlib.asynccontextmanager
async def missing_right(system: System) -> AsyncIterator[None]:
    """Give engines work, so that the deletion costs of their pods change, while the coordinator may not write them."""
    system.api_server.status = 403
    async with system.asked(clients=8):
        yield
    system.api_server.status = 200


@contextlib.asynccontextmanager
async def wrong_scaled_object(system: System) -> AsyncIterator[None]:
    """Repeat KEDA's calls with an invalid target."""

    async def ask(keda: "externalscaler_pb2_grpc.ExternalScalerAsyncStub") -> None:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await keda.IsActive(pb.ScaledObjectRef(name="engines", scalerMetadata={"targetLoad": "much"}))
            await asyncio.sleep(0.2)

    async with make_channel(system.coordinator.address) as channel:
        asking = asyncio.create_task(ask(externalscaler_pb2_grpc.ExternalScalerStub(channel)))
        yield
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


CASES = {
    case.fault.__name__: case
    for case in (
        Case(no_frontend, {"PenstockNoFrontend"}),
        Case(no_coordinator, {"PenstockCoordinatorDown", "PenstockViewStale"}),
        Case(no_engines, {"PenstockNoEngine", "PenstockRequestsHeld", "PenstockEngineUnreachable", "PenstockErrors"}),
        Case(wedged_engine, {"PenstockEngineWedged", "PenstockEngineWithoutProgress"}),
        Case(small_cache, {"PenstockKvCacheFull", "PenstockPreemptions"}),
        Case(nan, {"PenstockNanLogits", "PenstockErrors"}),
        Case(failing_drafter, {"PenstockDrafterOff"}),
        Case(overload, {"PenstockOverloaded", "PenstockTooFewEngines"}),
        Case(slow_steps, {"PenstockFirstTokenSlow", "PenstockTokensSlow"}),
        Case(another_engine, {"PenstockVariantsMixed", "PenstockVersionsMixed"}),
        Case(restarts, {"PenstockRestarting"}),
        Case(forgotten_certificate, {"PenstockCertificateExpires"}),
        Case(missing_right, {"PenstockKubernetesFailures"}),
        Case(wrong_scaled_object, {"PenstockScalerErrors"}),
    )
}
