"""A thin client of ``penstock.coordinator.v1``, for the command that has started the coordinator."""

import grpc

from penstock.coordinator.v1 import messages_pb2, service_pb2_grpc
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.cluster import view_from_proto
from penstock_common.types.cluster import ClusterView


async def cluster_view(address: str, *, deadline: float) -> ClusterView | None:
    """The cluster as the coordinator at ``address`` knows it; None where it does not answer within ``deadline`` seconds."""
    async with make_channel(address) as channel:
        stub = service_pb2_grpc.CoordinatorServiceStub(channel)
        try:
            response = await stub.GetCluster(messages_pb2.GetClusterRequest(), timeout=deadline)
        except grpc.aio.AioRpcError:
            return None  # it may be starting again
    return view_from_proto(response.view)
