"""The frontend's Prometheus metrics, under the names that vLLM's dashboards and the Gateway API extension read."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from penstock_common.observability.metrics import (
    LABELS,
    EngineLoad,
    Family,
    Histogram,
    engine_families,
    service_registry,
)
from penstock_common.types.outputs import FinishReason
from penstock_frontend.rpc.media_transport import TRANSPORTS, MediaCounts

# Upper ends of buckets are vLLM's, so that the quantiles of both can be compared. Its counts of tokens end at the model's
# length, which a frontend learns later than it makes its metrics.
_BELOW_A_SECOND = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
_FIRST_TOKEN = (*_BELOW_A_SECOND, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_BETWEEN_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))[:-2]
_SEQUENCES = (1, 2, 5, 10, 20)


class EngineSteps:
    """What one frame of an engine's outputs brought, counted once per frame rather than once per output.

    ``timestamp``: when the step ended, on the engine's clock.
    """

    __slots__ = ("gaps", "num_tokens", "timestamp")

    def __init__(self, timestamp: float) -> None:
        self.timestamp = timestamp
        self.num_tokens = 0
        self.gaps: dict[float, int] = {}
        """Sequences by the time since their last token; those of one batch have the same."""


class EngineMetrics:
    """What is measured of sequences that run on one engine. Times are in seconds."""

    def __init__(self, metrics: "FrontendMetrics", engine: str) -> None:
        labels = (metrics.model, engine)
        self._labels = labels
        self._success = metrics.success
        self._prompt_tokens = metrics.prompt_tokens.labels(*labels)
        self._generation_tokens = metrics.generation_tokens.labels(*labels)
        self._nans = metrics.nan_logits.labels(*labels)
        self._first_token = metrics.first_token.labels(*labels)
        self._between_tokens = metrics.between_tokens.labels(*labels)
        self._latency = metrics.latency.labels(*labels)
        self._queue = metrics.queue.labels(*labels)
        self._prefill = metrics.prefill.labels(*labels)
        self._decode = metrics.decode.labels(*labels)
        self._request_prompt = metrics.request_prompt.labels(*labels)
        self._request_generation = metrics.request_generation.labels(*labels)
        self._request_max = metrics.request_max.labels(*labels)

    def first_token(self, seconds: float, prompt_tokens: int) -> None:
        """The first output of a sequence came, ``seconds`` after it arrived."""
        self._first_token.observe(seconds)
        self._prompt_tokens.inc(prompt_tokens)

    def step(self, step: EngineSteps) -> None:
        """A frame is done."""
        if step.num_tokens:
            self._generation_tokens.inc(step.num_tokens)
        for seconds, count in step.gaps.items():
            self._between_tokens.observe(seconds, count)

    def nans(self, count: int) -> None:
        """NaN logits were seen."""
        self._nans.inc(count)

    def scheduled(self, queued: float) -> None:
        """A sequence ended that had waited for ``queued`` seconds before it was first scheduled."""
        self._queue.observe(queued)

    def generated(self, *, prefill: float | None, decode: float) -> None:
        """A sequence ended: the time to its first token since it was scheduled, if that is known, and to its last."""
        if prefill is not None:
            self._prefill.observe(prefill)
        self._decode.observe(decode)

    def finished(
        self, started: float, reason: FinishReason, *, prompt: int, generated: int = 0, max_tokens: int | None = None
    ) -> None:
        """A sequence ended normally. ``started``: ``time.monotonic()`` at its arrival; ``prompt``, ``generated``: tokens."""
        self._latency.observe(time.monotonic() - started)
        self._request_prompt.observe(prompt)
        self._request_generation.observe(generated)
        if max_tokens is not None:
            self._request_max.observe(max_tokens)
        self._success.labels(*self._labels, reason.name.lower()).inc()

    def pooled(self, started: float, prompt_tokens: int) -> None:
        """A pooling request ended normally. ``started``: ``time.monotonic()`` at its arrival."""
        self._prompt_tokens.inc(prompt_tokens)
        self.finished(started, FinishReason.STOP, prompt=prompt_tokens)


class FrontendMetrics:
    """What this frontend counts, in a registry of its own. What is measured of sequences is labelled with the model's name and
    the engine's, what is measured of calls with the model's alone.

    Requests in flight, held and failed and ``n`` are of calls; everything else counts each of a call's ``n`` sequences, as
    engines do.
    """

    def __init__(self, model_name: str) -> None:
        self.model = model_name
        self.registry = service_registry("frontend")
        self.success = self._counter("vllm:request_success", "Requests that ended normally", "finished_reason")
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Output tokens")
        self.nan_logits = self._counter("penstock:nan_logits", "NaN logits that engines reported")
        self.first_token = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token", _FIRST_TOKEN)
        self.between_tokens = self._histogram(
            "vllm:inter_token_latency_seconds", "From one output of a sequence to the next", _BETWEEN_TOKENS
        )
        self.latency = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to last token", _REQUEST)
        self.queue = self._histogram("vllm:request_queue_time_seconds", "In the engine's queue", _REQUEST)
        self.prefill = self._histogram("vllm:request_prefill_time_seconds", "Scheduled to first token", _REQUEST)
        self.decode = self._histogram("vllm:request_decode_time_seconds", "First to last token", _REQUEST)
        self.request_prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self.request_generation = self._histogram(
            "vllm:request_generation_tokens", "Output tokens of a request", _TOKENS
        )
        self.request_max = self._histogram("vllm:request_params_max_tokens", "max_tokens of a request", _TOKENS)
        self._n = Histogram(
            "vllm:request_params_n", "n of a request", ["model_name"], bounds=_SEQUENCES, registry=self.registry
        ).labels(model_name)
        self._failed = Counter(
            "penstock:requests_failed", "Requests that failed", ["model_name", "code"], registry=self.registry
        )
        self._refused = Counter(
            "penstock:requests_refused", "Requests not accepted", ["model_name", "reason"], registry=self.registry
        )
        self._in_flight = Gauge(
            "penstock:requests_in_flight", "Requests being served", ["model_name"], registry=self.registry
        ).labels(model_name)
        self._held = Gauge(
            "penstock:requests_held", "Requests that wait for an engine", ["model_name"], registry=self.registry
        ).labels(model_name)
        self._variants = Gauge(
            "penstock:engine_variants",
            "Engines that compute differently: 1 while all are the same, 0 without engines",
            ["model_name"],
            registry=self.registry,
        ).labels(model_name)
        self._moved = Counter(
            "penstock:requests_moved", "Sequences that left their engine", ["model_name"], registry=self.registry
        ).labels(model_name)
        self._legs = Counter(
            "penstock:legs",
            "Calls by the legs they were planned to go in, where there are engines of prompts",
            ["model_name", "plan", "why"],
            registry=self.registry,
        )
        self._handover_gap = Histogram(
            "penstock:handover_gap_seconds",
            "From a sequence's handoff to its next output",
            ["model_name"],
            bounds=_BETWEEN_TOKENS,
            registry=self.registry,
        ).labels(model_name)
        self._engines: dict[str, EngineMetrics] = {}

    def engine(self, engine: str) -> EngineMetrics:
        """The series of an engine, by its id; they show as 0 from the first time it is asked for."""
        if (found := self._engines.get(engine)) is None:
            found = self._engines[engine] = EngineMetrics(self, engine)
        return found

    def set_in_flight(self, count: int) -> None:
        """Requests that this frontend has accepted and not ended."""
        self._in_flight.set(count)

    def set_held(self, count: int) -> None:
        """Requests that wait for an engine."""
        self._held.set(count)

    def set_variants(self, count: int) -> None:
        """Engines that compute differently are so many variants of the model."""
        self._variants.set(count)

    def moved(self, count: int) -> None:
        """Sequences left their engine, to go on on another one."""
        self._moved.inc(count)

    def planned(self, plan: str, why: str) -> None:
        """A call goes in legs as ``plan`` says, ``one`` or ``two``, and why."""
        self._legs.labels(self.model, plan, why).inc()

    def handed_over(self, gap: float) -> None:
        """A sequence that was handed over has its next output, after so many seconds."""
        self._handover_gap.observe(gap)

    def asked_for(self, n: int) -> None:
        """A request for ``n`` sequences is on its way to an engine."""
        self._n.observe(n)

    def failed(self, code: str) -> None:
        """A request failed. ``code``: name of its gRPC status code, whatever protocol it came by."""
        self._failed.labels(self.model, code).inc()

    def refused(self, reason: str) -> None:
        """A request was not accepted. ``reason``: that of its error."""
        self._refused.labels(self.model, reason).inc()

    def add_engine_loads(self, loads: Callable[[], Iterable[EngineLoad]]) -> None:
        """Serve the engines' load as well."""
        self.registry.register(_EngineLoads(loads))

    def add_adapters(self, count: Callable[[], Mapping[str, int]]) -> None:
        """Serve how many LoRA adapters have names, too; ``count``: by where these come from."""
        self.registry.register(_AdapterNames(self.model, count))

    def add_media(self, counts: MediaCounts) -> None:
        """Serve what engines have been sent of media, too."""
        self.registry.register(_Media(self.model, counts))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, [*LABELS, *labels], registry=self.registry)

    def _histogram(self, name: str, text: str, bounds: Iterable[float]) -> Histogram:
        return Histogram(name, text, LABELS, bounds=tuple(bounds), registry=self.registry)


