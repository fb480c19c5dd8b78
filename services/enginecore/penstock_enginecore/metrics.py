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
    Reading(_G, "penstock:worker_up", "1 while the worker runs", "up"),
    Reading(
        _G,
        "penstock:device_memory_bytes",
        "Bytes of memory on the worker's device, by kind",
        _memory,
        ("device", "kind"),
    ),
)
_GRAPHS = (
    Reading(_G, "penstock:cuda_graphs", "Number of captured CUDA graphs", "captured"),
    Reading(
        _C,
        "penstock:cuda_graph_captures",
        "Number of captures of CUDA graphs, at start and while serving",
        "captures",
    ),
    Reading(_C, "penstock:cuda_graph_capture_failures", "Number of captures of CUDA graphs that failed", "failures"),
    Reading(_C, "penstock:cuda_graph_replays", "Number of steps that replayed a CUDA graph", "replays"),
    Reading(
        _C,
        "penstock:launched_steps",
        "Number of steps launched without a CUDA graph, on a device that replays graphs",
        "launched",
    ),
    Reading(_C, "penstock:replayed_tokens", "Number of tokens computed by steps that replayed a CUDA graph", "tokens"),
    Reading(
        _C,
        "penstock:padding_tokens",
        "Number of padding tokens computed by steps that replayed a CUDA graph",
        "padding_tokens",
    ),
    Reading(
        _C,
        "penstock:padding_rows",
        "Number of padding rows of logits computed by steps that replayed a CUDA graph",
        "padding_rows",
    ),
)
_TIMES = (
    Reading(
        _G,
        "penstock:stage_idle_ratio",
        "Fraction of time in which the pipeline stage computed nothing, in the last second that had steps",
        lambda w: {} if w.stage_idle is None else {str(w.stage): w.stage_idle},
        ("stage",),
    ),
    Reading(
        _H,
        "penstock:step_broadcast_seconds",
        "Seconds from the time the engine sends a step until a waiting worker has received the step",
        lambda w: {} if w.step_broadcast is None else w.step_broadcast,
    ),
    Reading(
        _H,
        "penstock:collective_seconds",
        "Seconds of each collective operation between workers, including the wait for the slowest worker",
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
    Reading(_G, "penstock:engine_paused", "1 while the engine is paused and schedules no requests", "paused"),
    Reading(
        _G,
        "vllm:engine_sleep_state",
        "1 for the current sleep state of the engine, 0 for the other states",
        lambda s: {name: level == s.sleep_level for level, name in enumerate(_SLEEP_STATES)},
        ("sleep_state",),
    ),
    Reading(
        _C,
        "penstock:nan_logits",
        "Number of NaN or infinite logits in rows from which tokens were sampled",
        "num_nan_logits",
    ),
    Reading(
        _G,
        "penstock:spec_decode_drafter_up",
        "1 while the drafter of speculative decoding works, 0 after it has failed and was switched off",
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
        tokens = Reading(_H, "vllm:iteration_tokens_total", "Number of tokens that a step computes", Buckets.counts)
        yield from families([tokens], [(labels, self._step_tokens)])
        yield from families(_STATE, [(labels, self._state())])
        yield from worker_families(labels, self._workers())


# Metrics of the data-parallel group.

_GROUP = (
    Reading(
        _G,
        "penstock:group_epoch",
        "Epoch of the data-parallel group, which increases with each change of its members",
        "epoch",
    ),
    Reading(_G, "penstock:group_ranks", "Number of ranks in the data-parallel group", "num_ranks"),
)
_GROUP_STATE = (
    Reading(
        _G,
        "penstock:group_suspended",
        "1 while the rank is in no data-parallel group that can compute steps",
        "suspended",
    ),
    Reading(
        _G,
        "penstock:expert_balance",
        "Mean number of expert tokens per rank divided by the highest number of a rank, in the last window of steps",
        "expert_balance",
    ),
    Reading(
        _C,
        "penstock:dummy_steps",
        "Number of steps that this rank ran for the other ranks without own requests",
        "num_dummy_steps",
    ),
    Reading(
        _C,
        "penstock:experts_moved",
        "Number of experts that this rank received from other ranks for load balance, over all layers",
        "num_experts_moved",
    ),
    Reading(
        _S,
        "penstock:group_recovery_seconds",
        "Seconds from the loss of a data-parallel group to the first exchange of the next group",
        lambda s: (s.num_recoveries, s.recovery_seconds),
    ),
    Reading(
        _S,
        "penstock:group_switch_seconds",
        "Seconds of planned group changes, from the old group's last step to the end of the new group's first exchange",
        lambda s: (s.num_switches, s.switch_seconds),
    ),
    Reading(
        _S,
        "penstock:exchange_seconds",
        "Seconds in exchanges between ranks before steps, including the wait for other ranks",
        lambda s: (s.num_exchanges, s.exchange_seconds),
    ),
)


def group_families(state: GroupState, target_size: int, ready: EngineReady) -> Iterator[Metric]:
    """Yield the metrics of the data-parallel group to which the engine ``ready`` belongs."""
    target = Reading(
        _G,
        "penstock:group_target_ranks",
        "Number of ranks that the data-parallel group should have, 0 if unknown",
        lambda _: target_size,
    )
    return families([*_GROUP, target, *_GROUP_STATE], [([ready.model, ready.engine_id], state)])
