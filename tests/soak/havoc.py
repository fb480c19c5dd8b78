"""Services killed, frozen and stopped at random, one accident at a time."""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

from tests.fakes.processes import Service
from tests.fakes.systems.cluster import Cluster

Accidents = Mapping[str, tuple[int, Callable[[], Awaitable[None]]]]


class Havoc:
    """Causes random accidents while ``run`` runs. ``mended`` waits until the current accident is over.

    ``counts`` has the number of accidents by name. The first engine of each kind and the first frontend are only
    frozen, never ended, so that their resource use can be compared over the whole run. While one of them is frozen, the
    others run.
    """

    def __init__(
        self,
        cluster: Cluster,
        rng: random.Random,
        *,
        pause: float,
        log: Callable[[str], object],
        more: Accidents | None = None,
        lasting: int = 1,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        """Args:
        pause: Mean seconds between two accidents.
        more: Additional accidents by name, each with its weight.
        lasting: Number of engines that are never ended.
        before: Called before each accident, while all processes run.
        """
        self._cluster = cluster
        self._rng = rng
        self._pause = pause
        self._log = log
        self._more = more or {}
        self._mortal = cluster.engines[lasting:]
        self._before = before
        self._over = asyncio.Event()
        self.counts: Counter[str] = Counter()

    async def run(self) -> None:
        """Cause one accident after the other, until ``end``."""
        accidents: Accidents = {
            "engine killed": (3, self._kill_engine),
            "two engines killed": (1, self._kill_two),
            "engine frozen": (2, self._freeze_engine),
            "engine stopped": (2, self._stop_engine),
            "coordinator killed": (1, self._kill_coordinator),
            "coordinator frozen": (1, self._freeze_coordinator),
            **self._more,
        }
        weights = [weight for weight, _ in accidents.values()]
        while not await self._ended_within(self._rng.uniform(0.5, 1.5) * self._pause):
            name = self._rng.choices(list(accidents), weights)[0]
            self._log(name)
            self._before()
            await accidents[name][1]()
            self.counts[name] += 1
            await self._cluster.until_engines_are_seen(len(self._cluster.engines))

    def end(self) -> None:
        """Stop after the current accident."""
        self._over.set()

    async def _ended_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._over.wait()
        except TimeoutError:
            return False
        return True

    async def _kill_engine(self) -> None:
        await self._killed(self._rng.choice(self._mortal))

    async def _kill_two(self) -> None:
        await asyncio.gather(*(self._killed(engine) for engine in self._mortal[:2]))

    async def _stop_engine(self) -> None:
        await stopped_and_started(self._rng.choice(self._mortal))

    async def _freeze_engine(self) -> None:
        await self._frozen(self._rng.choice(self._cluster.engines))

    async def _kill_coordinator(self) -> None:
        await self._killed(self._cluster.coordinator)

    async def _freeze_coordinator(self) -> None:
        await self._frozen(self._cluster.coordinator)

    async def _killed(self, service: Service) -> None:
        await service.kill()
        await asyncio.sleep(self._rng.uniform(0, 3))
        await service.start()
        await service.serving()

    async def _frozen(self, service: Service) -> None:
        service.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(self._rng.uniform(0.5, 8))
        finally:
            service.send_signal(signal.SIGCONT)
        await service.serving()


async def stopped_and_started(service: Service) -> None:
    """Stop a service with SIGTERM and restart it. Raises RuntimeError with the log if its exit code is not 0."""
    if (code := await service.stop()) != 0:
        raise RuntimeError(f"{service.module} was told to stop and ended with {code}:\n{service.log()}")
    await service.restart()
