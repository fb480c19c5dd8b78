"""Prometheus metrics: common metrics of all services, metrics about the load of engines, and fast histograms."""

import asyncio
import importlib.metadata
import platform
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from penstock_common.types.outputs import SchedulerStats


def service_version() -> str:
    """Return the version of the installed Penstock packages."""
    return importlib.metadata.version("penstock-common")


def service_registry(service: str) -> CollectorRegistry:
    """Return a registry with the metrics of every service: version, threads, and the process's memory, CPU time and
    files.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    labels = ("service", "version", "python")
    build = Gauge(
        "penstock:build_info",
        "Constant 1; the labels have the service, its version and Python's version",
        labels,
        registry=registry,
    )
    build.labels(service, service_version(), platform.python_version()).set(1)
    threads = Gauge("penstock:threads", "Number of Python threads of the process", registry=registry)
    threads.set_function(threading.active_count)
    return registry


def tell_connected(registry: CollectorRegistry, connected: Callable[[], bool]) -> None:
    """Add a metric for the connection to the coordinator. ``connected`` returns whether the connection exists, and may
    be called by any thread.
    """
    gauge = Gauge(
        "penstock:coordinator_connected",
        "1 while the process is connected to the coordinator, else 0",
        registry=registry,
    )
    gauge.set_function(connected)


def count_tasks(registry: CollectorRegistry, loop: asyncio.AbstractEventLoop) -> None:
    """Add a metric for the number of unfinished asyncio tasks of ``loop``. The loop may run on another thread."""
    tasks = Gauge("penstock:asyncio_tasks", "Number of unfinished asyncio tasks", registry=registry)
    tasks.set_function(lambda: len(asyncio.all_tasks(loop)))


# Prometheus histograms that are fast enough for hundreds of observations per step of an engine.


class BucketCounts(msgspec.Struct, frozen=True):
    """Snapshot of the observations of one series, which one process can send to another process.

    Attributes:
        bounds: See ``Buckets``.
        counts: Number of observations in each bucket. Unlike in Prometheus, a bucket's count does not include the
            counts of smaller buckets.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add this series to its metric family."""
        names = [*map(str, self.bounds), "+Inf"]
        counts = map(float, accumulate(self.counts))
        family.add_metric(labels, buckets=list(zip(names, counts, strict=True)), sum_value=self.sum)


class Buckets:
    """Observations of one series of a histogram. One thread adds observations, and other threads may read the
    observations.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Create buckets with these inclusive upper bounds, ascending. One more bucket is added for larger values."""
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add ``count`` observations of the same value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add this series to its metric family."""
        self.counts().add_to(family, labels)

    def counts(self) -> BucketCounts:
        """Return a consistent copy of the observations."""
        return BucketCounts(self._bounds, self._counts.copy(), self._sum)


