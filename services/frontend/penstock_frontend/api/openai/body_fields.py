"""What bodies say: decoded into their structs, and checked field by field."""

from typing import TypeVar

import msgspec

from penstock_common.errors import InvalidArgument, excerpt, nearest, quoted
from penstock_frontend.api.openai.errors import undecodable
from penstock_frontend.api.unsupported_fields import unsupported_in

T = TypeVar("T")
_INT32_MAX = 2**31 - 1


def decode(body: bytes, kind: type[T]) -> T:
    """The struct of a body that nests no deeper than ``json_size`` lets it. Unknown fields are left to ``FieldPolicy``. Raises
    InvalidArgument naming the field that is wrong.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        error = undecodable(e, kind=kind)
    raise _with_hint(error, body)


def _with_hint(error: InvalidArgument, body: bytes) -> InvalidArgument:
    """The error, and of a field that is not set the field of the body that may have been meant to be it."""
    if error.reason != "MISSING_FIELD" or "." in error.field:
        return error
    try:
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as e:  # behind the field, where the decoder had not come to
        return undecodable(e)
    word = nearest(error.field, given).removeprefix("; did you mean ").removesuffix("?")
    if not word:
        return error
    message = f"{error.message}; the body has {word}: did you mean '{error.field}'?"
    return InvalidArgument(message, field=error.field, reason=error.reason)


def refuse_fields(body: msgspec.Struct, *names: str) -> None:
    """Raise Unimplemented for the first of the named fields that asks for something. Each is a field that bodies of several
    routes have and this route refuses, as ``unsupported_fields.py`` says.
    """
    struct = type(body).__name__
    unsupported = unsupported_in(struct)
    for name in names:
        if unsupported[name].asks(getattr(body, name), struct):
            raise unsupported[name].refusal(name)


def check_range(name: str, value: float | None, low: float, high: float) -> None:
    """Raise InvalidArgument unless ``value`` is None or from ``low`` to ``high``. An upper limit that only the wire's 32 bits set
    is left out of messages about values that are too small.
    """
    if value is not None and not low <= value <= high:
        limit = f"at least {low}" if high == _INT32_MAX and low >= -1 and value < low else f"from {low} to {high}"
        raise InvalidArgument(f"{name} is {quoted(value)}; it must be {limit}", field=name)


def shown(value: object) -> str:
    """Return a value of a body as messages show it: a text in quotes, all else as JSON, and no more than an excerpt."""
    return quoted(value) if isinstance(value, str) else excerpt(msgspec.json.encode(value).decode())


def text_of(raw: msgspec.Raw, field: str) -> str | None:
    """A JSON value as it was written; of a JSON string, what it holds. None for null, and when unset."""
    text = bytes(raw)
    if text in (b"", b"null"):
        return None
    try:
        return str(msgspec.json.decode(text)) if text.startswith(b'"') else text.decode()
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise InvalidArgument(f"{field} cannot be read: {e}", field=field) from None
