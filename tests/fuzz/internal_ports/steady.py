"""Continuous streams whose answers are compared with those of an undisturbed run."""

import asyncio
import time
from collections import Counter
from types import TracebackType
from typing import Any

import grpc

from tests.fakes.patience import PATIENCE
from tests.fakes.systems.cluster import Cluster, read
from tests.fakes.systems.streams import Stream
from tests.fuzz.internal_ports.systems import Kind


class Steady:
    """Runs ``count`` streams at once: ``async with Steady(...)``. Each finished stream is followed by another with the
    same prompt.

    Attributes:
        problems: Problems with answers, and their counts.
        right: Number of correct answers.
    """

    def __init__(self, system: Cluster, kind: Kind, count: int, tokens: int, patience: float = PATIENCE) -> None:
        self._system = system
        self._kind = kind
        self._count = count
        self._tokens = tokens
        self._patience = patience
        self._expected: list[list[int]] = []
        self._current: dict[int, Stream] = {}
        self._over: list[Stream] = []
        self._stopped = False
        self.problems: Counter[str] = Counter()
        self.right = 0

    async def learn(self) -> None:
        """Record every answer without disturbance. Raises AssertionError if an answer is incomplete."""
        answers = await asyncio.gather(*(read(self._begin(number)) for number in range(self._count)))
        self._expected = [answer.token_ids for answer in answers]
        assert {len(each) for each in self._expected} == {self._tokens}

    async def __aenter__(self) -> "Steady":
        self._tasks = [asyncio.create_task(self._go_on(number)) for number in range(self._count)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        if kind is not None:  # after an error, the streams may never end
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=kind is not None)

    async def answered(self, count: int) -> None:
        """Wait for ``count`` more answers, right or wrong. Raises TimeoutError if they do not arrive."""
        wanted = self.num_answers + count
        async with asyncio.timeout(self._patience):
            while self.num_answers < wanted:
                await asyncio.sleep(0.02)

    @property
    def num_answers(self) -> int:
        """Number of ended streams."""
        return self.right + self.problems.total()

    def longest_gap(self, since: float) -> float:
        """Return the longest time between two parts of a stream.

        The second part arrived after ``since`` or is missing.
        """
        now = time.monotonic()
        waiting = [now - max(stream.times[-1], since) for stream in self._current.values() if stream.times]
        gaps = [stream.longest_gap(since) for stream in (*self._over, *self._current.values())]
        return max(gaps + waiting, default=0.0)

    def forget(self) -> None:
        """Remove the records of ended streams."""
        self._over.clear()

    def _begin(self, number: int) -> Any:
        return self._system.stub.Generate(self._kind.request(number, self._tokens), timeout=self._patience)

    async def _go_on(self, number: int) -> None:
        while not self._stopped:
            stream = self._current[number] = Stream(self._begin(number), self._expected[number])
            try:
                if await stream.is_right():
                    self.right += 1
                else:
                    self.problems["another answer than undisturbed"] += 1
            except grpc.aio.AioRpcError as e:
                self.problems[f"{e.code().name}: {e.details()}"] += 1
                await asyncio.sleep(0.3)
            self._over.append(self._current.pop(number))
