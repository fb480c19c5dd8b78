"""What a failed call tells, in lines for people."""

from collections.abc import Iterator

import grpc
from google.rpc import error_details_pb2, status_pb2

from penstock.common.v1 import finish_pb2


def describe(error: grpc.aio.AioRpcError) -> Iterator[str]:
    """The code and the message of a failed call, and its ``google.rpc`` details."""
    yield f"{error.code().name}: {error.details()}"
    status = status_pb2.Status.FromString(error.trailing_metadata().get("grpc-status-details-bin", b""))
    for detail in status.details:
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            yield f"  reason: {info.reason}"
        elif detail.Unpack(bad):
            for violation in bad.field_violations:
                yield f"  field: {violation.field}: {violation.description}"
        elif detail.Unpack(retry):
            yield f"  retry after: {retry.retry_delay.ToTimedelta().total_seconds():g} s"


def describe_one(error: finish_pb2.RequestError) -> Iterator[str]:
    """The same of one request in a session, where the others go on."""
    yield f"{error.code}: {error.message}"
    yield f"  reason: {error.reason}"
    if error.field:
        yield f"  field: {error.field}: {error.message}"
    if error.HasField("retry_after"):
        yield f"  retry after: {error.retry_after:g} s"