class Histogram(Collector):
    """Histogram with labels. ``labels`` returns the series of the given label values, which it creates on first use."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        *,
        bounds: Sequence[float],
        registry: CollectorRegistry | None = None,
    ) -> None:
        """Create a histogram. ``bounds`` are the inclusive upper bounds of the buckets, ascending. One more bucket is
        added for larger values.
        """
        self._name, self._text, self._label_names = name, text, labels
        self._bounds = bounds
        self._series: dict[tuple[str, ...], Buckets] = {}
        if registry is not None:
            registry.register(self)

    def labels(self, *values: str) -> Buckets:
        """Return the series of these label values."""
        if (found := self._series.get(values)) is None:
            found = self._series[values] = Buckets(self._bounds)
        return found

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the metric family of this histogram."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._label_names)
        for values, series in list(self._series.items()):
            series.add_to(family, values)
        yield family


# Tables of metrics: metrics that a process updates when events occur, and metrics that it reads at each scrape.

LABELS = ("model_name", "engine")


class Instrument(NamedTuple):
    """A metric that is updated when events occur.

    Attributes:
        labels: Label names, in addition to the labels of the whole table.
        bounds: Bucket bounds of a histogram.
    """

    kind: type[Counter] | type[Gauge] | type[Histogram]
    name: str
    text: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


class Instruments:
    """The time series of a table of metrics.

    Args:
        registry: Registry of the metrics.
        table: The metrics.
        more: Names of labels that all metrics have. Callers pass the values of these labels for each series.
        labels: Names and values of labels that all series have.
    """

    def __init__(
        self, registry: CollectorRegistry, table: Iterable[Instrument], more: Sequence[str] = (), **labels: str
    ) -> None:
        self._labels = tuple(labels.values())
        self._families: dict[str, Any] = {}
        for row in table:
            names = (*labels, *more, *row.labels)
            bounds: dict[str, Any] = {"bounds": row.bounds} if row.bounds else {}
            self._families[row.name] = row.kind(row.name, row.text, names, registry=registry, **bounds)
            if not (more or row.labels):
                self.series(row.name)  # creates the series, so that the metric is exported with the value 0

    def series(self, name: str, *labels: str) -> Any:
        """Return the counter, gauge or buckets of a metric, with values for ``more`` and for the labels in the metric's
        row.
        """
        family, values = self._families[name], (*self._labels, *labels)
        return family.labels(*values) if values or isinstance(family, Histogram) else family


Value = float | BucketCounts | tuple[int, float]
"""Value of a series. A tuple is the value of a summary: the number of observations and their sum."""


class Reading(NamedTuple):
    """A metric that is read from sources at each scrape. The metric is left out if no source has it.

    Attributes:
        read: Name of the source's attribute with the value, or a function that returns the value for a source. A
            mapping has the values of several series, by their values of ``labels``. None means that the source does not
            have the metric.
        labels: Label names, in addition to the labels of the whole table.
    """

    kind: type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | SummaryMetricFamily]
    name: str
    text: str
    read: str | Callable[[Any], Value | Mapping[Any, Value] | None]
    labels: tuple[str, ...] = ()


def families(
    table: Iterable[Reading], sources: Iterable[tuple[Sequence[str], Any]], labels: Sequence[str] = LABELS
) -> Iterator[Metric]:
    """Yield one family per row of ``table``, with the series of every source.

    A source is a pair: its values of ``labels``, and the object from which the metrics are read.
    """
    known = list(sources)
    for row in table:
        read = attrgetter(row.read) if isinstance(row.read, str) else row.read
        found = [(values, value) for values, source in known if (value := read(source)) is not None]
        if known and not found:
            continue
        family: Any = row.kind(row.name, row.text, labels=(*labels, *row.labels))
        for values, value in found:
            for more, each in value.items() if isinstance(value, Mapping) else [((), value)]:
                _add(family, (*values, *([more] if isinstance(more, str) else more)), each)
        yield family


def _add(family: Any, labels: Sequence[str], value: Value) -> None:
    if isinstance(value, BucketCounts):
        value.add_to(family, labels)
    elif isinstance(value, tuple):
        family.add_metric(labels, *value)
    else:
        family.add_metric(labels, value)


class Readings(Collector):
    """Collector that reads families at each scrape, so that values are not stored a second time."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Return one family per metric."""
        return self._read()


# The load of engines as Prometheus families, under the names that vLLM's dashboards and autoscalers read.
#
# An engine reports its own load. A frontend may report the load of all engines that it knows.

