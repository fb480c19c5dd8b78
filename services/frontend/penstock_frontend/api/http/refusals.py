"""Refusals of HTTP requests that no handler gets."""

from http import HTTPStatus

import httptools

from penstock_frontend.api.openai.errors import HttpError, answer


def malformed(error: httptools.HttpParserError, cause: BaseException | None) -> HttpError:
    """The refusal of bytes that are not an HTTP request. ``cause``: the exception of a parser event, if one failed. Raises it if
    it says nothing about the request.
    """
    if isinstance(cause, (UnicodeDecodeError, AttributeError, httptools.HttpParserInvalidURLError)):
        # A target that is not ASCII, has no path, or is no URL.
        return HttpError(400, "the request's target must be a path, or an http URL with one, in ASCII", "bad_request")
    if cause is not None:
        raise cause
    return HttpError(400, f"not an HTTP/1.1 request: {error}", "bad_request")


def refusal(error: HttpError) -> bytes:
    """The whole answer, head and body, which ends its connection."""
    body = answer(error).body
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
