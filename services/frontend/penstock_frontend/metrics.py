"""The frontend's Prometheus metrics, under the names that vLLM's dashboards and the Gateway API extension read."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from penstock_common.types.outputs import FinishReason

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)


class FrontendMetrics:
    """What this frontend counts, in a registry of its own; every series is labelled with the model's name.

    Requests in flight are calls; everything else counts each of a call's ``n`` sequences, as engines do.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model, registry, labels = model_name, self.registry, ["model_name"]
        self._success = Counter(
            "vllm:request_success", "Requests that ended normally", [*labels, "finished_reason"], registry=registry
        )
        self._prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens", labels, registry=registry)
        self._generation_tokens = Counter("vllm:generation_tokens", "Output tokens", labels, registry=registry)
        self._first_token = Histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token", labels, registry=registry, buckets=_SECONDS
        )
        self._latency = Histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to last token", labels, registry=registry, buckets=_SECONDS
        )
        self._nans = Counter("penstock:nan_logits", "NaN logits that engines saw", labels, registry=registry)
        self._in_flight = Gauge("penstock:requests_in_flight", "Requests being served", labels, registry=registry)
        for counter in (self._prompt_tokens, self._generation_tokens, self._nans):
            counter.labels(model_name)  # shows as 0 from the start
        for metric in (self._first_token, self._latency, self._in_flight):
            metric.labels(model_name)

    def set_in_flight(self, count: int) -> None:
        """Requests that this frontend has accepted and not ended."""
        self._in_flight.labels(self._model).set(count)

    def first_token(self, started: float, prompt_tokens: int) -> None:
        """The first output of a request came. ``started``: ``time.monotonic()`` at its arrival."""
        self._first_token.labels(self._model).observe(time.monotonic() - started)
        self._prompt_tokens.labels(self._model).inc(prompt_tokens)

    def tokens(self, count: int) -> None:
        """Output tokens came."""
        self._generation_tokens.labels(self._model).inc(count)

    def nans(self, count: int) -> None:
        """NaN logits were seen."""
        self._nans.labels(self._model).inc(count)

    def pooled(self, started: float, prompt_tokens: int) -> None:
        """A pooling request ended normally. ``started``: ``time.monotonic()`` at its arrival."""
        self._prompt_tokens.labels(self._model).inc(prompt_tokens)
        self.finished(started, FinishReason.STOP)

    def finished(self, started: float, reason: FinishReason) -> None:
        """A request ended normally. ``started``: ``time.monotonic()`` at its arrival."""
        self._latency.labels(self._model).observe(time.monotonic() - started)
        self._success.labels(self._model, reason.name.lower()).inc()
