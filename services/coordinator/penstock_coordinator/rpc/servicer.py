"""Implementation of CoordinatorService, which converts messages of engines and frontends to events for the cluster."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Collection, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc

from penstock.coordinator.v1 import messages_pb2 as pb
from penstock.coordinator.v1 import service_pb2_grpc
from penstock_common.config.sections import PeersConfig
from penstock_common.errors import InvalidArgument, RequestFailed, Unavailable
from penstock_common.observability.logging import get_logger
from penstock_common.rpc.cluster import delta_to_proto, groups_to_proto, view_to_proto
from penstock_common.rpc.handshake import first_message
from penstock_common.types.cluster import DEFAULT_POOL, ClusterView, ViewDelta
from penstock_common.types.data_parallel import FirstRequest
from penstock_coordinator.adapters import AdapterLink
from penstock_coordinator.cluster import Cluster
from penstock_coordinator.groups import Outbox, Rank
from penstock_coordinator.kubernetes.replicas import Replicas
from penstock_coordinator.metrics import CoordinatorMetrics
from penstock_coordinator.rpc import convert
from penstock_coordinator.view_channel import Broadcast, EncodedView, ViewReader

# The classes below encode views. A view is encoded once, and the same bytes are sent to all streams.

Handlers: TypeAlias = "Mapping[str, grpc.RpcMethodHandler[Any, Any]]"


class ProtoEncoder:
    """Encodes views as ``ClusterView`` messages."""

    def whole(self, view: ClusterView, version: int) -> bytes:
        message = view_to_proto(view)
        message.version = version
        return message.SerializeToString()

    def delta(self, view: ClusterView, delta: ViewDelta, version: int) -> bytes:
        message = groups_to_proto(view)
        message.version = version
        message.delta.CopyFrom(delta_to_proto(delta, base_version=version - 1))
        return message.SerializeToString()


class PreEncoded:
    """Adds the handlers of generated code to a server.

    For some methods, responses are bytes that are already encoded.
    """

    def __init__(self, server: grpc.aio.Server, methods: Collection[str]) -> None:
        self._server = server
        self._methods = methods

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Do nothing, because ``add_registered_method_handlers`` creates the generic handlers."""

    def add_registered_method_handlers(self, service: str, handlers: Handlers) -> None:
        """Add the handlers of a service, by method name. The methods in ``methods`` stream in both directions."""
        own = dict(handlers)
        for name in self._methods:
            given: Any = handlers[name]
            own[name] = grpc.stream_stream_rpc_method_handler(given.stream_stream, given.request_deserializer)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, own),))
        self._server.add_registered_method_handlers(service, own)


Context = grpc.aio.ServicerContext[object, object]
T = TypeVar("T")

SERVICE_NAME = "penstock.coordinator.v1.CoordinatorService"


