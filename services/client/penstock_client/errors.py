"""Errors of calls, a class for each status code that a program may want to tell apart, with their ``google.rpc`` details."""

import re
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from penstock.common.v1.finish_pb2 import RequestError

# The ``google.rpc`` details of a failed call.
#
# Their messages are declared here, in a pool of their own: the package that has them generated is not needed, and may be there.

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
"""Of each its fields: name, number, type, whether it is repeated. Names of messages that stand in others are only ours: what
is on the wire has none.
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
                added.type = kind  # type: ignore[assignment]  # the stub has a type for each constant
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{name}"))
        for name in _MESSAGES
    }


_DETAIL_CLASSES = _classes()


@dataclass(frozen=True, slots=True)
class Details:
    """What they say; empty or None where they do not."""

    reason: str = ""
    field: str = ""
    retry_after: float | None = None
    quota_subject: str = ""


def read_details(status: bytes) -> Details:
    """Those of a serialized ``google.rpc.Status``. Kinds that are not known here are passed over."""
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
    """A call has failed.

    ``code`` is the name of its gRPC status code and ``message`` what went wrong, for people: with a field at fault it has the
    value and the limit. ``field`` is that field's path in the request (``sampling_params.top_p``), ``reason`` a stable
    UPPER_SNAKE_CASE word for programs, ``retry_after`` the seconds after which trying again may succeed, None where the server
    names none, ``quota_subject`` whose quota is used up (``tenant:NAME``). Strings are empty where the server said nothing, as
    all but ``code`` and ``message`` are where no server was reached.
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
    """A field of the request is wrong."""


class Unauthenticated(PenstockError):  # noqa: N818
    """The key or token is missing, wrong or over."""


class PermissionDenied(PenstockError):  # noqa: N818
    """The caller is known and may not do that."""


class Unimplemented(PenstockError):  # noqa: N818
    """A field or method that the server does not serve."""


class NotFound(PenstockError):  # noqa: N818
    """The server has no model of that name."""


class FailedPrecondition(PenstockError):  # noqa: N818
    """The request is right and cannot be served as things are."""


class ResourceExhausted(PenstockError):  # noqa: N818
    """A queue is full, a quota used up, or a message too large."""


class Unavailable(PenstockError):  # noqa: N818
    """Nothing serves the request now."""


class DeadlineExceeded(PenstockError):  # noqa: N818
    """The deadline passed before the answer was whole."""


class Cancelled(PenstockError):  # noqa: N818
    """The call was ended before its answer was whole."""


class Internal(PenstockError):  # noqa: N818
    """A defect of the server; the message has a number that its log explains."""


_CLASSES = {re.sub(r"\B(?=[A-Z])", "_", each.__name__).upper(): each for each in PenstockError.__subclasses__()}
"""By the status code of the same name: INVALID_ARGUMENT, ..."""
_DETAILS_KEY = "grpc-status-details-bin"


def of_call(error: grpc.RpcError) -> PenstockError:
    """The error of a call of the stub, sync or async, with the details that the server gave."""
    call: Any = error  # every one of a call has a status, which the class does not say
    code, message = call.code().name, call.details() or ""
    details = read_details(next((value for key, value in call.trailing_metadata() or () if key == _DETAILS_KEY), b""))
    return _CLASSES.get(code, PenstockError)(
        code,
        message,
        field=details.field,
        reason=details.reason,
        retry_after=details.retry_after,
        quota_subject=details.quota_subject,
    )


def of_session(error: RequestError) -> PenstockError:
    """The error of one request of a GenerateSession, where the others go on."""
    return _CLASSES.get(error.code, PenstockError)(
        error.code,
        error.message,
        field=error.field,
        reason=error.reason,
        retry_after=error.retry_after if error.HasField("retry_after") else None,
        quota_subject=error.quota_subject,
    )
