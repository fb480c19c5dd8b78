"""Prometheus metrics of the coordinator."""

import collections
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily, Metric

from penstock_common.observability.metrics import Histogram, Instrument, Instruments, Reading, families
from penstock_common.types.cluster import ClusterView, EngineState
from penstock_coordinator.autoscaling import ScalingSignals, Targets, load_with_held, wanted_replicas
from penstock_coordinator.cluster import Frontends
from penstock_coordinator.config import ScalingConfig

_LAGS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
_ENGINES, _FRONTENDS = "penstock_coordinator_engines", "penstock_coordinator_frontends"
_HELD = "penstock_coordinator_held_requests"
_BYTES, _LAG = "penstock:view_bytes", "penstock:view_lag_seconds"
_TABLE = (
    Instrument(Gauge, _ENGINES, "Number of engines, by state.", ("state",)),
    Instrument(Gauge, _FRONTENDS, "Number of connected frontends."),
    Instrument(Gauge, _HELD, "Number of requests that frontends hold because no engine is ready."),
    Instrument(Counter, _BYTES, "Total size of the views sent to frontends, in bytes.", ("kind",)),
    Instrument(
        Histogram,
        _LAG,
        "Seconds from the time when a view was due until gRPC accepted the view for a frontend.",
        (),
        _LAGS,
    ),
)


class CoordinatorMetrics(Instruments):
    """Metrics of the cluster's engines and frontends, and of the size and delay of views."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, _TABLE)
        for kind in ("full", "delta"):
            self.series(_BYTES, kind)

    def update(self, view: ClusterView, frontends: Frontends) -> None:
        """Update the gauges with the current engines and frontends."""
        by_state = collections.Counter(engine.state for engine in view.engines)
        for state in EngineState:
            self.series(_ENGINES, state.name.lower()).set(by_state[state])
        self.series(_FRONTENDS).set(len(frontends))
        self.series(_HELD).set(frontends.num_held_requests)

    def sent(self, num_bytes: int, *, whole: bool, lag: float) -> None:
        """Record a view that was sent to a frontend.

        ``lag`` is the number of seconds from the time when the view was due until the view was sent.
        """
        self.series(_BYTES, "full" if whole else "delta").inc(num_bytes)
        self.series(_LAG).observe(lag)


def pool_families(signals: ScalingSignals, config: ScalingConfig) -> Iterator[Metric]:
    """Yield one metric family per autoscaling signal. Each pool with a known value has one time series."""
    targets = Targets(load=config.target_load, kv_cache_usage=config.target_kv_usage, slots=config.slots)
    table = (
        ("engines", "Number of engines of a pool.", lambda pool: pool.num_engines),
        (
            "load",
            "Load of a pool as a number of fully loaded engines, including the requests that frontends hold.",
            lambda pool: load_with_held(pool, targets),
        ),
        (
            "kv_cache_usage",
            "Sum of the used fractions of the KV caches of a pool's engines.",
            lambda pool: pool.kv_cache_usage,
        ),
        (
            "wanted_replicas",
            "Number of engines with which a pool would have its target load.",
            lambda pool: wanted_replicas(pool, targets),
        ),
    )
    rows = [Reading(GaugeMetricFamily, f"penstock_coordinator_pool_{name}", text, read) for name, text, read in table]
    return families(rows, [([name], pool) for name, pool in signals.pools.items()], ["pool"])
