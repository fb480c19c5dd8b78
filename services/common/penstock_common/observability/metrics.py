"""Prometheus metrics: those that all services have, the load of engines, and histograms that cost little."""

import asyncio
import importlib.metadata
import platform
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Gauge, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from penstock_common.types.outputs import KvTransferStats, LoraStats, MediaStats, SchedulerStats, SpecDecodingStats


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


# The load of engines as Prometheus families, under the names vLLM's dashboards and autoscalers read.
#
# Engines tell it of themselves; a frontend may tell it of the engines it knows.

T = TypeVar("T")

LABELS = ("model_name", "engine")
Family = CounterMetricFamily | GaugeMetricFamily | InfoMetricFamily

_GAUGES: dict[str, tuple[str, Callable[[SchedulerStats], float]]] = {
    "vllm:num_requests_running": ("Requests with KV blocks", lambda s: s.num_running_reqs),
    "vllm:num_requests_waiting": ("Requests in the queue", lambda s: s.num_waiting_reqs),
    "penstock:num_requests_held": ("Of these, waiting for something of their own", lambda s: s.num_skipped_reqs),
    "vllm:kv_cache_usage_perc": ("Used fraction of the KV cache, 0 to 1", lambda s: s.kv_cache_usage),
}
_COUNTERS: dict[str, tuple[str, Callable[[SchedulerStats], float]]] = {
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", lambda s: s.prefix_cache_queries),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache", lambda s: s.prefix_cache_hits),
    "vllm:num_preemptions": ("Requests that lost their KV blocks to another", lambda s: s.num_preemptions),
    "penstock:engine_steps": ("Steps executed", lambda s: s.step_counter),
}
_DRAFTS: dict[str, tuple[str, Callable[[SpecDecodingStats], float]]] = {
    "vllm:spec_decode_num_drafts": ("Times that a request had drafts in a step", lambda s: s.num_drafts),
    "vllm:spec_decode_num_draft_tokens": ("Drafted tokens that steps verified", lambda s: s.num_draft_tokens),
    "vllm:spec_decode_num_accepted_tokens": ("Of these, what the model chose", lambda s: s.num_accepted_tokens),
}
_LORA_GAUGES: dict[str, tuple[str, Callable[[LoraStats], float]]] = {
    "penstock:lora_cached": ("Adapters in host memory", lambda s: s.num_cached),
    "penstock:lora_cached_bytes": ("Bytes of these", lambda s: s.cached_bytes),
}
_LORA_COUNTERS: dict[str, tuple[str, Callable[[LoraStats], float]]] = {
    "penstock:lora_loads": ("Adapters loaded", lambda s: s.num_loads),
    "penstock:lora_load_seconds": ("Seconds that loading them took", lambda s: s.load_seconds),
    "penstock:lora_requests": ("Requests with adapters", lambda s: s.num_requests),
    "penstock:lora_requests_found": ("Of these, requests that found theirs in memory", lambda s: s.num_found),
    "penstock:lora_evictions": ("Adapters that made room for others", lambda s: s.num_evictions),
}
_MEDIA_GAUGES: dict[str, tuple[str, Callable[[MediaStats], float]]] = {
    "penstock:encoder_cache_usage": ("Used fraction of the encoder cache, 0 to 1", lambda s: s.encoder_cache_usage),
    "penstock:encoder_pending_embeds": ("Embeddings of media that are to be computed", lambda s: s.pending_embeds),
    "penstock:num_requests_waiting_for_media": ("Requests that wait for embeddings", lambda s: s.num_waiting_reqs),
    "penstock:receiver_cache_bytes": ("Bytes of processed media in host memory", lambda s: s.receiver_cache_bytes),
}
_MEDIA_COUNTERS: dict[str, tuple[str, Callable[[MediaStats], float]]] = {
    "penstock:encoder_embeds": ("Embeddings of media that were computed", lambda s: s.encoded_embeds),
    "penstock:encoder_cache_queries": ("Media looked up in the encoder cache", lambda s: s.encoder_cache_queries),
    "penstock:encoder_cache_hits": ("Media found in the encoder cache", lambda s: s.encoder_cache_hits),
}
_KV_COUNTERS: dict[str, tuple[str, Callable[[KvTransferStats], float]]] = {
    "vllm:external_prefix_cache_queries": (
        "Prompt tokens that were not in the KV cache",
        lambda s: s.external_prefix_cache_queries,
    ),
    "vllm:external_prefix_cache_hits": (
        "Of these, tokens whose blocks were loaded",
        lambda s: s.external_prefix_cache_hits,
    ),
}
_KV_GAUGES: dict[str, tuple[str, Callable[[KvTransferStats], float]]] = {
    "penstock:kv_leases": ("Requests whose blocks are kept for other engines", lambda s: s.num_leases),
    "penstock:kv_leased_blocks": ("Blocks that are kept for other engines", lambda s: s.num_leased_blocks),
}


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: who it is, how large its KV cache (in blocks, and tokens per block), how many requests it runs at once (0 where
    it does not say), and its load.
    """

    model: str
    engine: str
    num_kv_blocks: int
    block_size: int
    max_num_seqs: int
    stats: SchedulerStats


def engine_families(loads: Iterable[EngineLoad]) -> Iterator[Family]:
    """One family per metric, with a series per engine."""
    known = list(loads)
    stats = [(load, load.stats) for load in known]
    yield from _families(GaugeMetricFamily, _GAUGES, stats)
    yield from _families(CounterMetricFamily, _COUNTERS, stats)
    fraction = GaugeMetricFamily("penstock:load", "Requests running and waiting over max_num_seqs", labels=LABELS)
    for load in known:
        if load.max_num_seqs:
            requests = load.stats.num_running_reqs + load.stats.num_waiting_reqs
            fraction.add_metric((load.model, load.engine), requests / load.max_num_seqs)
    yield fraction
    info = InfoMetricFamily("vllm:cache_config", "Size of the KV cache", labels=LABELS)
    for load in known:
        sizes = {"num_gpu_blocks": str(load.num_kv_blocks), "block_size": str(load.block_size)}
        info.add_metric((load.model, load.engine), sizes)
    yield info
    yield from _speculation_families(known)
    yield from _lora_families(known)
    if media := [(load, load.stats.media) for load in known if load.stats.media is not None]:
        yield from _families(GaugeMetricFamily, _MEDIA_GAUGES, media)
        yield from _families(CounterMetricFamily, _MEDIA_COUNTERS, media)
    if moved := [(load, load.stats.kv_transfer) for load in known if load.stats.kv_transfer is not None]:
        yield from _families(CounterMetricFamily, _KV_COUNTERS, moved)
        yield from _families(GaugeMetricFamily, _KV_GAUGES, moved)


def _families(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    table: Mapping[str, tuple[str, Callable[[T], float]]],
    known: Sequence[tuple[EngineLoad, T]],
) -> Iterator[Family]:
    """One family per row of ``table``, with a series per engine, of its statistics."""
    for name, (text, value) in table.items():
        family = kind(name, text, labels=LABELS)
        for load, stats in known:
            family.add_metric((load.model, load.engine), value(stats))
        yield family


def _speculation_families(loads: Sequence[EngineLoad]) -> Iterator[Family]:
    """Those of engines that speculate; none where no engine does."""
    known = [(load, stats) for load in loads if (stats := load.stats.spec_decoding_stats) is not None]
    if not known:
        return
    yield from _families(CounterMetricFamily, _DRAFTS, known)
    by_place = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted tokens by their place in a draft, from 0",
        labels=[*LABELS, "position"],
    )
    for load, stats in known:
        for place, count in enumerate(stats.num_accepted_tokens_per_pos):
            by_place.add_metric((load.model, load.engine, str(place)), count)
    yield by_place


def _lora_families(loads: Sequence[EngineLoad]) -> Iterator[Family]:
    """Those of engines that apply LoRA adapters; none where no engine does."""
    known = [(load, stats) for load in loads if (stats := load.stats.lora) is not None]
    if not known:
        return
    names = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    info = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters of running requests, and of those that wait for others to have ended; seconds since the epoch",
        labels=[*LABELS, *names],
    )
    for load, stats in known:
        adapters = str(stats.max_loras), ",".join(stats.active), ",".join(stats.waiting)
        info.add_metric((load.model, load.engine, *adapters), time.time())
    yield info
    yield from _families(GaugeMetricFamily, _LORA_GAUGES, known)
    yield from _families(CounterMetricFamily, _LORA_COUNTERS, known)
