"""Answers as ASGI messages."""

from collections.abc import Mapping

from starlette.types import Send


async def send_head(send: Send, status: int, headers: Mapping[str, str]) -> None:
    """The status line and the headers."""
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})


async def send_json(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    """A whole answer."""
    length = {"content-type": "application/json", "content-length": str(len(body))}
    await send_head(send, status, {**length, **headers})
    await send({"type": "http.response.body", "body": body})