class _EngineLoads(Collector):
    def __init__(self, loads: Callable[[], Iterable[EngineLoad]]) -> None:
        self._loads = loads

    def collect(self) -> Iterator[Family]:
        """One family per metric; asked for at each scrape."""
        yield from engine_families(self._loads())


class _AdapterNames(Collector):
    def __init__(self, model: str, count: Callable[[], Mapping[str, int]]) -> None:
        self._model = model
        self._count = count

    def collect(self) -> Iterator[Family]:
        """One family; asked for at each scrape."""
        family = GaugeMetricFamily("penstock:lora_names", "LoRA adapters by name", labels=["model_name", "source"])
        for source, count in self._count().items():
            family.add_metric([self._model, source], count)
        yield family


class _Media(Collector):
    def __init__(self, model: str, counts: MediaCounts) -> None:
        self._model = model
        self._counts = counts

    def collect(self) -> Iterator[Family]:
        """What is counted since the start; asked for at each scrape."""
        counts = self._counts
        for name, text, value in (
            ("vllm:mm_cache_queries", "Media of requests that were sent to engines", counts.num_queries),
            ("vllm:mm_cache_hits", "Of these, media that the engine had already", counts.num_hits),
            (
                "penstock:media_resent",
                "Requests sent again because the engine had forgotten their media, or could not read them",
                counts.num_resent,
            ),
        ):
            family = CounterMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family
        sent = CounterMetricFamily(
            "penstock:media_sent_bytes",
            "Bytes of processed media, and of prompts as vectors, sent to engines",
            labels=["model_name", "transport"],
        )
        for transport in TRANSPORTS:
            sent.add_metric([self._model, transport], counts.num_bytes[transport])
        yield sent


# What is measured of media.

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
