"""Requests between acceptance and release. When a request ends, it is counted, logged, and recorded as a trace span."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import structlog

from penstock_common.config.sections import LogConfig
from penstock_common.config.settings import Reread
from penstock_common.errors import Cancelled, RequestFailed
from penstock_common.lora_registry import LoraAdapter
from penstock_common.observability.logging import current_caller, get_logger
from penstock_common.observability.tracing import Headers, Span, Tracer, current_call, trace_headers
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_frontend.call_types import (
    GenerateRequest,
    MediaPart,
    MixedPrompt,
    Part,
    PoolingPrompt,
    PoolingRequest,
    RequestOutput,
    current_principal,
)
from penstock_frontend.calls.admission import Demand
from penstock_frontend.metrics import FrontendMetrics
from penstock_frontend.processing.outputs.processor import RequestState
from penstock_frontend.tenants import TenantRefusals

# The classes below record metrics, log lines and trace spans of a request when it ends.

R = TypeVar("R", GenerateRequest, PoolingRequest)

_SHOWN = 256
"""Maximum number of characters of a name in a log line."""
_SAMPLING_ATTRIBUTES = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
}


class RequestObserver:
    """Records metrics, log lines and trace spans for the requests of all protocols."""

    def __init__(self, metrics: FrontendMetrics, log: Reread[LogConfig], tracer: Tracer | None = None) -> None:
        self.metrics = metrics
        self.tenants = TenantRefusals(metrics.model, metrics.registry)
        self.log = log
        self.tracer = tracer

    def refused(self, error: RequestFailed, tenant: str, request_id: str = "") -> None:
        """Count and log a request that was not accepted. ``request_id`` is the client's id for the request."""
        self.metrics.series("penstock:requests_failed", error.code).inc()
        self.metrics.series("penstock:requests_refused", error.reason).inc()
        self.tenants.refused(tenant, error)
        if self.log.now.requests:
            fields = {"request": request_id} if request_id else {}
            get_logger().info("request refused", **fields, **_whose(tenant), code=error.code, **_reason(error))

    def accepted(self, request_id: str, tenant: str) -> "ObservedRequest":
        """Start to observe an accepted request.

        The task that serves the request must call this method, because the method adds the request id to the log lines
        of the current task.
        """
        structlog.contextvars.bind_contextvars(request=request_id)
        self.tenants.accepted(tenant)
        return ObservedRequest(self, request_id, tenant)


