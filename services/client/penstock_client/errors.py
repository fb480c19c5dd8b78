"""Errors of calls, with one class per gRPC status code and the ``google.rpc`` details of the server."""

import re
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from penstock.common.v1.finish_pb2 import RequestError

# The code below decodes the ``google.rpc`` details of a failed call.
#
# It declares the messages in a separate descriptor pool. The package with the generated messages is therefore not
# needed, and causes no conflict if it is installed.

_STRING = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
_BYTES = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
_INT32 = descriptor_pb2.FieldDescriptorProto.TYPE_INT32
_INT64 = descriptor_pb2.FieldDescriptorProto.TYPE_INT64

_MESSAGES: dict[str, list[tuple[str, int, int | str, bool]]] = {
    "Any": [("type_url", 1, _STRING, False), ("value", 2, _BYTES, False)],
    "Status": [("code", 1, _INT32, False), ("message", 2, _STRING, False), ("details", 3, "Any", True)],
    "ErrorInfo": [("reason", 1, _STRING, False), ("domain", 2, _STRING, False)],
    "FieldViolation": [("field", 1, _STRING, False), ("description", 2, _STRING, False)],
    "BadRequest": [("field_violations", 1, "FieldViolation", True)],
    "QuotaViolation": [("subject", 1, _STRING, False), ("description", 2, _STRING, False)],
    "QuotaFailure": [("violations", 1, "QuotaViolation", True)],
    "Duration": [("seconds", 1, _INT64, False), ("nanos", 2, _INT32, False)],
    "RetryInfo": [("retry_delay", 1, "Duration", False)],
}
"""Fields of each message: name, number, type, and whether the field is repeated.

The names of nested messages need not equal the original names, because names are not part of the wire format.
"""


def _classes() -> dict[str, type[Message]]:
    file = descriptor_pb2.FileDescriptorProto(name="details.proto", package="penstock_client", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            label = (
                descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
                if repeated
                else descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
            )
            added = message.field.add(name=field, number=number, label=label)
            if isinstance(kind, str):
                added.type, added.type_name = (
                    descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE,
                    f".{file.package}.{kind}",
                )
            else:
                added.type = kind  # type: ignore[assignment]  # the stub has a separate type for each constant
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{name}"))
        for name in _MESSAGES
    }


_DETAIL_CLASSES = _classes()


@dataclass(frozen=True, slots=True)
class Details:
    """Details of a failed call. A missing detail is empty or None."""

    reason: str = ""
    field: str = ""
    retry_after: float | None = None
    quota_subject: str = ""


def read_details(status: bytes) -> Details:
    """Decode the details in a serialized ``google.rpc.Status``. Ignore unknown kinds of details."""
    reason = field = quota_subject = ""
    retry_after = None
    whole: Any = _DETAIL_CLASSES["Status"].FromString(status)
    for each in whole.details:
        kind = each.type_url.rpartition("google.rpc.")[2]
        if kind not in ("ErrorInfo", "BadRequest", "QuotaFailure", "RetryInfo"):
            continue
        detail: Any = _DETAIL_CLASSES[kind].FromString(each.value)
        if kind == "ErrorInfo":
            reason = detail.reason
        elif kind == "BadRequest" and detail.field_violations:
            field = detail.field_violations[0].field
        elif kind == "QuotaFailure" and detail.violations:
            quota_subject = detail.violations[0].subject
        elif kind == "RetryInfo":
            retry_after = detail.retry_delay.seconds + detail.retry_delay.nanos / 1e9
    return Details(reason=reason, field=field, retry_after=retry_after, quota_subject=quota_subject)


class PenstockError(Exception):
    """Error of a failed call.

    If the call did not reach a server, only ``code`` and ``message`` are set.

    Attributes:
        code: Name of the gRPC status code.
        message: Description for people. If a field is wrong, the description has the field's value and the limit.
        field: Path of the wrong field in the request, such as ``sampling_params.top_p``. Empty if no field is wrong.
        reason: Stable word in UPPER_SNAKE_CASE for programs. Empty if the error has no reason.
        retry_after: Seconds after which a retry may succeed. None if the server gives no time.
        quota_subject: Owner of the exhausted quota, such as ``tenant:NAME``. Empty if no quota is exhausted.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        field: str = "",
        reason: str = "",
        retry_after: float | None = None,
        quota_subject: str = "",
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.field = field
        self.reason = reason
        self.retry_after = retry_after
        self.quota_subject = quota_subject


class InvalidArgument(PenstockError):  # noqa: N818 - the names are those of the status codes
    """Error for a request with a wrong field."""


class Unauthenticated(PenstockError):  # noqa: N818
    """Error for a missing, wrong or expired key or token."""


class PermissionDenied(PenstockError):  # noqa: N818
    """Error for a call that the caller is not allowed to make."""


class Unimplemented(PenstockError):  # noqa: N818
    """Error for a field or method that the server does not support."""


class NotFound(PenstockError):  # noqa: N818
    """Error for a name that does not exist on the server, such as the name of a model."""


class FailedPrecondition(PenstockError):  # noqa: N818
    """Error for a valid request that the server cannot serve in its current state."""


class ResourceExhausted(PenstockError):  # noqa: N818
    """Error for a full queue, an exhausted quota, or a message that is too large."""


class Unavailable(PenstockError):  # noqa: N818
    """Error for a request that no server can serve now."""


class DeadlineExceeded(PenstockError):  # noqa: N818
    """Error for a call whose deadline passed before the answer was complete."""


class Cancelled(PenstockError):  # noqa: N818
    """Error for a call that was cancelled before the answer was complete."""


class Internal(PenstockError):  # noqa: N818
    """Error for an internal failure of the server.

    The message has an incident number. The server's log has details about this incident.
    """


_CLASSES = {re.sub(r"\B(?=[A-Z])", "_", each.__name__).upper(): each for each in PenstockError.__subclasses__()}
"""Error classes by status code, such as INVALID_ARGUMENT."""
_DETAILS_KEY = "grpc-status-details-bin"


def of_call(error: grpc.RpcError, address: str = "") -> PenstockError:
    """Convert the error of a stub call, sync or async. The result includes the server's details.

    ``address`` is the address of the server, for errors of the connection.
    """
    call: Any = error  # every error of a call has a status, but the class RpcError does not declare the status
    code, message = call.code().name, call.details() or ""
    details = read_details(next((value for key, value in call.trailing_metadata() or () if key == _DETAILS_KEY), b""))
    if code == "UNAVAILABLE" and not details.reason and address:
        message = f"no connection to {address}: {message}"
        if "failed to connect" in message.lower():
            message += "; is a server running? Start one with: penstock serve MODEL"
    return _CLASSES.get(code, PenstockError)(
        code,
        message,
        field=details.field,
        reason=details.reason,
        retry_after=details.retry_after,
        quota_subject=details.quota_subject,
    )


def of_session(error: RequestError) -> PenstockError:
    """Convert the error of one request of a GenerateSession. Other requests of the session continue."""
    return _CLASSES.get(error.code, PenstockError)(
        error.code,
        error.message,
        field=error.field,
        reason=error.reason,
        retry_after=error.retry_after if error.HasField("retry_after") else None,
        quota_subject=error.quota_subject,
    )
