"""Lifecycle of the frontend process: startup, serving, drain and shutdown."""

import asyncio
import signal
import time

from penstock_common.config_file import ConfigFile
from penstock_common.metrics_server import MetricsServer
from penstock_common.observability.logging import configure, get_logger
from penstock_common.observability.metrics import count_tasks, tell_connected
from penstock_common.observability.tracer import make_tracer
from penstock_common.rpc.loop import Liveness
from penstock_common.security.tls import Certificates
from penstock_frontend.app.running_model import RunningModel
from penstock_frontend.app.servers import QUIET, Draining, Servers
from penstock_frontend.calls.admission import Readiness
from penstock_frontend.config import FrontendConfig

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
        """Read the files of the models, which may take a long time. Raises ConfigError if the configuration or a file is
        not valid.
        """
        self._config = config
        self._changed = asyncio.Event()
        self._stopping = False
        self._cut_short = asyncio.Event()
        self._readiness = Readiness(without_engines=config.ready_without_engines)
        self._tracer = make_tracer(config.tracing, service="frontend", instance=config.name)
        self._certificates = Certificates()
        self._usable: list[bool] = []
        """Whether engines of each model accepted requests at the last update of the readiness."""
        self._models: list[RunningModel] = []
        for each in config.per_model():
            model = RunningModel(
                each,
                tracer=self._tracer,
                certificates=self._certificates,
                on_change=self._update_readiness,
                first=self._models[0].assembly if self._models else None,
            )
            self._models.append(model)
        self._registry = self._models[0].assembly.metrics.registry
        self._registry.register(self._certificates)
        self._servers = Servers(
            config,
            self._models,
            tracer=self._tracer,
            readiness=self._readiness,
            certificates=self._certificates,
        )
        if config.coordinator.address:
            tell_connected(self._registry, lambda: all(model.coordinator_connected for model in self._models))
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
        count_tasks(self._registry, asyncio.get_running_loop())
        self._warn_of_a_short_drain()
        for model in self._models:
            await model.begin()
        await self._servers.start()
        self._metrics_server = MetricsServer(self._config.metrics, self._servers.registry, self._certificates)
        for model in self._models:
            model.follow_engines()
        self._living = asyncio.create_task(
            Liveness(self._servers.public, self._essential, clock=time.monotonic).run(), name="liveness"
        )
        for model in self._models:
            if model.assembly.media is not None:
                await model.assembly.media.start()
        names = ", ".join(model.name for model in self._models)
        get_logger().info("frontend started", model=names, grpc_port=self.port, admin_port=self.admin_port)

    def _essential(self) -> list[asyncio.Task[None]]:
        """Return the tasks that the frontend needs to work. The liveness check watches whether these tasks still run."""
        http = self._servers.http.task
        return [*(task for model in self._models for task in model.tasks), *([] if http is None else [http])]

    def apply(self, config: FrontendConfig) -> None:
        """Apply the reloadable settings of ``config``. Requests in flight continue, even if they exceed the new limits."""
        settings = self._models[0].assembly.settings
        settings.limits.now, settings.fairness.now, settings.log.now = config.limits, config.fairness, config.log
        for model in self._models:
            model.assembly.llm.limits_changed()

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
        if self._living is not None:
            self._living.cancel()
            await asyncio.gather(self._living, return_exceptions=True)
        if left := sum(model.assembly.llm.num_live for model in self._models):
            get_logger().warning("ending requests that are still running after the drain", count=left)
        for model in self._models:
            await model.end_requests(ended_by)
        await self._servers.stop(_CLOSE_GRACE)
        for model in self._models:
            await model.close()
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

    def _update_readiness(self) -> None:
        """Update the readiness. The frontend is ready if one of its models is ready, so that a model without engines
        does not take the other models out of service.
        """
        usable = [model.assembly.engines.usable for model in self._models]
        changed = self._readiness.update(
            engine=any(usable),
            view=all(model.knows_cluster for model in self._models),
            full=all(model.full for model in self._models),
        )
        if changed or usable != self._usable:
            self._usable = usable
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
