"""The engine's I/O thread: an asyncio loop with the gRPC server and the coordinator session."""

import asyncio
import contextlib
import socket
import time
from functools import partial

import msgspec

from penstock.enginecore.v1 import service_pb2_grpc
from penstock_common.addresses import with_default_port, with_port
from penstock_common.config.sections import PeersConfig
from penstock_common.config_file import ConfigFile
from penstock_common.observability.logging import configure, get_logger
from penstock_common.observability.metrics import count_tasks, service_registry, tell_connected
from penstock_common.observability.tracer import make_tracer
from penstock_common.rpc.call_authorization import PeerGuard
from penstock_common.rpc.credentials import ClientCredentials
from penstock_common.rpc.interceptor import CallTelemetry
from penstock_common.rpc.server import LIVENESS, SERVICES, STARTUP, RpcServer
from penstock_common.security.tls import Certificates
from penstock_common.types.cluster import EngineRegistration
from penstock_common.types.outputs import EngineCoreOutputs, EngineReady
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.busy_loop import BusyLoop
from penstock_enginecore.data_parallel.core.driver import ToCoordinator
from penstock_enginecore.data_parallel.group import EngineRank
from penstock_enginecore.rpc.coordinator_client import CoordinatorClient
from penstock_enginecore.rpc.frontend_sessions import Sessions
from penstock_enginecore.rpc.internal_ports import LoopThread
from penstock_enginecore.rpc.servicer import EngineCoreServicer
from penstock_enginecore.rpc.traces import EngineTraces

SERVICE_NAME = "penstock.enginecore.v1.EngineCoreService"
CHECK_INTERVAL = 1.0
FLUSH_TIMEOUT = 5.0

log = get_logger()