class ObservedRequest:
    """Observes one request from acceptance to its end.

    The caller calls ``begin`` once the request is parsed, ``failed`` if the request fails, and ``end`` in every case.
    """

    __slots__ = (
        "_code",
        "_deadline",
        "_ended",
        "_error",
        "_observer",
        "_request_id",
        "_span",
        "_started",
        "_tenant",
        "_texts",
        "_whose",
    )

    def __init__(self, observer: RequestObserver, request_id: str, tenant: str) -> None:
        self._observer = observer
        self._tenant = tenant
        # Read these fields now, because the request may end in another task than the task that serves the call.
        self._whose = _whose(tenant) if observer.log.now.requests else {}
        self._request_id = request_id
        self._started = time.monotonic()
        self._deadline: float | None = None
        self._span: Span | None = None
        self._code = ""
        self._error: RequestFailed | None = None
        self._texts: dict[str, Any] = {}
        self._ended = False

    def begin(self, request: R) -> R:
        """Start the trace span of the request. Return the request. If tracing is on, it carries the trace context of
        the span.
        """
        self._deadline = request.context.deadline
        if self._observer.log.now.prompts:
            self._texts = {"prompt": _prompt(request)}
        tracer = self._observer.tracer
        if tracer is None:
            return request
        parent = current_call.get() or trace_headers(request.context.trace_context)
        self._span = tracer.start("frontend.request", parent)
        context = msgspec.structs.replace(request.context, trace_context=dict(self._span.headers))
        return msgspec.structs.replace(request, context=context)

    @property
    def headers(self) -> Headers:
        """Trace context of the request's span as headers, from which child spans can be created."""
        return self._span.headers if self._span is not None else {}

    def output(self, output: RequestOutput, *, cumulative: bool) -> None:
        """Record a piece of output for the log line at the end, if the logging of prompts and outputs is on."""
        if not self._texts:
            return
        outputs: dict[int, str] = self._texts.setdefault("outputs", {})
        outputs[output.index] = output.text if cumulative else outputs.get(output.index, "") + output.text

    def failed(self, error: Exception) -> None:
        """Record the error that ends the request. Only the first error is recorded."""
        if not self._code:
            self._error = error if isinstance(error, RequestFailed) else None
            self._code = self._error.code if self._error is not None else "INTERNAL"

    def end(
        self, request: GenerateRequest | PoolingRequest | None, states: Sequence[RequestState], *, done: bool
    ) -> None:
        """End the observation of the request. Idempotent.

        ``done`` is True if all output of the request was produced. If a request is neither done nor failed, its client
        cancelled it, or its deadline passed.
        """
        if self._ended:
            return
        self._ended = True
        code = "" if done and not self._code else self._code or self._given_up()
        if code:
            self._observer.metrics.series("penstock:requests_failed", code).inc()
        if self._error is not None and not any(state.text.num_tokens for state in states):
            self._observer.tenants.refused(self._tenant, self._error)
        if self._observer.log.now.requests:
            self._write(states, code)
        if self._span is not None:
            attributes = _attributes(self._request_id, self._observer.metrics.model, request, states)
            self._span.end(attributes if self._span.recording else {}, error=code)

    def _given_up(self) -> str:
        late = self._deadline is not None and time.time() >= self._deadline
        return "DEADLINE_EXCEEDED" if late else "CANCELLED"

    def _write(self, states: Sequence[RequestState], code: str) -> None:
        fields: dict[str, Any] = {
            "request": self._request_id,
            **self._whose,
            "seconds": round(time.monotonic() - self._started, 4),
        }
        if states:
            first = _first_token_after(states)
            fields |= {"prompt_tokens": states[0].num_prompt, "completion_tokens": _completion_tokens(states)}
            fields |= {"cached_tokens": max(state.num_cached for state in states)}
            fields |= {} if first is None else {"first_token_after": round(first, 4)}
            preemptions = sum(state.num_preemptions for state in states)
            fields |= {"preemptions": preemptions} if preemptions else {}
        # If the logging of prompts was switched off while the request ran, drop the texts. If the logging was switched
        # on while the request ran, the beginning of the texts is missing.
        texts = self._texts if self._observer.log.now.prompts else {}
        if code:
            if self._error is not None:
                fields |= _reason(self._error)
            get_logger().info("request failed", code=code, **fields, **texts)
        else:
            get_logger().info("request finished", finish=_finish_reasons(states), **fields, **texts)


def _whose(tenant: str) -> dict[str, str]:
    """Return the log fields tenant, route and client of the request that the current task serves.

    The field client is the name of the API key or token that the client used, or the client's address.
    """
    caller, principal = current_caller.get(), current_principal.get()
    client = caller.address if principal is None else principal.name
    return {"tenant": tenant[:_SHOWN], "route": caller.route[:_SHOWN], "client": client}


def _reason(error: RequestFailed) -> dict[str, str]:
    return {"reason": error.reason, "field": error.field}


