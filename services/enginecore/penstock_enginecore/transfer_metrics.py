"""Metrics of blocks that go from engine to engine."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock_common.observability.engine_metrics import LABELS
from penstock_common.types.outputs import EngineReady
from penstock_enginecore.core.kv_transfer.leases import Leases, LeaseState
from penstock_enginecore.rpc.kv.counts import TransferCounts


class TransferCollector(Collector):
    """Reads what was counted when it is scraped. ``num_pulls``: streams that are open, those of others and own ones;
    ``num_slots_used``: blocks in shared memory that nobody has read.
    """

    def __init__(
        self,
        leases: Leases,
        counts: TransferCounts,
        ready: EngineReady,
        *,
        num_pulls: Callable[[], tuple[int, int]],
        num_slots_used: Callable[[], int],
    ) -> None:
        self._leases = leases
        self._counts = counts
        self._num_pulls = num_pulls
        self._num_slots_used = num_slots_used
        self._labels = [ready.model, ready.engine_id]

    def collect(self) -> Iterator[Metric]:
        """One family per metric."""
        counts = self._counts
        seconds = HistogramMetricFamily(
            "penstock:kv_transfer_seconds", "From asking another engine for blocks to the last of them", labels=LABELS
        )
        counts.seconds.add_to(seconds, self._labels)
        yield seconds
        for name, text, found in (
            (
                "penstock:kv_transfer_bytes",
                "Bytes of blocks from other engines (in) and to them (out)",
                counts.num_bytes,
            ),
            ("penstock:kv_transfer_blocks", "Blocks from other engines (in) and to them (out)", counts.num_blocks),
        ):
            family = CounterMetricFamily(name, text, labels=[*LABELS, "direction", "transport"])
            for (direction, transport), value in sorted(found.copy().items()):
                family.add_metric([*self._labels, direction, transport], value)
            yield family
        failures = CounterMetricFamily(
            "penstock:kv_transfer_failures", "What did not come, or was not sent", labels=[*LABELS, "reason"]
        )
        for reason, value in sorted(counts.failures.copy().items()):
            failures.add_metric([*self._labels, reason], value)
        yield failures
        pulls = GaugeMetricFamily(
            "penstock:kv_pulls",
            "Open streams of blocks from other engines (in) and to them (out)",
            labels=[*LABELS, "direction"],
        )
        for direction, count in zip(("out", "in"), self._num_pulls(), strict=True):
            pulls.add_metric([*self._labels, direction], count)
        yield pulls
        yield from self._lease_families()

    def _lease_families(self) -> Iterator[Metric]:
        leases = self._leases
        for name, text, value in (
            ("penstock:kv_leases", "Requests whose blocks are kept for other engines", len(leases)),
            ("penstock:kv_leased_blocks", "Blocks that are kept for other engines", leases.num_blocks),
            ("penstock:kv_arena_blocks", "Blocks in shared memory that nobody has read", self._num_slots_used()),
        ):
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        ends = CounterMetricFamily("penstock:kv_lease_ends", "Leases that are over, by how", labels=[*LABELS, "end"])
        for state in LeaseState:
            if state.ended:
                ends.add_metric([*self._labels, state.value], leases.ends[state])
        ends.add_metric([*self._labels, "refused"], leases.num_refused)
        yield ends
