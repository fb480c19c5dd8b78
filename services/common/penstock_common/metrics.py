"""What the metrics of all services have in common, and the endpoint of a service without an HTTP server of its own."""

import asyncio
import importlib.metadata
import platform
import threading

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, start_http_server

from penstock_common.config import MetricsConfig
from penstock_common.errors import ConfigError
from penstock_common.logging import get_logger


def service_version() -> str:
    """The version of the installed distributions."""
    return importlib.metadata.version("penstock-common")


def service_registry(service: str) -> CollectorRegistry:
    """A registry with what every service tells of itself: version, threads, and its process's memory, CPU time and files."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    labels = ("service", "version", "python")
    build = Gauge("penstock:build_info", "1, labelled with what runs", labels, registry=registry)
    build.labels(service, service_version(), platform.python_version()).set(1)
    threads = Gauge("penstock:threads", "Threads that Python knows of", registry=registry)
    threads.set_function(threading.active_count)
    return registry


def count_tasks(registry: CollectorRegistry, loop: asyncio.AbstractEventLoop) -> None:
    """Also tell how many asyncio tasks of ``loop`` have not ended. It may run on another thread than the one that is asked."""
    tasks = Gauge("penstock:asyncio_tasks", "Asyncio tasks that have not ended", registry=registry)
    tasks.set_function(lambda: len(asyncio.all_tasks(loop)))


class MetricsServer:
    """Serves ``/metrics`` from a thread until ``stop``."""

    def __init__(self, config: MetricsConfig, registry: CollectorRegistry) -> None:
        """Raises ConfigError when the port is taken."""
        self._server = None
        if config.port < 0:
            return
        try:
            self._server, self._thread = start_http_server(config.port, addr=config.host, registry=registry)
        except OSError as e:
            raise ConfigError(
                f"metrics.port {config.port} on {config.host}: {e.strerror or e}; set another port, or -1 for none"
            ) from None
        get_logger().info("metrics", address=f"{config.host}:{self._server.server_port}")

    def stop(self) -> None:
        """Close the port. Idempotent."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None
