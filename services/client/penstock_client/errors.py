"""What calls fail with, a class for each status code that a program may want to tell apart.

PenstockError
 ├─ InvalidArgument      a field is wrong: ``field`` is its path, the message has the value and the limit
 ├─ Unauthenticated      a key or token is missing, wrong or over
 ├─ PermissionDenied     the caller is known and may not do that
 ├─ Unimplemented        a field or method that the server does not serve yet
 ├─ NotFound             no such model
 ├─ FailedPrecondition   not while things are as they are
 ├─ ResourceExhausted    a queue is full, or a tenant at its limit: try again after ``retry_after``
 ├─ Unavailable          no server, no engine, or it went away: try again
 ├─ DeadlineExceeded     ``timeout`` has passed
 ├─ Cancelled            the call was ended by an operator, or by its own stream's ``close``
 └─ Internal             a defect of the server
"""

from typing import Any

import grpc

from penstock.common.v1.finish_pb2 import RequestError
from penstock_client.details import read_details


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


_CLASSES: dict[str, type[PenstockError]] = {
    "INVALID_ARGUMENT": InvalidArgument,
    "UNAUTHENTICATED": Unauthenticated,
    "PERMISSION_DENIED": PermissionDenied,
    "UNIMPLEMENTED": Unimplemented,
    "NOT_FOUND": NotFound,
    "FAILED_PRECONDITION": FailedPrecondition,
    "RESOURCE_EXHAUSTED": ResourceExhausted,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "INTERNAL": Internal,
}
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
