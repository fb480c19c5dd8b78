"""Tracing spans of the engine: one span each for the time in the queue, prefill and decode of each traced request."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from penstock_common.observability.logging import incident
from penstock_common.observability.tracing import Headers, Tracer, is_sampled
from penstock_common.types.outputs import EngineCoreOutput, EngineCoreOutputs, EventType, TokenColumns
from penstock_common.types.request import EngineCoreRequest
from penstock_enginecore.kv_transfer.core.transfer_stats import Transfer

Clock = Callable[[], float]


class _Phase:
    """A phase of a request (queue, prefill or decode), with the events during the phase. Times are on the engine's
    clock.
    """

    __slots__ = ("began", "ended", "events", "name")

    def __init__(self, name: str, began: float) -> None:
        self.name = name
        self.began = began
        self.ended: float | None = None
        self.events: list[tuple[str, float]] = []


class _TracedRequest:
    """State of a traced request, according to its outputs so far. The last element of ``phases`` is the current
    phase.
    """

    __slots__ = ("headers", "num_cached", "num_prompt", "num_tokens", "number", "phases", "request_id")

    def __init__(self, request: EngineCoreRequest, now: float) -> None:
        self.headers: Headers = request.context.trace_context
        self.request_id = request.request_id
        self.number = request.request_number
        self.num_prompt = len(request.prompt_token_ids)
        self.num_cached = 0
        self.num_tokens = 0
        self.phases = [_Phase("engine.queue", now)]

    def take(self, output: EngineCoreOutput, timestamp: float) -> None:
        """Record an output of the request. ``timestamp`` is the time at which the step of the output ended."""
        self._take_events(output)
        if output.prefill_stats is not None:
            self.num_cached = output.prefill_stats.num_cached_tokens
        self.take_tokens(len(output.new_token_ids), timestamp)

    def take_tokens(self, count: int, timestamp: float) -> None:
        """Record that the request got ``count`` new tokens in a step that ended at ``timestamp``."""
        if count and not self.num_tokens:
            self._go_on("engine.decode", timestamp)
        self.num_tokens += count

    def _take_events(self, output: EngineCoreOutput) -> None:
        for event in output.events:
            phase = self.phases[-1]
            if event.type is EventType.QUEUED:
                phase.began = event.timestamp
            elif event.type is EventType.SCHEDULED and phase.name == "engine.queue":
                self._go_on("engine.prefill", event.timestamp)
            else:
                phase.events.append((event.type.name.lower(), event.timestamp))

    def attributes(self, phase: _Phase, finish_reason: str) -> Iterator[tuple[str, Any]]:
        """Yield the attributes of the span for a phase, according to OpenTelemetry's conventions for generative AI."""
        yield "gen_ai.request.id", self.request_id
        if phase.name == "engine.prefill":
            yield "gen_ai.usage.input_tokens", self.num_prompt
            yield "penstock.cached_tokens", self.num_cached
        if phase is self.phases[-1]:
            yield "gen_ai.usage.output_tokens", self.num_tokens
            yield "gen_ai.response.finish_reasons", [finish_reason]

    def _go_on(self, name: str, now: float) -> None:
        self.phases[-1].ended = now
        self.phases.append(_Phase(name, now))


