"""Each way in which a system goes wrong, and the alerts that must say so."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

from tests.monitoring.system import ENGINES, LIMIT, System

Fault = Callable[[System], AbstractAsyncContextManager[None]]


class Case(NamedTuple):
    """``fault``: the system is as it was when its block is over. ``alerts``: those that fire inside."""

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
    """Requests that run together need more blocks than there are."""
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
    """One of another version, which computes differently."""
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


CASES = {
    case.fault.__name__: case
    for case in (
        Case(no_frontend, {"PenstockNoFrontend"}),
        Case(no_coordinator, {"PenstockCoordinatorDown", "PenstockViewStale"}),
        Case(no_engines, {"PenstockNoEngine", "PenstockRequestsHeld", "PenstockEngineUnreachable", "PenstockErrors"}),
        Case(wedged_engine, {"PenstockEngineWedged", "PenstockEngineWithoutProgress"}),
        Case(small_cache, {"PenstockKvCacheFull", "PenstockPreemptions"}),
        Case(nan, {"PenstockNanLogits"}),
        Case(overload, {"PenstockOverloaded", "PenstockTooFewEngines"}),
        Case(slow_steps, {"PenstockFirstTokenSlow", "PenstockTokensSlow"}),
        Case(another_engine, {"PenstockVariantsMixed", "PenstockVersionsMixed"}),
        Case(restarts, {"PenstockRestarting"}),
    )
}
