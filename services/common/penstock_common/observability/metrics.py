"""Prometheus metrics that all services have in common, and histograms that cost little for hundreds of observations."""

import asyncio
import importlib.metadata
import platform
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import msgspec
from prometheus_client import CollectorRegistry, Gauge, ProcessCollector
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


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


# Prometheus histograms that cost little where one step of an engine brings hundreds of observations.


class BucketCounts(msgspec.Struct, frozen=True):
    """The observations of one series at one time, as one process tells another. ``bounds``: as for ``Buckets``. ``counts``: by
    bucket, not accumulated.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Write this series into its family."""
        names = [*map(str, self.bounds), "+Inf"]
        counts = map(float, accumulate(self.counts))
        family.add_metric(labels, buckets=list(zip(names, counts, strict=True)), sum_value=self.sum)


class Buckets:
    """The observations of one series. One thread observes; others may read."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds``: upper ends of the buckets, inclusive and ascending; one more for all that is larger is implied."""
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add ``count`` observations of the same value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Write this series into its family."""
        self.counts().add_to(family, labels)

    def counts(self) -> BucketCounts:
        """What has been observed: consistent in itself, whatever is observed meanwhile."""
        return BucketCounts(self._bounds, self._counts.copy(), self._sum)


class Histogram(Collector):
    """A histogram with labels. ``labels`` gives the series of some label values, and makes it on first use."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        *,
        bounds: Sequence[float],
        registry: CollectorRegistry | None = None,
    ) -> None:
        """``bounds``: upper ends of each series' buckets, inclusive and ascending; one more for all that is larger is implied."""
        self._name, self._text, self._label_names = name, text, labels
        self._bounds = bounds
        self._series: dict[tuple[str, ...], Buckets] = {}
        if registry is not None:
            registry.register(self)

    def labels(self, *values: str) -> Buckets:
        """The series of these label values."""
        if (found := self._series.get(values)) is None:
            found = self._series[values] = Buckets(self._bounds)
        return found

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """One family."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._label_names)
        for values, series in list(self._series.items()):
            series.add_to(family, values)
        yield family
