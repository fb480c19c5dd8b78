"""The text that a scrape reads, metric for metric: dashboards and alerts of others hang on names, labels, help and buckets."""

from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from penstock_common.observability import metrics as common
from penstock_common.observability.metrics import Buckets, EngineLoad, Readings
from penstock_common.types.cluster import ClusterView
from penstock_common.types.kv_transfer import KvMedium
from penstock_common.types.outputs import (
    EngineReady,
    FinishReason,
    KvTransferStats,
    LoraStats,
    MediaStats,
    SchedulerStats,
    SpecDecodingStats,
)
from penstock_coordinator.autoscaling import PoolLoad
from penstock_coordinator.config import ScalingConfig
from penstock_coordinator.metrics import CoordinatorMetrics, pool_families
from penstock_enginecore.core.control import EngineState
from penstock_enginecore.core.worker_stats import GraphStats, WorkerStats
from penstock_enginecore.data_parallel.core.driver import GroupState
from penstock_enginecore.kv_transfer.core.leases import Leases
from penstock_enginecore.kv_transfer.core.tiers import TierStats
from penstock_enginecore.kv_transfer.core.transfer_stats import PART, Transfer
from penstock_enginecore.kv_transfer.metrics import TransferCounts, lease_families, tier_families, transfer_families
from penstock_enginecore.metrics import EngineCollector, group_families
from penstock_frontend.metrics import EngineSteps, FrontendMetrics, MediaMetrics
from penstock_frontend.rpc.media_transport import MediaCounts

RECORDED = Path(__file__).with_name("scraped_text.txt")
READY = EngineReady(
    engine_id="e", incarnation="1", model="m", max_model_len=8, num_kv_blocks=4, block_size=16, vocab_size=9
)
OF_THE_PROCESS = ("process_", "penstock:build_info", "penstock:threads")


class _Frontends(NamedTuple):
    num_held_requests: int

    def __len__(self) -> int:
        return 2


class _Signals(NamedTuple):
    pools: dict[str, PoolLoad]


def seconds() -> Buckets:
    found = Buckets([0.1, 1.0])
    found.observe(0.05)
    found.observe(0.5, 2)
    return found


def full_stats() -> SchedulerStats:
    return SchedulerStats(
        num_running_reqs=1,
        num_waiting_reqs=2,
        num_skipped_reqs=3,
        kv_cache_usage=0.5,
        prefix_cache_queries=4,
        prefix_cache_hits=5,
        num_preemptions=6,
        step_counter=7,
        spec_decoding_stats=SpecDecodingStats(
            num_drafts=8, num_draft_tokens=9, num_accepted_tokens=10, num_accepted_tokens_per_pos=[7, 3]
        ),
        lora=LoraStats(
            max_loras=2,
            active=["a", "b"],
            waiting=["c"],
            num_cached=11,
            cached_bytes=12,
            num_loads=13,
            load_seconds=1.5,
            num_evictions=14,
            num_requests=15,
            num_found=16,
        ),
        media=MediaStats(
            pending_embeds=17,
            encoded_embeds=18,
            encoder_cache_queries=19,
            encoder_cache_hits=20,
            encoder_cache_usage=0.25,
            receiver_cache_bytes=21,
            num_waiting_reqs=22,
        ),
        kv_transfer=KvTransferStats(
            external_prefix_cache_queries=23, external_prefix_cache_hits=24, num_leases=25, num_leased_blocks=26
        ),
    )


def load_of(engine: str, stats: SchedulerStats, max_num_seqs: int) -> EngineLoad:
    return EngineLoad(model="m", engine=engine, num_kv_blocks=8, block_size=16, max_num_seqs=max_num_seqs, stats=stats)


def frontend() -> CollectorRegistry:
    """A frontend with media and adapters and two engines, of which one says little."""
    metrics = FrontendMetrics("m")
    engine = metrics.engine("e")
    engine.first_token(0.05, 3)
    step = EngineSteps(1.0)
    step.num_tokens, step.gaps = 3, {0.02: 2}
    engine.step(step)
    engine.nans(4)
    engine.scheduled(0.7)
    engine.generated(prefill=0.4, decode=0.9)
    engine.generated(prefill=None, decode=1.1)
    engine.finished(float("-inf"), FinishReason.STOP, prompt=3, generated=5, max_tokens=7)
    engine.pooled(float("-inf"), 9)
    metrics.engine("f")
    metrics.series("penstock:requests_in_flight").set(3)
    metrics.series("penstock:requests_held").set(2)
    metrics.series("penstock:engine_variants").set(1)
    metrics.series("penstock:requests_moved").inc(5)
    metrics.series("penstock:legs", "two", "long").inc()
    metrics.series("penstock:handover_gap_seconds").observe(0.1)
    metrics.series("vllm:request_params_n").observe(2)
    metrics.series("penstock:requests_failed", "INTERNAL").inc()
    metrics.series("penstock:requests_refused", "MODEL_NOT_FOUND").inc()
    metrics.add_engine_loads(lambda: [load_of("e", full_stats(), 4), load_of("f", SchedulerStats(), 0)])
    metrics.add_adapters(lambda: {"config": 2, "directory": 1})
    counts = MediaCounts()
    counts.num_queries, counts.num_hits, counts.num_resent = 5, 3, 1
    counts.num_bytes["frames"] = 9
    metrics.add_media(counts)
    media = MediaMetrics(metrics.registry, "m")
    media.series("penstock:media_seconds", "image", "fetch").observe(0.1)
    media.series("penstock:media_refused", "image", "MEDIA_TOO_LARGE").inc()
    media.series("penstock:media_store_queries").inc(2)
    media.series("penstock:media_store_hits").inc()
    media.series("penstock:media_store_bytes").set(100)
    media.series("penstock:media_queued").set(2)
    media.series("penstock:media_workers_replaced").inc()
    return metrics.registry


