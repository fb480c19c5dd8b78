"""Foreign connections to every port as soon as it opens, while a system starts."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.fakes.engines import slow_listeners
from tests.fakes.engines.worker_faults import installed
from tests.fakes.processes import Service
from tests.fuzz.internal_ports.foreign import Foreign
from tests.fuzz.internal_ports.systems import Port, internal, ports_of

_EVERY = 0.02


class Forming:
    """Opens foreign connections while services start: ``async with Forming(services, folder, ...)``.

    The services wait a second at each socket at which ranks listen. ``met`` lists the attacked ports. The connections
    stay open until the block ends.
    """

    def __init__(self, services: Mapping[str, Service], folder: Path, count: int, kinds: Sequence[str]) -> None:
        self._services = dict(services)
        self._count = count
        self._kinds = kinds
        self._foreign: list[Foreign] = []
        self.met: list[Port] = []
        found = installed(folder / "plugin", slow_listeners.NAME, slow_listeners.__name__)
        for service in services.values():
            service.environment |= found

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
                    self._foreign.append(Foreign(port.host, port.port))
                    self._foreign[-1].open_now(self._kinds, self._count)
