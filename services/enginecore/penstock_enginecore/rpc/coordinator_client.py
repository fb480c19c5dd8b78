"""The engine's session with the coordinator: registration, load reports, commands for data-parallel ranks, and
deregistration.
"""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable

import grpc
import msgspec

from penstock.common.v1 import data_parallel_pb2, stats_pb2
from penstock.coordinator.v1 import messages_pb2 as pb
from penstock.coordinator.v1 import service_pb2_grpc
from penstock.enginecore.v1 import messages_pb2 as enginecore_pb
from penstock_common.errors import Internal
from penstock_common.lora_registry import LoraHeld
from penstock_common.rpc import data_parallel, request
from penstock_common.rpc.by_field import from_message, to_message
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.credentials import NO_TLS, ClientCredentials
from penstock_common.rpc.reconnect import Reconnector, wait_at_most
from penstock_common.types.cluster import DrainCommand, EngineRegistration
from penstock_common.types.data_parallel import (
    PeerLost,
    PrepareFailed,
    Reconfigure,
    StartDpWave,
    StartWave,
    WaveComplete,
    rank_name,
)
from penstock_common.types.outputs import SchedulerStats
from penstock_enginecore.config import CoordinatorClientConfig
from penstock_enginecore.data_parallel.core.driver import ToCoordinator
from penstock_enginecore.data_parallel.core.group_channels import Named
from penstock_enginecore.rpc import convert


def report_to_proto(message: ToCoordinator) -> pb.EngineReport:
    """Convert a message from a data-parallel rank to a report for the coordinator."""
    match message:
        case StartWave():
            return pb.EngineReport(start_wave=to_message(message, data_parallel_pb2.GroupWave))
        case WaveComplete():
            return pb.EngineReport(wave_complete=to_message(message, data_parallel_pb2.GroupWave))
        case PeerLost():
            return pb.EngineReport(peer_lost=to_message(message, pb.PeerLost))
        case PrepareFailed():
            return pb.EngineReport(prepare_failed=to_message(message, pb.PrepareFailed))
        case _:
            return pb.EngineReport(rank_report=data_parallel.report_to_proto(message))


def register_to_proto(engine: EngineRegistration) -> pb.Register:
    """Return the message with which an engine registers."""
    group = engine.group and to_message(
        engine.group, pb.GroupRegistration, report=data_parallel.report_to_proto(engine.group.report)
    )
    return to_message(engine, pb.Register, group=group)


def start_dp_wave_from_proto(message: pb.StartDpWave, rank: str) -> StartDpWave:
    """Convert the coordinator's message that tells ``rank`` to join a wave (the steps that all ranks of the group run
    together).
    """
    return StartDpWave(rank, message.group_epoch, message.wave, data_parallel.pauses_from_proto(message.pauses))


def named_from_proto(message: pb.Reconfigure, rank: str) -> Named:
    """Convert the coordinator's message that tells ``rank`` to join a data-parallel group."""
    command = from_message(
        message,
        Reconfigure,
        engine=rank,
        group=data_parallel.group_from_proto(message.group),
        pauses=data_parallel.pauses_from_proto(message.pauses),
        base=message.base_epoch,
    )
    return Named(command, data_parallel.meetings_from_proto(message.group))


REGISTER_TIMEOUT = 5.0
CLOSE_TIMEOUT = 1.0
REPORTS_PER_LEASE = 3

Session = grpc.aio.StreamStreamCall[pb.EngineReport, pb.EngineCommand]