class CoordinatorServicer(service_pb2_grpc.CoordinatorServiceServicer):
    """Converts messages to events for the cluster, which stores the state.

    After ``stop``, streams end with UNAVAILABLE.
    """

    def __init__(self, cluster: Cluster, replicas: Replicas, metrics: CoordinatorMetrics) -> None:
        self._cluster = cluster
        self._replicas = replicas
        self._metrics = metrics
        self._stopping = asyncio.Event()

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Register the service with ``server``."""
        adding: Any = PreEncoded(server, ["FrontendSession"])
        service_pb2_grpc.add_CoordinatorServiceServicer_to_server(self, adding)

    def stop(self) -> None:
        """End all streams of engines and frontends, now and later."""
        self._stopping.set()

    async def EngineSession(
        self, request_iterator: AsyncIterator[pb.EngineReport], context: Context
    ) -> AsyncIterator[pb.EngineCommand]:
        """Process an engine's ``register`` message, then its reports until the engine leaves.

        If only the stream ends, the engine stays a member.
        """
        reports = aiter(request_iterator)
        registration = convert.registration(await self._unless_stopped(first_message(reports, "register")))
        session = self._cluster.new_session()
        membership = self._cluster.membership
        groups = self._cluster.groups
        groups.check(registration)
        self._cluster.apply(membership.register(session, registration, self._cluster.now()))
        rank = groups.register(registration, self._cluster.now())
        index = membership.index_of(registration.engine_id)
        yield pb.EngineCommand(
            registered=pb.Registered(
                engine_index=index,
                lease_seconds=self._cluster.lease_seconds,
                group_epoch=self._cluster.group_epoch(registration),
            )
        )
        intervals = self._cluster.report_interval((registration.model, registration.pool))
        reader = asyncio.create_task(self._read_until_left(session, rank, reports))
        outbox = Outbox() if rank is None else rank.outbox
        try:
            async with contextlib.aclosing(self._commands_until_over(intervals, outbox, reader)) as commands:
                async for command in commands:
                    yield command
        finally:
            await _cancel(reader)
            if rank is not None:
                groups.stream_broken(rank, self._cluster.now())

    async def FrontendSession(  # type: ignore[override]  # views are encoded once for all streams
        self, request_iterator: AsyncIterator[pb.FrontendReport], context: Context
    ) -> AsyncIterator[bytes]:
        """Process a frontend's ``hello`` message, then yield each new view until the stream ends or the frontend
        leaves.

        Yields encoded ``ClusterView`` messages. If the stream ends before the frontend has announced that it leaves,
        the frontend counts as lost.
        """
        reports = aiter(request_iterator)
        hello = convert.hello(await self._unless_stopped(first_message(reports, "hello")))
        subscription, deltas = convert.subscription(hello)
        session = self._cluster.new_session()
        self._cluster.frontends.connect(session, hello.frontend_id, subscription)
        get_logger().info("frontend connected", frontend=hello.frontend_id)
        reader = self._cluster.subscribe(subscription, deltas=deltas)
        link = self._cluster.adapters.connect(subscription.model, reader.wake) if hello.views.loras else None
        reading = asyncio.create_task(self._read_reports(session, hello.frontend_id, link, reports))
        stopped = asyncio.create_task(self._stopped())
        try:
            if link is not None:  # send adapter names before the first view
                yield convert.adapters(link.tell())
            async with contextlib.aclosing(self._messages_until_failed(reader, link, reading, stopped)) as messages:
                async for view in messages:
                    if isinstance(view, bytes):
                        yield view
                        continue
                    yield view.data
                    lag = self._cluster.now() - view.since
                    self._metrics.sent(len(view.data), whole=view.whole, lag=lag)
        finally:
            left, why = _end_of(reading)
            await _cancel(reading, stopped)
            self._cluster.unsubscribe(reader)
            if link is not None:
                self._cluster.adapters.disconnect(link)
            self._cluster.frontends.disconnect(session, hello.frontend_id)
            if left:
                get_logger().info("frontend left", frontend=hello.frontend_id)
            elif not self._stopping.is_set():
                get_logger().warning("frontend lost", frontend=hello.frontend_id, peer=context.peer(), reason=why)

    async def GetCluster(self, request: pb.GetClusterRequest, context: Context) -> pb.GetClusterResponse:
        """Return the current view. Shortly after a start, this method returns a view before frontends get views."""
        return pb.GetClusterResponse(view=view_to_proto(self._cluster.view()))

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.ScaleResponse:
        """Change the number of engines of a pool, or the number of ranks of a group.

        Raises the errors of ``Replicas.scale``. For ranks, also raises the errors of ``Replicas.check_ranks`` and
        ``GroupOfPool.scale``.
        """
        replicas = request.replicas if request.HasField("replicas") else None
        pool = request.pool or DEFAULT_POOL
        if replicas is not None:
            self._replicas.check_ranks(pool, replicas)
        if replicas is not None and (previous := self._cluster.groups.scale(pool, replicas, self._cluster.now())):
            return pb.ScaleResponse(previous_replicas=previous)
        return pb.ScaleResponse(previous_replicas=await self._replicas.scale(request.pool, replicas))

    def _take(self, session: int, rank: Rank | None, report: pb.EngineReport) -> bool:
        """Handle one report of a registered engine. Return whether the engine has left."""
        cluster, membership = self._cluster, self._cluster.membership
        match report.WhichOneof("message"):
            case "outputs":
                cluster.apply(membership.report(session, convert.load(report.outputs), cluster.now()))
            case "draining":
                convert.check_draining(report.draining)
                cluster.apply(membership.drain(session, cluster.now()))
            case "notification":
                convert.check_shutdown_complete(report.notification)
                cluster.apply(membership.leave(session))
                return True
            case "register":
                raise InvalidArgument(
                    "register was sent twice on this stream; it must be only the first message", field="register"
                )
            case kind:
                message = convert.from_rank(report, "" if rank is None else rank.name)
                if rank is None:
                    raise InvalidArgument(
                        f"only ranks of a data-parallel group may send {kind}, but the engine did not set register.group at the "
                        "start of this stream",
                        field=kind or "message",
                    )
                cluster.apply(membership.report(session, None, cluster.now()))
                cluster.groups.take(rank, message, cluster.now())
        return False

    async def _read_until_left(self, session: int, rank: Rank | None, reports: AsyncIterator[pb.EngineReport]) -> None:
        async for report in reports:
            if self._take(session, rank, report):
                return

    async def _read_reports(
        self,
        session: int,
        frontend_id: str,
        link: AdapterLink | None,
        reports: AsyncIterator[pb.FrontendReport],
    ) -> bool:
        """Handle reports until the stream ends. Return whether the frontend has announced that it leaves."""
        async for report in reports:
            said = convert.from_frontend(report)
            if said is None:
                return True
            if isinstance(said, FirstRequest):
                self._cluster.groups.first_request(said, self._cluster.now())
            elif isinstance(said, list):
                if link is None:
                    raise InvalidArgument(
                        "the frontend sent loras, but did not set hello.views.loras at the start of this stream; set "
                        "hello.views.loras, or do not send loras",
                        field="loras",
                    )
                link.hear(said)
            else:
                self._cluster.frontends.demand(session, frontend_id, said)
        return False

    async def _messages_until_failed(
        self, reader: ViewReader, link: AdapterLink | None, reading: asyncio.Task[bool], stopped: asyncio.Task[NoReturn]
    ) -> AsyncGenerator[EncodedView | bytes, None]:
        """Yield new views and adapter messages until the task ``reading`` returns, which means that the frontend
        leaves.

        Raises the error of ``reading`` or ``stopped``. If a frontend only closes its side of the stream, it still gets
        views.
        """
        for task in (reading, stopped):
            task.add_done_callback(lambda _: reader.wake())
        while True:
            await reader.woken()
            if stopped.done():
                stopped.result()
            if reading.done() and reading.result():
                return
            while link is not None and (registrations := link.tell()):
                yield convert.adapters(registrations)
            if link is not None and (refused := link.take_refused()):
                yield convert.adapters([], refused)
            for view in reader.take():
                yield view

    async def _commands_until_over(
        self, intervals: Broadcast[float], outbox: Outbox, reader: asyncio.Task[None]
    ) -> AsyncGenerator[pb.EngineCommand, None]:
        """Yield messages to a rank, and changes of the report interval, until the task ``reader`` is done.

        The interval is sent only if it differs from the interval that the engine chose. Raises the reader's error, and
        Unavailable when the coordinator stops.
        """
        version, told = 0, 0.0
        newer = asyncio.ensure_future(intervals.newer_than(version))
        mail = asyncio.ensure_future(outbox.next())
        try:
            while True:
                await self._unless_stopped(asyncio.wait({newer, mail, reader}, return_when=asyncio.FIRST_COMPLETED))
                if reader.done():
                    reader.result()
                    return
                if mail.done():
                    yield convert.to_rank(mail.result(), self._cluster.groups.meetings)
                    mail = asyncio.ensure_future(outbox.next())
                if newer.done():
                    version, seconds = newer.result()
                    newer = asyncio.ensure_future(intervals.newer_than(version))
                    if seconds != told:
                        told = seconds
                        yield pb.EngineCommand(report_interval=pb.ReportInterval(seconds=seconds))
        finally:
            await _cancel(newer, mail)

    async def _stopped(self) -> NoReturn:
        """Raise Unavailable when the coordinator stops."""
        await self._stopping.wait()
        raise Unavailable("the coordinator is shutting down", reason="SHUTTING_DOWN", retry_after=1.0)

    async def _unless_stopped(self, work: Awaitable[T]) -> T:
        """Return the result of ``work``. If the coordinator stops first, cancel ``work`` and raise Unavailable."""
        working = asyncio.ensure_future(work)
        stopped = asyncio.create_task(self._stopped())
        try:
            await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else stopped.result()
        finally:
            await _cancel(working, stopped)


def allowed(peers: PeersConfig) -> dict[str, tuple[str, ...]]:
    """Return the allowed certificate names for each method.

    With its certificate, an engine cannot act as a frontend or an operator.

    Operators call most methods through a frontend, which checks their permissions.
    """
    methods = {
        "EngineSession": peers.engines,
        "FrontendSession": peers.frontends,
        "GetCluster": peers.frontends + peers.operators,
        "Scale": peers.frontends + peers.operators,
    }
    return {f"/{SERVICE_NAME}/{method}": names for method, names in methods.items()}


def _end_of(reading: asyncio.Task[bool]) -> tuple[bool, str]:
    """Return whether a frontend announced that it leaves. If not, also return the reason why its session ended."""
    if reading.done() and not reading.cancelled():
        if isinstance(error := reading.exception(), RequestFailed):
            return False, f"report refused: {error.message}"
        if error is None and reading.result():
            return True, ""
    return False, "the stream ended without a goodbye message"


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
