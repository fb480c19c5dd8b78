"""The operators' API, ``penstock.admin.v1.AdminService``."""

from collections.abc import Callable
from typing import Any

import grpc

from penstock.admin.v1 import messages_pb2 as pb
from penstock.admin.v1 import service_pb2, service_pb2_grpc
from penstock_common.errors import RequestFailed
from penstock_common.rpc.cluster import engine_to_proto
from penstock_frontend.api.unserved import refuses_unserved
from penstock_frontend.engine.client import EngineClient

_SERVICE = service_pb2.DESCRIPTOR.services_by_name["AdminService"]
SERVICE_NAME = _SERVICE.full_name

Context = grpc.aio.ServicerContext[Any, Any]


@refuses_unserved(_SERVICE)
class AdminServicer(service_pb2_grpc.AdminServiceServicer):
    """Controls engines through their sessions. What comes later is refused by name."""

    def __init__(self, engines: EngineClient, coordinator_connected: Callable[[], bool]) -> None:
        self._engines = engines
        self._coordinator_connected = coordinator_connected

    async def GetCluster(self, request: pb.GetClusterRequest, context: Context) -> pb.GetClusterResponse:
        """The cluster as this frontend sees it."""
        return pb.GetClusterResponse(
            engines=[engine_to_proto(status) for status in self._engines.cluster()],
            coordinator_connected=self._coordinator_connected(),
        )

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: Context
    ) -> pb.ResetPrefixCacheResponse:
        """Forgets cached prefixes. An engine that has gone meanwhile counts as one that did not."""
        results = await self._engines.call_utility("reset_prefix_cache")
        failed = [result for result in results.values() if isinstance(result, RequestFailed)]
        if failed and len(failed) == len(results):
            raise failed[0]
        return pb.ResetPrefixCacheResponse(num_engines_reset=sum(result is True for result in results.values()))


def add_to_server(server: grpc.aio.Server, engines: EngineClient, coordinator_connected: Callable[[], bool]) -> None:
    """Serve the operators' API on ``server``."""
    # The methods that the class does not define are added by its decorator, which mypy does not see.
    servicer = AdminServicer(engines, coordinator_connected)  # type: ignore[abstract]
    service_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)
