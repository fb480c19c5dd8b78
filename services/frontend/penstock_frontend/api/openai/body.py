"""The bodies of calls: read up to a limit, decoded into their structs."""

from collections.abc import Mapping
from typing import TypeVar

import msgspec
from starlette.types import Receive

from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_frontend.api.openai.errors import HttpError, undecodable

_DISCARDED = 4
"""A body that is too large is read on, up to so many times the limit, so that its client reads why it was refused."""

T = TypeVar("T")


class ClientGone(Exception):  # noqa: N818 - not an error of anybody's
    """The client hung up before its body was complete."""


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole body. Raises HttpError 413 above ``limit`` bytes, ClientGone."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size <= limit:
            parts.append(part)
        else:
            parts.clear()
        if not message.get("more_body", False) or size > _DISCARDED * limit:
            break
    if size > limit:
        raise HttpError(
            413,
            f"the body has {'' if size <= _DISCARDED * limit else 'more than '}{size} bytes; "
            f"http.max_body_bytes is {limit}",
            "request_too_large",
        )
    return b"".join(parts)


def decode(body: bytes, kind: type[T]) -> T:
    """The struct of a body. Unknown fields are ignored. Raises InvalidArgument naming the field that is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise undecodable(e) from None
    except RecursionError:
        raise InvalidArgument("the body nests too deeply", reason="INVALID_JSON") from None


def refuse_fields(body: msgspec.Struct, names: Mapping[str, str]) -> None:
    """Raise Unimplemented for the first of ``names`` that is set. They map to what a client may use instead, or ``""``."""
    for name, instead in names.items():
        if getattr(body, name) is not None:
            raise Unimplemented(f"{name} is not served{instead and f'; use {instead}'}", field=name)


def check_range(name: str, value: float | None, low: float, high: float) -> None:
    """Raise InvalidArgument unless ``value`` is None or from ``low`` to ``high``."""
    if value is not None and not low <= value <= high:
        raise InvalidArgument(f"{name} is {value}; it must be from {low} to {high}", field=name)


def text_of(raw: msgspec.Raw, field: str) -> str | None:
    """A JSON value as it was written; of a JSON string, what it holds. None for null, and when unset."""
    text = bytes(raw)
    if text in (b"", b"null"):
        return None
    try:
        return str(msgspec.json.decode(text)) if text.startswith(b'"') else text.decode()
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise InvalidArgument(f"{field} cannot be read: {e}", field=field) from None
