"""What the coordinator counts for Prometheus."""

import collections
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from penstock_common.observability.metrics import Histogram
from penstock_common.types.cluster import ClusterView, EngineState
from penstock_coordinator.autoscaling import ScalingSignals, Targets, load_with_held, wanted_replicas
from penstock_coordinator.cluster import Frontends
from penstock_coordinator.config import ScalingConfig

_LAGS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)


class CoordinatorMetrics:
    """Gauges that follow the cluster."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._engines = Gauge("penstock_coordinator_engines", "Engines by state.", ["state"], registry=registry)
        self._frontends = Gauge("penstock_coordinator_frontends", "Connected frontends.", registry=registry)
        self._held = Gauge(
            "penstock_coordinator_held_requests", "Requests that frontends hold as no engine is up.", registry=registry
        )

    def update(self, view: ClusterView, frontends: Frontends) -> None:
        """Take the values of now."""
        by_state = collections.Counter(engine.state for engine in view.engines)
        for state in EngineState:
            self._engines.labels(state.name.lower()).set(by_state[state])
        self._frontends.set(len(frontends))
        self._held.set(frontends.num_held_requests)


class ViewMetrics:
    """What views cost and how late they are."""

    def __init__(self, registry: CollectorRegistry) -> None:
        sent = Counter("penstock:view_bytes", "Bytes of views sent to frontends.", ["kind"], registry=registry)
        self._bytes = {whole: sent.labels("full" if whole else "delta") for whole in (True, False)}
        self._lag = Histogram(
            "penstock:view_lag_seconds",
            "From when a view was due to when gRPC had taken it for a frontend.",
            [],
            bounds=_LAGS,
            registry=registry,
        ).labels()

    def sent(self, num_bytes: int, *, whole: bool, lag: float) -> None:
        """A frontend was sent a view, ``lag`` seconds after it was due."""
        self._bytes[whole].inc(num_bytes)
        self._lag.observe(lag)


class PoolCollector(Collector):
    """What autoscalers are told, for those that read Prometheus: no series before it is known, and none where it is not."""

    def __init__(self, signals: ScalingSignals, config: ScalingConfig) -> None:
        self._signals = signals
        self._targets = Targets(load=config.target_load, kv_cache_usage=config.target_kv_usage, slots=config.slots)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """A family for each number, with a series for each pool."""
        families = {
            "engines": "Engines of a pool.",
            "load": "Load of a pool, in engines, with the requests that frontends hold.",
            "kv_cache_usage": "Used fractions of the KV caches of a pool, summed.",
            "wanted_replicas": "Engines with which a pool is as loaded as it shall be.",
        }
        found = {
            name: GaugeMetricFamily(f"penstock_coordinator_pool_{name}", text, labels=["pool"])
            for name, text in families.items()
        }
        for name, pool in self._signals.pools.items():
            values = {
                "engines": pool.num_engines,
                "load": load_with_held(pool, self._targets),
                "kv_cache_usage": pool.kv_cache_usage,
                "wanted_replicas": wanted_replicas(pool, self._targets),
            }
            for key, value in values.items():
                if value is not None:
                    found[key].add_metric([name], value)
        yield from found.values()
