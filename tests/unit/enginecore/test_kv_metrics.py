"""Metrics of an engine about KV blocks: loaded from other places, kept on the host, and leased to other engines."""

from dataclasses import replace

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from penstock_common.observability.metrics import Buckets, Readings
from penstock_common.types.kv_transfer import KvMedium
from penstock_common.types.outputs import EngineReady, KvTransferStats, SchedulerStats
from penstock_enginecore.core.control import EngineState
from penstock_enginecore.kv_transfer.core.leases import Leases
from penstock_enginecore.kv_transfer.core.size_class import TierStats
from penstock_enginecore.kv_transfer.core.transfer_stats import ABANDONED, NOTHING, PART, WHOLE, Transfer
from penstock_enginecore.kv_transfer.metrics import TransferCounts, lease_families, tier_families, transfer_families
from penstock_enginecore.metrics import EngineCollector

LABELS = {"model_name": "m", "engine": "engine-0"}
READY = EngineReady(
    engine_id="engine-0", incarnation="1", model="m", max_model_len=8, num_kv_blocks=4, block_size=16, vocab_size=9
)
LOADED = {KvMedium.DEVICE: 0, KvMedium.HOST: 7, KvMedium.DISK: 3, KvMedium.PEER: 2}


def tiers(disk: bool = True) -> TierStats:
    return TierStats(
        host_usage=0.5,
        disk_usage=0.25 if disk else None,
        num_saved_blocks=20,
        num_written_blocks=11,
        num_loaded_blocks=LOADED,
        block_bytes=100,
    )


class Metrics:
    def __init__(self, *collectors: Collector) -> None:
        self.registry = CollectorRegistry()
        for collector in collectors:
            self.registry.register(collector)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, LABELS | labels)


def transfer(medium: KvMedium, transport: str, seconds: float, num_blocks: int, outcome: str = WHOLE) -> Transfer:
    return Transfer({}, medium, transport, 10.0, 10.0 + seconds, 4, num_blocks, num_blocks * 100, outcome)


def test_an_engine_tells_of_hits_elsewhere_and_of_leases() -> None:
    moved = KvTransferStats(
        external_prefix_cache_queries=40, external_prefix_cache_hits=30, num_leases=2, num_leased_blocks=9
    )
    state = EngineState(paused=False, sleep_level=0, num_nan_logits=0)
    for stats, there in ((SchedulerStats(kv_transfer=moved), True), (SchedulerStats(), False)):
        metrics = Metrics(EngineCollector(lambda: stats, lambda: state, Buckets([1.0]), READY, list))  # noqa: B023
        found = {
            name: metrics.value(name)
            for name in (
                "vllm:external_prefix_cache_queries_total",
                "vllm:external_prefix_cache_hits_total",
                "penstock:kv_leases",
                "penstock:kv_leased_blocks",
            )
        }
        assert list(found.values()) == ([40, 30, 2, 9] if there else [None] * 4)


def test_bytes_are_those_of_every_way() -> None:
    counts = TransferCounts()
    for _ in range(2):
        counts.moved("in", "grpc", 100)
    counts.moved("out", "shared_memory", 100)
    metrics = Metrics(Readings(lambda: transfer_families(counts, tiers(), READY)))
    found = {
        (direction, way): metrics.value("penstock:kv_transfer_bytes_total", direction=direction, transport=way)
        for direction in ("in", "out")
        for way in ("grpc", "shared_memory", "host", "disk")
    }
    assert found == {
        ("in", "grpc"): 200,
        ("in", "shared_memory"): None,
        ("in", "host"): 700,
        ("in", "disk"): 300,
        ("out", "grpc"): None,
        ("out", "shared_memory"): 100,
        ("out", "host"): 2000,
        ("out", "disk"): 1100,
    }
    assert metrics.value("penstock:kv_transfer_blocks_total", direction="in", transport="grpc") == 2


def test_a_tier_that_is_not_there_has_no_series() -> None:
    metrics = Metrics(Readings(lambda: transfer_families(TransferCounts(), tiers(disk=False), READY)))
    assert metrics.value("penstock:kv_transfer_bytes_total", direction="in", transport="host") == 700
    assert metrics.value("penstock:kv_transfer_bytes_total", direction="in", transport="disk") is None


