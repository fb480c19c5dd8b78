"""What the metrics of all services have in common."""

import asyncio
import importlib.metadata
import platform
import threading
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector


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


def tell_connected(registry: CollectorRegistry, connected: Callable[[], bool]) -> None:
    """Also tell whether the coordinator is there, as ``connected`` says when it is asked, which may be on another thread."""
    gauge = Gauge("penstock:coordinator_connected", "1 while the coordinator is there", registry=registry)
    gauge.set_function(connected)


def count_tasks(registry: CollectorRegistry, loop: asyncio.AbstractEventLoop) -> None:
    """Also tell how many asyncio tasks of ``loop`` have not ended. It may run on another thread than the one that is asked."""
    tasks = Gauge("penstock:asyncio_tasks", "Asyncio tasks that have not ended", registry=registry)
    tasks.set_function(lambda: len(asyncio.all_tasks(loop)))
