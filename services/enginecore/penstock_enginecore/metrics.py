"""The engine's Prometheus metrics, with the names that dashboards and autoscalers for vLLM use."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from penstock_common.observability.metrics import LABELS, Buckets, EngineLoad, Reading, engine_families, families
from penstock_common.types.outputs import EngineReady, SchedulerStats
from penstock_enginecore.core.control import EngineState
from penstock_enginecore.core.worker_stats import WorkerStats
from penstock_enginecore.data_parallel.core.driver import GroupState

_C, _G, _H, _S = CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily


def _memory(worker: WorkerStats) -> dict[tuple[str, str], int]:
    """Return the number of bytes of each kind of memory. If the device has its own memory, the result includes the
    total and the used memory of the device.
    """
    device = {"total": worker.total_memory, "used": worker.used_memory} if worker.total_memory else {}
    kinds = {**device, "weights": worker.weight_bytes, "kv_cache": worker.kv_cache_bytes}
    return {(worker.device, kind): num_bytes for kind, num_bytes in kinds.items()}


_UP = (
    Reading(_G, "penstock:worker_up", "1 while the worker computes", "up"),
    Reading(_G, "penstock:device_memory_bytes", "Memory by kind", _memory, ("device", "kind")),
)
_GRAPHS = (
    Reading(_G, "penstock:cuda_graphs", "Captured CUDA graphs", "captured"),
    Reading(_C, "penstock:cuda_graph_replays", "Steps replayed", "replays"),
    Reading(
        _C, "penstock:launched_steps", "Steps launched kernel by kernel on a device that replays graphs", "launched"
    ),
    Reading(_C, "penstock:replayed_tokens", "Tokens computed by replayed steps", "tokens"),
    Reading(_C, "penstock:padding_tokens", "Padding tokens computed by replayed steps", "padding_tokens"),
    Reading(_C, "penstock:padding_rows", "Padding rows of logits computed by replayed steps", "padding_rows"),
)
_TIMES = (
    Reading(
        _G,
        "penstock:stage_idle_ratio",
        "Fraction of the last second with steps in which the stage computed nothing",
        lambda w: {} if w.stage_idle is None else {str(w.stage): w.stage_idle},
        ("stage",),
    ),
    Reading(
        _H,
        "penstock:step_broadcast_seconds",
        "Seconds that a step takes from the engine to a waiting worker",
        lambda w: {} if w.step_broadcast is None else w.step_broadcast,
    ),
    Reading(
        _H,
        "penstock:collective_seconds",
        "Seconds of collectives between workers, by operation",
        "collectives",
        ("operation",),
    ),
)


def worker_families(labels: Sequence[str], workers: Sequence[WorkerStats]) -> Iterator[Metric]:
    """Yield the metrics of workers. ``labels`` are the label values of the engine."""
    ranked = [([*labels, str(worker.rank)], worker) for worker in workers]
    replaying = [(values, worker.graphs) for values, worker in ranked if worker.total_memory]
    for table, sources in ((_UP, ranked), (_GRAPHS, replaying), (_TIMES, ranked)):
        yield from families(table, sources, (*LABELS, "rank"))


_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""Names of the sleep levels, as in vLLM."""
_STATE = (
    Reading(_G, "penstock:engine_paused", "1 while nothing is scheduled", "paused"),
    Reading(
        _G,
        "vllm:engine_sleep_state",
        "1 for the state the engine is in",
        lambda s: {name: level == s.sleep_level for level, name in enumerate(_SLEEP_STATES)},
        ("sleep_state",),
    ),
    Reading(_C, "penstock:nan_logits", "Logits of sampled rows that were NaN or infinite", "num_nan_logits"),
    Reading(
        _G,
        "penstock:spec_decode_drafter_up",
        "0 after the drafter has failed and was switched off",
        lambda s: None if s.drafter_failure is None else not s.drafter_failure,
    ),
)


class EngineCollector(Collector):
    """Collector that reads the engine's statistics at each scrape, so that metrics take no time in steps."""

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
        """Yield the engine's metrics."""
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
        tokens = Reading(_H, "vllm:iteration_tokens_total", "Tokens computed by a step", Buckets.counts)
        yield from families([tokens], [(labels, self._step_tokens)])
        yield from families(_STATE, [(labels, self._state())])
        yield from worker_families(labels, self._workers())


# Metrics of the data-parallel group.

_GROUP = (
    Reading(_G, "penstock:group_epoch", "Epoch of the group, which increases with each change of its members", "epoch"),
    Reading(_G, "penstock:group_ranks", "Ranks of the group", "num_ranks"),
)
_GROUP_STATE = (
    Reading(_G, "penstock:group_suspended", "1 while the rank is in no group that can run", "suspended"),
    Reading(
        _G,
        "penstock:expert_balance",
        "Mean number of expert tokens per rank divided by the maximum, in the last window",
        "expert_balance",
    ),
    Reading(_C, "penstock:dummy_steps", "Steps without own requests, run for the other ranks", "num_dummy_steps"),
    Reading(
        _C,
        "penstock:experts_moved",
        "Experts that this rank received from others for balance, over all layers",
        "num_experts_moved",
    ),
    Reading(
        _S,
        "penstock:group_recovery_seconds",
        "Seconds from the loss of a group to the first exchange of the next one",
        lambda s: (s.num_recoveries, s.recovery_seconds),
    ),
    Reading(
        _S,
        "penstock:group_switch_seconds",
        "Seconds of planned group changes, from the last step to the end of the first exchange",
        lambda s: (s.num_switches, s.switch_seconds),
    ),
    Reading(
        _S,
        "penstock:exchange_seconds",
        "Seconds in exchanges before steps, including waiting for other ranks",
        lambda s: (s.num_exchanges, s.exchange_seconds),
    ),
)


def group_families(state: GroupState, target_size: int, ready: EngineReady) -> Iterator[Metric]:
    """Yield the metrics of the data-parallel group to which the engine ``ready`` belongs."""
    target = Reading(
        _G,
        "penstock:group_target_ranks",
        "Ranks that the group should have, as far as known",
        lambda _: target_size,
    )
    return families([*_GROUP, target, *_GROUP_STATE], [([ready.model, ready.engine_id], state)])