def test_seconds_are_those_of_transfers_that_brought_something() -> None:
    counts = TransferCounts()
    for each in (
        transfer(KvMedium.PEER, "grpc", 0.02, 4),
        transfer(KvMedium.PEER, "grpc", 0.2, 1, "silent"),
        transfer(KvMedium.PEER, "", 3.0, 0, "lease"),
        transfer(KvMedium.HOST, "", 0.004, 4),
        transfer(KvMedium.DISK, "", 0.5, 3, PART),
    ):
        counts.ended(each)
    metrics = Metrics(Readings(lambda: transfer_families(counts, tiers(), READY)))
    name = "penstock:kv_transfer_seconds"
    sums = {way: metrics.value(f"{name}_sum", transport=way) for way in ("grpc", "host", "disk", "peer")}
    assert {way: value and round(value, 6) for way, value in sums.items()} == {
        "grpc": 0.22,
        "host": 0.004,
        "disk": 0.5,
        "peer": None,
    }
    assert metrics.value(f"{name}_bucket", transport="grpc", le="0.025") == 1
    assert metrics.value(f"{name}_count", transport="grpc") == 2


def test_blocks_missing_in_own_tiers_are_failures_and_peers_failures_count_elsewhere() -> None:
    counts = TransferCounts()
    counts.failures["lease"] += 1
    for each in (
        transfer(KvMedium.PEER, "", 3.0, 0, "lease"),
        transfer(KvMedium.HOST, "", 0.1, 0, NOTHING),
        transfer(KvMedium.DISK, "", 0.1, 3, PART),
        transfer(KvMedium.DISK, "", 0.1, 4),
    ):
        counts.ended(each)
    metrics = Metrics(Readings(lambda: transfer_families(counts, tiers(), READY)))
    found = {r: metrics.value("penstock:kv_transfer_failures_total", reason=r) for r in ("lease", "host", "disk")}
    assert found == {"lease": 1, "host": 4, "disk": 1}


def test_the_tiers_tell_how_full_they_are_and_what_they_took_and_gave() -> None:
    metrics = Metrics(Readings(lambda: tier_families(tiers(), READY)))
    assert [metrics.value("penstock:kv_tier_usage_perc", medium=m) for m in ("host", "disk")] == [0.5, 0.25]
    loaded = [metrics.value("penstock:kv_tier_loaded_blocks_total", medium=m) for m in ("host", "disk", "peer")]
    assert loaded == [7, 3, 2]
    assert metrics.value("penstock:kv_tier_saved_blocks_total") == 20
    assert metrics.value("penstock:kv_tier_written_blocks_total") == 11
    none = Metrics(Readings(lambda: tier_families(tiers(disk=False), READY)))
    assert none.value("penstock:kv_tier_usage_perc", medium="disk") is None


def test_states_have_metrics_of_their_own_and_their_bytes_count_with_those_of_blocks() -> None:
    states = replace(tiers(), block_bytes=1000)
    metrics = Metrics(Readings(lambda: tier_families(tiers(), READY, states)))
    assert [metrics.value("penstock:state_tier_usage_perc", medium=m) for m in ("host", "disk")] == [0.5, 0.25]
    assert [metrics.value("penstock:state_tier_loaded_total", medium=m) for m in ("host", "disk", "peer")] == [7, 3, 2]
    assert metrics.value("penstock:state_tier_saved_total") == 20
    assert metrics.value("penstock:state_tier_written_total") == 11
    without = Metrics(Readings(lambda: tier_families(tiers(), READY)))
    assert without.value("penstock:state_tier_saved_total") is None
    both = Metrics(Readings(lambda: transfer_families(TransferCounts(), tiers(), READY, states)))
    name, size = "penstock:kv_transfer_bytes_total", tiers().block_bytes
    assert both.value(name, direction="in", transport="host") == 7 * (size + 1000)
    assert both.value(name, direction="out", transport="disk") == 11 * (size + 1000)


def test_ends_of_leases_and_open_pulls() -> None:
    leases = Leases(lambda _: None, 4)
    leases.grant(b"l" * 16, [[]], {}, 0.0)
    leases.released(b"l" * 16)
    leases.expire(1.0)
    metrics = Metrics(Readings(lambda: lease_families(leases, READY, num_pulls=(3, 1), num_slots_used=5)))
    assert [metrics.value("penstock:kv_pulls", direction=d) for d in ("out", "in")] == [3, 1]
    assert metrics.value("penstock:kv_arena_blocks") == 5
    ends = {end: metrics.value("penstock:kv_lease_ends_total", end=end) for end in ("released", "expired", "revoked")}
    assert ends == {"released": 1, "expired": 0, "revoked": 0}
    assert metrics.value("penstock:kv_lease_ends_total", end="refused") == 0


def test_what_counts_as_failed() -> None:
    outcomes = {outcome: transfer(KvMedium.PEER, "grpc", 1, 1, outcome).failed for outcome in (WHOLE, ABANDONED, PART)}
    assert outcomes == {WHOLE: False, ABANDONED: False, PART: True}
