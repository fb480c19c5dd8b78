"""Metrics of the data-parallel group that an engine is a rank of."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from penstock_common.observability.engine_metrics import LABELS
from penstock_common.types.outputs import EngineReady
from penstock_enginecore.core.data_parallel.driver import GroupState


class GroupCollector(Collector):
    """Reads the state of the rank when it is scraped."""

    def __init__(self, state: Callable[[], GroupState], ready: EngineReady) -> None:
        self._state = state
        self._labels = [ready.model, ready.engine_id]

    def collect(self) -> Iterator[Metric]:
        """One family per metric."""
        state = self._state()
        gauges = {
            "penstock:group_epoch": ("Memberships of the group so far", state.epoch),
            "penstock:group_ranks": ("Ranks of the group", state.num_ranks),
            "penstock:group_suspended": ("1 while the group stands still for want of ranks", state.suspended),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        dummies = CounterMetricFamily("penstock:dummy_steps", "Steps for the other ranks' sake", labels=LABELS)
        dummies.add_metric(self._labels, state.num_dummy_steps)
        yield dummies
        recovery = SummaryMetricFamily(
            "penstock:group_recovery_seconds",
            "From the loss of a group to the next one's first exchange",
            labels=LABELS,
        )
        recovery.add_metric(self._labels, count_value=state.num_recoveries, sum_value=state.recovery_seconds)
        yield recovery
