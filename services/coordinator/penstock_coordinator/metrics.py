"""What the coordinator counts for Prometheus."""

from collections import Counter

from prometheus_client import CollectorRegistry, Gauge

from penstock_common.types.cluster import ClusterView, EngineState
from penstock_coordinator.frontends import Frontends


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
        by_state = Counter(engine.state for engine in view.engines)
        for state in EngineState:
            self._engines.labels(state.name.lower()).set(by_state[state])
        self._frontends.set(len(frontends))
        self._held.set(frontends.num_held_requests)