class IoThread:
    """Owns the thread and the event loop for I/O. The main thread calls the methods, which wait until the loop has done
    the work.

    Call order: ``start`` (opens the port, but serves no requests yet), ``attach`` (the model is loaded; serves
    requests), ``stop``.

    Health service names:

    - The empty name and the service's own name: requests are accepted.
    - ``startup``: SERVING once the model is loaded.
    - ``liveness``: SERVING while the process makes progress. The status is NOT_SERVING while there is work but no step
      has ended for ``wedged_after`` seconds, and permanently after the engine has failed.

    Together, these names distinguish four states: loading (not started), serving, draining (started, alive, not
    accepting), and wedged or dead (not alive).
    """

    def __init__(self, config: EngineCoreConfig, config_file: ConfigFile[EngineCoreConfig] | None = None) -> None:
        """Create the object without starting the thread. ``config_file`` is watched for settings that can change at run
        time.
        """
        self._config = config
        self._config_file = config_file
        self._thread = LoopThread("io")
        self.registry = service_registry("enginecore")
        """Prometheus registry with metrics of the process and its gRPC calls. Other parts of the engine register their
        metrics here.
        """
        self.certificates = Certificates()
        """TLS certificates of the engine's listeners and connections."""
        self.registry.register(self.certificates)
        count_tasks(self.registry, self._thread.loop)
        self._tracer = make_tracer(config.tracing, service="enginecore", instance=config.name)
        self.telemetry = CallTelemetry(self.registry, self._tracer)
        """Telemetry of gRPC calls to the engine's listeners."""
        traces = EngineTraces(self._tracer, model=config.model.name) if self._tracer is not None else None
        self.sessions = Sessions(
            self._thread.loop,
            on_draining=self._on_draining,
            traces=traces,
            max_message_bytes=config.server.max_message_bytes,
            limits=config.sessions,
        )
        self._servicer = EngineCoreServicer(self.sessions)
        self._coordinator_credentials = ClientCredentials(
            config.coordinator.tls, field="coordinator.tls", certificates=self.certificates
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._coordinator: CoordinatorClient | None = None
        self._server: RpcServer
        self.port = 0

    def start(self) -> None:
        """Start the thread and listen on the port. Raises ConfigError if the port is in use."""
        self._thread.start()
        self._thread.run(self._start())

    def attach(self, busy_loop: BusyLoop, ready: EngineReady, rank: EngineRank | None = None) -> None:
        """Accept sessions of frontends and register with the coordinator, now that the model is loaded. ``rank`` is set
        for an engine in a data-parallel group.
        """
        self._thread.run(self._attach(busy_loop, ready, rank))

    def stop(self) -> None:
        """Send the queued messages to frontends, leave the cluster and close the port. Idempotent."""
        if not self._thread.running:
            return
        self._thread.run(self._stop())
        self._thread.stop()
        if self._tracer is not None:
            self._tracer.shutdown()

    async def _start(self) -> None:
        self._server = RpcServer(
            self._config.server,
            service_names=(SERVICE_NAME,),
            interceptors=[PeerGuard(_allowed(self._config.peers))] if self._config.server.tls.ca else [],
            observer=self.telemetry,
            keepalive=SERVICES,
            loads=True,
            certificates=self.certificates,
        )
        service_pb2_grpc.add_EngineCoreServiceServicer_to_server(self._servicer, self._server.server)
        self.port = await self._server.start()
        if self._config_file is not None:
            self._tasks.append(asyncio.create_task(self._config_file.follow(_apply), name="config file"))
        log.info("listening for frontends", address=with_port(self._config.server.host, self.port))

    async def _attach(self, busy_loop: BusyLoop, ready: EngineReady, rank: EngineRank | None) -> None:
        self._servicer.attach(busy_loop, ready)
        await self._server.set_serving(True, STARTUP)
        await self._server.set_serving(True)
        self._tasks.append(asyncio.create_task(self._watch(busy_loop)))
        if self._config.coordinator.address:
            self._coordinator = coordinator = self._coordinator_client(busy_loop, ready, rank)
            if rank is not None:
                rank.driver.to_frontends = self.sessions.start_wave
                rank.driver.to_coordinator = self._tell_coordinator
            tell_connected(self.registry, lambda: coordinator.connected)
            self._tasks.append(asyncio.create_task(coordinator.run()))

    def _coordinator_client(
        self, busy_loop: BusyLoop, ready: EngineReady, rank: EngineRank | None
    ) -> CoordinatorClient:
        config = self._config.coordinator
        registration = EngineRegistration(
            engine_id=ready.engine_id,
            incarnation=ready.incarnation,
            address=with_default_port(config.advertise or socket.getfqdn(), self.port),
            model=ready.model,
            pool=self._config.pool,
            max_num_seqs=ready.max_num_seqs,
            role=ready.role,
            kv_address=ready.kv_address,
            kv_fingerprint=ready.kv_fingerprint,
        )
        return CoordinatorClient(
            config,
            registration=lambda: (
                registration if rank is None else msgspec.structs.replace(registration, group=rank.registration)
            ),
            stats=busy_loop.stats,
            on_command=lambda command: busy_loop.request_shutdown(command.timeout),
            on_registered=partial(self._on_registered, rank),
            on_group=None if rank is None else rank.take,
            credentials=self._coordinator_credentials,
        )

    def _tell_coordinator(self, message: ToCoordinator) -> None:
        if self._coordinator is not None:
            self._thread.loop.call_soon_threadsafe(self._coordinator.tell, message)

    def _on_registered(self, rank: EngineRank | None, engine_index: int, lease: float) -> None:
        self.sessions.engine_index = engine_index
        if rank is not None:
            rank.registered(lease)

    def _on_draining(self, time_left: float) -> None:
        self._tasks.append(asyncio.ensure_future(self._server.set_serving(False)))
        if self._coordinator is not None:
            self._coordinator.draining(time_left)

    async def _watch(self, busy_loop: BusyLoop) -> None:
        """Update the ``liveness`` health status, which is NOT_SERVING while the engine is wedged. When it changes, send
        the engine's load to frontends.
        """
        alive = True
        while True:
            await asyncio.sleep(CHECK_INTERVAL)
            self.sessions.drop_stale()
            if alive == (not busy_loop.wedged and self.sessions.dead is None):
                continue
            alive = not alive
            await self._server.set_serving(alive, LIVENESS)
            await self._server.set_serving(alive and not busy_loop.draining)
            if self.sessions.dead is not None:
                return
            stats = busy_loop.stats()  # While the busy loop hangs in a step, it cannot send its statistics.
            self.sessions.broadcast(EngineCoreOutputs(scheduler_stats=stats, timestamp=time.monotonic()))
            if alive:
                log.info("engine is no longer wedged: it completes steps again")
            else:
                age = round(stats.seconds_since_last_step, 1)
                log.error("engine is wedged: it has work, but completes no step", seconds=age)

    async def _stop(self) -> None:
        await self._server.set_serving(False)
        if self._coordinator is not None:
            await self._coordinator.close()
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.sessions.close_all()
        await self._server.stop(FLUSH_TIMEOUT)
        log.info("engine stopped")


def _apply(config: EngineCoreConfig) -> None:
    """Apply the settings that can change at run time."""
    configure(config.log, service="enginecore")


def _allowed(peers: PeersConfig) -> dict[str, tuple[str, ...]]:
    """Return, for each method, the kinds of peers that may call it. Only frontends may send requests. Operators may
    query the engine.
    """
    return {
        f"/{SERVICE_NAME}/Session": peers.frontends,
        f"/{SERVICE_NAME}/GetEngineInfo": peers.frontends + peers.operators,
    }