def _attributes(
    request_id: str, model: str, request: GenerateRequest | PoolingRequest | None, states: Sequence[RequestState]
) -> dict[str, Any]:
    """Return the attributes of a request's trace span, under the names of OpenTelemetry's conventions for generative
    AI.

    A value for which the conventions have no name gets the name that vLLM uses.
    """
    generates = isinstance(request, GenerateRequest)
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "text_completion" if generates or request is None else "embeddings",
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": model,
        "gen_ai.request.id": request_id,
    }
    if isinstance(request, GenerateRequest):
        given: Mapping[str, Any] = request.sampling
        attributes |= {name: given[key] for key, name in _SAMPLING_ATTRIBUTES.items() if given.get(key) is not None}
    if states:
        attributes["gen_ai.usage.input_tokens"] = states[0].num_prompt
        attributes["gen_ai.usage.output_tokens"] = _completion_tokens(states)
        attributes["gen_ai.response.finish_reasons"] = _finish_reasons(states)
        if (first := _first_token_after(states)) is not None:
            attributes["gen_ai.latency.time_to_first_token"] = first
    return attributes


def _prompt(request: GenerateRequest | PoolingRequest) -> object:
    """Return the text or the token ids of a prompt as plain data, for the log. For pooling requests and mixed prompts,
    return a list of texts and token ids.
    """
    if isinstance(request, PoolingRequest):
        return [_whole(each) for each in request.inputs]
    return _whole(request.prompt)


def _whole(prompt: PoolingPrompt) -> object:
    return [_plain(part) for part in prompt.parts] if isinstance(prompt, MixedPrompt) else _plain(prompt)


def _plain(part: Part) -> object:
    if isinstance(part, MediaPart):
        return f"{part.modality} at {part.field}"  # the log must never contain the content of a media item, or its URL
    if isinstance(part, PromptEmbeds):
        return f"{part.num_tokens} vectors"
    return part if isinstance(part, str) else list(part)


def _completion_tokens(states: Sequence[RequestState]) -> int:
    return sum(state.text.num_tokens for state in states)


def _first_token_after(states: Sequence[RequestState]) -> float | None:
    return min((s.first_token_after for s in states if s.first_token_after is not None), default=None)


def _finish_reasons(states: Sequence[RequestState]) -> list[str]:
    return [state.finish.reason.name.lower() for state in states if state.finish is not None]


class LiveRequest:
    """A request from its acceptance until its release."""

    __slots__ = (
        "_aborted",
        "_wait",
        "demand",
        "done",
        "lora",
        "name",
        "observed",
        "prompt_token_ids",
        "released",
        "request",
        "request_id",
        "states",
    )

    def __init__(
        self, request_id: str, observed: ObservedRequest, demand: Demand, name: tuple[str, str] | None = None
    ) -> None:
        self.request_id = request_id
        """Id of the request that the client chose. The id need not be unique."""
        self.name = name
        """Tenant and id by which clients can abort the request. None if clients cannot abort the request."""
        self.demand = demand
        self.observed = observed
        self.lora: LoraAdapter | None = None
        """LoRA adapter of the request. None if the request uses no adapter, or if the frontend has not found the
        adapter yet.
        """
        self.request: GenerateRequest | PoolingRequest | None = None
        """The parsed request. None until the request is started."""
        self.prompt_token_ids: Sequence[int] = ()
        """Token ids of the prompt. Empty until the request is sent to an engine, like ``states``."""
        self.states: Sequence[RequestState] = ()
        """States of the request's sequences. Empty until the request is sent to an engine."""
        self.done = False
        """True if all output of the request was produced."""
        self.released = False
        """True if the request has been released."""
        self._aborted = False
        self._wait: asyncio.Timeout | None = None

    @contextlib.asynccontextmanager
    async def until_aborted(self) -> AsyncIterator[None]:
        """Return a context manager whose block raises Cancelled when the request is aborted."""
        try:
            async with asyncio.timeout(0 if self._aborted else None) as self._wait:
                yield
        except TimeoutError:
            if not self._aborted:
                raise
            raise Cancelled(f"request {self.request_id} was aborted", reason="ABORTED") from None
        finally:
            self._wait = None

    def abort(self) -> None:
        """Cancel the block of ``until_aborted``. If the block has not started yet, cancel it when it starts.
        Idempotent.
        """
        if self._wait is not None and not self._aborted:
            self._wait.reschedule(0)
        self._aborted = True
