"""The event loop of processes that speak gRPC: one wake-up for many of gRPC's events."""

import asyncio
import functools
import socket
from collections import deque
from typing import Any

import grpc
import pytest

from penstock_common.rpc import loop as loop_module
from penstock_common.rpc.loop import GrpcEventLoop


class PollerCompletionQueue:
    """As gRPC's: events in a queue, a byte in a socket for each; the reader takes one byte and all events."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.reading, self.writing = socket.socketpair()
        self.reading.setblocking(False)
        self.events: deque[int] = deque()
        self.handled: list[int] = []
        self.num_wakes = 0
        loop.add_reader(self.reading, functools.partial(self._handle_events, loop))

    def put(self, event: int) -> None:
        """What gRPC's thread does."""
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
    """What the loop looks for is private to gRPC: a new version may call it something else."""
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
