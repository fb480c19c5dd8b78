"""Event loop for processes that use gRPC, and health checks of the loop and its tasks."""

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
    """uvloop's event loop, with one wakeup for many gRPC events instead of one wakeup per event.

    A gRPC thread puts each event into a queue and then writes one byte to a socket. The reader that gRPC adds to the
    loop reads one byte and empties the queue. So in a burst, all bytes except the first wake the loop unnecessarily.
    This loop reads all bytes of a burst together. No event is lost: each event is queued before its byte is written,
    and the queue is emptied after the bytes are read.
    """

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]  # variadic there
        """Call ``callback`` with ``args`` when ``fd`` is readable, as asyncio does. A callback of gRPC is called only
        once per burst.
        """
        if isinstance(fd, socket.socket) and _is_of_grpc(callback):
            super().add_reader(fd, _take_burst, fd, callback, *args)
        else:
            super().add_reader(fd, callback, *args)


def _is_of_grpc(callback: Callable[..., Any]) -> bool:
    function = callback.func if isinstance(callback, functools.partial) else callback
    return type(getattr(function, "__self__", None)).__name__ == "PollerCompletionQueue"


def _take_burst(events: socket.socket, callback: Callable[..., Any], *args: Any) -> None:
    """Read all bytes except one, and call ``callback``, which reads the last byte."""
    count = len(events.recv(_MOST_BYTES, socket.MSG_PEEK))
    if count > 1:
        events.recv(count - 1)
    callback(*args)


# Health of a service and its event loop: a periodic timer (beat), and tasks that must not end.

INTERVAL = 1.0
"""Seconds between two beats of the periodic timer."""
MAX_LATE = 5.0
"""Maximum delay of a beat of the periodic timer, in seconds. A kubelet restarts a container after three failed probes,
ten seconds apart.
"""

Sleep = Callable[[float], Awaitable[None]]


class Health(Protocol):
    """Interface to set the health status. ``RpcServer`` implements it."""

    async def set_serving(self, serving: bool, *names: str) -> None:
        """Set the status that the health service reports for the given names."""


class Liveness:
    """Monitor that sets the status of the health name ``liveness`` according to the state of the event loop.

    While the event loop is blocked, the process answers no probe. This class reports two other problems. If a beat is
    more than ``MAX_LATE`` late, the status is NOT_SERVING until a beat is on time. If an essential task has ended, the
    status is NOT_SERVING permanently.

    Args:
        essential: Returns the current essential tasks.
        clock: Returns monotonic seconds.
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
        """Run the periodic timer until cancelled."""
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
            get_logger().info("liveness check passes again: the event loop is no longer blocked")
        elif ended:
            get_logger().error("liveness check fails: essential tasks have ended", tasks=ended)
        else:
            get_logger().error("liveness check fails: the event loop is blocked", seconds=round(late, 1))
