"""Metrics of an engine about media; an engine without media exports none."""

from prometheus_client import CollectorRegistry

from penstock_common.observability.metrics import Buckets
from penstock_common.types.outputs import EngineReady, MediaStats, SchedulerStats
from penstock_enginecore.core.control import EngineState
from penstock_enginecore.metrics import EngineCollector

LABELS = {"model_name": "m", "engine": "engine-0"}
READY = EngineReady(
    engine_id="engine-0", incarnation="1", model="m", max_model_len=8, num_kv_blocks=4, block_size=16, vocab_size=9
)
MEDIA = MediaStats(
    pending_embeds=7,
    encoded_embeds=70,
    encoder_cache_queries=9,
    encoder_cache_hits=4,
    encoder_cache_usage=0.25,
    receiver_cache_bytes=1000,
    num_waiting_reqs=3,
)


def registry(stats: SchedulerStats) -> CollectorRegistry:
    found = CollectorRegistry()
    state = EngineState(paused=False, sleep_level=0, num_nan_logits=0)
    found.register(EngineCollector(lambda: stats, lambda: state, Buckets([1.0]), READY, list))
    return found


def test_an_engine_that_takes_media_tells_of_its_embeddings() -> None:
    found = registry(SchedulerStats(media=MEDIA))
    expected = {
        "encoder_cache_usage": 0.25,
        "encoder_cache_queries_total": 9,
        "encoder_cache_hits_total": 4,
        "encoder_embeds_total": 70,
        "encoder_pending_embeds": 7,
        "num_requests_waiting_for_media": 3,
        "receiver_cache_bytes": 1000,
    }
    assert {name: found.get_sample_value(f"penstock:{name}", LABELS) for name in expected} == expected


def test_an_engine_that_reads_text_alone_says_nothing_of_media() -> None:
    names = {metric.name for metric in registry(SchedulerStats()).collect()}
    assert not {name for name in names if "encoder" in name or "receiver" in name or "media" in name}
