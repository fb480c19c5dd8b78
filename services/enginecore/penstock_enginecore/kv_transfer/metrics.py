"""Metrics of blocks that come from elsewhere and go there, and of the tiers that keep blocks beside the KV cache."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock_common.observability.metrics import LABELS, BucketCounts, Buckets
from penstock_common.types.kv_transfer import KvMedium
from penstock_common.types.outputs import EngineReady
from penstock_enginecore.kv_transfer.core.leases import Leases, LeaseState
from penstock_enginecore.kv_transfer.core.tiers import TierStats
from penstock_enginecore.kv_transfer.core.transfer_stats import Transfer

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class TransferCounts:
    """Since the start. Those of other engines are counted on the transfer thread, those of the engine's own media on the busy
    loop's; any thread may read.
    """

    def __init__(self) -> None:
        self.num_bytes: Counter[tuple[str, str]] = Counter()
        """Of blocks, by direction ("in", "out") and transport."""
        self.num_blocks: Counter[tuple[str, str]] = Counter()
        """Likewise."""
        self.failures: Counter[str] = Counter()
        """What did not come, or was not sent, by reason."""
        self._seconds: dict[str, Buckets] = {}

    def moved(self, direction: str, transport: str, num_bytes: int) -> None:
        """A block was sent, or has come."""
        self.num_bytes[direction, transport] += num_bytes
        self.num_blocks[direction, transport] += 1

    def ended(self, transfer: Transfer) -> None:
        """Blocks have come, or have not. How long it took counts where any came."""
        if transfer.num_blocks:
            if (seconds := self._seconds.get(transfer.way)) is None:
                seconds = self._seconds[transfer.way] = Buckets(_SECONDS)
            seconds.observe(transfer.ended - transfer.began)
        if transfer.medium is not KvMedium.PEER and (lost := transfer.num_wanted - transfer.num_blocks):
            self.failures[transfer.medium.name.lower()] += lost

    @property
    def seconds(self) -> Mapping[str, BucketCounts]:
        """From asking for blocks to the last of them, by transport or medium."""
        return {way: seconds.counts() for way, seconds in sorted(self._seconds.copy().items())}


_MEDIA = ("host", "disk", "peer")


class TierCollector(Collector):
    """Reads what was counted when it is scraped."""

    def __init__(self, tiers: Callable[[], TierStats], ready: EngineReady) -> None:
        self._tiers = tiers
        self._labels = [ready.model, ready.engine_id]

    def collect(self) -> Iterator[Metric]:
        """One family per metric."""
        tiers = self._tiers()
        for name, text, value in (
            ("penstock:kv_tier_saved_blocks", "Blocks that were copied to host memory", tiers.num_saved_blocks),
            ("penstock:kv_tier_written_blocks", "Blocks that were written to the disk", tiers.num_written_blocks),
        ):
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        labels = [*LABELS, "medium"]
        usage = GaugeMetricFamily("penstock:kv_tier_usage_perc", "Used fraction of a tier, 0 to 1", labels=labels)
        for medium, fraction in (("host", tiers.host_usage), ("disk", tiers.disk_usage)):
            if fraction is not None:
                usage.add_metric([*self._labels, medium], fraction)
        yield usage
        loaded = CounterMetricFamily("penstock:kv_tier_loaded_blocks", "Blocks that were loaded", labels=labels)
        for medium in _MEDIA:
            loaded.add_metric([*self._labels, medium], tiers.num_loaded_blocks[KvMedium[medium.upper()]])
        yield loaded


class TransferCollector(Collector):
    """Reads what was counted when it is scraped, of other engines, and of host memory and the disk, whose names stand for a
    transport.
    """

    def __init__(self, counts: TransferCounts, tiers: Callable[[], TierStats], ready: EngineReady) -> None:
        self._counts = counts
        self._tiers = tiers
        self._labels = [ready.model, ready.engine_id]

    def collect(self) -> Iterator[Metric]:
        """One family per metric."""
        counts = self._counts
        seconds = HistogramMetricFamily(
            "penstock:kv_transfer_seconds",
            "From asking for blocks to the last of them",
            labels=[*LABELS, "transport"],
        )
        for way, observed in counts.seconds.items():
            observed.add_to(seconds, [*self._labels, way])
        yield seconds
        for name, text, found in (
            ("penstock:kv_transfer_bytes", "Bytes of blocks that came (in) and went (out)", self._num_bytes()),
            (
                "penstock:kv_transfer_blocks",
                "Blocks from other engines (in) and to them (out)",
                counts.num_blocks.copy(),
            ),
        ):
            family = CounterMetricFamily(name, text, labels=[*LABELS, "direction", "transport"])
            for (direction, transport), value in sorted(found.items()):
                family.add_metric([*self._labels, direction, transport], value)
            yield family
        failures = CounterMetricFamily(
            "penstock:kv_transfer_failures", "What did not come, or was not sent", labels=[*LABELS, "reason"]
        )
        for reason, value in sorted(counts.failures.copy().items()):
            failures.add_metric([*self._labels, reason], value)
        yield failures

    def _num_bytes(self) -> Counter[tuple[str, str]]:
        """By direction and transport; of host memory and disk where the engine has them."""
        tiers, found = self._tiers(), self._counts.num_bytes.copy()
        for way, usage, loaded, kept in (
            ("host", tiers.host_usage, tiers.num_loaded_blocks[KvMedium.HOST], tiers.num_saved_blocks),
            ("disk", tiers.disk_usage, tiers.num_loaded_blocks[KvMedium.DISK], tiers.num_written_blocks),
        ):
            if usage is not None:
                found["in", way] = loaded * tiers.block_bytes
                found["out", way] = kept * tiers.block_bytes
        return found


class LeaseCollector(Collector):
    """Reads what there is when it is scraped. ``num_pulls``: streams that are open, those of others and own ones;
    ``num_slots_used``: blocks in shared memory that nobody has read.
    """

    def __init__(
        self,
        leases: Leases,
        ready: EngineReady,
        *,
        num_pulls: Callable[[], tuple[int, int]],
        num_slots_used: Callable[[], int],
    ) -> None:
        self._leases = leases
        self._num_pulls = num_pulls
        self._num_slots_used = num_slots_used
        self._labels = [ready.model, ready.engine_id]

    def collect(self) -> Iterator[Metric]:
        """One family per metric."""
        pulls = GaugeMetricFamily(
            "penstock:kv_pulls",
            "Open streams of blocks from other engines (in) and to them (out)",
            labels=[*LABELS, "direction"],
        )
        for direction, count in zip(("out", "in"), self._num_pulls(), strict=True):
            pulls.add_metric([*self._labels, direction], count)
        yield pulls
        arena = GaugeMetricFamily(
            "penstock:kv_arena_blocks", "Blocks in shared memory that nobody has read", labels=LABELS
        )
        arena.add_metric(self._labels, self._num_slots_used())
        yield arena
        leases = self._leases
        ends = CounterMetricFamily("penstock:kv_lease_ends", "Leases that are over, by how", labels=[*LABELS, "end"])
        for state in LeaseState:
            if state.ended:
                ends.add_metric([*self._labels, state.value], leases.ends[state])
        ends.add_metric([*self._labels, "refused"], leases.num_refused)
        yield ends
