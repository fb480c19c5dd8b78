"""Trace collector: OpenTelemetry's gRPC service, which stores all received spans."""

from typing import Any

import grpc
import msgspec
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class ReceivedSpan(msgspec.Struct, frozen=True):
    """A received span. Ids are hexadecimal, ``parent`` is empty for a root span, times are nanoseconds since the epoch."""

    name: str
    service: str
    trace: str
    id: str
    parent: str
    began: int
    ended: int
    kind: int
    error: str
    attributes: dict[str, Any]
    events: list[str]


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """OTLP receiver: ``async with OtlpReceiver() as receiver``. It listens on ``endpoint`` and collects ``spans``."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.endpoint = ""

    async def __aenter__(self) -> "OtlpReceiver":
        self._server = grpc.aio.server()
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    def named(self, name: str) -> ReceivedSpan:
        """Return the only span with this name."""
        [span] = [span for span in self.spans if span.name == name]
        return span

    async def Export(self, request: Any, context: Any) -> Any:
        for of_resource in request.resource_spans:
            resource = {each.key: _value(each.value) for each in of_resource.resource.attributes}
            for of_scope in of_resource.scope_spans:
                self.spans.extend(_received(span, resource["service.name"]) for span in of_scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()


def _received(span: Any, service: str) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        service=service,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        began=span.start_time_unix_nano,
        ended=span.end_time_unix_nano,
        kind=span.kind,
        error=span.status.message,
        attributes={each.key: _value(each.value) for each in span.attributes},
        events=[event.name for event in span.events],
    )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
