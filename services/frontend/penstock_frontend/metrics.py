"""Prometheus metrics of the frontend, under the names that vLLM's dashboards and the Gateway API extension use."""

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock_common.observability.metrics import (
    EngineLoad,
    Histogram,
    Instrument,
    Instruments,
    Reading,
    Readings,
    engine_families,
    families,
    service_registry,
)
from penstock_common.types.outputs import FinishReason
from penstock_frontend.interfaces import LossCause
from penstock_frontend.rpc.media_transport import TRANSPORTS, MediaCounts

# The bucket bounds are the same as vLLM's, so that quantiles can be compared. vLLM's token buckets end at the model's
# maximum length. A frontend does not know this length yet when it creates its metrics.
_BELOW_A_SECOND = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
_FIRST_TOKEN = (*_BELOW_A_SECOND, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_BETWEEN_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))[:-2]
_SEQUENCES = (1, 2, 5, 10, 20)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_REAL_TIME_FACTORS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

_SUCCESS = "vllm:request_success"
_OF_SEQUENCES = (
    Instrument(Counter, _SUCCESS, "Requests that ended normally", ("finished_reason",)),
    Instrument(Counter, "vllm:prompt_tokens", "Prompt tokens"),
    Instrument(Counter, "vllm:generation_tokens", "Output tokens"),
    Instrument(Counter, "penstock:nan_logits", "NaN logits that engines reported"),
    Instrument(Histogram, "vllm:time_to_first_token_seconds", "Arrival to first token", (), _FIRST_TOKEN),
    Instrument(
        Histogram, "vllm:inter_token_latency_seconds", "From one output of a sequence to the next", (), _BETWEEN_TOKENS
    ),
    Instrument(Histogram, "vllm:e2e_request_latency_seconds", "Arrival to last token", (), _REQUEST),
    Instrument(Histogram, "vllm:request_queue_time_seconds", "In the engine's queue", (), _REQUEST),
    Instrument(Histogram, "vllm:request_prefill_time_seconds", "Scheduled to first token", (), _REQUEST),
    Instrument(Histogram, "vllm:request_decode_time_seconds", "First to last token", (), _REQUEST),
    Instrument(Histogram, "vllm:request_prompt_tokens", "Prompt tokens of a request", (), _TOKENS),
    Instrument(Histogram, "vllm:request_generation_tokens", "Output tokens of a request", (), _TOKENS),
    Instrument(Histogram, "vllm:request_params_max_tokens", "max_tokens of a request", (), _TOKENS),
)
"""Metrics that record each of the ``n`` sequences of a call. Their labels are the model and the engine."""
_OF_CALLS = (
    Instrument(Histogram, "vllm:request_params_n", "n of a request", (), _SEQUENCES),
    Instrument(Counter, "penstock:requests_failed", "Requests that failed", ("code",)),
    Instrument(Counter, "penstock:requests_refused", "Requests not accepted", ("reason",)),
    Instrument(Gauge, "penstock:requests_in_flight", "Requests being served"),
    Instrument(Gauge, "penstock:requests_held", "Requests that wait for an engine"),
    Instrument(
        Gauge,
        "penstock:engine_variants",
        "Engines that compute differently: 1 while all are the same, 0 without engines",
    ),
    Instrument(Gauge, "penstock:engines_connected", "Engines to which the frontend is connected"),
    Instrument(Counter, "penstock:engines_lost", "Engines lost", ("cause",)),
    Instrument(
        Counter,
        "penstock:requests_moved",
        "Moves: how often a sequence left an engine to resume on another engine",
    ),
    Instrument(
        Counter,
        "penstock:legs",
        "Calls by planned number of engines (legs), while there are prefill engines",
        ("plan", "why"),
    ),
    Instrument(
        Histogram, "penstock:handover_gap_seconds", "From a sequence's handoff to its next output", (), _BETWEEN_TOKENS
    ),
)
_OF_MEDIA = (
    Instrument(
        Histogram,
        "penstock:media_seconds",
        "Time of a media item by stage: fetching, waiting for a media worker, decoding and preprocessing",
        ("modality", "stage"),
        _SECONDS,
    ),
    Instrument(Counter, "penstock:media_refused", "Media items refused", ("modality", "reason")),
    Instrument(Counter, "penstock:media_store_queries", "Media items looked up in the cache of processed items"),
    Instrument(Counter, "penstock:media_store_hits", "Media items found in the cache of processed items"),
    Instrument(Gauge, "penstock:media_store_bytes", "Bytes of cached processed media items"),
    Instrument(Gauge, "penstock:media_queued", "Media items waiting for a media worker"),
    Instrument(
        Counter, "penstock:media_workers_replaced", "Media workers that ended or were stopped, and were replaced"
    ),
)
_OF_SPEECH = (
    Instrument(Counter, "penstock:speech_audio_seconds", "Seconds of audio that were transcribed"),
    Instrument(
        Histogram,
        "penstock:speech_real_time_factor",
        "Time of a transcription divided by the length of its audio",
        (),
        _REAL_TIME_FACTORS,
    ),
)
_MEDIA_SENT = (
    Reading(CounterMetricFamily, "vllm:mm_cache_queries", "Media of requests that were sent to engines", "num_queries"),
    Reading(
        CounterMetricFamily, "vllm:mm_cache_hits", "Media of requests that the engine had already cached", "num_hits"
    ),
    Reading(
        CounterMetricFamily,
        "penstock:media_resent",
        "Requests sent again because the engine had forgotten their media, or could not read them",
        "num_resent",
    ),
    Reading(
        CounterMetricFamily,
        "penstock:media_sent_bytes",
        "Bytes of processed media and prompt embeddings sent to engines",
        lambda counts: {transport: counts.num_bytes[transport] for transport in TRANSPORTS},
        ("transport",),
    ),
)


