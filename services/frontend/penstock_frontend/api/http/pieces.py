"""Pieces of a streamed answer on their way to the client's connection."""

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

PIECES = "penstock.pieces"
"""The ASGI extension under which a request's scope has its ``Pieces``, where it has them."""


class Pieces:
    """Writes pieces of a streamed body straight to the connection: on its way through the application, and through uvicorn, a
    piece of a few bytes takes longer than everything else that is done for it.

    The answer's head must be sent, without a length, and its end is sent as always: between them uvicorn has nothing to know.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    async def write(self, data: bytes) -> None:
        """Write one piece, which must not be empty, when the connection takes it; into the void when the client has gone."""
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
