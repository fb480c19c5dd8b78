"""Hierarchy of errors, and the only mapping from errors to gRPC status codes.

PenstockError
 ├─ ConfigError              a config file, flag or environment variable is wrong
 └─ RequestFailed            a request cannot be served; has a status code
     ├─ InvalidArgument      a field is wrong
     ├─ Unauthenticated      the caller is not authenticated
     ├─ PermissionDenied     the caller has no permission for the call
     ├─ Unimplemented        a known field or method is not supported
     ├─ NotFound             no such model, request or method
     ├─ AlreadyExists        a name is in use
     ├─ FailedPrecondition   not possible in the current state; a retry also fails
     ├─ ResourceExhausted    a bounded queue is full; retry later
     ├─ Unavailable          no engine is available, or the engine was lost; retry
     ├─ DeadlineExceeded     the request's deadline has passed
     ├─ Cancelled            the client or an operator ended the request
     ├─ OutOfRange           a stream cannot begin at the requested position
     ├─ DataLoss             a stream cannot continue without a gap; start again
     └─ Internal             a bug in Penstock
"""

import difflib
import re
from collections.abc import Iterable
from typing import ClassVar, NamedTuple

WRONG_MODEL_KIND = "WRONG_MODEL_KIND"
"""Error reason if a request asks a pooling model to generate, or a generative model to pool.

No later version will support such a request.
"""


class PenstockError(Exception):
    """Base class of all errors that Penstock raises intentionally."""


class ConfigError(PenstockError):
    """Invalid configuration value. The message names the key, the value and the limit."""


class RequestFailed(PenstockError):  # noqa: N818 - the name states the event
    """A request that cannot be served.

    Attributes:
        code: Name of a gRPC status code.
        field: Path of the invalid request field, for example ``sampling_params.top_p``.
        reason: Stable UPPER_SNAKE_CASE identifier for programs.
        retry_after: Seconds after which a retry may succeed, or None.
        quota_subject: Owner of the exhausted quota, for example ``tenant:NAME``.
    """

    code: ClassVar[str] = "INTERNAL"
    default_reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        reason: str = "",
        retry_after: float | None = None,
        quota_subject: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.reason = reason or self.default_reason
        self.retry_after = retry_after
        self.quota_subject = quota_subject


class InvalidArgument(RequestFailed):
    """A field of the request is wrong."""

    code = "INVALID_ARGUMENT"
    default_reason = "INVALID_FIELD"


class Unauthenticated(RequestFailed):
    """The caller's credentials are missing or wrong."""

    code = "UNAUTHENTICATED"
    default_reason = "CREDENTIALS_MISSING"


class PermissionDenied(RequestFailed):
    """The caller is known but has no permission for the call."""

    code = "PERMISSION_DENIED"
    default_reason = "NOT_ALLOWED"


class Unimplemented(RequestFailed):
    """A field or method that exists in the API but is not supported by this version."""

    code = "UNIMPLEMENTED"
    default_reason = "NOT_SERVED_YET"


class NotFound(RequestFailed):
    """The model, request or method that the call names does not exist."""

    code = "NOT_FOUND"
    default_reason = "NOT_FOUND"


class AlreadyExists(RequestFailed):
    """A name that must be unique is in use."""

    code = "ALREADY_EXISTS"
    default_reason = "NAME_TAKEN"


class FailedPrecondition(RequestFailed):
    """The request is valid but cannot be served in the current state. A retry fails until the state is changed."""

    code = "FAILED_PRECONDITION"
    default_reason = "FAILED_PRECONDITION"


class ResourceExhausted(RequestFailed):
    """A bounded queue is full."""

    code = "RESOURCE_EXHAUSTED"
    default_reason = "QUEUE_FULL"


class Unavailable(RequestFailed):
    """No engine can serve the request now."""

    code = "UNAVAILABLE"
    default_reason = "NO_ENGINE"


