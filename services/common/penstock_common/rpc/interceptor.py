"""Server interceptors that map exceptions to gRPC statuses, refuse unreadable messages, and count and trace calls."""

import contextlib
import inspect
import zlib
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import grpc
import structlog
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry, Counter

from penstock_common.errors import InvalidArgument, RequestFailed, ResourceExhausted, Unimplemented
from penstock_common.in_flight import BytesInFlight, Held
from penstock_common.observability.logging import Caller, current_caller, incident, peer_address
from penstock_common.observability.tracing import Headers, Span, Tracer, current_call, trace_headers
from penstock_common.rpc.status import abort

# Decompression of clients' messages with a size limit. gRPC itself would decompress the whole message before it checks
# the size.

MAX_DECOMPRESSED_BYTES = 4 * 1024 * 1024
"""Maximum bytes of a compressed message after decompression."""
GZIP_ONLY = [
    (
        "grpc.compression_enabled_algorithms_bitset",
        0b101,
    ),  # identity and gzip; calls with other encodings end as UNIMPLEMENTED
    ("grpc.per_message_decompression", 0),
]
"""Options of a server whose deserializers call ``decompressed``."""
NOT_COMPRESSED = [("grpc.compression_enabled_algorithms_bitset", 0b001)]
"""Options of a server that accepts no compressed messages."""
_GZIP = b"\x1f\x8b"
"""First bytes of gzip data. No protobuf message begins with them: 0x1f would be a field of a nonexistent type."""
_WITH_GZIP_HEADER = 31


def decompressed(data: bytes, limit: int = MAX_DECOMPRESSED_BYTES) -> bytes:
    """Return the decompressed message if ``data`` is gzip, else ``data``.

    Args:
        data: The message as received.
        limit: Maximum bytes of a compressed message after decompression.

    Raises:
        ResourceExhausted: The message exceeds the limit. Decompression stops at the limit.
        zlib.error: The message is corrupt.
    """
    if not data.startswith(_GZIP):
        return data
    decompressor = zlib.decompressobj(wbits=_WITH_GZIP_HEADER)
    plain = decompressor.decompress(data, limit + 1)
    if len(plain) > limit:
        raise ResourceExhausted(
            f"a compressed message has more than {limit} bytes after decompression; send the message without compression",
            reason="MESSAGE_TOO_LARGE",
        )
    if not decompressor.eof or decompressor.unused_data:
        raise zlib.error("the compressed message is incomplete, or other data follows it")
    return plain


# Errors for calls whose messages cannot be accepted. gRPC itself would end such a call as UNKNOWN, and log a traceback.

REASON = "UNREADABLE_MESSAGE"


class Unreadable(NamedTuple):
    """Placeholder for a message that the parser cannot read. ``why`` is the parser's error."""

    why: str


class Refused(NamedTuple):
    """Placeholder for a message that was refused before it was decoded. ``why`` is the error of the call."""

    why: ResourceExhausted


def reader(
    deserialize: Callable[[bytes], Any] | None,
    in_flight: BytesInFlight | None = None,
    max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES,
) -> Callable[[bytes], Any] | None:
    """Return a deserializer that does not raise errors, and returns an Unreadable or Refused object instead.

    ``in_flight`` counts large messages; such a message is returned as Held. ``max_decompressed_bytes`` is the limit for
    compressed messages.
    """
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:
        try:
            data = decompressed(data, max_decompressed_bytes)
        except ResourceExhausted as e:
            return Refused(e)
        except zlib.error as e:
            return Unreadable(str(e))
        if in_flight is not None and (refusal := in_flight.refusal(len(data))) is not None:
            return Refused(refusal)
        try:
            message = deserialize(data)
        except Exception as e:
            return Unreadable(str(e))
        return message if in_flight is None else in_flight.hold(message, len(data))

    return read


def checked(message: Any) -> Any:
    """Return the message. Raises InvalidArgument for an Unreadable message, and the stored error for a Refused one."""
    if isinstance(message, Unreadable):
        raise InvalidArgument(f"the message cannot be read: {message.why}", reason=REASON)
    if isinstance(message, Refused):
        raise message.why
    return message.message if isinstance(message, Held) else message