class EngineTraces:
    """Records spans of requests whose traces are sampled, from the messages that the I/O thread handles. The busy loop
    does no work for tracing.

    The spans of a request are recorded when the request ends. Only the I/O thread may use the object.
    """

    def __init__(
        self, tracer: Tracer, *, model: str, monotonic_clock: Clock = time.monotonic, wall_clock: Clock = time.time
    ) -> None:
        self._tracer = tracer
        self._model = model
        self._clock = monotonic_clock
        self._wall_clock = wall_clock
        self._requests: dict[tuple[str, str], _TracedRequest] = {}
        self._by_number: dict[tuple[str, int], _TracedRequest] = {}

    def __len__(self) -> int:
        """Return the number of traced requests."""
        return len(self._requests)

    def add(self, client_id: str, request: EngineCoreRequest) -> None:
        """Begin to trace a new request, if its trace context is sampled."""
        try:
            if is_sampled(request.context.trace_context):
                traced = _TracedRequest(request, self._clock())
                self._requests[client_id, request.request_id] = traced
                if traced.number:
                    self._by_number[client_id, traced.number] = traced
        except Exception as e:  # Errors in tracing must not affect the request.
            incident(e, request=request.request_id, doing="tracing the request")

    def take(self, client_id: str, outputs: EngineCoreOutputs) -> None:
        """Record the outputs of a step for one client."""
        if self._requests:
            if outputs.tokens is not None:
                self._take_tokens(client_id, outputs.tokens, outputs.timestamp or self._clock())
            self._take(client_id, outputs.outputs, outputs.timestamp or self._clock())

    def transferred(self, transfer: Transfer) -> None:
        """Record a transfer of KV blocks, successful or not. Thread-safe, because the method uses no state of requests."""
        try:
            if is_sampled(transfer.headers):
                self._record_transfer(transfer)
        except Exception as e:  # Errors in tracing must not affect the request.
            incident(e, request="", doing="tracing a transfer of KV blocks")

    def client_gone(self, client_id: str) -> None:
        """End the spans of a closed session's requests, because the requests get no more outputs."""
        for key in [key for key in self._requests if key[0] == client_id]:
            try:
                self._end(self._forget(*key), self._clock(), "abort", "")
            except Exception as e:
                incident(e, request=key[1], doing="tracing the request")

    def _record_transfer(self, transfer: Transfer) -> None:
        to_epoch = self._wall_clock() - self._clock()
        attributes: dict[str, str | int] = {
            "gen_ai.request.model": self._model,
            "penstock.kv.medium": transfer.medium.name.lower(),
            "penstock.kv.wanted_blocks": transfer.num_wanted,
            "penstock.kv.blocks": transfer.num_blocks,
            "penstock.kv.bytes": transfer.num_bytes,
            "penstock.kv.outcome": transfer.outcome,
        }
        if transfer.transport:
            attributes["penstock.kv.transport"] = transfer.transport
        self._tracer.record(
            "engine.kv_transfer",
            transfer.headers,
            began=transfer.began + to_epoch,
            ended=transfer.ended + to_epoch,
            attributes=attributes,
            error=transfer.outcome if transfer.failed else "",
        )

    def _take(self, client_id: str, outputs: Sequence[EngineCoreOutput], timestamp: float) -> None:
        for output in outputs:
            request = self._requests.get((client_id, output.request_id))
            if request is None:
                continue
            try:
                request.take(output, timestamp)
                if output.finish_reason is not None:
                    self._forget(client_id, output.request_id)
                    error = output.error.code if output.error is not None else ""
                    self._end(request, timestamp, output.finish_reason.name.lower(), error)
            except Exception as e:  # Errors in tracing must not affect the request.
                if (client_id, output.request_id) in self._requests:
                    self._forget(client_id, output.request_id)
                incident(e, request=output.request_id, doing="tracing the request")

    def _take_tokens(self, client_id: str, tokens: TokenColumns, timestamp: float) -> None:
        for number, _, token_ids in tokens.rows():
            if (request := self._by_number.get((client_id, number))) is not None:
                request.take_tokens(len(token_ids), timestamp)

    def _forget(self, client_id: str, request_id: str) -> _TracedRequest:
        request = self._requests.pop((client_id, request_id))
        self._by_number.pop((client_id, request.number), None)
        return request

    def _end(self, request: _TracedRequest, now: float, finish_reason: str, error: str) -> None:
        to_epoch = self._wall_clock() - self._clock()
        for phase in request.phases:
            is_last = phase is request.phases[-1]
            self._tracer.record(
                phase.name,
                request.headers,
                began=phase.began + to_epoch,
                ended=(now if phase.ended is None else phase.ended) + to_epoch,
                attributes={"gen_ai.request.model": self._model, **dict(request.attributes(phase, finish_reason))},
                events=[(name, time + to_epoch) for name, time in phase.events],
                error=error if is_last else "",
            )
