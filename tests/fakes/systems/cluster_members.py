"""Coordinator on a free port, and its real clients of engines and frontends, without the rest of these services."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from penstock.coordinator.v1 import messages_pb2 as pb
from penstock.coordinator.v1 import service_pb2_grpc
from penstock_common.config.sections import ServerConfig
from penstock_common.rpc.credentials import NO_TLS, ClientCredentials
from penstock_common.types.cluster import DEFAULT_POOL, ClusterView, DrainCommand, EngineRegistration
from penstock_common.types.outputs import SchedulerStats
from penstock_coordinator.app import Coordinator
from penstock_coordinator.config import CoordinatorConfig
from penstock_enginecore.config import CoordinatorClientConfig
from penstock_enginecore.rpc.coordinator_client import CoordinatorClient as EngineClient
from penstock_frontend.rpc.coordinator_client import CoordinatorClient as FrontendClient
from tests.fakes.patience import PATIENCE

TIMEOUT = PATIENCE
LONG_LEASE = 600.0


@contextlib.asynccontextmanager
async def running(**config: Any) -> AsyncIterator[Coordinator]:
    values: dict[str, Any] = {"restart_grace": 0.0, "lease_seconds": LONG_LEASE, "view_interval": 0.02} | config
    values.setdefault("server", ServerConfig(host="127.0.0.1", port=0))
    coordinator = Coordinator(CoordinatorConfig(**values))
    await coordinator.start()
    try:
        yield coordinator
    finally:
        await coordinator.stop()


def address_of(coordinator: Coordinator) -> str:
    return f"127.0.0.1:{coordinator.port}"


@contextlib.asynccontextmanager
async def connected(address: str) -> "AsyncIterator[service_pb2_grpc.CoordinatorServiceAsyncStub]":
    async with grpc.aio.insecure_channel(address) as channel:
        yield service_pb2_grpc.CoordinatorServiceStub(channel)


class Engine:
    """An engine's coordinator client, with the answers of an engine process."""

    def __init__(
        self,
        address: str,
        engine_id: str = "engine-0",
        incarnation: str = "1",
        *,
        stats_interval: float = 0.02,
        credentials: ClientCredentials = NO_TLS,
        pool: str = DEFAULT_POOL,
        max_num_seqs: int = 4,
    ) -> None:
        self.load = SchedulerStats()
        self.commands: list[DrainCommand] = []
        self.client = EngineClient(
            CoordinatorClientConfig(address=address, stats_interval=stats_interval, reconnect_max=0.1),
            registration=lambda: EngineRegistration(
                engine_id=engine_id,
                incarnation=incarnation,
                address=f"{engine_id}:50052",
                model="demo",
                pool=pool,
                max_num_seqs=max_num_seqs,
            ),
            stats=lambda: self.load,
            on_command=self.commands.append,
            credentials=credentials,
        )


class Frontend:
    """A frontend's coordinator client, which stores all views and lets tests wait for a view."""

    def __init__(
        self,
        address: str,
        frontend_id: str = "frontend-0",
        *,
        credentials: ClientCredentials = NO_TLS,
        model: str = "",
        pools: Sequence[str] = (),
    ) -> None:
        self.views: list[ClusterView] = []
        self._changed = asyncio.Event()
        self.client = FrontendClient(
            address,
            frontend_id=frontend_id,
            incarnation="1",
            on_view=self._take,
            model=model,
            pools=pools,
            reconnect_max=0.1,
            credentials=credentials,
        )

    def _take(self, view: ClusterView) -> None:
        self.views.append(view)
        self._changed.set()

    async def view_where(self, condition: Callable[[ClusterView], bool]) -> ClusterView:
        async with asyncio.timeout(TIMEOUT):
            while not (self.views and condition(self.views[-1])):
                self._changed.clear()
                await self._changed.wait()
        return self.views[-1]

    async def engines(self, *engine_ids: str) -> ClusterView:
        return await self.view_where(lambda view: [e.engine_id for e in view.engines] == list(engine_ids))


@contextlib.asynccontextmanager
async def alive(*sides: Engine | Frontend) -> AsyncIterator[tuple[Engine | Frontend, ...]]:
    """Run the clients of engines or frontends during the block."""
    tasks = [asyncio.create_task(side.client.run()) for side in sides]
    try:
        yield sides
    finally:
        async with asyncio.timeout(TIMEOUT):
            await asyncio.gather(*(side.client.close() for side in sides))
            await asyncio.gather(*tasks)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT):
        while not condition():
            await asyncio.sleep(0.005)


def register(engine_id: str = "engine-0", incarnation: str = "1", **changes: Any) -> pb.EngineReport:
    return pb.EngineReport(
        register=pb.Register(engine_id=engine_id, incarnation=incarnation, address="h:1", model="demo", **changes)
    )


def gauge(coordinator: Coordinator, name: str, **labels: str) -> float | None:
    return coordinator.registry.get_sample_value(f"penstock_coordinator_{name}", labels)


HELLO = pb.FrontendReport(hello=pb.FrontendHello(frontend_id="f", incarnation="1"))
