"""Where a call came from, for the log."""

from contextvars import ContextVar
from typing import NamedTuple
from urllib.parse import unquote


class Caller(NamedTuple):
    """The route that a call uses (an HTTP path or a gRPC method), and the address that it came from."""

    route: str = ""
    address: str = ""


NO_CALL = Caller()
current_caller: ContextVar[Caller] = ContextVar("current_caller", default=NO_CALL)
"""The call that the current task serves."""


def peer_address(peer: str) -> str:
    """The address in what gRPC calls a peer: ``ipv6:%5B::1%5D:50051`` is ``[::1]:50051``."""
    family, _, address = unquote(peer).partition(":")
    return address if family in ("ipv4", "ipv6") else unquote(peer)
