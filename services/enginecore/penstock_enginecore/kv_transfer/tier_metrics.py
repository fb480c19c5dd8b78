"""Metrics of the memories that keep blocks beside the KV cache."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock_common.observability.engine_metrics import LABELS
from penstock_common.types.kv_transfer import KvMedium
from penstock_common.types.outputs import EngineReady
from penstock_enginecore.kv_transfer.core.tiers import TierStats

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
