"""The calls of ``penstock.admin.v1`` about LoRA adapters."""

from collections.abc import Awaitable
from typing import TypeVar

import grpc
import msgspec

from penstock.admin.v1 import messages_pb2 as pb
from penstock_local.rpc.admin import AdminClient
from penstock_local.rpc.client import call_failure
from penstock_local.rpc.connect import ADMIN

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