class CoordinatorClient:
    """Keeps the engine registered at the coordinator while ``run`` runs. While the coordinator cannot be reached, the
    engine still serves requests.

    Only the engine's I/O loop may call the methods. The loop also calls the callbacks, possibly while a step runs, so
    callbacks must return without waiting.

    Reports with the engine's load are sent every ``stats_interval`` if the load has changed. The coordinator can
    lengthen the interval. At least three reports are sent within the duration of the engine's lease. After a lost
    connection, the engine also tries to reconnect at least three times within this duration. The engine is then
    connected again before a restarted coordinator first publishes its view of the cluster.

    Args:
        config: Settings of the connection to the coordinator.
        registration: Function that returns the engine's registration. It is called for each connection.
        stats: Function that returns the load for a report, or None before the first step.
        on_command: Function that is called with the coordinator's commands.
        on_registered: Function that is called with the engine's index and the duration of its lease in seconds.
        on_group: Function that is called with commands for a data-parallel rank. None if such commands are refused.
        credentials: TLS credentials of the engine.
    """

    def __init__(
        self,
        config: CoordinatorClientConfig,
        *,
        registration: Callable[[], EngineRegistration],
        stats: Callable[[], SchedulerStats | None],
        on_command: Callable[[DrainCommand], None],
        on_registered: Callable[[int, float], None] = lambda *_: None,
        on_group: Callable[[StartDpWave | Named], None] | None = None,
        credentials: ClientCredentials = NO_TLS,
    ) -> None:
        self._config = config
        self._registration = registration
        self._stats = stats
        self._on_command = on_command
        self._on_registered = on_registered
        self._on_group = on_group
        self._told: deque[ToCoordinator] = deque()
        self._credentials = credentials
        self._reconnector = Reconnector(self._session, peer="coordinator", max_delay=config.reconnect_max)
        self._wake = asyncio.Event()
        self._rank = ""
        self._drained_at: float | None = None
        self._told_interval = 0.0

    @property
    def connected(self) -> bool:
        """Whether the engine is registered at the coordinator now."""
        return self._reconnector.connected

    async def run(self) -> None:
        """Register at the coordinator, and register again whenever the connection is lost, until ``close`` is
        called.
        """
        await self._reconnector.run()

    def draining(self, time_left: float) -> None:
        """Tell the coordinator, now and after each reconnect, that the engine refuses new requests until it exits.

        ``time_left`` is the number of seconds until the remaining requests end with ABORT.
        """
        self._drained_at = asyncio.get_running_loop().time() + time_left
        self._wake.set()

    def tell(self, message: ToCoordinator) -> None:
        """Send a message from a data-parallel rank to the coordinator. Without a connection, the message is dropped,
        because the next registration includes the rank's state.
        """
        if self.connected:
            self._told.append(message)
            self._wake.set()

    async def close(self) -> None:
        """Leave the cluster and end ``run``. The call takes at most ``CLOSE_TIMEOUT`` seconds, even if the coordinator
        does not react. Idempotent.
        """
        self._wake.set()
        await self._reconnector.close(grace=CLOSE_TIMEOUT)

    async def _session(self) -> None:
        async with make_channel(self._config.address, credentials=self._credentials) as channel:
            call = service_pb2_grpc.CoordinatorServiceStub(channel).EngineSession()
            async with asyncio.timeout(REGISTER_TIMEOUT):
                registered = await self._register(call)
            self._on_registered(registered.engine_index, registered.lease_seconds)
            heartbeat = registered.lease_seconds / REPORTS_PER_LEASE
            self._told_interval = 0.0
            self._told.clear()
            self._reconnector.limit_delay(heartbeat)
            self._reconnector.established()
            reader = asyncio.create_task(self._read(call))
            reader.add_done_callback(lambda _: self._wake.set())
            try:
                await self._write_until_over(call, reader, heartbeat, registered.engine_index)
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)

    async def _register(self, call: Session) -> pb.Registered:
        registration = self._registration()
        self._rank = rank_name(registration.engine_id, registration.incarnation)
        if self._drained_at is not None:
            registration = msgspec.structs.replace(registration, draining=True)
        await call.write(pb.EngineReport(register=register_to_proto(registration)))
        first = await call.read()
        if not isinstance(first, pb.EngineCommand) or first.WhichOneof("message") != "registered":
            raise Internal("the coordinator answered the message 'register' with another message than 'registered'")
        if not first.registered.lease_seconds > 0:
            raise Internal(f"registered.lease_seconds is {first.registered.lease_seconds}; it must be greater than 0")
        return first.registered

    async def _write_until_over(
        self, call: Session, reader: asyncio.Task[None], heartbeat: float, engine_index: int
    ) -> None:
        """Send reports until the stream ends or ``close`` is called. Raises the stream's error."""
        loop = asyncio.get_running_loop()
        sent: SchedulerStats | None = None
        told_loras: LoraHeld | None = None
        sent_at = -math.inf
        told_draining: float | None = None
        # A write raises InvalidStateError if the stream has ended. The task that reads from the stream gets the reason.
        with contextlib.suppress(asyncio.InvalidStateError):
            while not reader.done() and not self._reconnector.closing:
                self._wake.clear()
                if self._drained_at is not None and self._drained_at != told_draining:
                    told_draining = self._drained_at
                    time_left = max(told_draining - loop.time(), 0.0)
                    await call.write(pb.EngineReport(draining=convert.draining_to_proto(time_left)))
                while self._told:
                    await call.write(report_to_proto(self._told.popleft()))
                stats = self._stats()
                if stats != sent or loop.time() - sent_at >= heartbeat:
                    sent, sent_at = stats, loop.time()
                    held = None if stats is None or stats.lora is None else stats.lora.held
                    if stats is not None and held == told_loras:
                        stats = stats.without_held()
                    told_loras = held
                    await call.write(_outputs(stats, engine_index))
                await wait_at_most(self._wake, min(max(self._config.stats_interval, self._told_interval), heartbeat))
            if not reader.done():
                await self._leave(call, reader)
        if reader.done():
            reader.result()

    async def _leave(self, call: Session, reader: asyncio.Task[None]) -> None:
        """Tell the coordinator that the engine shuts down, and wait until the coordinator ends the stream."""
        await call.write(pb.EngineReport(notification=pb.NOTIFICATION_SHUTDOWN_COMPLETE))
        # The stream has ended. The task that reads from the stream gets the reason.
        with contextlib.suppress(grpc.aio.InternalError):
            await call.done_writing()
        await asyncio.wait({reader})

    async def _read(self, call: Session) -> None:
        while isinstance(command := await call.read(), pb.EngineCommand):
            if self._on_group is None:
                request.refuse_set(command, ("start_dp_wave", "reconfigure"))
            elif command.HasField("start_dp_wave"):
                self._on_group(start_dp_wave_from_proto(command.start_dp_wave, self._rank))
            elif command.HasField("reconfigure"):
                self._on_group(named_from_proto(command.reconfigure, self._rank))
            if command.HasField("drain"):
                self._on_command(DrainCommand(timeout=command.drain.timeout_seconds))
            if command.HasField("report_interval"):
                self._told_interval = _checked_interval(command.report_interval.seconds)


def _checked_interval(seconds: float) -> float:
    if not (math.isfinite(seconds) and seconds >= 0):
        raise Internal(f"report_interval.seconds is {seconds}; it must be finite and at least 0")
    return seconds


def _outputs(stats: SchedulerStats | None, engine_index: int) -> pb.EngineReport:
    """Return a report with the engine's load. Without statistics, the report only renews the engine's lease."""
    outputs = enginecore_pb.EngineCoreOutputs(engine_index=engine_index, timestamp=time.monotonic())
    if stats is not None:
        outputs.scheduler_stats.CopyFrom(to_message(stats, stats_pb2.SchedulerStats))
    return pb.EngineReport(outputs=outputs)
