"""Lines of a batch: requests in OpenAI's batch format, and what is wrong with them."""

from collections.abc import Collection

import msgspec

from penstock_common.errors import InvalidArgument, nearest


class BatchRequest(msgspec.Struct, frozen=True):
    """A request ready to be posted. ``number``: of its line, from 1 on."""

    number: int
    custom_id: str
    url: str
    body: bytes


class _Line(msgspec.Struct, frozen=True):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Body(msgspec.Struct, frozen=True):
    stream: bool | None = None
    input: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()


class _Named(msgspec.Struct, frozen=True):
    custom_id: str = ""


_CHAT, _RESPONSES = "/v1/chat/completions", "/v1/responses"
_NO_RESPONSES = (
    f"for {_CHAT}, write body.messages in place of input, a message with the role system in place of instructions, and "
    "max_completion_tokens in place of max_output_tokens"
)
"""What to write in place of a response, which a server keeps for later calls; a batch keeps nothing."""
_LINES = msgspec.json.Decoder(_Line)
_BODIES = msgspec.json.Decoder(_Body)
_NAMES = msgspec.json.Decoder(_Named)


def custom_id_of(line: bytes) -> str:
    """A line's ``custom_id``, empty where it has none, also of a line that is wrong in all else."""
    try:
        return _NAMES.decode(line).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def request_of(line: bytes, number: int, urls: Collection[str]) -> BatchRequest:
    """The request of a line. ``urls``: those that are known. Raises InvalidArgument saying what is wrong."""
    try:
        given = _LINES.decode(line)
    except msgspec.ValidationError as e:
        raise _wrong(f"{str(e)[:1].lower()}{str(e)[1:]}", "INVALID_TYPE") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise _wrong(f"it is no JSON: {e}", "INVALID_JSON") from None
    if not given.custom_id:
        raise _wrong("custom_id is empty", "MISSING_FIELD", "custom_id")
    if given.method != "POST":
        raise _wrong(f"method is {given.method!r}; it must be 'POST'", "INVALID_FIELD", "method")
    if given.url not in urls:
        hint = f"; {_NO_RESPONSES}" if given.url.rstrip("/") == _RESPONSES else nearest(given.url, urls)
        raise _wrong(f"url is {given.url!r}; known: {', '.join(urls)}{hint}", "UNKNOWN_URL", "url")
    try:
        body = _BODIES.decode(given.body)
    except msgspec.DecodeError as e:
        raise _wrong(f"body: {str(e)[:1].lower()}{str(e)[1:]}", "INVALID_TYPE", "body") from None
    if given.url == _CHAT and _is_set(body.input) and not _is_set(body.messages):
        raise _wrong(f"body.input is set, as for {_RESPONSES}; {_NO_RESPONSES}", "INVALID_FIELD", "body.input")
    if body.stream:
        raise _wrong("body.stream is true; a batch has whole answers", "INVALID_FIELD", "body.stream")
    return BatchRequest(number, given.custom_id, given.url, bytes(given.body))


def _is_set(value: msgspec.Raw) -> bool:
    return bytes(value) not in (b"", b"null")


def _wrong(message: str, reason: str, field: str = "") -> InvalidArgument:
    return InvalidArgument(message, field=field, reason=reason)
