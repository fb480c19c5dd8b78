"""Plugin that routes the connections of a data-parallel rank to other ranks through a ``Cable`` of the test."""

import asyncio
import os
import socket
import struct
import sys

from penstock_common import addresses
from tests.fakes.network.tcp_proxy import TcpProxy

NAME = "rank-cables"
VARIABLE = "PENSTOCK_RANK_CABLE"
"""Environment variable with the port of the cable."""
_PORT = struct.Struct("!H")


class Cable(TcpProxy):
    """Proxy for the connections of one rank. A rank connects to earlier ranks: the first rank's proxy is unused, the
    last rank's carries all of its connections.
    """

    def __init__(self) -> None:
        super().__init__(0)

    async def _where(self, reader: asyncio.StreamReader) -> int:
        (port,) = _PORT.unpack(await reader.readexactly(_PORT.size))
        return int(port)


def install() -> None:
    """Install the plugin. Without a port in the environment, it does nothing."""
    cable = os.environ.get(VARIABLE)
    if cable is None or "penstock_enginecore.app" not in sys.modules:
        return
    from penstock_enginecore.parallel.rendezvous import Rendezvous

    to_port = Rendezvous._to_port

    def through_cable(rendezvous: Rendezvous, whom: str, address: str) -> socket.socket:
        if not whom.startswith("rank "):
            return to_port(rendezvous, whom, address)
        connection = to_port(rendezvous, whom, f"127.0.0.1:{cable}")
        connection.sendall(_PORT.pack(addresses.split(address)[1]))
        return connection

    Rendezvous._to_port = through_cable  # type: ignore[method-assign]
