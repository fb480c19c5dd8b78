"""Metrics of the data-parallel group that an engine is a rank of."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from penstock_common.observability.engine_metrics import LABELS
from penstock_common.types.outputs import EngineReady
from penstock_enginecore.data_parallel.core.driver import GroupState


class GroupCollector(Collector):
    """Reads the state of the rank when it is scraped."""

    def __init__(self, state: Callable[[], GroupState], target_size: Callable[[], int], ready: EngineReady) -> None:
        self._state = state
        self._target_size = target_size
        self._labels = [ready.model, ready.engine_id]

    def collect(self) -> Iterator[Metric]:
        """One family per metric."""
        state = self._state()
        gauges: dict[str, tuple[str, float]] = {
            "penstock:group_epoch": ("Memberships of the group so far", state.epoch),
            "penstock:group_ranks": ("Ranks of the group", state.num_ranks),
            "penstock:group_target_ranks": ("Ranks that the group shall have, as far as known", self._target_size()),
            "penstock:group_suspended": ("1 while the group stands still for want of ranks", state.suspended),
        }
        if state.expert_balance is not None:
            text = "Mean of the ranks' tokens of experts over the highest, in the last window"
            gauges["penstock:expert_balance"] = text, state.expert_balance
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        yield self._counter("penstock:dummy_steps", "Steps for the other ranks' sake", state.num_dummy_steps)
        if state.num_experts_moved is not None:
            text = "Experts that have come to this rank from others, for the sake of balance, in all layers"
            yield self._counter("penstock:experts_moved", text, state.num_experts_moved)
        yield self._summary(
            "penstock:group_recovery_seconds",
            "From the loss of a group to the next one's first exchange",
            state.num_recoveries,
            state.recovery_seconds,
        )
        yield self._summary(
            "penstock:group_switch_seconds",
            "From the last step in a group to the next one's first exchange being over, of planned changes",
            state.num_switches,
            state.switch_seconds,
        )
        yield self._summary(
            "penstock:exchange_seconds",
            "In exchanges before steps, waiting for other ranks among it",
            state.num_exchanges,
            state.exchange_seconds,
        )

    def _counter(self, name: str, text: str, count: int) -> Metric:
        counter = CounterMetricFamily(name, text, labels=LABELS)
        counter.add_metric(self._labels, count)
        return counter

    def _summary(self, name: str, text: str, count: int, seconds: float) -> Metric:
        summary = SummaryMetricFamily(name, text, labels=LABELS)
        summary.add_metric(self._labels, count_value=count, sum_value=seconds)
        return summary
