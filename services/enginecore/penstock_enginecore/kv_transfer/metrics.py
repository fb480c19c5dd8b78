"""Metrics of KV block transfers, of leases, and of the tiers that store evicted blocks and states."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from penstock_common.observability.metrics import BucketCounts, Buckets, Reading, families
from penstock_common.types.kv_transfer import KvMedium
from penstock_common.types.outputs import EngineReady
from penstock_enginecore.kv_transfer.core.leases import Leases, LeaseState
from penstock_enginecore.kv_transfer.core.size_class import TierStats
from penstock_enginecore.kv_transfer.core.transfer_stats import Transfer

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class TransferCounts:
    """Counts of transferred blocks and bytes since the engine started. The transfer thread counts transfers with other
    engines. The busy loop's thread counts transfers from host memory and disk. Any thread may read the counts.
    """

    def __init__(self) -> None:
        self.num_bytes: Counter[tuple[str, str]] = Counter()
        """Number of transferred bytes, by direction ("in", "out") and transport."""
        self.num_blocks: Counter[tuple[str, str]] = Counter()
        """Number of transferred blocks, by direction and transport."""
        self.num_states: Counter[tuple[str, str]] = Counter()
        """Number of transferred states of recurrent layers, by direction and transport."""
        self.failures: Counter[str] = Counter()
        """Number of blocks that did not arrive, or were not sent, by reason."""
        self._seconds: dict[str, Buckets] = {}

    def moved(self, direction: str, transport: str, num_bytes: int, *, of_states: bool = False) -> None:
        """Count a block or state that was sent to another engine or has arrived."""
        self.num_bytes[direction, transport] += num_bytes
        (self.num_states if of_states else self.num_blocks)[direction, transport] += 1

    def ended(self, transfer: Transfer) -> None:
        """Count a finished transfer. Record its duration if at least one block arrived."""
        if transfer.num_blocks:
            if (seconds := self._seconds.get(transfer.way)) is None:
                seconds = self._seconds[transfer.way] = Buckets(_SECONDS)
            seconds.observe(transfer.ended - transfer.began)
        if transfer.medium is not KvMedium.PEER and (lost := transfer.num_wanted - transfer.num_blocks):
            self.failures[transfer.medium.name.lower()] += lost

    @property
    def seconds(self) -> dict[str, BucketCounts]:
        """Histogram of the time in seconds from a request for blocks to the arrival of the last block, by transport or
        medium.
        """
        return {way: seconds.counts() for way, seconds in sorted(self._seconds.copy().items())}


_C, _G = CounterMetricFamily, GaugeMetricFamily
_MEDIA = ("host", "disk", "peer")


def _usage(tiers: TierStats) -> dict[str, float]:
    usages = {"host": tiers.host_usage, "disk": tiers.disk_usage}
    return {medium: usage for medium, usage in usages.items() if usage is not None}


_TIERS = (
    Reading(_C, "penstock:kv_tier_saved_blocks", "Blocks saved to host memory", "num_saved_blocks"),
    Reading(_C, "penstock:kv_tier_written_blocks", "Blocks written to the disk", "num_written_blocks"),
    Reading(_G, "penstock:kv_tier_usage_perc", "Used fraction of a tier, 0 to 1", _usage, ("medium",)),
    Reading(
        _C,
        "penstock:kv_tier_loaded_blocks",
        "Blocks loaded from a tier or another engine",
        lambda t: {medium: t.num_loaded_blocks[KvMedium[medium.upper()]] for medium in _MEDIA},
        ("medium",),
    ),
)


_STATE_TIERS = (
    Reading(_C, "penstock:state_tier_saved", "States of recurrent layers saved to host memory", "num_saved_blocks"),
    Reading(_C, "penstock:state_tier_written", "States of recurrent layers written to the disk", "num_written_blocks"),
    Reading(_G, "penstock:state_tier_usage_perc", "Used fraction of a tier for states, 0 to 1", _usage, ("medium",)),
    Reading(
        _C,
        "penstock:state_tier_loaded",
        "States of recurrent layers loaded from a tier or another engine",
        lambda t: {medium: t.num_loaded_blocks[KvMedium[medium.upper()]] for medium in _MEDIA},
        ("medium",),
    ),
)


def tier_families(tiers: TierStats, ready: EngineReady, states: TierStats | None = None) -> Iterator[Metric]:
    """Yield the metrics of the tiers of the engine that ``ready`` identifies. ``states`` is None for a model without
    recurrent layers.
    """
    labels = [ready.model, ready.engine_id]
    yield from families(_TIERS, [(labels, tiers)])
    if states is not None:
        yield from families(_STATE_TIERS, [(labels, states)])


def _num_bytes(read: tuple[TransferCounts, list[TierStats]]) -> dict[tuple[str, str], int]:
    """Return the number of transferred bytes, by direction and transport. For tiers, the transport is the name of the
    tier.
    """
    counts, classes = read
    found = counts.num_bytes.copy()
    for tiers in classes:
        for way, usage, loaded, kept in (
            ("host", tiers.host_usage, tiers.num_loaded_blocks[KvMedium.HOST], tiers.num_saved_blocks),
            ("disk", tiers.disk_usage, tiers.num_loaded_blocks[KvMedium.DISK], tiers.num_written_blocks),
        ):
            if usage is not None:
                found["in", way] += loaded * tiers.block_bytes
                found["out", way] += kept * tiers.block_bytes
    return dict(sorted(found.items()))


_TRANSFERS = (
    Reading(
        HistogramMetricFamily,
        "penstock:kv_transfer_seconds",
        "Seconds from the request for blocks to the last block",
        lambda read: read[0].seconds,
        ("transport",),
    ),
    Reading(
        _C,
        "penstock:kv_transfer_bytes",
        "Bytes of blocks and states received (in) and sent (out)",
        _num_bytes,
        ("direction", "transport"),
    ),
    Reading(
        _C,
        "penstock:kv_transfer_blocks",
        "Blocks received from other engines (in) and sent to them (out)",
        lambda read: dict(sorted(read[0].num_blocks.copy().items())),
        ("direction", "transport"),
    ),
    Reading(
        _C,
        "penstock:state_transfers",
        "States of recurrent layers received from other engines (in) and sent to them (out)",
        lambda read: dict(sorted(read[0].num_states.copy().items())),
        ("direction", "transport"),
    ),
    Reading(
        _C,
        "penstock:kv_transfer_failures",
        "Blocks and states that did not arrive or were not sent",
        lambda read: dict(sorted(read[0].failures.copy().items())),
        ("reason",),
    ),
)


def transfer_families(
    counts: TransferCounts, tiers: TierStats, ready: EngineReady, states: TierStats | None = None
) -> Iterator[Metric]:
    """Yield the metrics of transfers with other engines, host memory and the disk."""
    classes = [tiers] if states is None else [tiers, states]
    return families(_TRANSFERS, [([ready.model, ready.engine_id], (counts, classes))])


def _ends(leases: Leases) -> dict[str, int]:
    ends = {state.value: leases.ends[state] for state in LeaseState if state.ended}
    return {**ends, "refused": leases.num_refused}


def lease_families(
    leases: Leases, ready: EngineReady, *, num_pulls: tuple[int, int], num_slots_used: int
) -> Iterator[Metric]:
    """Yield the metrics of leases. ``num_pulls`` has two numbers: the number of open pulls by other engines, and the
    number of open pulls by this engine. ``num_slots_used`` is the number of slots in shared memory that are in use.
    """
    table = (
        Reading(
            _G,
            "penstock:kv_pulls",
            "Open streams of blocks from other engines (in) and to them (out)",
            lambda _: dict(zip(("out", "in"), num_pulls, strict=True)),
            ("direction",),
        ),
        Reading(
            _G, "penstock:kv_arena_blocks", "Blocks in shared memory that have not been read", lambda _: num_slots_used
        ),
        Reading(
            _C,
            "penstock:kv_lease_ends",
            "Leases that have ended, by end state",
            _ends,
            ("end",),
        ),
    )
    return families(table, [([ready.model, ready.engine_id], leases)])