class EngineSteps:
    """Totals over one frame of an engine's outputs, by which the metrics are updated once per frame instead of once per
    output.

    ``timestamp`` is the time at which the step ended, on the engine's clock.
    """

    __slots__ = ("gaps", "num_tokens", "timestamp")

    def __init__(self, timestamp: float) -> None:
        self.timestamp = timestamp
        self.num_tokens = 0
        self.gaps: dict[float, int] = {}
        """Number of sequences whose previous token was a given time ago, by that time in seconds. Most sequences of a
        batch have the same time.
        """


class EngineMetrics:
    """Metrics of the sequences that ran on one engine. All times are in seconds."""

    def __init__(self, of_sequences: Instruments, engine: str) -> None:
        self._series = {row.name: of_sequences.series(row.name, engine) for row in _OF_SEQUENCES if not row.labels}
        self._ended = functools.partial(of_sequences.series, _SUCCESS, engine)

    def first_token(self, seconds: float, prompt_tokens: int) -> None:
        """Record the first output of a sequence. The output came ``seconds`` seconds after the sequence arrived."""
        self._series["vllm:time_to_first_token_seconds"].observe(seconds)
        self._series["vllm:prompt_tokens"].inc(prompt_tokens)

    def step(self, step: EngineSteps) -> None:
        """Record the totals of one frame of outputs."""
        if step.num_tokens:
            self._series["vllm:generation_tokens"].inc(step.num_tokens)
        for seconds, count in step.gaps.items():
            self._series["vllm:inter_token_latency_seconds"].observe(seconds, count)

    def nans(self, count: int) -> None:
        """Add ``count`` to the number of NaN logits."""
        self._series["penstock:nan_logits"].inc(count)

    def scheduled(self, queued: float) -> None:
        """Record, at the end of a sequence, that it waited ``queued`` seconds until it was first scheduled."""
        self._series["vllm:request_queue_time_seconds"].observe(queued)

    def generated(self, *, prefill: float | None, decode: float) -> None:
        """Record, at the end of a sequence, its prefill time (None if unknown) and its decode time."""
        if prefill is not None:
            self._series["vllm:request_prefill_time_seconds"].observe(prefill)
        self._series["vllm:request_decode_time_seconds"].observe(decode)

    def finished(
        self, started: float, reason: FinishReason, *, prompt: int, generated: int = 0, max_tokens: int | None = None
    ) -> None:
        """Record the normal end of a sequence.

        ``started`` is the value of ``time.monotonic()`` when the sequence arrived. ``prompt`` and ``generated`` are
        numbers of tokens.
        """
        self._series["vllm:e2e_request_latency_seconds"].observe(time.monotonic() - started)
        self._series["vllm:request_prompt_tokens"].observe(prompt)
        self._series["vllm:request_generation_tokens"].observe(generated)
        if max_tokens is not None:
            self._series["vllm:request_params_max_tokens"].observe(max_tokens)
        self._ended(reason.name.lower()).inc()

    def pooled(self, started: float, prompt_tokens: int) -> None:
        """Record the normal end of a pooling request. ``started`` is the value of ``time.monotonic()`` when the request
        arrived.
        """
        self._series["vllm:prompt_tokens"].inc(prompt_tokens)
        self.finished(started, FinishReason.STOP, prompt=prompt_tokens)


