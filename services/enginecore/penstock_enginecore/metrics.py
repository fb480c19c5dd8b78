"""The engine's Prometheus metrics, under the names vLLM's dashboards and autoscalers read."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock_common.observability.engine_metrics import LABELS, EngineLoad, engine_families
from penstock_common.observability.histogram import Buckets
from penstock_common.types.outputs import EngineReady, SchedulerStats
from penstock_enginecore.core.control import EngineState
from penstock_enginecore.core.worker_stats import WorkerStats
from penstock_enginecore.worker_metrics import worker_families

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
