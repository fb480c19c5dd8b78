"""The event loop of processes that speak gRPC: which one, and whether it and its tasks are alive."""

import asyncio
import functools
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import uvloop

from penstock_common.observability.logging import get_logger
from penstock_common.rpc.server import LIVENESS

_MOST_BYTES = 64 * 1024


class GrpcEventLoop(uvloop.Loop):
    """uvloop's, which gRPC wakes once for many events rather than once for each.

    A thread of gRPC's puts every event into a queue and then writes a byte to a socket. The reader that gRPC adds to the loop
    takes one byte and empties the queue, so all but the first byte of a burst wake the loop for nothing: a turn of it for every
    message that was sent. Here the bytes of a burst are taken together. No event is left behind: it is in the queue before its
    byte is written, and the queue is emptied after the bytes are taken.
    """

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]  # variadic there
        """Call ``callback`` with ``args`` when ``fd`` can be read, as asyncio does; that of gRPC's events once for a burst."""
        if isinstance(fd, socket.socket) and _is_of_grpc(callback):
            super().add_reader(fd, _take_burst, fd, callback, *args)
        else:
            super().add_reader(fd, callback, *args)


def _is_of_grpc(callback: Callable[..., Any]) -> bool:
    function = callback.func if isinstance(callback, functools.partial) else callback
    return type(getattr(function, "__self__", None)).__name__ == "PollerCompletionQueue"


def _take_burst(events: socket.socket, callback: Callable[..., Any], *args: Any) -> None:
    """Leave one byte for the reader, which waits for it."""
    count = len(events.recv(_MOST_BYTES, socket.MSG_PEEK))
    if count > 1:
        events.recv(count - 1)
    callback(*args)


# Whether a service that lives on its event loop is alive: the loop's beat, and the tasks that must not end.

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
