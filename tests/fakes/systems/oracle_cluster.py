"""A frontend in front of oracle engines, for one test."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from penstock_common.errors import RequestFailed
from tests.fakes.engines.oracle_process import OracleProcess
from tests.fakes.frontends.frontend_server import FrontendServer, collect
from tests.fakes.patience import PATIENCE
from tests.fakes.systems.matrix.shapes import Shape
from tests.fakes.systems.matrix.verdicts import judge

TIMEOUT = PATIENCE


class OracleCluster:
    """Cluster: ``async with OracleCluster(model, [engine, ...], **frontend options)``. All running engines are
    connected.
    """

    def __init__(self, model: Path, engines: Sequence[OracleProcess], **options: Any) -> None:
        self.engines = engines
        self.num_deaths = 0
        """Number of restarts by ``kept_alive``."""
        self._model = model
        self._options = options
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "OracleCluster":
        for engine in self.engines:
            await self._stack.enter_async_context(engine)
        await asyncio.gather(*(engine.serving() for engine in self.engines))
        addresses = [engine.reached_at for engine in self.engines]
        self.frontend = await self._stack.enter_async_context(
            FrontendServer(self._model, engines=addresses, **self._options)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def until_connected(self, count: int | None = None) -> None:
        """Wait until the frontend uses ``count`` engines, or all engines without a number."""
        wanted = len(self.engines) if count is None else count
        async with asyncio.timeout(TIMEOUT):
            while self.frontend.frontend._models[0].assembly.engines.view.num_engines != wanted:
                await asyncio.sleep(0.01)

    async def until_held(self, count: int) -> None:
        """Wait until ``count`` sequences wait for an engine."""
        async with asyncio.timeout(TIMEOUT):
            while self.frontend.frontend._models[0].assembly.engines._dispatch.num_held != count:
                await asyncio.sleep(0.01)

    def start(self, shape: Shape, *, timeout: float = TIMEOUT) -> "asyncio.Task[Any]":
        """Start a request. The task returns its messages, or raises its error."""

        async def outcome() -> Any:
            try:
                return await collect(self.frontend.stub.Generate(shape.request, timeout=timeout))
            except RequestFailed as e:
                return e

        return asyncio.create_task(outcome())

    @contextlib.asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Restart engines that die, as Kubernetes does."""

        async def keep() -> None:
            while True:
                for engine in self.engines:
                    if not engine.alive:
                        self.num_deaths += 1
                        await engine.start()
                await asyncio.sleep(0.02)

        task = asyncio.create_task(keep())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def wrong(shapes: Sequence[Shape], outcomes: Sequence[Any]) -> list[str]:
    """Return the errors of the streams of these requests, as text."""
    pairs = zip(shapes, outcomes, strict=True)
    return [verdict.problem for shape, outcome in pairs for verdict in judge(shape, outcome) if verdict.kind != "right"]
