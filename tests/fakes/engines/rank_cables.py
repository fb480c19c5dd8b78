"""A plugin with which the connections that a rank of a data-parallel group makes to others go through a ``Cable`` of the test."""

import asyncio
import os
import socket
import struct
import sys
from types import SimpleNamespace
from typing import Any

from tests.fakes.network.tcp_proxy import TcpProxy

NAME = "rank-cables"
VARIABLE = "PENSTOCK_RANK_CABLE"
"""Names the cable's port."""
_PORT = struct.Struct("!H")


class Cable(TcpProxy):
    """Of one rank. A rank connects to those before it: the first one's cable is not used, the last one's all that it has."""

    def __init__(self) -> None:
        super().__init__(0)

    async def _where(self, reader: asyncio.StreamReader) -> int:
        (port,) = _PORT.unpack(await reader.readexactly(_PORT.size))
        return int(port)


def install() -> None:
    """What the plugin does: nothing where no port is named."""
    cable = os.environ.get(VARIABLE)
    if cable is None or "penstock_enginecore.app" not in sys.modules:
        return
    from penstock_enginecore.parallel import mesh

    def create_connection(address: tuple[str, int], timeout: float) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", int(cable)), timeout)
        connection.sendall(_PORT.pack(address[1]))
        return connection

    changed: Any = SimpleNamespace(**{**vars(socket), "create_connection": create_connection})
    mesh.socket = changed
