"""Connections to peers that are connected but do not answer, like stopped processes."""

import asyncio
import time

import pytest

from penstock_common.config.sections import ServerConfig
from penstock_common.rpc.channel import Keepalive
from penstock_common.rpc.server import RpcServer

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_ACKNOWLEDGED = b"\x00\x00\x00\x04\x01\x00\x00\x00\x00"
GRPCS_OWN = 60.0
"""Seconds after which gRPC itself gives up an unanswered ping."""


@pytest.mark.asyncio
async def test_a_server_gives_up_a_silent_peer_when_its_time_is_over() -> None:
    server = RpcServer(ServerConfig(host="127.0.0.1"), service_names=(), keepalive=Keepalive(1.0, 1.0))
    port = await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_PREFACE + _SETTINGS + _ACKNOWLEDGED)
    began = time.monotonic()
    while await reader.read(4096):
        pass
    assert time.monotonic() - began < GRPCS_OWN / 2
    writer.close()
    await server.stop(0)
