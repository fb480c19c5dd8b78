"""The metrics of workers."""

from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from penstock_common.observability.metrics import Buckets
from penstock_enginecore.core.worker_stats import GraphStats, WorkerStats
from penstock_enginecore.metrics import worker_families

ENGINE = {"model_name": "m", "engine": "e"}


def value(workers: list[WorkerStats], name: str, **labels: str) -> float | None:
    class Workers(Collector):
        def collect(self) -> Any:
            return worker_families(list(ENGINE.values()), workers)

    registry = CollectorRegistry()
    registry.register(Workers())
    return registry.get_sample_value(name, ENGINE | labels)


def test_a_gpu_tells_its_memory_and_what_it_replayed() -> None:
    graphs = GraphStats(
        captured=3, captures=9, failures=2, replays=50, launched=4, tokens=90, padding_tokens=7, padding_rows=5
    )
    workers = [
        WorkerStats(
            device="cuda:0", total_memory=100, used_memory=60, weight_bytes=40, kv_cache_bytes=10, graphs=graphs
        ),
        WorkerStats(rank=1, up=False, device="cuda:1", total_memory=100, used_memory=61),
    ]
    kinds = {"total": 100, "used": 60, "weights": 40, "kv_cache": 10}
    for kind, num_bytes in kinds.items():
        assert value(workers, "penstock:device_memory_bytes", rank="0", device="cuda:0", kind=kind) == num_bytes
    assert value(workers, "penstock:device_memory_bytes", rank="1", device="cuda:1", kind="used") == 61
    assert value(workers, "penstock:worker_up", rank="0") == 1
    assert value(workers, "penstock:worker_up", rank="1") == 0
    assert value(workers, "penstock:cuda_graphs", rank="0") == 3
    assert value(workers, "penstock:cuda_graph_captures_total", rank="0") == 9
    assert value(workers, "penstock:cuda_graph_capture_failures_total", rank="0") == 2
    assert value(workers, "penstock:cuda_graph_replays_total", rank="0") == 50
    assert value(workers, "penstock:launched_steps_total", rank="0") == 4
    assert value(workers, "penstock:replayed_tokens_total", rank="0") == 90
    assert value(workers, "penstock:padding_tokens_total", rank="0") == 7
    assert value(workers, "penstock:padding_rows_total", rank="0") == 5


def test_a_cpu_has_no_memory_of_its_own_and_replays_nothing() -> None:
    workers = [WorkerStats(device="cpu", weight_bytes=40)]
    assert value(workers, "penstock:device_memory_bytes", rank="0", device="cpu", kind="weights") == 40
    assert value(workers, "penstock:device_memory_bytes", rank="0", device="cpu", kind="total") is None
    assert value(workers, "penstock:cuda_graph_replays_total", rank="0") is None
    assert value(workers, "penstock:step_broadcast_seconds_count", rank="0") is None


def test_times_are_histograms_by_rank_and_operation() -> None:
    seconds = Buckets([0.1, 1.0])
    seconds.observe(0.05)
    seconds.observe(0.5, count=2)
    stats = WorkerStats(rank=1, step_broadcast=seconds.counts(), collectives={"all_reduce": seconds.counts()})
    assert value([stats], "penstock:step_broadcast_seconds_bucket", rank="1", le="0.1") == 1
    assert value([stats], "penstock:step_broadcast_seconds_count", rank="1") == 3
    assert value([stats], "penstock:collective_seconds_sum", rank="1", operation="all_reduce") == 1.05


def test_stages_tell_how_idle_they_are() -> None:
    stats = WorkerStats(rank=3, stage=1, waited_for_stages=2.0, stage_idle=0.25)
    assert value([stats], "penstock:stage_idle_ratio", rank="3", stage="1") == 0.25
    assert value([WorkerStats()], "penstock:stage_idle_ratio", rank="0", stage="0") is None
