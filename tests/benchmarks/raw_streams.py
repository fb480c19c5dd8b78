"""Streaming clients with minimal cost: bytes over sockets, without an HTTP or gRPC library.

Each ``start`` sends one request. ``on_piece(count)`` is called for the pieces of output as they arrive, and
``on_end(tokens)`` at the end, with the token count from the server.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.inference.v1 import messages_pb2 as pb

OnPiece = Callable[[int], None]
OnEnd = Callable[[int], None]


class StreamError(Exception):
    """A server did not answer with a whole stream."""


class Streams(Protocol):
    """A way to reach a server."""

    async def start(self, on_piece: OnPiece, on_end: OnEnd) -> None:
        """Send one request."""

    async def close(self) -> None:
        """Close the connections."""


class HttpStreams:
    """OpenAI's streams, a connection per stream that is kept for the next one. ``path``: of the completions or the chat."""

    def __init__(self, base_url: str, *, model: str, prompt: str, max_tokens: int, chat: bool = False) -> None:
        url = urlsplit(base_url)
        self._host, self._port = url.hostname or "127.0.0.1", url.port or 80
        given: dict[str, object] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        body = msgspec.json.encode(
            {
                "model": model,
                **given,
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "temperature": 0.0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        path = f"{url.path.rstrip('/')}/v1/{'chat/completions' if chat else 'completions'}"
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body
        self._idle: list[_HttpConnection] = []
        self._all: list[_HttpConnection] = []

    async def start(self, on_piece: OnPiece, on_end: OnEnd) -> None:
        """See Streams."""
        if self._idle:
            connection = self._idle.pop()
        else:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(
                lambda: _HttpConnection(self._idle.append), self._host, self._port
            )
            self._all.append(connection)
        connection.send(self._request, on_piece, on_end)

    async def close(self) -> None:
        """See Streams."""
        for connection in self._all:
            connection.close()


class _HttpConnection(asyncio.Protocol):
    _PIECE = b'"finish_reason"'
    _USAGE = b'"completion_tokens":'
    _DONE = b"data: [DONE]"
    _END = b"0\r\n\r\n"

    def __init__(self, on_idle: "Callable[[_HttpConnection], None]") -> None:
        self._on_idle = on_idle
        self._tail = b""
        self._tokens = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]  # asyncio gives TCP a Transport

    def send(self, request: bytes, on_piece: OnPiece, on_end: OnEnd) -> None:
        self._on_piece, self._on_end = on_piece, on_end
        self._tail, self._tokens, self._done = b"", -1, False
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        # Prepend the end of the previous data, which may be the beginning of a searched word.
        text = self._tail + data
        if (count := text.count(self._PIECE)) > 0:
            self._on_piece(count)
        if (at := text.rfind(self._USAGE)) >= 0 and not self._done:
            digits = text[at + len(self._USAGE) : at + len(self._USAGE) + 12]
            self._tokens = int(digits.strip().split(b",")[0].split(b"}")[0] or -1)
        self._done = self._done or self._DONE in text
        if self._done and text.endswith(self._END):
            self._on_idle(self)
            self._on_end(self._tokens)
            return
        # The word that counts must not be counted twice: of it at most a part is kept.
        keep = max(len(self._PIECE) - 1, 0)
        usage = text.rfind(self._USAGE)
        self._tail = text[usage:] if usage >= 0 else text[-keep:]

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            raise StreamError(f"the connection broke: {exc}")

    def close(self) -> None:
        self._transport.close()


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 0x1, 0x1, 0x4
_INITIAL_WINDOW_SIZE = 4
_LARGEST_WINDOW = 2**31 - 1


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


class GrpcStreams:
    """``Generate`` calls on ``connections`` connections, as many on each."""

    def __init__(self, address: str, *, prompt: str, max_tokens: int, connections: int) -> None:
        self._address = address
        self._count = connections
        self._next = 0
        self._all: list[_GrpcConnection] = []
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        body = pb.GenerateRequest(text=prompt, sampling_params=params).SerializeToString()
        self._body = b"\0" + len(body).to_bytes(4, "big") + body
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": "/penstock.inference.v1.InferenceService/Generate",
            ":authority": address,
            "te": "trailers",
            "content-type": "application/grpc",
        }
        # HPACK's plainest form: literal, not indexed, not compressed.
        self._head = b"".join(
            b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
            for name, value in fields.items()
        )

    async def start(self, on_piece: OnPiece, on_end: OnEnd) -> None:
        """See Streams."""
        if len(self._all) < self._count:
            host, _, port = self._address.rpartition(":")
            _, connection = await asyncio.get_running_loop().create_connection(_GrpcConnection, host, int(port))
            self._all.append(connection)
        self._next = (self._next + 1) % len(self._all)
        self._all[self._next].call(self._head, self._body, on_piece, on_end)

    async def close(self) -> None:
        """See Streams."""
        for connection in self._all:
            connection.close()


class _Call:
    __slots__ = ("buffer", "on_end", "on_piece", "tokens")

    def __init__(self, on_piece: OnPiece, on_end: OnEnd) -> None:
        self.on_piece, self.on_end = on_piece, on_end
        self.buffer = b""
        self.tokens = 0


class _GrpcConnection(asyncio.Protocol):
    """HTTP/2 as far as a gRPC client of small requests needs it: windows so large that they never have to be opened again."""

    def __init__(self) -> None:
        self._buffer = b""
        self._calls: dict[int, _Call] = {}
        self._last_id = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]  # asyncio gives TCP a Transport
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _LARGEST_WINDOW)
        window = (_LARGEST_WINDOW - 65_535).to_bytes(4, "big")
        transport.write(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, window))  # type: ignore[attr-defined]

    def call(self, head: bytes, body: bytes, on_piece: OnPiece, on_end: OnEnd) -> None:
        self._last_id += 2
        self._calls[self._last_id] = _Call(on_piece, on_end)
        headers = _frame(_HEADERS, _END_HEADERS, self._last_id, head)
        self._transport.write(headers + _frame(_DATA, _END_STREAM, self._last_id, body))

    def data_received(self, data: bytes) -> None:
        buffer, at = self._buffer + data, 0
        while len(buffer) - at >= 9:
            end = at + 9 + int.from_bytes(buffer[at : at + 3], "big")
            if len(buffer) < end:
                break
            kind, flags = buffer[at + 3], buffer[at + 4]
            stream = int.from_bytes(buffer[at + 5 : at + 9], "big")
            self._take(kind, flags, stream, buffer[at + 9 : end])
            at = end
        self._buffer = buffer[at:]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA:
            self._data(self._calls[stream], payload)
        elif kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._transport.write(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
        elif kind in (_RST, _GOAWAY) and self._calls:
            raise StreamError(f"the server reset stream {stream}: {payload!r}")
        if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
            call = self._calls.pop(stream)
            call.on_end(call.tokens)

    def _data(self, call: _Call, payload: bytes) -> None:
        call.buffer += payload
        while len(call.buffer) >= 5:
            end = 5 + int.from_bytes(call.buffer[1:5], "big")
            if len(call.buffer) < end:
                return
            call.tokens += len(pb.GenerateResponse.FromString(call.buffer[5:end]).token_ids)
            call.buffer = call.buffer[end:]
            call.on_piece(1)

    def close(self) -> None:
        self._transport.close()