def bare_frontend() -> CollectorRegistry:
    """A frontend that has served nothing and knows no engine."""
    metrics = FrontendMetrics("m")
    metrics.add_engine_loads(list)
    MediaMetrics(metrics.registry, "m")
    return metrics.registry


def coordinator() -> CollectorRegistry:
    registry = CollectorRegistry()
    view = ClusterView()
    views = CoordinatorMetrics(registry)
    views.update(view, _Frontends(3))  # type: ignore[arg-type]
    views.sent(10, whole=True, lag=0.2)
    views.sent(3, whole=False, lag=0.002)
    pools = {
        "p": PoolLoad(num_engines=2, load=1.5, kv_cache_usage=0.5, num_held_reqs=2, slots=4.0),
        "q": PoolLoad(num_engines=1, load=None),
    }
    registry.register(Readings(lambda: pool_families(_Signals(pools), ScalingConfig())))  # type: ignore[arg-type]
    return registry


def engine() -> CollectorRegistry:
    """A rank of a group whose worker has a GPU, with tiers, transfers and leases."""
    registry = CollectorRegistry()
    workers = [
        WorkerStats(
            device="cuda:0",
            total_memory=100,
            used_memory=60,
            weight_bytes=40,
            kv_cache_bytes=10,
            graphs=GraphStats(captured=3, replays=50, launched=4, tokens=90, padding_tokens=7, padding_rows=5),
            step_broadcast=seconds().counts(),
            collectives={"all_reduce": seconds().counts()},
            stage=1,
            stage_idle=0.25,
        ),
        WorkerStats(rank=1, up=False, device="cpu", weight_bytes=4),
    ]
    state = EngineState(paused=True, sleep_level=1, num_nan_logits=2, drafter_failure="")
    registry.register(EngineCollector(full_stats, lambda: state, seconds(), READY, lambda: workers))
    group = GroupState(
        epoch=3,
        num_ranks=4,
        suspended=False,
        num_dummy_steps=5,
        num_recoveries=1,
        recovery_seconds=0.5,
        num_switches=2,
        switch_seconds=0.75,
        num_exchanges=6,
        exchange_seconds=1.25,
        expert_balance=0.9,
        num_experts_moved=8,
    )
    registry.register(Readings(lambda: group_families(group, 5, READY)))
    loaded = {KvMedium.DEVICE: 0, KvMedium.HOST: 7, KvMedium.DISK: 3, KvMedium.PEER: 2}
    tiers = TierStats(0.5, 0.25, 20, 11, loaded, 100)
    counts = TransferCounts()
    counts.moved("in", "grpc", 100)
    counts.ended(Transfer({}, KvMedium.HOST, "", 0.0, 1.0, 2, 1, 100, PART))
    registry.register(Readings(lambda: tier_families(tiers, READY)))
    registry.register(Readings(lambda: transfer_families(counts, tiers, READY)))
    leases = Leases(lambda _: None, 4)
    registry.register(Readings(lambda: lease_families(leases, READY, num_pulls=(3, 1), num_slots_used=5)))
    return registry


def bare_engine() -> CollectorRegistry:
    """An engine without a GPU, drafter, group, adapters and tiers, before its workers are known."""
    registry = CollectorRegistry()
    state = EngineState(paused=False, sleep_level=0, num_nan_logits=0)
    registry.register(EngineCollector(SchedulerStats, lambda: state, Buckets([1.0]), READY, list))
    registry.register(Readings(lambda: group_families(GroupState(), 0, READY)))
    none = TierStats(None, None, 0, 0, dict.fromkeys(KvMedium, 0), 0)
    registry.register(Readings(lambda: tier_families(none, READY)))
    registry.register(Readings(lambda: transfer_families(TransferCounts(), none, READY)))
    return registry


def text_of(registry: CollectorRegistry) -> str:
    """A scrape of it, without the times at which series began and what the process says of itself."""
    lines = generate_latest(registry).decode().splitlines()
    return "\n".join(
        line
        for line in lines
        if "_created" not in line
        and not line.removeprefix("# HELP ").removeprefix("# TYPE ").startswith(OF_THE_PROCESS)
    )


def test_a_scrape_reads_what_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common.time, "time", lambda: 1000.0)
    found = "".join(
        f"== {part.__name__}\n{text_of(part())}\n"
        for part in (frontend, bare_frontend, coordinator, engine, bare_engine)
    )
    assert found == RECORDED.read_text()
