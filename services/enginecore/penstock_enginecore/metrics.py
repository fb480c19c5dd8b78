"""The engine's Prometheus metrics, under the names vLLM's dashboards and autoscalers read."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from penstock_common.observability.metrics import LABELS, Buckets, EngineLoad, engine_families
from penstock_common.types.outputs import EngineReady, SchedulerStats
from penstock_enginecore.core.control import EngineState
from penstock_enginecore.core.worker_stats import WorkerStats
from penstock_enginecore.data_parallel.core.driver import GroupState

_LABELS = (*LABELS, "rank")
_GRAPHS: tuple[tuple[str, str, type[CounterMetricFamily | GaugeMetricFamily], Callable[[WorkerStats], int]], ...] = (
    ("penstock:cuda_graphs", "Steps that the device can replay", GaugeMetricFamily, lambda w: w.graphs.captured),
    ("penstock:cuda_graph_replays", "Steps replayed", CounterMetricFamily, lambda w: w.graphs.replays),
    (
        "penstock:launched_steps",
        "Steps launched piece by piece by a device that replays others",
        CounterMetricFamily,
        lambda w: w.graphs.launched,
    ),
    ("penstock:replayed_tokens", "Tokens computed by replayed steps", CounterMetricFamily, lambda w: w.graphs.tokens),
    (
        "penstock:padding_tokens",
        "Tokens computed because of the shapes of replayed steps",
        CounterMetricFamily,
        lambda w: w.graphs.padding_tokens,
    ),
    (
        "penstock:padding_rows",
        "Rows of logits computed because of the shapes of replayed steps",
        CounterMetricFamily,
        lambda w: w.graphs.padding_rows,
    ),
)


def worker_families(labels: Sequence[str], workers: Sequence[WorkerStats]) -> Iterator[Metric]:
    """One family per metric, of what the workers have; ``labels`` are the engine's values of its own."""
    ranked = [([*labels, str(worker.rank)], worker) for worker in workers]
    up = GaugeMetricFamily("penstock:worker_up", "1 while the worker computes", labels=_LABELS)
    memory = GaugeMetricFamily("penstock:device_memory_bytes", "Memory by kind", labels=[*_LABELS, "device", "kind"])
    for values, worker in ranked:
        up.add_metric(values, worker.up)
        for kind, num_bytes in _memory(worker).items():
            memory.add_metric([*values, worker.device, kind], num_bytes)
    yield up
    yield memory
    for name, text, family, read in _GRAPHS:
        found = family(name, text, labels=_LABELS)
        for values, worker in ranked:
            if worker.total_memory:
                found.add_metric(values, read(worker))
        yield found
    idle = GaugeMetricFamily(
        "penstock:stage_idle_ratio",
        "Share of the last second with steps in which a stage computed nothing",
        labels=[*_LABELS, "stage"],
    )
    for values, worker in ranked:
        if worker.stage_idle is not None:
            idle.add_metric([*values, str(worker.stage)], worker.stage_idle)
    yield idle
    broadcast = HistogramMetricFamily(
        "penstock:step_broadcast_seconds", "From the engine to a worker that waits for a step", labels=_LABELS
    )
    collective = HistogramMetricFamily(
        "penstock:collective_seconds", "Exchanges between workers, by operation", labels=[*_LABELS, "operation"]
    )
    for values, worker in ranked:
        if worker.step_broadcast is not None:
            worker.step_broadcast.add_to(broadcast, values)
        for operation, counts in worker.collectives.items():
            counts.add_to(collective, [*values, operation])
    yield broadcast
    yield collective


def _memory(worker: WorkerStats) -> dict[str, int]:
    """Bytes by kind; those of the whole device where it has a memory of its own."""
    device = {"total": worker.total_memory, "used": worker.used_memory} if worker.total_memory else {}
    return {**device, "weights": worker.weight_bytes, "kv_cache": worker.kv_cache_bytes}


_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""By sleep level, as vLLM calls them."""


class EngineCollector(Collector):
    """Reads the engine's statistics when it is scraped: nothing is counted twice, and a step pays nothing."""

    def __init__(
        self,
        stats: Callable[[], SchedulerStats],
        state: Callable[[], EngineState],
        step_tokens: Buckets,
        ready: EngineReady,
        workers: Callable[[], Sequence[WorkerStats]],
    ) -> None:
        self._workers = workers
        self._stats = stats
        self._state = state
        self._step_tokens = step_tokens
        self._ready = ready

    def collect(self) -> Iterator[Metric]:
        """One family per metric."""
        ready = self._ready
        labels = [ready.model, ready.engine_id]
        load = EngineLoad(
            model=ready.model,
            engine=ready.engine_id,
            num_kv_blocks=ready.num_kv_blocks,
            block_size=ready.block_size,
            max_num_seqs=ready.max_num_seqs,
            stats=self._stats(),
        )
        yield from engine_families([load])
        steps = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens computed by a step", labels=LABELS)
        self._step_tokens.add_to(steps, labels)
        yield steps
        yield from self._state_families(labels)
        yield from worker_families(labels, self._workers())

    def _state_families(self, labels: list[str]) -> Iterator[Metric]:
        state = self._state()
        paused = GaugeMetricFamily("penstock:engine_paused", "1 while nothing is scheduled", labels=LABELS)
        paused.add_metric(labels, state.paused)
        yield paused
        sleep = GaugeMetricFamily(
            "vllm:engine_sleep_state", "1 for the state the engine is in", labels=[*LABELS, "sleep_state"]
        )
        for level, name in enumerate(_SLEEP_STATES):
            sleep.add_metric([*labels, name], level == state.sleep_level)
        yield sleep
        nans = CounterMetricFamily(
            "penstock:nan_logits", "Logits of sampled rows that were NaN or infinity", labels=LABELS
        )
        nans.add_metric(labels, state.num_nan_logits)
        yield nans
        if state.drafter_failure is not None:
            up = GaugeMetricFamily(
                "penstock:spec_decode_drafter_up", "0 when what drafts has failed and was switched off", labels=LABELS
            )
            up.add_metric(labels, not state.drafter_failure)
            yield up


# Metrics of the data-parallel group that an engine is a rank of.


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
