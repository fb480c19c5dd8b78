"""Decoding of request bodies into structs, and checks of single fields."""

from typing import TypeVar

import msgspec

from penstock_common.errors import InvalidArgument, excerpt, nearest, quoted
from penstock_frontend.api.openai.errors import undecodable
from penstock_frontend.api.unsupported_fields import unsupported_in

T = TypeVar("T")
_INT32_MAX = 2**31 - 1


def decode(body: bytes, kind: type[T]) -> T:
    """Return the struct of a body, decoded from JSON. The caller must have checked the nesting depth. ``FieldPolicy``
    handles unknown fields.

    Raises InvalidArgument, which names the faulty field.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        error = undecodable(e, kind=kind)
    raise _with_hint(error, body)


def _with_hint(error: InvalidArgument, body: bytes) -> InvalidArgument:
    """Return the decoder's error with a hint. If a field is missing, the hint is the field of the body with the most
    similar name.
    """
    if error.reason != "MISSING_FIELD" or "." in error.field:
        return error
    try:
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    # the text has a syntax error after the object with the missing field, so the names in this object cannot be read
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        return undecodable(e)
    word = nearest(error.field, given).removeprefix("; did you mean ").removesuffix("?")
    if not word:
        return error
    message = f"{error.message}; the body has {word}: did you mean '{error.field}'?"
    return InvalidArgument(message, field=error.field, reason=error.reason)


def refuse_fields(body: msgspec.Struct, *names: str) -> None:
    """Check that each of the named fields has a value without effect. Raises Unimplemented for the first field whose
    value has an effect.

    The bodies of several routes share these fields, but this route does not support them. ``unsupported_fields.py``
    lists these fields.
    """
    struct = type(body).__name__
    unsupported = unsupported_in(struct)
    for name in names:
        if unsupported[name].asks(getattr(body, name), struct):
            raise unsupported[name].refusal(name)


def check_range(name: str, value: float | None, low: float, high: float) -> None:
    """Check that ``value`` is None or in the range from ``low`` to ``high``, and raise InvalidArgument otherwise.

    If ``high`` is only the maximum of a 32-bit field, errors about too small values do not mention it.
    """
    if value is not None and not low <= value <= high:
        limit = f"at least {low}" if high == _INT32_MAX and low >= -1 and value < low else f"from {low} to {high}"
        raise InvalidArgument(f"{name} is {quoted(value)}; it must be {limit}", field=name)


def shown(value: object) -> str:
    """Return an excerpt of a value of a body for error messages. A text is in quotes, and another value is JSON."""
    return quoted(value) if isinstance(value, str) else excerpt(msgspec.json.encode(value).decode())


def text_of(raw: msgspec.Raw, field: str) -> str | None:
    """Return a JSON value as text, or the content of the value if it is a JSON string. Return None for null and for
    unset values.
    """
    text = bytes(raw)
    if text in (b"", b"null"):
        return None
    try:
        return str(msgspec.json.decode(text)) if text.startswith(b'"') else text.decode()
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise InvalidArgument(f"{field} cannot be read: {e}", field=field) from None