class CheckedMessages:
    """Iterator over the messages of a stream. A message counts towards the limit on large messages until the next
    message is requested.

    For an unacceptable message, the iterator raises the errors of ``checked``.
    """

    def __init__(self, messages: AsyncIterable[Any]) -> None:
        self._messages = messages
        self._iterator: AsyncIterator[Any] | None = None
        self._last: Any = None

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self._iterator is None:  # gRPC logs an error if an iterator is created but never used
            self._iterator = aiter(self._messages)
        if isinstance(self._last, Held):
            self._last.release()  # gRPC's own iterator would release the message later
        self._last = await anext(self._iterator)
        return checked(self._last)


Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
CallEnd: TypeAlias = Callable[[str], None]
"""Function that is called when a call has ended, with the name of the call's status code."""


class CallObserver(Protocol):
    """Observer of every call, except calls of gRPC's own services."""

    def started(self, method: str, kind: str, request: object, context: Context) -> CallEnd:
        """Observe the start of a call of ``method`` (``/package.Service/Method``), in the task that serves it.

        ``request`` is the message, or the iterator over messages. ``kind`` is unary, server_stream, client_stream or
        bidi_stream.
        """


class Unobserved:
    """Observer that ignores all calls."""

    def started(self, method: str, kind: str, request: object, context: Context) -> CallEnd:
        """Ignore the call and its end."""
        del method, kind, request, context
        return lambda _: None


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor that maps exceptions to statuses.

    RequestFailed becomes its status with details. Other errors are logged as incidents and become INTERNAL, without
    their text. A message that cannot be read is an error of the sender and becomes INVALID_ARGUMENT. The mapping also
    applies to gRPC's own services (health, reflection), but the observer does not get their calls.
    """

    def __init__(
        self,
        observer: CallObserver | None = None,
        *,
        max_response_bytes: int | None = None,
        in_flight: BytesInFlight | None = None,
        max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES,
    ) -> None:
        """Create the interceptor.

        Args:
            observer: Observes calls, or None.
            max_response_bytes: Size limit of responses. A larger response ends its call as RESOURCE_EXHAUSTED. None
                disables the check.
            in_flight: Counts the messages of calls, or None.
            max_decompressed_bytes: Limit for compressed messages.
        """
        self._observer = observer or Unobserved()
        self._max_response_bytes = max_response_bytes
        self._in_flight = in_flight
        self._max_decompressed_bytes = max_decompressed_bytes

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the handler of the called method."""
        handler: Any = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None:
            return None
        codecs = (
            reader(handler.request_deserializer, self._in_flight, self._max_decompressed_bytes),
            handler.response_serializer,
        )
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(self._single(handler.unary_unary, method, "unary"), *codecs)
        if handler.stream_unary:
            single = self._single(handler.stream_unary, method, "client_stream")
            return grpc.stream_unary_rpc_method_handler(single, *codecs)
        if handler.unary_stream:
            # A streaming method may also be a coroutine that writes to its context, as in gRPC's health service.
            wrap = self._single if inspect.iscoroutinefunction(handler.unary_stream) else self._stream
            stream = wrap(handler.unary_stream, method, "server_stream")
            return grpc.unary_stream_rpc_method_handler(stream, *codecs)
        stream = self._stream(handler.stream_stream, method, "bidi_stream")
        return grpc.stream_stream_rpc_method_handler(stream, *codecs)

    def _started(self, method: str, kind: str, request: Any, context: Context) -> CallEnd:
        """Notify the observer of the start, and return a function that notifies the observer of the end.

        Errors of the observer do not fail the call.
        """
        observer = Unobserved() if method.startswith("/grpc.") else self._observer
        try:
            tell = observer.started(method, kind, request, context)
        except Exception as e:
            incident(e, request=_id_of(request), doing=f"observing the start of {method}")
            return lambda _: None

        def ended(code: str) -> None:
            try:
                tell(code)
            except Exception as e:
                incident(e, request=_id_of(request), doing=f"observing the end of {method}")

        return ended

    def _check_size(self, response: Any) -> None:
        if self._max_response_bytes is not None and response is not None:
            check_response_size(response, self._max_response_bytes)

    def _single(self, behaviour: Any, method: str, kind: str) -> Any:
        async def call(given: Any, context: Context) -> Any:
            async with self._observed(given, method, kind, context) as request:
                response = await behaviour(request, context)
                self._check_size(response)
                return response

        return call

    def _stream(self, behaviour: Any, method: str, kind: str) -> Any:
        async def call(given: Any, context: Context) -> AsyncIterator[Any]:
            async with self._observed(given, method, kind, context) as request:
                async for response in behaviour(request, context):
                    self._check_size(response)
                    yield response

        return call

    @contextlib.asynccontextmanager
    async def _observed(self, given: Any, method: str, kind: str, context: Context) -> AsyncIterator[Any]:
        """Yield the request for the servicer. If the servicer fails, end the call with the error's status. In all
        cases, notify the observer of the end.
        """
        request = _message(given)
        ended, code = self._started(method, kind, request, context), ""
        try:
            yield _readable(request, kind)
            code = "OK"
        except (grpc.aio.AbortError, grpc.aio.BaseError):
            code = _code_of(context)
            raise
        except Exception as e:
            failed = _failed(e, method, request)
            code = failed.code
            await abort(context, failed)
        finally:
            ended(code or _cut_short(context))


