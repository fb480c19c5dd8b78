"""Foreign connections to every port as soon as it opens, while a system starts."""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from types import TracebackType

from tests.fakes.processes import Service
from tests.fuzz.internal_ports.foreign import Foreign
from tests.fuzz.internal_ports.systems import Port, internal, ports_of

_EVERY = 0.005
_HEADSTART = 0.3
"""Seconds for which the other processes are stopped, so that the foreign connections come first. Shorter than any lease."""


class Forming:
    """``async with Forming(services, ...)``, around the start of the services. ``met``: the ports that have been met; their
    connections stay open until the block ends.
    """

    def __init__(self, services: Mapping[str, Service], count: int, kinds: Sequence[str]) -> None:
        self._services = dict(services)
        self._count = count
        self._kinds = kinds
        self._foreign: list[Foreign] = []
        self.met: list[Port] = []

    async def __aenter__(self) -> "Forming":
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for each in self._foreign:
            each.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_EVERY)
            for port in internal([*ports_of(self._services)]):
                if port not in self.met:
                    self.met.append(port)
                    await self._meet(port)

    async def _meet(self, port: Port) -> None:
        others = [each.pid for name, each in self._services.items() if each.alive and name != port.service]
        try:
            for pid in others:
                os.kill(pid, signal.SIGSTOP)
            each = Foreign(port.host, port.port)
            self._foreign.append(each)
            each.open_now(self._kinds, self._count)
            await asyncio.sleep(_HEADSTART)
        finally:
            for pid in others:
                os.kill(pid, signal.SIGCONT)
