"""A thin client of ``penstock.admin.v1``."""

import json
from collections.abc import Awaitable
from typing import Any, Self, TypeVar

import grpc
import msgspec

from penstock.admin.v1 import messages_pb2, service_pb2_grpc
from penstock.admin.v1 import messages_pb2 as pb
from penstock_common.rpc.cluster import engine_from_proto
from penstock_common.rpc.data_parallel import pool_group_from_proto
from penstock_common.rpc.status import from_rpc_error
from penstock_common.types.cluster import EngineStatus
from penstock_common.types.data_parallel import PoolGroup
from penstock_local.rpc.client import call_failure
from penstock_local.rpc.connect import ADMIN, connect


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """An engine and how many requests it has, running or waiting, as the frontend knows it."""

    engine_id: str
    num_requests: int


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """Engines with the same configuration as far as their tokens depend on it."""

    config_hash: str
    engine_ids: tuple[str, ...]
    differs: dict[str, str]
    """Its values of the settings in which the variants differ, by name."""


class LostEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that the frontend lost lately."""

    engine_id: str
    address: str
    reason: str
    seconds_ago: float
    num_moved: int
    """Sequences of the frontend that went on elsewhere."""


class TenantRefusals(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a tenant that the frontend refused in the last minute. ``tenant``: empty for requests that name none."""

    tenant: str
    reason: str
    num_refused: int


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster as one frontend sees it."""

    engines: tuple[EngineStatus, ...]
    """By index."""
    coordinator_connected: bool
    """Whether the frontend has a session with the coordinator."""
    variants: tuple[Variant, ...] = ()
    groups: tuple[PoolGroup, ...] = ()
    """Data-parallel groups that engines are ranks of."""
    lost_engines: tuple[LostEngine, ...] = ()
    """The latest first."""
    tenant_refusals: tuple[TenantRefusals, ...] = ()
    """The most first."""


class AdminClient:
    """Asks a frontend about its cluster, and for changes of it. Use as an async context manager."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = connect(address, prefix=ADMIN)
        self.stub = service_pb2_grpc.AdminServiceStub(self._channel)
        """For what has no method here."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def engine_loads(self) -> list[EngineLoad]:
        """Every engine of the cluster, by id. Raises RequestFailed."""
        try:
            response = await self.stub.GetCluster(messages_pb2.GetClusterRequest())
        except grpc.aio.AioRpcError as e:
            raise from_rpc_error(e) from None
        loads = [
            EngineLoad(engine_id=engine.engine_id, num_requests=engine.num_running_reqs + engine.num_waiting_reqs)
            for engine in response.engines
        ]
        return sorted(loads, key=lambda load: load.engine_id)

    async def cluster(self, *, deadline: float) -> Cluster:
        """The cluster as the frontend sees it. ``deadline``: seconds from now. Raises RequestFailed, ServerUnreachableError."""
        try:
            response = await self.stub.GetCluster(messages_pb2.GetClusterRequest(), timeout=deadline)
        except grpc.aio.AioRpcError as e:
            raise await call_failure(e, self.address, prefix=ADMIN) from None
        engines = sorted(map(engine_from_proto, response.engines), key=lambda engine: (engine.index, engine.engine_id))
        variants = tuple(
            Variant(config_hash=v.config_hash, engine_ids=tuple(v.engine_ids), differs=dict(v.differs))
            for v in response.variants
        )
        return Cluster(
            engines=tuple(engines),
            coordinator_connected=response.coordinator_connected,
            variants=variants,
            groups=tuple(map(pool_group_from_proto, response.groups)),
            lost_engines=tuple(
                LostEngine(
                    engine_id=lost.engine_id,
                    address=lost.address,
                    reason=lost.reason,
                    seconds_ago=lost.seconds_ago,
                    num_moved=lost.num_moved,
                )
                for lost in response.lost_engines
            ),
            tenant_refusals=tuple(
                TenantRefusals(tenant=each.tenant, reason=each.reason, num_refused=each.num_refused)
                for each in response.tenant_refusals
            ),
        )

    async def scale(self, pool: str, replicas: int, *, deadline: float) -> int:
        """Have ``replicas`` engines in ``pool``. Returns how many there were to be before. Raises as ``cluster`` does."""
        request = messages_pb2.ScaleRequest(pool=pool, replicas=replicas)
        try:
            response = await self.stub.Scale(request, timeout=deadline)
        except grpc.aio.AioRpcError as e:
            raise await call_failure(e, self.address, prefix=ADMIN) from None
        return response.previous_replicas

    async def engine_info(self, *, deadline: float) -> dict[str, dict[str, Any]]:
        """What each connected engine is and holds, by engine id. Raises as ``cluster`` does, also for a single slow engine."""
        try:
            response = await self.stub.GetEngineInfo(messages_pb2.GetEngineInfoRequest(), timeout=deadline)
        except grpc.aio.AioRpcError as e:
            raise await call_failure(e, self.address, prefix=ADMIN) from None
        return {engine_id: json.loads(info) for engine_id, info in response.engines.items()}


T = TypeVar("T")
_SOURCES = {
    pb.LORA_SOURCE_CONFIG: "config",
    pb.LORA_SOURCE_DIRECTORY: "directory",
    pb.LORA_SOURCE_RUN_TIME: "run time",
}


class ListedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter. ``rank``, ``num_bytes`` and ``modules`` are as the engines ``engine_ids`` tell, which have it in memory."""

    name: str
    path: str
    digest: str
    """In hexadecimal; empty while no engine has read it."""
    source: str
    rank: int
    num_bytes: int
    modules: tuple[str, ...]
    pinned: bool
    engine_ids: tuple[str, ...]


class LoraCalls:
    """All raise RequestFailed and ServerUnreachableError. ``deadline``: seconds that each call has."""

    def __init__(self, admin: AdminClient, *, deadline: float) -> None:
        self._admin = admin
        self._deadline = deadline

    async def load(self, name: str, path: str, *, inplace: bool, pinned: bool) -> ListedAdapter:
        """Have every engine read an adapter, and give it a name."""
        request = pb.LoadLoraRequest(name=name, path=path, load_inplace=inplace, pinned=pinned)
        return _listed((await self._answer(self._admin.stub.LoadLora(request, timeout=self._deadline))).lora)

    async def unload(self, name: str) -> None:
        """Take a name away."""
        await self._answer(self._admin.stub.UnloadLora(pb.UnloadLoraRequest(name=name), timeout=self._deadline))

    async def list(self) -> list[ListedAdapter]:
        """The adapters that requests can name, by name."""
        answer = await self._answer(self._admin.stub.ListLoras(pb.ListLorasRequest(), timeout=self._deadline))
        return [_listed(each) for each in answer.loras]

    async def pin(self, name: str, *, pinned: bool) -> None:
        """Have every engine keep an adapter in memory, or not any longer."""
        request = pb.PinLoraRequest(name=name, unpin=not pinned)
        await self._answer(self._admin.stub.PinLora(request, timeout=self._deadline))

    async def _answer(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as e:
            raise await call_failure(e, self._admin.address, prefix=ADMIN) from None


def _listed(info: pb.LoraInfo) -> ListedAdapter:
    return ListedAdapter(
        name=info.name,
        path=info.path,
        digest=info.digest.hex(),
        source=_SOURCES.get(info.source, ""),
        rank=info.rank,
        num_bytes=info.num_bytes,
        modules=tuple(info.modules),
        pinned=info.pinned,
        engine_ids=tuple(info.engine_ids),
    )
