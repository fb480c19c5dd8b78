"""The event loop of processes that speak gRPC: one wake-up for many of gRPC's events."""

import asyncio
import functools
import socket
from collections import deque
from typing import Any

import grpc
import pytest

from penstock_common.rpc import loop as loop_module
from penstock_common.rpc.loop import INTERVAL, MAX_LATE, GrpcEventLoop, Liveness
from penstock_common.rpc.server import LIVENESS


class PollerCompletionQueue:
    """A fake of gRPC's queue: events, and a byte in a socket for each; the reader takes one byte and all events."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.reading, self.writing = socket.socketpair()
        self.reading.setblocking(False)
        self.events: deque[int] = deque()
        self.handled: list[int] = []
        self.num_wakes = 0
        loop.add_reader(self.reading, functools.partial(self._handle_events, loop))

    def put(self, event: int) -> None:
        """Add an event as gRPC's thread does."""
        self.events.append(event)
        self.writing.send(b"1")

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self.reading)
        self.reading.close()
        self.writing.close()

    def _handle_events(self, loop: asyncio.AbstractEventLoop) -> None:
        self.reading.recv(1)
        self.num_wakes += 1
        while self.events:
            self.handled.append(self.events.popleft())


def run(work: Any) -> Any:
    with asyncio.Runner(loop_factory=GrpcEventLoop) as runner:
        return runner.run(work())


def test_a_burst_of_events_wakes_the_loop_once() -> None:
    async def work() -> tuple[int, list[int]]:
        loop = asyncio.get_running_loop()
        queue = PollerCompletionQueue(loop)
        for event in range(100):
            queue.put(event)
        for _ in range(300):
            await asyncio.sleep(0)
        queue.close(loop)
        return queue.num_wakes, queue.handled

    assert run(work) == (1, list(range(100)))


def test_events_that_come_later_wake_it_again() -> None:
    async def work() -> list[int]:
        loop = asyncio.get_running_loop()
        queue = PollerCompletionQueue(loop)
        for event in range(3):
            queue.put(event)
            while len(queue.handled) <= event:
                await asyncio.sleep(0)
        queue.close(loop)
        return queue.handled

    assert run(work) == [0, 1, 2]


def test_the_readers_of_others_are_left_alone() -> None:
    async def work() -> bytes:
        loop = asyncio.get_running_loop()
        reading, writing = socket.socketpair()
        got: asyncio.Future[bytes] = loop.create_future()
        loop.add_reader(reading, lambda: got.done() or got.set_result(reading.recv(100)))
        writing.send(b"everything")
        data = await got
        loop.remove_reader(reading)
        reading.close()
        writing.close()
        return data

    assert run(work) == b"everything"


def test_grpcs_own_queue_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop looks for a private object of gRPC, which a new version may rename."""
    taken: list[socket.socket] = []
    take_burst = loop_module._take_burst

    def watching(events: socket.socket, *rest: Any) -> None:
        taken.append(events)
        take_burst(events, *rest)

    monkeypatch.setattr(loop_module, "_take_burst", watching)

    async def work() -> None:
        server = grpc.aio.server()
        await server.start()
        await server.stop(None)

    run(work)
    assert taken


# A service is alive while its event loop keeps its beat and its essential tasks run.


class Loop:
    """An event loop whose beats are as late as the test sets. Holds its clock, its sleep, and the health that it
    reported.
    """

    def __init__(self, *late: float) -> None:
        self.now = 0.0
        self.told: list[bool] = []
        self._late = list(late)

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        if not self._late:
            raise asyncio.CancelledError
        self.now += seconds + self._late.pop(0)

    async def set_serving(self, serving: bool, *names: str) -> None:
        assert names == (LIVENESS,)
        self.told.append(serving)


async def told(loop: Loop, *tasks: asyncio.Task[None]) -> list[bool]:
    liveness = Liveness(loop, lambda: tasks, clock=loop.clock, sleep=loop.sleep)
    with pytest.raises(asyncio.CancelledError):
        await liveness.run()
    return loop.told


async def test_a_loop_that_keeps_its_beat_is_alive() -> None:
    assert await told(Loop(0.0, INTERVAL, MAX_LATE)) == []


async def test_a_loop_that_is_behind_is_not_alive_until_it_has_caught_up() -> None:
    assert await told(Loop(0.0, MAX_LATE + 0.1, MAX_LATE + 9.0, 0.0, 0.0)) == [False, True]


async def test_a_service_whose_essential_task_has_ended_is_not_alive_any_more() -> None:
    async def ends() -> None:
        return

    task = asyncio.create_task(ends(), name="coordinator")
    await task
    assert await told(Loop(0.0, 0.0), task) == [False]


async def test_tasks_that_run_say_nothing() -> None:
    task = asyncio.create_task(asyncio.Event().wait())
    try:
        assert await told(Loop(0.0, 0.0), task) == []  # type: ignore[arg-type]
    finally:
        task.cancel()
