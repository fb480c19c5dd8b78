"""Session of a frontend with the coordinator. The coordinator sends the view of the cluster, and scales pools of
engines.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import grpc
import msgspec

from penstock.coordinator.v1 import messages_pb2 as pb
from penstock.coordinator.v1 import service_pb2_grpc
from penstock_common.errors import FailedPrecondition, Internal, PermissionDenied, RequestFailed, Unavailable
from penstock_common.lora_registry import Gossip, LoraRegistry
from penstock_common.observability.logging import get_logger
from penstock_common.observability.tracing import current_call
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.cluster import (
    delta_from_proto,
    registrations_from_proto,
    registrations_to_proto,
    view_from_proto,
)
from penstock_common.rpc.credentials import NO_TLS, ClientCredentials, advised
from penstock_common.rpc.data_parallel import member_to_proto
from penstock_common.rpc.reconnect import Reconnector
from penstock_common.rpc.status import DETAILS_KEY, from_rpc_error
from penstock_common.types.cluster import ClusterView, changed_by
from penstock_common.types.data_parallel import FirstRequest

# The class below assembles the view of the cluster from the received messages. The first message of a stream is a
# complete view. Later messages may be deltas.


class ReceivedView:
    """Assembles the view of the cluster from the messages of one stream. Coordinators that do not support deltas send
    only complete views.
    """

    def __init__(self) -> None:
        self._view = ClusterView()
        self._version = 0

    def take(self, message: pb.ClusterView) -> ClusterView:
        """Return the view of the cluster after this message.

        Raises Internal if a delta was made for another view than the current one. In this case, the caller must end the
        stream.
        """
        view = view_from_proto(message)
        if message.HasField("delta"):
            base = message.delta.base_version
            if not self._version or base != self._version:
                raise Internal(f"delta.base_version is {base}, but this frontend's view has version {self._version}")
            try:
                engines = changed_by(self._view.engines, delta_from_proto(message.delta))
            except ValueError as e:
                raise Internal(f"the delta cannot be applied to the view of version {base}: {e}") from None
            view = msgspec.structs.replace(view, engines=engines)
        self._view, self._version = view, message.version
        return view


SCALE_TIMEOUT = 20.0
"""Timeout of a Scale call in seconds.

During the call, the coordinator calls the Kubernetes API server twice. Before that, it may have to wait until an
earlier change is complete.
"""
CLOSE_TIMEOUT = 1.0
"""Timeout for sending the goodbye message to the coordinator, in seconds."""
_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""Status codes which mean that the coordinator gave no answer. An error that the coordinator itself raises has details."""

Session = grpc.aio.StreamStreamCall[pb.FrontendReport, pb.ClusterView]


