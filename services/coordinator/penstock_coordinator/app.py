"""Process of the coordinator, from start to stop."""

import asyncio
import os
import signal
import time

from penstock_common.addresses import with_port
from penstock_common.config_file import ConfigFile
from penstock_common.errors import ConfigError
from penstock_common.metrics_server import MetricsServer
from penstock_common.observability.logging import configure, get_logger
from penstock_common.observability.metrics import Readings, count_tasks, service_registry
from penstock_common.observability.tracer import make_tracer
from penstock_common.rpc.call_authorization import PeerGuard
from penstock_common.rpc.interceptor import CallTelemetry
from penstock_common.rpc.loop import Liveness
from penstock_common.rpc.reconnect import wait_at_most
from penstock_common.rpc.server import SERVICES, RpcServer
from penstock_common.security.tls import Certificates
from penstock_coordinator.autoscaling import ScalingSignals
from penstock_coordinator.cluster import Clock, Cluster
from penstock_coordinator.config import CoordinatorConfig
from penstock_coordinator.kubernetes.link import KubernetesLink
from penstock_coordinator.metrics import CoordinatorMetrics, pool_families
from penstock_coordinator.rpc import external_scaler
from penstock_coordinator.rpc.external_scaler import ExternalScalerServicer
from penstock_coordinator.rpc.servicer import SERVICE_NAME, CoordinatorServicer, ProtoEncoder, allowed

STREAMS_TIMEOUT = 2.0
"""Seconds that streams have to end with a status before the server stops."""
STOP_GRACE = 0.2
"""Seconds after the stop of the server at which the remaining calls are cancelled."""


class Coordinator:
    """Coordinator service. The service runs from ``start`` to ``stop``, on the event loop on which ``start`` was
    called.
    """

    def __init__(self, config: CoordinatorConfig, *, clock: Clock = time.monotonic) -> None:
        """Create the service. ``clock`` returns monotonic seconds."""
        self._config = config
        self._clock = clock
        self.registry = service_registry("coordinator")
        self._certificates = Certificates()
        self.registry.register(self._certificates)
        self.port = 0
        self._tracer = make_tracer(config.tracing, service="coordinator", instance=os.uname().nodename)
        self._calls = CallTelemetry(self.registry, self._tracer)
        self._metrics = CoordinatorMetrics(self.registry)

    async def start(self) -> int:
        """Start to serve. Return the port. Raises ConfigError if a port is in use."""
        count_tasks(self.registry, asyncio.get_running_loop())
        self._cluster = Cluster(self._config, self._clock, ProtoEncoder())
        self._metrics_server = MetricsServer(self._config.metrics, self.registry, self._certificates)
        self._signals = ScalingSignals(self._config.scaling)
        self.registry.register(Readings(lambda: pool_families(self._signals, self._config.scaling)))
        peers = self._config.peers
        guards = [PeerGuard(allowed(peers) | external_scaler.allowed(peers))] if self._config.server.tls.ca else []
        self._rpc = RpcServer(
            self._config.server,
            service_names=[SERVICE_NAME, external_scaler.SERVICE_NAME],
            interceptors=guards,
            observer=self._calls,
            keepalive=SERVICES,
            certificates=self._certificates,
        )
        self._kubernetes = KubernetesLink(self._config.kubernetes, self.registry, self._clock)
        self._servicer = CoordinatorServicer(self._cluster, self._kubernetes.replicas, self._metrics)
        self._servicer.add_to_server(self._rpc.server)
        self._scaler = ExternalScalerServicer(self._signals, self._config.scaling, self._clock)
        self._scaler.add_to_server(self._rpc.server)
        try:
            self.port = await self._rpc.start()
        except ConfigError:
            self._metrics_server.stop()
            await self._kubernetes.stop()
            raise
        self._ticking = asyncio.create_task(self._tick(), name="tick")
        self._kubernetes.start(
            lambda: self._cluster.view() if self._cluster.known else None, slots=self._config.scaling.slots
        )
        liveness = Liveness(self._rpc, lambda: [self._ticking, *self._kubernetes.tasks], clock=time.monotonic)
        self._living = asyncio.create_task(liveness.run(), name="liveness")
        await self._rpc.set_serving(True)
        get_logger().info("coordinator started", address=with_port(self._config.server.host, self.port))
        return self.port

    async def stop(self) -> None:
        """End all streams, and close the ports. Engines and frontends keep serving without a coordinator."""
        for task in (self._living, self._ticking):
            task.cancel()
        await asyncio.gather(self._living, self._ticking, return_exceptions=True)
        await self._kubernetes.stop()
        await self._rpc.set_serving(False)
        self._servicer.stop()
        self._scaler.stop()
        await self._rpc.calls_ended(STREAMS_TIMEOUT)
        await self._rpc.stop(STOP_GRACE)
        self._metrics_server.stop()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.shutdown)
        get_logger().info("coordinator stopped")

    async def _tick(self) -> None:
        while True:
            self._cluster.tick()
            view, frontends = self._cluster.view(), self._cluster.frontends
            self._metrics.update(view, frontends)
            if self._cluster.known:
                self._signals.take(view, frontends.held_for, self._clock())
            await wait_at_most(self._cluster.look, self._cluster.sleep)
            if self._cluster.look.is_set():
                await asyncio.sleep(self._cluster.sleep)


async def serve(config_file: ConfigFile[CoordinatorConfig]) -> None:
    """Run until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    coordinator = Coordinator(config_file.running)
    await coordinator.start()
    async with config_file.followed(lambda config: configure(config.log, service="coordinator")):
        await stop.wait()
    await coordinator.stop()
