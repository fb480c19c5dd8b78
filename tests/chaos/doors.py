"""Proxies in front of frontends. A proxy refuses new connections while its frontend shuts down."""

import contextlib
from collections.abc import AsyncIterator, Sequence

from tests.chaos.client import Address
from tests.fakes.network.tcp_proxy import TcpProxy
from tests.fakes.processes import Service


class Doors:
    """Runs one proxy for each frontend: ``async with Doors(frontends)``.

    Clients connect to ``addresses``, over gRPC or HTTP.
    """

    def __init__(self, frontends: Sequence[Service]) -> None:
        self._doors = {id(each): (TcpProxy(each.port), TcpProxy(each.metrics_port)) for each in frontends}
        self._stack = contextlib.AsyncExitStack()

    @property
    def addresses(self) -> list[Address]:
        """Addresses of the proxies, in the order of the frontends."""
        return [Address(f"127.0.0.1:{grpc.port}", http.port) for grpc, http in self._doors.values()]

    @contextlib.asynccontextmanager
    async def closed(self, service: Service) -> AsyncIterator[None]:
        """Refuse new connections to the service.

        Open connections continue. Services without a proxy are not affected.
        """
        doors = self._doors.get(id(service), ())
        for door in doors:
            door.refuse()
        try:
            yield
        finally:
            for door in doors:
                await door.start()

    async def __aenter__(self) -> "Doors":
        for doors in self._doors.values():
            for door in doors:
                await door.start()
                self._stack.push_async_callback(door.close)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