_C, _G = CounterMetricFamily, GaugeMetricFamily
_STATS = (
    Reading(_G, "vllm:num_requests_running", "Number of running requests, which have KV blocks", "num_running_reqs"),
    Reading(_G, "vllm:num_requests_waiting", "Number of requests in the queue", "num_waiting_reqs"),
    Reading(
        _G,
        "penstock:num_requests_held",
        "Number of requests in the queue that could not start even on an idle engine",
        "num_skipped_reqs",
    ),
    Reading(_G, "vllm:kv_cache_usage_perc", "Used fraction of the KV cache, 0 to 1", "kv_cache_usage"),
    Reading(
        _C, "vllm:prefix_cache_queries", "Number of prompt tokens looked up in the prefix cache", "prefix_cache_queries"
    ),
    Reading(_C, "vllm:prefix_cache_hits", "Number of prompt tokens found in the prefix cache", "prefix_cache_hits"),
    Reading(
        _C,
        "vllm:num_preemptions",
        "Number of times that a request lost its KV blocks to another request",
        "num_preemptions",
    ),
    Reading(_C, "penstock:engine_steps", "Number of executed steps", "step_counter"),
)
_DRAFTS = (
    Reading(_C, "vllm:spec_decode_num_drafts", "Number of times that a request had drafts in a step", "num_drafts"),
    Reading(
        _C, "vllm:spec_decode_num_draft_tokens", "Number of drafted tokens that steps verified", "num_draft_tokens"
    ),
    Reading(
        _C,
        "vllm:spec_decode_num_accepted_tokens",
        "Number of verified draft tokens that the model accepted",
        "num_accepted_tokens",
    ),
    Reading(
        _C,
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Number of accepted draft tokens, by their position in the draft, from 0",
        lambda s: {str(place): count for place, count in enumerate(s.num_accepted_tokens_per_pos)},
        ("position",),
    ),
)
_LORA = (
    Reading(
        _G,
        "vllm:lora_requests_info",
        "Time in Unix seconds; the labels have the adapters of running requests and the adapters that wait for a slot",
        lambda s: {(str(s.max_loras), ",".join(s.active), ",".join(s.waiting)): time.time()},
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    ),
    Reading(_G, "penstock:lora_cached", "Number of LoRA adapters in host memory", "num_cached"),
    Reading(_G, "penstock:lora_cached_bytes", "Size of the LoRA adapters in host memory, in bytes", "cached_bytes"),
    Reading(_C, "penstock:lora_loads", "Number of LoRA adapters that were loaded", "num_loads"),
    Reading(_C, "penstock:lora_load_seconds", "Total seconds spent on loading LoRA adapters", "load_seconds"),
    Reading(_C, "penstock:lora_requests", "Number of requests with LoRA adapters", "num_requests"),
    Reading(
        _C, "penstock:lora_requests_found", "Number of requests whose LoRA adapter was already in memory", "num_found"
    ),
    Reading(_C, "penstock:lora_evictions", "Number of LoRA adapters evicted from host memory", "num_evictions"),
)
_MEDIA = (
    Reading(_G, "penstock:encoder_cache_usage", "Used fraction of the encoder cache, 0 to 1", "encoder_cache_usage"),
    Reading(
        _G,
        "penstock:encoder_pending_embeds",
        "Number of media embeddings that the engine must still compute",
        "pending_embeds",
    ),
    Reading(
        _G,
        "penstock:num_requests_waiting_for_media",
        "Number of requests that wait only for their media embeddings",
        "num_waiting_reqs",
    ),
    Reading(
        _G,
        "penstock:receiver_cache_bytes",
        "Size of the processed media in host memory, in bytes",
        "receiver_cache_bytes",
    ),
    Reading(_C, "penstock:encoder_embeds", "Number of computed media embeddings", "encoded_embeds"),
    Reading(
        _C,
        "penstock:encoder_cache_queries",
        "Number of media items looked up in the encoder cache",
        "encoder_cache_queries",
    ),
    Reading(
        _C, "penstock:encoder_cache_hits", "Number of media items found in the encoder cache", "encoder_cache_hits"
    ),
)
_KV = (
    Reading(
        _C,
        "vllm:external_prefix_cache_queries",
        "Number of prompt tokens that were not in the KV cache and were looked up elsewhere",
        "external_prefix_cache_queries",
    ),
    Reading(
        _C,
        "vllm:external_prefix_cache_hits",
        "Number of looked-up prompt tokens whose KV blocks were loaded",
        "external_prefix_cache_hits",
    ),
    Reading(_G, "penstock:kv_leases", "Number of requests whose KV blocks are kept for other engines", "num_leases"),
    Reading(
        _G, "penstock:kv_leased_blocks", "Number of KV blocks that are kept for other engines", "num_leased_blocks"
    ),
)
_STATES = (
    Reading(_G, "penstock:state_slots", "Number of slots for states of recurrent layers", "num_slots"),
    Reading(_G, "penstock:state_slots_used", "Number of slots that running requests own or read", "num_used_slots"),
    Reading(_G, "penstock:states_kept", "Number of states of recurrent layers that the prefix cache keeps", "num_kept"),
    Reading(
        _C,
        "penstock:state_evictions",
        "Number of states of recurrent layers that the prefix cache evicted",
        "num_evictions",
    ),
    Reading(
        _C,
        "penstock:state_recomputed_tokens",
        "Number of prompt tokens recomputed because their keys and values were cached without a state",
        "num_recomputed_tokens",
    ),
)
_PARTS = (
    ("spec_decoding_stats", _DRAFTS),
    ("lora", _LORA),
    ("media", _MEDIA),
    ("kv_transfer", _KV),
    ("states", _STATES),
)
"""Statistics that only some engines have, with their metrics. If no engine has such statistics, their metrics are left
out.
"""


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Identity, limits and load of one engine.

    Attributes:
        num_kv_blocks: Size of the KV cache in blocks.
        block_size: Tokens per block.
        max_num_seqs: Maximum number of running requests, or 0 if unknown.
    """

    model: str
    engine: str
    num_kv_blocks: int
    block_size: int
    max_num_seqs: int
    stats: SchedulerStats


def engine_families(loads: Iterable[EngineLoad]) -> Iterator[Metric]:
    """Yield one family per metric, with one series per engine."""
    known = [((load.model, load.engine), load) for load in loads]
    yield from families(_STATS, [(labels, load.stats) for labels, load in known])
    fraction = GaugeMetricFamily(
        "penstock:load", "Number of running and waiting requests, divided by max_num_seqs", labels=LABELS
    )
    info = InfoMetricFamily("vllm:cache_config", "Constant 1; the labels have the size of the KV cache", labels=LABELS)
    for labels, load in known:
        if load.max_num_seqs:
            requests = load.stats.num_running_reqs + load.stats.num_waiting_reqs
            fraction.add_metric(labels, requests / load.max_num_seqs)
        info.add_metric(labels, {"num_gpu_blocks": str(load.num_kv_blocks), "block_size": str(load.block_size)})
    yield fraction
    yield info
    for name, table in _PARTS:
        if having := [(labels, part) for labels, load in known if (part := getattr(load.stats, name)) is not None]:
            yield from families(table, having)
