"""Concurrent streams that send a catalogue's requests one after the other while a test disturbs the services."""

import asyncio
from collections.abc import Sequence
from types import TracebackType

from tests.chaos.client import Client, send_all
from tests.chaos.outcome import Outcome
from tests.chaos.requests import Request
from tests.chaos.summary import Pair, Summary, summarize


async def catalogue(client: Client, requests: Sequence[Request], *, streams: int) -> list[tuple[Request, Outcome]]:
    """Return the requests with their outcomes without faults. The requests are sent twice, and the second outcome
    counts, because the first run compiles the grammars.
    """
    load = [requests[stream::streams] for stream in range(streams)]
    await send_all(client, load)
    found = await send_all(client, load)
    return [pair for row, outcomes in zip(load, found, strict=True) for pair in zip(row, outcomes, strict=True)]


class Flow:
    """Runs streams while a block runs: ``async with Flow(...) as flow``. At the end of the block, each stream finishes
    its current request.

    ``pairs`` lists the finished requests, with their expected outcomes.
    """

    def __init__(self, client: Client, known: Sequence[tuple[Request, Outcome]], *, streams: int) -> None:
        self._client = client
        self._known = known
        self._streams = streams
        self._over = False
        self.sent = 0
        self.pairs: list[Pair] = []
        self._failed: set[int] = set()

    @property
    def running(self) -> int:
        """Number of requests that have not ended."""
        return self.sent - len(self.pairs)

    @property
    def summary(self) -> Summary:
        """Return the summary of the finished requests."""
        return summarize(self.pairs, streams=self._streams, finished=self._streams - len(self._failed))

    async def next_requests(self, count: int) -> None:
        """Wait until ``count`` more requests have ended."""
        target = len(self.pairs) + count
        while len(self.pairs) < target:
            await asyncio.sleep(0.02)

    def end(self) -> None:
        """Start no more requests."""
        self._over = True

    async def __aenter__(self) -> "Flow":
        self._tasks = [asyncio.create_task(self._stream(number)) for number in range(self._streams)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        if error is not None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=error is not None)

    async def _stream(self, number: int) -> None:
        at = number
        while not self._over:
            request, expected = self._known[at % len(self._known)]
            self.sent += 1
            got = await self._client.send(request)
            self.pairs.append(Pair(request, expected, got))
            if got.error and got.error != expected.error:
                self._failed.add(number)
            at += self._streams
