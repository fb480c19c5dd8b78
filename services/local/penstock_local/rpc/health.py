"""Asks services that a command has started: whether they are ready, and the coordinator which engines it knows."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.coordinator.v1 import messages_pb2, service_pb2_grpc
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.cluster import view_from_proto
from penstock_common.types.cluster import ClusterView
from penstock_local.rpc.connect import connect

SERVICE = "penstock.inference.v1.InferenceService"
"""The public gRPC API."""
_RETRY_SECONDS = 0.05


async def wait_until_serving(address: str, *, secured: bool = False) -> None:
    """Return when ``grpc.health.v1`` at ``address`` reports SERVING for the process. Waits for a server to appear, too.

    ``secured``: with what the environment says of TLS.
    """
    async with connect(address) if secured else make_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            watch = stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)  # type: ignore[attr-defined]
            try:
                async for response in watch:
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError as e:
                if e.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            finally:
                watch.cancel()
            await asyncio.sleep(_RETRY_SECONDS)


async def serving(address: str, service: str = "", *, deadline: float) -> bool | None:
    """Return whether ``grpc.health.v1`` at ``address`` reports SERVING for a service, or for the process if ``service`` is empty.

    None when nothing answers in time, or the server does not know the service.
    """
    async with connect(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=deadline)  # type: ignore[attr-defined]
        except grpc.aio.AioRpcError:
            return None
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


async def cluster_view(address: str, *, deadline: float) -> ClusterView | None:
    """The cluster as the coordinator at ``address`` knows it; None where it does not answer within ``deadline`` seconds."""
    async with make_channel(address) as channel:
        stub = service_pb2_grpc.CoordinatorServiceStub(channel)
        try:
            response = await stub.GetCluster(messages_pb2.GetClusterRequest(), timeout=deadline)
        except grpc.aio.AioRpcError:
            return None  # it may be starting again
    return view_from_proto(response.view)
