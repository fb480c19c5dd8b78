"""What is measured of media."""

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock_common.observability.metrics import Histogram

Stage = Literal["fetch", "queue", "process"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class MediaMetrics:
    """Series of this frontend's media, labelled with the model's name."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model = model_name
        self._seconds = Histogram(
            "penstock:media_seconds",
            "An item's time by stage: fetched, waiting for a media worker, decoded and processed",
            ["model_name", "modality", "stage"],
            bounds=_SECONDS,
            registry=registry,
        )
        self._refused = Counter(
            "penstock:media_refused", "Items not taken", ["model_name", "modality", "reason"], registry=registry
        )
        labels = ["model_name"]
        self._queries = Counter(
            "penstock:media_store_queries", "Items looked up among those processed before", labels, registry=registry
        ).labels(model_name)
        self._hits = Counter("penstock:media_store_hits", "Items found there", labels, registry=registry).labels(
            model_name
        )
        self._stored = Gauge(
            "penstock:media_store_bytes", "Bytes of processed items that are kept", labels, registry=registry
        ).labels(model_name)
        self._queued = Gauge(
            "penstock:media_queued", "Items that wait for a media worker", labels, registry=registry
        ).labels(model_name)
        self._replaced = Counter(
            "penstock:media_workers_replaced",
            "Media workers that ended or were ended, and had to be replaced",
            labels,
            registry=registry,
        ).labels(model_name)

    def took(self, modality: str, stage: Stage, seconds: float) -> None:
        """An item was so long in that stage."""
        self._seconds.labels(self._model, modality, stage).observe(seconds)

    def refused(self, modality: str, reason: str) -> None:
        """An item was not taken. ``reason``: that of its error."""
        self._refused.labels(self._model, modality, reason).inc()

    def looked_up(self, *, hit: bool) -> None:
        """An item was looked for among those that are kept, or being processed."""
        self._queries.inc()
        if hit:
            self._hits.inc()

    def stored(self, num_bytes: int) -> None:
        """So much is kept now."""
        self._stored.set(num_bytes)

    def queued(self, count: int) -> None:
        """So many items wait for a media worker now."""
        self._queued.set(count)

    def replaced_worker(self) -> None:
        """A media worker is gone."""
        self._replaced.inc()