class CoordinatorClient:
    """Keeps a session with the coordinator open while ``run`` runs.

    If the coordinator is unreachable, the frontend keeps using the last view.

    ``on_view`` is called on the event loop with each view. An engine that is missing in a view has left the cluster,
    because a coordinator sends no view until it knows all engines. A coordinator also waits for all engines after its
    own restart. All methods must be called on the event loop.
    """

    def __init__(
        self,
        address: str,
        *,
        frontend_id: str,
        incarnation: str,
        on_view: Callable[[ClusterView], None],
        model: str = "",
        pools: Sequence[str] = (),
        reconnect_max: float = 2.0,
        credentials: ClientCredentials = NO_TLS,
        on_lost: Callable[[], None] = lambda: None,
        loras: LoraRegistry | None = None,
    ) -> None:
        """Args:
        address: host:port of the coordinator.
        frontend_id: name of this frontend.
        incarnation: id of this run of the frontend process.
        on_view: called with each view of the cluster.
        model: model whose engines the views contain. Empty means all models.
        pools: pools whose engines the views contain. Empty means all pools.
        reconnect_max: maximum seconds between two connection attempts.
        credentials: TLS credentials of the connection.
        on_lost: called when the session ends. No views arrive until the next session.
        loras: names of LoRA adapters to share with other frontends, if the coordinator supports sharing. None means
            that no names are shared.
        """
        self._address = address
        views = pb.ViewSubscription(deltas=True, model=model, pools=pools, loras=loras is not None)
        self._hello = pb.FrontendHello(frontend_id=frontend_id, incarnation=incarnation, views=views)
        self._on_view = on_view
        self._credentials = credentials
        self._on_lost = on_lost
        self._loras = loras
        self._gossip: Gossip | None = None
        """Exchange of names of LoRA adapters in this session. None until the coordinator has sent names, because a
        coordinator may not support the exchange.
        """
        self._reconnector = Reconnector(self._session, peer="coordinator", max_delay=reconnect_max)
        self._view: ClusterView | None = None
        self._num_held = 0
        self._first_requests: deque[FirstRequest] = deque()
        self._news = asyncio.Event()

    @property
    def connected(self) -> bool:
        """True if the session with the coordinator is open, so that the last view is current."""
        return self._reconnector.connected

    @property
    def view(self) -> ClusterView | None:
        """Latest view of the cluster, or None before the first view."""
        return self._view

    async def run(self) -> None:
        """Connect to the coordinator, and reconnect whenever the connection is lost, until ``close`` is called."""
        await self._reconnector.run()

    async def close(self) -> None:
        """Send a goodbye message to the coordinator, and end ``run``. This takes at most ``CLOSE_TIMEOUT`` seconds.
        Idempotent.
        """
        closing = asyncio.create_task(self._reconnector.close(grace=CLOSE_TIMEOUT))
        await asyncio.sleep(0)  # let the task of ``run`` start, so that ``closing`` becomes True
        self._news.set()
        await closing

    def first_request(self, message: FirstRequest) -> None:
        """Report to the coordinator that a request was sent to a rank of an idle data-parallel group.

        If there is no session with a coordinator, the message is dropped.
        """
        if self.connected:
            self._first_requests.append(message)
            self._news.set()

    def loras_changed(self) -> None:
        """Send the changes of the names of LoRA adapters to the coordinator."""
        self._news.set()

    def demand(self, num_held_requests: int) -> None:
        """Report to the coordinator how many requests this frontend holds because no engine accepts requests."""
        self._num_held = num_held_requests
        self._news.set()

    async def scale(self, pool: str, replicas: int | None) -> int:
        """Ask the coordinator to scale the pool ``pool`` to ``replicas`` engines. Return the number of engines before.

        ``replicas`` is None if the caller of the API gave no number. The call works without a session, because a
        coordinator that has just started sends no views for some time. Raises the coordinator's error, and Unavailable
        if the coordinator does not answer. If the coordinator does not answer, the number of engines may have changed
        or not.
        """
        request = pb.ScaleRequest(pool=pool, replicas=replicas)
        metadata = tuple((current_call.get() or {}).items())
        async with make_channel(self._address, credentials=self._credentials) as channel:
            stub = service_pb2_grpc.CoordinatorServiceStub(channel)
            try:
                response = await stub.Scale(request, timeout=SCALE_TIMEOUT, metadata=metadata)
            except grpc.aio.AioRpcError as e:
                raise self._failure(e) from None
        return response.previous_replicas

    def _failure(self, error: grpc.aio.AioRpcError) -> RequestFailed:
        failed = from_rpc_error(error)
        if error.code() in _NO_ANSWER and all(key != DETAILS_KEY for key, _ in error.trailing_metadata() or ()):
            return Unavailable(
                f"the coordinator at {self._address} does not answer: {advised(failed.message)}",
                reason="COORDINATOR_AWAY",
                retry_after=1.0,
            )
        if isinstance(failed, PermissionDenied):
            # the coordinator refused the credentials of this frontend, not those of the caller of this method
            return FailedPrecondition(f"the coordinator refuses this frontend: {failed.message}", reason=failed.reason)
        return failed

    async def _session(self) -> None:
        async with make_channel(self._address, credentials=self._credentials) as channel:
            call = service_pb2_grpc.CoordinatorServiceStub(channel).FrontendSession()
            await call.write(pb.FrontendReport(hello=self._hello))
            self._gossip = None
            demand = asyncio.create_task(self._report(call))
            try:
                await self._read(call)
            finally:
                self._on_lost()
                demand.cancel()
                await asyncio.gather(
                    demand, return_exceptions=True
                )  # ignore this error, because reading from the broken stream raises an error too

    async def _read(self, call: Session) -> None:
        received = ReceivedView()
        while isinstance(message := await call.read(), pb.ClusterView):
            if message.HasField("loras"):
                self._hear(message.loras)
                continue
            view = received.take(message)
            if not self.connected:
                self._reconnector.established()
            self._view = view
            self._on_view(view)

    def _hear(self, message: pb.LoraRegistrations) -> None:
        if self._loras is None:
            raise Internal("the coordinator sent LoRA adapters, but this frontend did not subscribe to LoRA adapters")
        if self._gossip is None:
            self._gossip = Gossip(self._loras)
        heard = self._gossip.hear(registrations_from_proto(message))
        for each in heard:
            what = "unloaded" if each.unloaded else "loaded"
            get_logger().info(
                f"LoRA adapter {what} on another frontend", name=each.name, path=each.path, by=each.frontend_id
            )
        for refused in message.refused:
            get_logger().warning(
                "the coordinator rejected a LoRA adapter, so other frontends do not get the adapter",
                name=refused.name,
                reason=refused.reason,
            )
        self._news.set()

    async def _report(self, call: Session) -> None:
        reported = 0
        self._first_requests.clear()
        while not self._reconnector.closing:
            self._news.clear()
            if self._num_held != reported:
                reported = self._num_held
                await call.write(pb.FrontendReport(demand=pb.Demand(num_held_requests=reported)))
            while self._first_requests:
                first = self._first_requests.popleft()
                rank = member_to_proto(first.engine)
                report = pb.FirstRequest(wave=first.wave, rank=rank, group_epoch=first.epoch)
                await call.write(pb.FrontendReport(first_request=report))
            while self._gossip is not None and (said := self._gossip.tell()):
                await call.write(pb.FrontendReport(loras=registrations_to_proto(said)))
            if not self._reconnector.closing:
                await self._news.wait()
        await call.write(pb.FrontendReport(notification=pb.NOTIFICATION_SHUTDOWN_COMPLETE))
