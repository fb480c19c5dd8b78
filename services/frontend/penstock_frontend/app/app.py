"""Lifecycle of the frontend process: startup, serving, drain and shutdown."""

import asyncio
import signal
import time
import uuid

from penstock_common.config_file import ConfigFile
from penstock_common.metrics_server import MetricsServer
from penstock_common.observability.logging import configure, get_logger
from penstock_common.observability.metrics import count_tasks, tell_connected
from penstock_common.observability.tracer import make_tracer
from penstock_common.rpc.credentials import ClientCredentials
from penstock_common.rpc.loop import Liveness
from penstock_common.security.tls import Certificates
from penstock_frontend.app.assembly import AssemblyConfig, assemble
from penstock_frontend.app.servers import QUIET, Draining, Servers
from penstock_frontend.calls.adapters import AdapterDirectory
from penstock_frontend.calls.admission import Readiness
from penstock_frontend.config import FrontendConfig
from penstock_frontend.dispatch.client import GrpcEngineClient
from penstock_frontend.dispatch.kv_events import KvEventFeed
from penstock_frontend.interfaces import OutputHandler
from penstock_frontend.metrics import FrontendMetrics
from penstock_frontend.rpc.coordinator_client import CoordinatorClient

_CLOSE_GRACE = 1.0
"""Number of seconds that calls have to deliver their last status when the servers stop."""
_LOOK_INTERVAL = 0.25
"""Number of seconds between two checks whether the drain of the frontend is complete."""