def check_response_size(response: Message, limit: int) -> None:
    """Raise ResourceExhausted if ``response`` is larger than ``limit`` bytes."""
    if (size := response.ByteSize()) > limit:
        raise ResourceExhausted(
            f"the response has {size} bytes; server.max_message_bytes is {limit}", reason="MESSAGE_TOO_LARGE"
        )


def _message(given: Any) -> Any:
    """Return the message without its ``Held``. The message counts towards the limit on large messages until the call
    ends.
    """
    return given.message if isinstance(given, Held) else given


def _readable(request: Any, kind: str) -> Any:
    """Return the request message, or the stream of request messages. Raises the errors of ``checked``, for a stream
    while the stream is read.
    """
    return CheckedMessages(request) if kind in ("client_stream", "bidi_stream") else checked(request)


def _id_of(request: Any) -> str:
    """Return the log ID of the request that the current task serves, or ''."""
    name: object = structlog.contextvars.get_contextvars().get("request") or getattr(request, "request_id", "")
    return name if isinstance(name, str) else ""


def _failed(error: Exception, method: str, request: Any) -> RequestFailed:
    if isinstance(error, NotImplementedError):
        return Unimplemented(f"{method} is not supported yet")
    if not isinstance(error, RequestFailed):
        return incident(error, request=_id_of(request), doing=f"serving {method}")
    return error


def _code_of(context: Context) -> str:
    """Return the status code that the servicer has set on its context."""
    code: object = context.code()
    return code.name if isinstance(code, grpc.StatusCode) else "UNKNOWN"


def _cut_short(context: Context) -> str:
    """Return the status code of a call whose handler was cancelled, because the client left or the deadline passed."""
    left: float | None = context.time_remaining()  # None without a deadline, contrary to the type stub
    return "DEADLINE_EXCEEDED" if left is not None and left <= 0 else "CANCELLED"


# Metrics and traces of gRPC calls.

_SERVER_ERRORS = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
"""Codes that OpenTelemetry's conventions classify as server errors."""


class CallTelemetry:
    """Observer that counts calls, and creates a span for each call with a single request.

    The metrics have the names that gRPC's Prometheus interceptors use.

    The parent of a call's span is in the message's ``routing.trace_context``, or else in the metadata. A stream of
    requests has no span, because each request has its own context.
    """

    def __init__(self, registry: CollectorRegistry, tracer: Tracer | None = None) -> None:
        labels = ("grpc_type", "grpc_service", "grpc_method")
        self._started = Counter("grpc_server_started", "Number of gRPC calls that began", labels, registry=registry)
        self._handled = Counter(
            "grpc_server_handled", "Number of gRPC calls that ended", (*labels, "grpc_code"), registry=registry
        )
        self._tracer = tracer

    def started(self, method: str, kind: str, request: object, context: Context) -> CallEnd:
        """Count a started call. If the call has a single request, start its span.

        Returns a function that must be called with the status code when the call ends.
        """
        _, service, name = method.split("/", 2)
        self._started.labels(kind, service, name).inc()
        # The task belongs to the call, so there is no need to restore the old value.
        current_caller.set(Caller(method, peer_address(context.peer())))
        span = self._span(service, name, request, context) if kind in ("unary", "server_stream") else None

        def ended(code: str) -> None:
            self._handled.labels(kind, service, name, code).inc()
            if span is not None:
                status: int = grpc.StatusCode[code].value[0]
                span.end({"rpc.grpc.status_code": status}, error=code if code in _SERVER_ERRORS else "")

        return ended

    def _span(self, service: str, name: str, request: object, context: Context) -> Span | None:
        if self._tracer is None:
            return None
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
        span = self._tracer.start(f"{service}/{name}", _parent(request, context), server=True, attributes=attributes)
        current_call.set(span.headers)
        return span


def _parent(request: object, context: Context) -> Headers:
    hints: object = getattr(getattr(request, "routing", None), "trace_context", None)
    if isinstance(hints, Mapping) and hints:
        return trace_headers(hints)
    return trace_headers({key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)})
