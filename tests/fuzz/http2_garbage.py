"""Connections to the gRPC ports with invalid HTTP/2, or with a different protocol."""

import asyncio
import contextlib
import struct
from random import Random

from tests.fuzz.http2 import PREFACE, raw_frame
from tests.fuzz.rpc_calls import End

_PATIENCE = 0.3
"""Seconds until the client disconnects."""


def garbage(rng: Random) -> bytes:
    """Return the bytes that a connection sends."""
    how = rng.randrange(10)
    if how == 0:
        return rng.randbytes(rng.choice((1, 20, 500, 20_000)))
    if how == 1:
        return b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
    if how == 2:
        return b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(300)
    frames = b"".join(_frame(rng) for _ in range(rng.choice((1, 3, 30))))
    settings = raw_frame(4, 0, 0, b"")
    if how == 3:
        return PREFACE[: rng.randrange(len(PREFACE))]
    if how == 4:
        return PREFACE + frames
    if how == 5:  # streams opened and reset at once
        opened = (
            raw_frame(1, 4, 2 * i + 1, b"\x83\x86\x44\x01/") + raw_frame(3, 0, 2 * i + 1, b"\0\0\0\x08")
            for i in range(200)
        )
        return PREFACE + settings + b"".join(opened)
    if how == 6:  # headers that never end
        return PREFACE + settings + raw_frame(1, 0, 1, b"\x83") + raw_frame(9, 0, 1, b"\x40\x01a\x01b" * 500) * 50
    if how == 7:
        return PREFACE + settings + raw_frame(6, 0, 0, b"pingping") * 300
    if how == 8:
        return PREFACE + settings + raw_frame(4, 0, 0, struct.pack(">HI", rng.randrange(10), rng.getrandbits(32)) * 50)
    return PREFACE + settings + frames


def _frame(rng: Random) -> bytes:
    frame = raw_frame(
        rng.randrange(12), rng.randrange(256), rng.choice((0, 1, 2, 3, 2**31)), rng.randbytes(rng.randrange(60))
    )
    return frame if rng.random() < 0.8 else b"\xff\xff\xff" + frame[3:]


async def connect(address: str, sent: bytes) -> End:
    """Send the bytes, and wait until the server closes the connection, or disconnect."""
    host, port = address.rsplit(":", 1)
    writer = None
    try:
        async with asyncio.timeout(_PATIENCE):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            await writer.drain()
            await reader.read()
            return End("(closed)")
    except TimeoutError:
        return End("(left)")
    except ConnectionError:
        return End("(closed)")
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
