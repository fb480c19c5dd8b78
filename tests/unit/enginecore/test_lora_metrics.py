"""Metrics of an engine about its adapters; an engine without adapters exports none."""

from prometheus_client import CollectorRegistry

from penstock_common.observability.metrics import Buckets
from penstock_common.types.outputs import EngineReady, LoraStats, SchedulerStats
from penstock_enginecore.core.control import EngineState
from penstock_enginecore.metrics import EngineCollector

LABELS = {"model_name": "m", "engine": "engine-0"}
READY = EngineReady(
    engine_id="engine-0", incarnation="1", model="m", max_model_len=8, num_kv_blocks=4, block_size=16, vocab_size=9
)
LORA = LoraStats(
    max_loras=2,
    active=["a", "b"],
    waiting=["c"],
    num_cached=3,
    cached_bytes=300,
    num_loads=7,
    load_seconds=0.5,
    num_evictions=4,
    num_requests=20,
    num_found=13,
)


def registry(stats: SchedulerStats) -> CollectorRegistry:
    found = CollectorRegistry()
    state = EngineState(paused=False, sleep_level=0, num_nan_logits=0)
    found.register(EngineCollector(lambda: stats, lambda: state, Buckets([1.0]), READY, list))
    return found


def test_an_engine_with_adapters_names_those_of_its_requests_and_counts_loads() -> None:
    found = registry(SchedulerStats(lora=LORA))
    names = {"max_lora": "2", "running_lora_adapters": "a,b", "waiting_lora_adapters": "c"}
    assert found.get_sample_value("vllm:lora_requests_info", LABELS | names) > 1e9
    expected = {
        "cached": 3,
        "cached_bytes": 300,
        "loads_total": 7,
        "load_seconds_total": 0.5,
        "evictions_total": 4,
        "requests_total": 20,
        "requests_found_total": 13,
    }
    assert {name: found.get_sample_value(f"penstock:lora_{name}", LABELS) for name in expected} == expected


def test_an_engine_without_adapters_has_no_such_metrics() -> None:
    assert not [family.name for family in registry(SchedulerStats()).collect() if "lora" in family.name]
