"""Client of the admin API, ``penstock.admin.v1``."""

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
    """Engines for which all settings that can change output tokens are equal."""

    config_hash: str
    engine_ids: tuple[str, ...]
    differs: dict[str, str]
    """Values of the settings in which the variants differ, by setting name."""


class LostEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that the frontend lost recently, or that is still missing."""

    engine_id: str
    address: str
    reason: str
    seconds_ago: float
    num_moved: int
    """Number of the frontend's sequences that moved to another engine."""


class TenantRefusals(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a tenant that the frontend refused in the last minute.

    ``tenant`` is empty for requests without a tenant.
    """

    tenant: str
    reason: str
    num_refused: int


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Cluster as seen by one frontend."""

    engines: tuple[EngineStatus, ...]
    """Engines in order of their index."""
    coordinator_connected: bool
    """Whether the frontend has a session with the coordinator."""
    variants: tuple[Variant, ...] = ()
    groups: tuple[PoolGroup, ...] = ()
    """Data-parallel groups whose ranks are engines of the cluster."""
    lost_engines: tuple[LostEngine, ...] = ()
    """Lost engines, most recent first."""
    tenant_refusals: tuple[TenantRefusals, ...] = ()
    """Refusals by tenant and reason, highest count first."""


class AdminClient:
    """Client of a frontend's admin API, which shows and changes the cluster. Use it as an async context manager.

    ``deadline`` is the timeout of a call in seconds. Calls raise RequestFailed, ServerUnreachableError,
    WrongAddressError and TlsMismatchError.
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
        """Return the cluster as the frontend sees it."""
        response = await self._call(self._stub.GetCluster, pb.GetClusterRequest(), deadline)
        engines = sorted(map(engine_from_proto, response.engines), key=lambda engine: (engine.index, engine.engine_id))
        groups = tuple(map(pool_group_from_proto, response.groups))
        return from_message(response, Cluster, engines=tuple(engines), groups=groups)

    async def scale(self, pool: str, replicas: int, *, deadline: float) -> int:
        """Set the number of engines in ``pool`` to ``replicas``. Returns the previous target."""
        request = pb.ScaleRequest(pool=pool, replicas=replicas)
        return int((await self._call(self._stub.Scale, request, deadline)).previous_replicas)

    async def engine_info(self, *, deadline: float) -> dict[str, dict[str, Any]]:
        """Return information about each connected engine, by engine id. A single slow engine makes the call fail."""
        response = await self._call(self._stub.GetEngineInfo, pb.GetEngineInfoRequest(), deadline)
        return {engine_id: json.loads(info) for engine_id, info in response.engines.items()}

    async def load_lora(self, name: str, path: str, *, inplace: bool, pinned: bool, deadline: float) -> "ListedAdapter":
        """Load an adapter into every engine, and give it a name."""
        request = pb.LoadLoraRequest(name=name, path=path, load_inplace=inplace, pinned=pinned)
        return _listed((await self._call(self._stub.LoadLora, request, deadline)).lora)

    async def unload_lora(self, name: str, *, deadline: float) -> None:
        """Remove an adapter name."""
        await self._call(self._stub.UnloadLora, pb.UnloadLoraRequest(name=name), deadline)

    async def list_loras(self, *, deadline: float) -> "list[ListedAdapter]":
        """Return the adapters that requests can use, sorted by name."""
        return list(map(_listed, (await self._call(self._stub.ListLoras, pb.ListLorasRequest(), deadline)).loras))

    async def pin_lora(self, name: str, *, pinned: bool, deadline: float) -> None:
        """Pin an adapter in the memory of every engine, or unpin it."""
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
    """An adapter. ``engine_ids`` names the engines with the adapter in memory, which report ``rank``, ``num_bytes`` and
    ``modules``.
    """

    name: str
    path: str
    digest: str
    """Digest of the adapter in hexadecimal; empty until an engine has read it."""
    source: str
    rank: int
    num_bytes: int
    modules: tuple[str, ...]
    pinned: bool
    engine_ids: tuple[str, ...]


def _listed(info: pb.LoraInfo) -> ListedAdapter:
    return from_message(info, ListedAdapter, digest=info.digest.hex(), source=_SOURCES.get(info.source, ""))
