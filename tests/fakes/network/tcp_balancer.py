"""Load balancer like a Kubernetes Service: forwards each new connection to the next of several ports."""

import itertools
from collections.abc import Iterator, Sequence

from tests.fakes.network.tcp_proxy import TcpProxy


class TcpBalancer:
    """Balancer that listens on ``port``. A forgotten target gets no new connections, but keeps existing ones.

    ``async with TcpBalancer([a, b])``.
    """

    def __init__(self, targets: Sequence[int]) -> None:
        self._targets = list(targets)
        self._turns: Iterator[int] = itertools.cycle(self._targets)
        self._proxy = TcpProxy(self._next)

    @property
    def port(self) -> int:
        """Port to which clients connect."""
        return self._proxy.port

    def forget(self, target: int) -> None:
        """Pass no new connections to this port."""
        self._targets.remove(target)
        self._turns = itertools.cycle(self._targets)

    def _next(self) -> int:
        return next(self._turns)

    async def __aenter__(self) -> "TcpBalancer":
        await self._proxy.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._proxy.close()
