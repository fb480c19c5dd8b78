"""Errors in OpenAI's format: ``{"error": {message, type, param, code}}`` and an HTTP status."""

import math
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from penstock_common.errors import InvalidArgument, RequestFailed, excerpt, nearest, wrong_type
from penstock_common.observability.logging import incident

_STATUS = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "UNIMPLEMENTED": 400,  # not 501, because clients would retry a request after this status
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 400,
    "FAILED_PRECONDITION": 400,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_REASON_STATUS = {"MEDIA_TOO_LARGE": 413}
"""HTTP statuses of the error reasons that do not have the usual status of their gRPC code."""
_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    431: "invalid_request_error",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    499: "cancelled_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_CODES = {
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "QUEUE_FULL": "rate_limit_exceeded",
    "TENANT_QUOTA": "rate_limit_exceeded",
    "INVALID_FIELD": "invalid_value",
    "NOT_SERVED_YET": "unsupported",
    "UNKNOWN_FIELD": "unknown_parameter",
    "CREDENTIALS_MISSING": "invalid_api_key",
    "CREDENTIALS_WRONG": "invalid_api_key",
}
"""OpenAI's codes of some error reasons. For other reasons, the code is the reason in lower case."""
_PLACE = re.compile(r" - at `(?:(?P<key>key)` in `)?\$(?P<path>[^`]*)`$")

_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_PROCESSOR_KWARGS = re.compile(r"(?<![\w.])processor_kwargs\b")
"""Name that the gRPC API uses for the field ``mm_processor_kwargs``."""


_HTTP_NAMES = {"json_schema": "json"}
"""Names of members over HTTP, by their names in the gRPC API."""


class ErrorDetails(msgspec.Struct, frozen=True):
    """Details of an error in OpenAI's format. ``param`` is the name of the faulty field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """Body of every answer whose status is not 200, and body of the event that ends a failed stream."""

    error: ErrorDetails


class HttpError(Exception):
    """An error whose HTTP status has no corresponding gRPC code."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


class ErrorAnswer(msgspec.Struct, frozen=True):
    """HTTP answer with an error. ``headers`` has Retry-After if a retry may succeed, and WWW-Authenticate if
    credentials are required.
    """

    status: int
    body: bytes
    headers: Mapping[str, str]


def answer(error: Exception, request_id: str = "") -> ErrorAnswer:
    """Return the HTTP answer for an error.

    Errors other than RequestFailed and HttpError are incidents: the frontend logs the error, and the client gets status
    500 without the text of the error.
    """
    if isinstance(error, HttpError):
        return _answer(error.status, error.message, None, error.code)
    if not isinstance(error, RequestFailed):
        error = incident(error, request=request_id, doing="serving the call")
    status = _REASON_STATUS.get(error.reason) or _STATUS.get(error.code, 500)
    code = _CODES.get(error.reason, error.reason.lower())
    if status == 404 and error.field in ("model", "name"):
        code = "model_not_found"
    return _answer(status, error.message, error.field or None, code, error.retry_after)


def renamed(error: RequestFailed, names: Mapping[str, str]) -> RequestFailed:
    """Return the error with the names of the client's fields. ``names`` maps prefixes of Penstock's field paths to
    prefixes of the client's field paths.

    A key of ``names`` with a space is a prefix of an error message, not of a field path.
    """
    message, field = error.message, error.field
    for ours, theirs in names.items():
        if " " in ours and message.startswith(ours):
            message = message.replace(ours, theirs, 1)
    for ours, theirs in {**names, "sampling_params.": ""}.items():
        rest = field.removeprefix(ours)
        if " " not in ours and rest != field and (ours.endswith(".") or rest[:1] in ("", ".", "[")):
            message, field = message.replace(ours, theirs, 1), theirs + rest
            break
    for ours, theirs in names.items():  # other parameters that the error message mentions
        if ours.startswith("sampling_params."):
            message = message.replace(ours, theirs)
    message = _PROCESSOR_KWARGS.sub("mm_processor_kwargs", message.replace("sampling_params.", ""))
    if (message, field) == (error.message, error.field):
        return error
    result = type(error)(message, field=field, reason=error.reason, retry_after=error.retry_after)
    result.__cause__ = error
    return result


