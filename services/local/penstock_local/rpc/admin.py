"""A thin client of ``penstock.admin.v1``."""

from typing import Self

import grpc
import msgspec

from penstock.admin.v1 import messages_pb2, service_pb2_grpc
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.status import from_rpc_error


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """An engine and how many requests it has, running or waiting, as the frontend knows it."""

    engine_id: str
    num_requests: int


class AdminClient:
    """Asks a frontend about its cluster. Use as an async context manager."""

    def __init__(self, address: str) -> None:
        self._channel = make_channel(address)
        self._stub = service_pb2_grpc.AdminServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def engine_loads(self) -> list[EngineLoad]:
        """Every engine of the cluster, by id. Raises RequestFailed."""
        try:
            response = await self._stub.GetCluster(messages_pb2.GetClusterRequest())
        except grpc.aio.AioRpcError as e:
            raise from_rpc_error(e) from None
        loads = [
            EngineLoad(engine_id=engine.engine_id, num_requests=engine.num_running_reqs + engine.num_waiting_reqs)
            for engine in response.engines
        ]
        return sorted(loads, key=lambda load: load.engine_id)
