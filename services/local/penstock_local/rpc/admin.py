"""A thin client of ``penstock.admin.v1``."""

import json
from collections.abc import Callable
from typing import Any, Self

import grpc
import msgspec

from penstock.admin.v1 import messages_pb2 as pb
from penstock.admin.v1 import service_pb2_grpc
from penstock_client.errors import of_call
from penstock_common.rpc.by_field import from_message
from penstock_common.rpc.cluster import engine_from_proto
from penstock_common.rpc.data_parallel import pool_group_from_proto
from penstock_common.types.cluster import EngineStatus
from penstock_common.types.data_parallel import PoolGroup
from penstock_local.rpc.client import call_failure
from penstock_local.rpc.connect import ADMIN, connect, metadata


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
    """Asks a frontend about its cluster, and for changes of it. Use as an async context manager.

    ``deadline``: seconds that a call has. Calls raise RequestFailed, ServerUnreachableError, WrongAddressError and
    TlsMismatchError.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = connect(address, prefix=ADMIN)
        self._stub = service_pb2_grpc.AdminServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def cluster(self, *, deadline: float) -> Cluster:
        """The cluster as the frontend sees it."""
        response = await self._call(self._stub.GetCluster, pb.GetClusterRequest(), deadline)
        engines = sorted(map(engine_from_proto, response.engines), key=lambda engine: (engine.index, engine.engine_id))
        groups = tuple(map(pool_group_from_proto, response.groups))
        return from_message(response, Cluster, engines=tuple(engines), groups=groups)

    async def scale(self, pool: str, replicas: int, *, deadline: float) -> int:
        """Have ``replicas`` engines in ``pool``. Returns how many there were to be before."""
        request = pb.ScaleRequest(pool=pool, replicas=replicas)
        return int((await self._call(self._stub.Scale, request, deadline)).previous_replicas)

    async def engine_info(self, *, deadline: float) -> dict[str, dict[str, Any]]:
        """What each connected engine is and holds, by engine id. Raises also for a single slow engine."""
        response = await self._call(self._stub.GetEngineInfo, pb.GetEngineInfoRequest(), deadline)
        return {engine_id: json.loads(info) for engine_id, info in response.engines.items()}

    async def load_lora(self, name: str, path: str, *, inplace: bool, pinned: bool, deadline: float) -> "ListedAdapter":
        """Have every engine read an adapter, and give it a name."""
        request = pb.LoadLoraRequest(name=name, path=path, load_inplace=inplace, pinned=pinned)
        return _listed((await self._call(self._stub.LoadLora, request, deadline)).lora)

    async def unload_lora(self, name: str, *, deadline: float) -> None:
        """Take a name away."""
        await self._call(self._stub.UnloadLora, pb.UnloadLoraRequest(name=name), deadline)

    async def list_loras(self, *, deadline: float) -> "list[ListedAdapter]":
        """The adapters that requests can name, by name."""
        return list(map(_listed, (await self._call(self._stub.ListLoras, pb.ListLorasRequest(), deadline)).loras))

    async def pin_lora(self, name: str, *, pinned: bool, deadline: float) -> None:
        """Have every engine keep an adapter in memory, or not any longer."""
        await self._call(self._stub.PinLora, pb.PinLoraRequest(name=name, unpin=not pinned), deadline)

    async def _call(self, method: Callable[..., Any], request: Any, deadline: float) -> Any:
        try:
            return await method(request, timeout=deadline, metadata=metadata())
        except grpc.aio.AioRpcError as e:
            raise await call_failure(of_call(e), self.address, prefix=ADMIN) from None


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


def _listed(info: pb.LoraInfo) -> ListedAdapter:
    return from_message(info, ListedAdapter, digest=info.digest.hex(), source=_SOURCES.get(info.source, ""))