def undecodable(
    error: msgspec.DecodeError | UnicodeDecodeError, path: str = "", kind: type | None = None
) -> InvalidArgument:
    """Return the error for a JSON text that is not valid, or that has a field of the wrong type.

    Args:
        error: the error of the decoder.
        path: path of the JSON text in the body.
        kind: struct of the body. The types of the struct's fields define the allowed words and the known names.
    """
    if not isinstance(error, msgspec.ValidationError):
        return InvalidArgument(f"the body is not valid JSON: {error}", reason="INVALID_JSON")
    text = str(error)
    place = _PLACE.search(text)
    what = excerpt(text[: place.start()] if place else text)
    where = f"{path}{place['path'] if place else ''}".removeprefix(".")
    if (missing := _MISSING.fullmatch(what)) is not None:
        field = f"{where}.{missing['name']}".removeprefix(".")
        return InvalidArgument(f"{field} is not set", field=field, reason="MISSING_FIELD")
    if (unknown := _UNKNOWN.fullmatch(what)) is not None:
        field = f"{where}.{unknown['name']}".removeprefix(".")
        hint = _hint(unknown["name"], _fields_at(kind, place["path"] if place else ""))
        return InvalidArgument(f"{field} is not a known field{hint}", field=field, reason="UNKNOWN_FIELD")
    if what.startswith("Invalid enum value") and (words := _words(kind, where)):
        value = what.removeprefix("Invalid enum value ")
        return InvalidArgument(f"{where} is {value}; known: {', '.join(words)}", field=where, reason="INVALID_TYPE")
    subject = f"{'a key of ' if place and place['key'] else ''}{where or 'the body'}"
    if (wrong := wrong_type(what)) is not None:
        given = f" is {wrong.given}; it" if wrong.given else ""
        return InvalidArgument(f"{subject}{given} must be {wrong.wanted}", field=where, reason="INVALID_TYPE")
    return InvalidArgument(f"{subject}: {what[:1].lower()}{what[1:]}", field=where, reason="INVALID_TYPE")


def _hint(name: str, known: Collection[str]) -> str:
    """Return the end of the error for an unknown field: the known name to use, or the advice to remove the field."""
    if (other := _HTTP_NAMES.get(name)) in known:
        return f"; use {other}"
    return nearest(name, known) or "; remove it"


def _fields_at(kind: Any, path: str) -> Collection[str]:
    """Return the field names of the object at ``path`` in a text of ``kind``; empty if the types do not tell them.

    ``path`` has msgspec's form, such as ``.tools[0].function``.
    """
    for step in re.findall(r"\.(\w+)|(\[)", path):
        types = typing.get_args(kind) or (kind,)
        if step[1]:
            kind = next((typing.get_args(each)[0] for each in (kind, *types) if typing.get_origin(each) is list), None)
        else:
            fields = [field for each in types if _is_struct(each) for field in msgspec.structs.fields(each)]
            kind = next((field.type for field in fields if field.encode_name == step[0]), None)
    structs = [each for each in (kind, *typing.get_args(kind)) if _is_struct(each)]
    return [field.encode_name for each in structs for field in msgspec.structs.fields(each)]


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _words(kind: type | None, name: str) -> Sequence[str]:
    """Return the words that a field allows. Return an empty list if the field allows any text, or is not in the struct."""
    fields = msgspec.structs.fields(kind) if kind is not None and issubclass(kind, msgspec.Struct) else ()
    types = [member for field in fields if field.name == name for member in (field.type, *typing.get_args(field.type))]
    return [str(word) for of in types if typing.get_origin(of) is typing.Literal for word in typing.get_args(of)]


def _answer(
    status: int, message: str, param: str | None, code: str | None, retry_after: float | None = None
) -> ErrorAnswer:
    details = ErrorDetails(message, _TYPES.get(status, "server_error"), param, code)
    headers = {} if retry_after is None else {"retry-after": str(max(1, math.ceil(retry_after)))}
    if status == 401:
        headers["www-authenticate"] = 'Bearer realm="penstock"'
    return ErrorAnswer(status, msgspec.json.encode(ErrorBody(details)), headers)
