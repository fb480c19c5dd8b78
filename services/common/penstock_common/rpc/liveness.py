"""Whether a service that lives on its event loop is alive: the loop's beat, and the tasks that must not end."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from penstock_common.observability.logging import get_logger
from penstock_common.rpc.server import LIVENESS

INTERVAL = 1.0
"""Seconds between two beats."""
MAX_LATE = 5.0
"""Seconds that a beat may be late. Kubelets ask three times, ten seconds apart, before they restart anything."""

Sleep = Callable[[float], Awaitable[None]]


class Health(Protocol):
    """What is told: an ``RpcServer``."""

    async def set_serving(self, serving: bool, *names: str) -> None:
        """Set the status of health names."""


class Liveness:
    """Keeps ``liveness`` true to the event loop it runs on.

    A loop that is held answers no probe, which speaks for itself. What would go unseen is told here: a loop so far behind that
    a beat comes more than ``MAX_LATE`` late (SERVING again with the next one in time), and an essential task that has ended,
    for good. ``essential``: those tasks now. ``clock``: monotonic seconds.
    """

    def __init__(
        self,
        health: Health,
        essential: Callable[[], Sequence[asyncio.Task[None]]],
        *,
        clock: Callable[[], float],
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._health = health
        self._essential = essential
        self._clock = clock
        self._sleep = sleep
        self._alive = True

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            due = self._clock() + INTERVAL
            await self._sleep(INTERVAL)
            await self._beat(late=self._clock() - due)

    async def _beat(self, late: float) -> None:
        ended = [task.get_name() for task in self._essential() if task.done()]
        alive = late <= MAX_LATE and not ended
        if alive == self._alive:
            return
        self._alive = alive
        await self._health.set_serving(alive, LIVENESS)
        if alive:
            get_logger().info("the event loop keeps up again")
        elif ended:
            get_logger().error("not alive: tasks that must not end have ended", tasks=ended)
        else:
            get_logger().error("not alive: the event loop is behind", seconds=round(late, 1))