class FrontendMetrics(Instruments):
    """Metrics of one model of this frontend, in a metrics registry of their own.

    Metrics of sequences have the labels model and engine. Metrics of calls have the label model.
    """

    def __init__(self, model_name: str, *, with_process: bool = True) -> None:
        """``with_process`` adds the metrics of the process. Only one registry of a process may have them."""
        self.model = model_name
        self.registry = service_registry("frontend") if with_process else CollectorRegistry()
        self._of_sequences = Instruments(self.registry, _OF_SEQUENCES, more=["engine"], model_name=model_name)
        super().__init__(self.registry, _OF_CALLS, model_name=model_name)
        for cause in LossCause:
            self.series("penstock:engines_lost", cause)  # create the series with the value 0, so that rates are right
        self._engines: dict[str, EngineMetrics] = {}

    def engine(self, engine: str) -> EngineMetrics:
        """Return the metrics of an engine, by the engine's id. The first call for an engine creates its time series
        with the value 0.
        """
        if (found := self._engines.get(engine)) is None:
            found = self._engines[engine] = EngineMetrics(self._of_sequences, engine)
        return found

    def add_engine_loads(self, loads: Callable[[], Iterable[EngineLoad]]) -> None:
        """Add the engines' load to the metrics."""
        self.registry.register(Readings(lambda: engine_families(loads())))

    def add_adapters(self, count: Callable[[], Mapping[str, int]]) -> None:
        """Add the number of LoRA adapter names to the metrics. ``count`` returns the number of names by the source that
        defines them.
        """
        names = Reading(
            GaugeMetricFamily, "penstock:lora_names", "LoRA adapters by name", lambda _: dict(count()), ("source",)
        )
        self._add([names], None)

    def add_media(self, counts: MediaCounts) -> None:
        """Add counters for the media items that were sent to engines."""
        self._add(_MEDIA_SENT, counts)

    def _add(self, table: Iterable[Reading], source: object) -> None:
        self.registry.register(Readings(lambda: families(table, [([self.model], source)], ["model_name"])))


def merged(registries: Sequence[CollectorRegistry]) -> CollectorRegistry:
    """Return a registry with the metrics of all ``registries``, which are read at each scrape.

    If several registries have the same metric, the result has one family with the series of all of them. The labels of
    these series must differ.
    """
    if len(registries) == 1:
        return registries[0]
    all_of_them = CollectorRegistry()
    all_of_them.register(Readings(lambda: _families_of(registries)))
    return all_of_them


def _families_of(registries: Iterable[CollectorRegistry]) -> Iterable[Metric]:
    families: dict[str, Metric] = {}
    for registry in registries:
        for family in registry.collect():
            first = families.setdefault(family.name, family)
            if first is not family:
                first.samples.extend(family.samples)
    return families.values()


class MediaMetrics(Instruments):
    """Metrics of the media processing of this frontend, with the model's name as a label."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        super().__init__(registry, _OF_MEDIA, model_name=model_name)


class SpeechMetrics(Instruments):
    """Metrics of the transcription calls of this frontend, with the model's name as a label."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        super().__init__(registry, _OF_SPEECH, model_name=model_name)

    def transcribed(self, audio_seconds: float, seconds: float) -> None:
        """Count a complete transcription of ``audio_seconds`` seconds of audio, which took ``seconds`` seconds."""
        self.series("penstock:speech_audio_seconds").inc(audio_seconds)
        self.series("penstock:speech_real_time_factor").observe(seconds / audio_seconds)