class DeadlineExceeded(RequestFailed):
    """The deadline passed before the request was complete."""

    code = "DEADLINE_EXCEEDED"
    default_reason = "DEADLINE_EXCEEDED"


class Cancelled(RequestFailed):
    """The client or an operator ended the request."""

    code = "CANCELLED"
    default_reason = "CANCELLED"


class OutOfRange(RequestFailed):
    """A stream cannot begin at the requested position."""

    code = "OUT_OF_RANGE"
    default_reason = "POSITION_GONE"


class DataLoss(RequestFailed):
    """A stream cannot continue without a gap. The client must start again."""

    code = "DATA_LOSS"
    default_reason = "TOO_FAR_BEHIND"


class Internal(RequestFailed):
    """A bug in Penstock."""


_BY_CODE: dict[str, type[RequestFailed]] = {
    kind.code: kind
    for kind in (
        InvalidArgument,
        Unauthenticated,
        PermissionDenied,
        Unimplemented,
        NotFound,
        AlreadyExists,
        FailedPrecondition,
        ResourceExhausted,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        OutOfRange,
        DataLoss,
        Internal,
    )
}


def request_failed(code: str, message: str, *, field: str = "", reason: str = "") -> RequestFailed:
    """Return the exception for a status code name received from another process. An unknown code becomes Internal."""
    return _BY_CODE.get(code, Internal)(message, field=field, reason=reason)


_LONGEST_WORD = 256
"""Maximum number of characters of a word that is compared with known names.

The time for a comparison grows with the square of the length.
"""


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``"; did you mean 'x'?"``, where x is the known word most similar to ``word``. Else return ``""``.

    ``cutoff`` is the similarity that x must have, from 0 to 1.
    """
    if len(word) > _LONGEST_WORD:
        return ""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"; did you mean '{matches[0]}'?" if matches else ""


_WRONG_TYPE = re.compile(r"Expected `(?P<wanted>[^`]+)`(?:, got `(?P<given>[^`]+)`)?(?P<limit>.*)", re.DOTALL)
_TYPE_WORDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "array": "a list",
    "object": "an object",
}


class WrongType(NamedTuple):
    """An error of msgspec about a value of the wrong type, in words.

    Attributes:
        given: The type of the value, such as ``a string``; empty if the value has the right type.
        wanted: The type and the limit, such as ``an integer or null``.
    """

    given: str
    wanted: str


def wrong_type(message: str) -> WrongType | None:
    """Return the types in msgspec's message ``Expected `int | null`, got `str```, or None for other messages."""
    found = _WRONG_TYPE.fullmatch(message)
    if found is None:
        return None
    *most, last = [_TYPE_WORDS.get(word, word) for word in found["wanted"].split(" | ")]
    wanted = f"{', '.join(most)} or {last}" if most else last
    given = found["given"] or ""
    return WrongType(_TYPE_WORDS.get(given, given), wanted + found["limit"])


LONGEST_QUOTE = 100
"""Maximum number of characters of a client's value in an error message."""
LONGEST_PATH = 512
"""Maximum number of characters of a file path in an error message."""
_URL = re.compile(r"\s*(data:|[a-z][a-z0-9+.-]{1,15}://)", re.IGNORECASE)


def quoted(value: object, limit: int = LONGEST_QUOTE) -> str:
    """Return a client's value for an error message, cut after ``limit`` characters. A string is in quotes.

    Of a URL, only the scheme is shown, because data URLs contain media and other URLs may contain credentials.
    """
    if isinstance(value, str):
        if (url := _URL.match(value)) is not None:
            return repr(f"{url[1]}...")
        return repr(value) if len(value) <= limit else f"{value[:limit]!r}..."
    return excerpt(repr(value), limit)


def excerpt(text: str, limit: int = 3 * LONGEST_QUOTE) -> str:
    """Return the first ``limit`` characters of a text that contains input of clients."""
    return text if len(text) <= limit else f"{text[:limit]}..."
