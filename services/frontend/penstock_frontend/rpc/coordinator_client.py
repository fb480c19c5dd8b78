"""The frontend's session with the coordinator: which engines there are."""

import asyncio
from collections.abc import Callable

import grpc

from penstock.coordinator.v1 import messages_pb2 as pb
from penstock.coordinator.v1 import service_pb2_grpc
from penstock_common.rpc import cluster
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.credentials import NO_TLS, ClientCredentials
from penstock_common.rpc.reconnect import Reconnector
from penstock_common.types.cluster import ClusterView

Session = grpc.aio.StreamStreamCall[pb.FrontendReport, pb.ClusterView]


class CoordinatorClient:
    """Keeps a view of the cluster while ``run`` runs, and keeps the last one while the coordinator is away.

    ``on_view`` is called on the event loop with each view as it comes. An engine that is missing in a view has left the
    cluster: a coordinator sends none before it can know all engines, not even after a restart. All methods belong to the loop.
    """

    def __init__(
        self,
        address: str,
        *,
        frontend_id: str,
        incarnation: str,
        on_view: Callable[[ClusterView], None],
        reconnect_max: float = 2.0,
        credentials: ClientCredentials = NO_TLS,
    ) -> None:
        """``reconnect_max``: seconds between two attempts at most."""
        self._address = address
        self._hello = pb.FrontendHello(frontend_id=frontend_id, incarnation=incarnation)
        self._on_view = on_view
        self._credentials = credentials
        self._reconnector = Reconnector(self._session, peer="coordinator", max_delay=reconnect_max)
        self._view: ClusterView | None = None
        self._num_held = 0
        self._demand_changed = asyncio.Event()

    @property
    def connected(self) -> bool:
        """Whether views come in: the last one is of now."""
        return self._reconnector.connected

    @property
    def view(self) -> ClusterView | None:
        """The last view, or None before the first."""
        return self._view

    async def run(self) -> None:
        """Connect, and connect again whenever the connection is lost, until ``close``."""
        await self._reconnector.run()

    async def close(self) -> None:
        """End ``run``. Idempotent."""
        await self._reconnector.close()

    def demand(self, num_held_requests: int) -> None:
        """Tell the coordinator how many requests wait here because no engine is up."""
        self._num_held = num_held_requests
        self._demand_changed.set()

    async def _session(self) -> None:
        async with make_channel(self._address, credentials=self._credentials) as channel:
            call = service_pb2_grpc.CoordinatorServiceStub(channel).FrontendSession()
            await call.write(pb.FrontendReport(hello=self._hello))
            demand = asyncio.create_task(self._report_demand(call))
            try:
                await self._read(call)
            finally:
                demand.cancel()
                await asyncio.gather(demand, return_exceptions=True)  # it fails with the stream, as the reader has

    async def _read(self, call: Session) -> None:
        while isinstance(message := await call.read(), pb.ClusterView):
            if not self.connected:
                self._reconnector.established()
            self._view = cluster.view_from_proto(message)
            self._on_view(self._view)

    async def _report_demand(self, call: Session) -> None:
        reported = 0
        while True:
            self._demand_changed.clear()
            if self._num_held != reported:
                reported = self._num_held
                await call.write(pb.FrontendReport(demand=pb.Demand(num_held_requests=reported)))
            await self._demand_changed.wait()
