"""The engine's Prometheus metrics, under the names vLLM's dashboards and autoscalers read."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from penstock_common.types.outputs import EngineReady, SchedulerStats
from penstock_enginecore.core.control import EngineState

_LABELS = ["model_name", "engine"]
_Family = CounterMetricFamily | GaugeMetricFamily | InfoMetricFamily

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


_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""By sleep level, as vLLM calls them."""


class EngineCollector(Collector):
    """Reads the engine's statistics when it is scraped: nothing is counted twice, and a step pays nothing."""

    def __init__(
        self, stats: Callable[[], SchedulerStats], state: Callable[[], EngineState], ready: EngineReady
    ) -> None:
        self._stats = stats
        self._state = state
        self._ready = ready

    def collect(self) -> Iterator[_Family]:
        """One family per metric."""
        stats = self._stats()
        labels = [self._ready.model, self._ready.engine_id]
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, (text, value) in table.items():
                family = kind(name, text, labels=_LABELS)
                family.add_metric(labels, value(stats))
                yield family
        yield from self._state_families(labels)
        info = InfoMetricFamily("vllm:cache_config", "Size of the KV cache", labels=_LABELS)
        sizes = {"num_gpu_blocks": self._ready.num_kv_blocks, "block_size": self._ready.block_size}
        info.add_metric(labels, {name: str(size) for name, size in sizes.items()})
        yield info

    def _state_families(self, labels: list[str]) -> Iterator[_Family]:
        state = self._state()
        paused = GaugeMetricFamily("penstock:engine_paused", "1 while nothing is scheduled", labels=_LABELS)
        paused.add_metric(labels, state.paused)
        yield paused
        sleep = GaugeMetricFamily(
            "vllm:engine_sleep_state", "1 for the state the engine is in", labels=[*_LABELS, "sleep_state"]
        )
        for level, name in enumerate(_SLEEP_STATES):
            sleep.add_metric([*labels, name], level == state.sleep_level)
        yield sleep
        nans = CounterMetricFamily("penstock:nan_logits", "Logits of sampled rows that were NaN", labels=_LABELS)
        nans.add_metric(labels, state.num_nan_logits)
        yield nans


def engine_registry(
    stats: Callable[[], SchedulerStats], state: Callable[[], EngineState], ready: EngineReady
) -> CollectorRegistry:
    """A registry with the engine's metrics alone."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(stats, state, ready))
    return registry