class Frontend:
    """A frontend process. Call ``startup``, then ``main_loop``, which runs until ``stop`` is called, then ``shutdown``.

    ``Readiness`` decides which health status the frontend reports. The first call of ``stop`` starts a drain. During
    the drain, the frontend serves calls while its clients move to other frontends. The drain ends when no more calls
    can arrive, or after ``drain_timeout`` seconds. A second call of ``stop`` ends the drain immediately.
    """

    def __init__(self, config: FrontendConfig) -> None:
        """Read the files of the model, which may take a long time. Raises ConfigError if the configuration or a file is
        not valid.
        """
        self._config = config
        self._changed = asyncio.Event()
        self._stopping = False
        self._cut_short = asyncio.Event()
        self._readiness = Readiness(without_engines=config.ready_without_engines)
        get_logger().info("loading the tokenizer", model=config.model.path)
        self._tracer = make_tracer(config.tracing, service="frontend", instance=config.name)
        incarnation, kv_events, self._certificates = uuid.uuid4().hex, KvEventFeed(), Certificates()

        def engines(outputs: OutputHandler, metrics: FrontendMetrics) -> GrpcEngineClient:
            return GrpcEngineClient(
                config,
                incarnation=incarnation,
                outputs=outputs,
                on_change=self._on_change,
                on_moved=metrics.series("penstock:requests_moved").inc,
                on_planned=lambda plan, why: metrics.series("penstock:legs", plan, why).inc(),
                on_gap=metrics.series("penstock:handover_gap_seconds").observe,
                kv_events=kv_events,
                certificates=self._certificates,
                on_lost=lambda cause: metrics.series("penstock:engines_lost", cause).inc(),
            )

        assembly = assemble(
            AssemblyConfig(
                model=config.model,
                tokenizer_threads=config.tokenizer_threads,
                limits=config.limits,
                fairness=config.fairness,
                log=config.log,
                lora=config.lora,
                media=config.media,
                disaggregation=config.disaggregation,
                frontend_id=config.name,
            ),
            engines,
            tracer=self._tracer,
            on_full=self._update_readiness,
        )
        self._assembly = assembly
        self._llm, self._engines, self._metrics = assembly.llm, assembly.engines, assembly.metrics
        self._metrics.registry.register(self._certificates)
        self._metrics.add_media(self._engines.media_counts)
        if config.lora.serves:
            self._metrics.add_adapters(self._llm.adapters.adapters.count)
        if config.http.engine_metrics:
            self._metrics.add_engine_loads(self._engines.view.for_metrics)
        self._coordinator = self._coordinator_client(incarnation) if config.coordinator.address else None
        self._servers = Servers(
            config,
            assembly,
            kv_events=kv_events,
            coordinator=self._coordinator,
            tracer=self._tracer,
            readiness=self._readiness,
            certificates=self._certificates,
        )
        if self._coordinator is not None:
            coordinator = self._coordinator
            tell_connected(self._metrics.registry, lambda: coordinator.connected)
            self._engines.on_first_request = coordinator.first_request
            self._llm.adapters.adapters.on_change = coordinator.loras_changed
        lora = config.lora
        self._directory = (
            AdapterDirectory(lora.directory, lora.scan_interval, self._llm.adapters.adapters)
            if lora.directory
            else None
        )
        self._directory_task: asyncio.Task[None] | None = None
        self._coordinator_task: asyncio.Task[None] | None = None
        self._living: asyncio.Task[None] | None = None
        self._metrics_server: MetricsServer | None = None

    @property
    def port(self) -> int:
        """Port of the public gRPC server."""
        return self._servers.public.port

    @property
    def admin_port(self) -> int:
        """Port of the gRPC server for operators."""
        return self._servers.admin.port

    @property
    def http_port(self) -> int:
        """Port of the HTTP server. -1 if the HTTP server is off."""
        return self._servers.http.port

    async def startup(self) -> None:
        """Start to listen on all ports, and start to connect to engines. Raises ConfigError if a port cannot be bound."""
        count_tasks(self._metrics.registry, asyncio.get_running_loop())
        self._warn_of_a_short_drain()
        if self._directory is not None:
            await self._directory.begin()
            self._directory_task = asyncio.create_task(self._directory.run(), name="lora directory")
        await self._servers.start()
        self._metrics_server = MetricsServer(self._config.metrics, self._metrics.registry, self._certificates)
        if self._coordinator is not None:
            self._coordinator_task = asyncio.create_task(self._coordinator.run(), name="coordinator")
        else:
            self._engines.follow(self._config.engines)
        self._living = asyncio.create_task(
            Liveness(self._servers.public, self._essential, clock=time.monotonic).run(), name="liveness"
        )
        if self._assembly.media is not None:
            await self._assembly.media.start()
        get_logger().info(
            "frontend started", model=self._config.model.name, grpc_port=self.port, admin_port=self.admin_port
        )

    def _essential(self) -> list[asyncio.Task[None]]:
        """Return the tasks that the frontend needs to work. The liveness check watches whether these tasks still run."""
        tasks = [self._coordinator_task, self._directory_task, self._servers.http.task]
        return [task for task in tasks if task is not None]

    def apply(self, config: FrontendConfig) -> None:
        """Apply the reloadable settings of ``config``. Requests in flight continue, even if they exceed the new limits."""
        settings = self._assembly.settings
        settings.limits.now, settings.fairness.now, settings.log.now = config.limits, config.fairness, config.log
        self._llm.limits_changed()

    async def main_loop(self) -> None:
        """Update the status in the health service until ``stop`` is called."""
        told = False
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._stopping:
                return
            if told != self._readiness.ready:
                told = self._readiness.ready
                get_logger().info("serving requests" if told else f"not serving requests: {self._readiness.why}")
            await self._servers.tell_health()

    def stop(self) -> None:
        """End ``main_loop``, after which the frontend drains. A second call ends the drain immediately."""
        if self._stopping:
            self._cut_short.set()
        self._stopping = True
        self._changed.set()

    async def shutdown(self) -> None:
        """Drain, end the remaining requests, and close the ports. Idempotent. The caller may also call it if
        ``startup`` failed.
        """
        self._readiness.drain(moves_clients=self._config.server.max_connection_age > 0)
        await self._servers.tell_health()
        ended_by = await self._drain()
        self._readiness.close()
        await self._servers.tell_health()
        for task in (self._living, self._directory_task):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if left := self._llm.num_live:
            get_logger().warning("ending requests that are still running after the drain", count=left)
        self._llm.tenants.flush()
        self._llm.end_all(ended_by)
        await self._servers.stop(_CLOSE_GRACE)
        if self._assembly.media is not None:
            await self._assembly.media.close()
        if self._coordinator is not None and self._coordinator_task is not None:
            await self._coordinator.close()
            await self._coordinator_task
        await self._engines.close()
        await self._assembly.chat.renderer.close()
        self._assembly.tokenizer.close()
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.stop)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.shutdown)
        get_logger().info("frontend stopped")

    async def _drain(self) -> str:
        """Serve calls until no more calls can arrive. If the drain ends before that, return the reason, and otherwise an
        empty string.
        """
        if self._living is None:  # startup failed, so no client has connected
            return ""
        timeout, clock = self._config.drain_timeout, asyncio.get_running_loop().time
        get_logger().info("frontend is draining", timeout=timeout)
        draining = Draining(clock(), timeout=timeout, max_age=self._config.server.max_connection_age)
        self._servers.drain()
        while not self._servers.drained(draining, now := clock()):
            if (left := draining.deadline - now) <= 0.0:
                return f"the drain_timeout of {timeout:g} s has passed"
            try:  # check at intervals, because no event reports that a connection has closed
                async with asyncio.timeout(min(left, _LOOK_INTERVAL)):
                    await self._cut_short.wait()
                return "the process was told to stop twice"
            except TimeoutError:
                continue
        return ""

    def _warn_of_a_short_drain(self) -> None:
        server = self._config.server
        needed = Draining(0.0, timeout=0.0, max_age=server.max_connection_age).moved_after + QUIET
        if server.max_connection_age and self._config.drain_timeout < needed:
            get_logger().warning(
                "drain_timeout is too short for all clients to move to another frontend; increase drain_timeout, or decrease "
                "server.max_connection_age",
                drain_timeout=self._config.drain_timeout,
                max_connection_age=server.max_connection_age,
                needed=round(needed, 1),
            )

    def _coordinator_client(self, incarnation: str) -> CoordinatorClient:
        return CoordinatorClient(
            self._config.coordinator.address,
            frontend_id=self._config.name,
            incarnation=incarnation,
            on_view=self._engines.follow_view,
            on_lost=self._engines.coordinator_lost,
            loras=self._llm.adapters.adapters.registry if self._config.lora.serves else None,
            model=self._config.model.name,
            pools=self._config.coordinator.pools,
            reconnect_max=self._config.coordinator.reconnect_max,
            credentials=ClientCredentials(
                self._config.coordinator.tls, field="coordinator.tls", certificates=self._certificates
            ),
        )

    def _on_change(self) -> None:
        connected = self._engines.view.connected
        for engine in connected:
            self._metrics.engine(
                engine
            )  # create the time series of each engine, so that they have the value 0 before the first request
        self._llm.adapters.engines_changed()
        self._metrics.series("penstock:engines_connected").set(len(connected))
        self._metrics.series("penstock:requests_held").set(self._engines.num_held)
        self._metrics.series("penstock:engine_variants").set(len(self._engines.view.variants()))
        if self._coordinator is not None:
            self._coordinator.demand(self._engines.num_held)
        self._update_readiness()

    def _update_readiness(self) -> None:
        engines, coordinator = self._engines, self._coordinator
        if self._readiness.update(
            engine=engines.usable,
            view=coordinator is not None and coordinator.view is not None,
            full=self._llm.full or engines.full,
        ):
            self._changed.set()


async def run(config_file: ConfigFile[FrontendConfig]) -> None:
    """Run the frontend until the process receives SIGTERM or SIGINT. Raises ConfigError if a setting or a file that a
    setting names is not valid.
    """
    frontend = Frontend(config_file.running)

    def apply(config: FrontendConfig) -> None:
        configure(config.log, service="frontend")
        frontend.apply(config)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, frontend.stop)
    try:
        await frontend.startup()
        async with config_file.followed(apply):
            await frontend.main_loop()
    finally:
        await frontend.shutdown()
