"""Errors in Anthropic's format: ``{"type": "error", "error": {type, message}, "request_id"}`` and an HTTP status."""

import msgspec
from starlette.types import Scope

from penstock_frontend.api.openai import errors as openai

PREFIX = "/v1/messages"
"""Prefix of the paths of Anthropic's protocol."""
_VERSION = b"anthropic-version"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_OVERLOADED = 529
"""Status that Anthropic's clients interpret as an overloaded server."""


class MessagesErrorDetails(msgspec.Struct, frozen=True):
    """Details of an error in Anthropic's format. If a field of the request is wrong, the message begins with the name
    of that field.
    """

    type: str
    message: str


class MessagesError(msgspec.Struct, frozen=True, kw_only=True):
    """Body of every answer whose status is not 200, and body of the event that ends a failed stream."""

    type: str = "error"
    error: MessagesErrorDetails
    request_id: str | None = None


def is_anthropic(scope: Scope) -> bool:
    """Return True if the path or the header ``anthropic-version`` shows that a call uses Anthropic's protocol."""
    return f"{PREFIX}/" in f"{scope['path']}/" or any(name == _VERSION for name, _ in scope["headers"])


def answer(error: Exception, request_id: str = "") -> openai.ErrorAnswer:
    """Return the HTTP answer for an error.

    Errors other than RequestFailed and HttpError are incidents: the frontend logs the error, and the client gets status
    500 without the text of the error.
    """
    told = openai.answer(error, request_id)
    details = msgspec.json.decode(told.body, type=openai.ErrorBody).error
    message = details.message
    if details.param and not message.startswith(details.param):
        message = f"{details.param}: {message}"
    body = MessagesError(
        error=MessagesErrorDetails(_TYPES.get(told.status, "api_error"), message), request_id=request_id or None
    )
    return openai.ErrorAnswer(
        _OVERLOADED if told.status == 503 else told.status, msgspec.json.encode(body), told.headers
    )


def event(error: Exception, request_id: str) -> bytes:
    """Return the event with an error that ends a failed stream."""
    return b"event: error\ndata: %b\n\n" % answer(error, request_id).body
