"""Random requests, some of which their clients give up, and what was wrong with the answers."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from types import TracebackType

from tests.chaos.client import Client
from tests.chaos.media import salted
from tests.chaos.outages import Known
from tests.chaos.outcome import Outcome, difference
from tests.chaos.requests import Request

CANCELLED, DEADLINE = 0.15, 0.1
"""Shares of the requests."""
FRESH = 0.25
"""Share of the requests whose media nobody has had, where there are any."""
PATIENCE = 1.5
"""Seconds after which clients give up, at most."""
MAX_EXAMPLES = 20


class Traffic:
    """``async with Traffic(...)``: ``streams`` at once send requests of a catalogue, chosen at random, for as long as the block
    lasts, and finish those that they are at.

    Most run to their end, the others are cancelled or have a deadline that may pass. ``counts``: completed, cancelled, expired,
    harmed. ``examples``: of harmed ones, in words. ``with_media``: some requests get a salt of their own.
    """

    def __init__(
        self, client: Client, known: Known, *, streams: int, rng: random.Random, with_media: bool = False
    ) -> None:
        self._client = client
        self._known = known
        self._streams = streams
        self._rng = rng
        self._with_media = with_media
        self._over = False
        self.counts: Counter[str] = Counter()
        self.examples: list[str] = []

    async def __aenter__(self) -> "Traffic":
        self._tasks = [asyncio.create_task(self._stream()) for _ in range(self._streams)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)

    async def _stream(self) -> None:
        while not self._over:
            request, expected = self._rng.choice(self._known)
            if self._with_media and self._rng.random() < FRESH:
                request = salted(request, f"{self._rng.getrandbits(64):x}")
            share = self._rng.random()
            if share < CANCELLED:
                await self._cancelled(request, expected)
            elif share < CANCELLED + DEADLINE:
                await self._with_deadline(request, expected)
            else:
                self._judge(request, expected, await self._client.send(request))

    async def _cancelled(self, request: Request, expected: Outcome) -> None:
        outcome = Outcome()
        task = asyncio.create_task(self._client.send(request, into=outcome))
        await asyncio.wait([task], timeout=self._rng.uniform(0, PATIENCE))
        if task.done():
            self._judge(request, expected, task.result())
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.counts["cancelled"] += 1
        self._judge_part(request, expected, outcome)

    async def _with_deadline(self, request: Request, expected: Outcome) -> None:
        got = await self._client.send(request, seconds=self._rng.uniform(0.01, PATIENCE))
        if got.error != "DEADLINE_EXCEEDED":
            self._judge(request, expected, got)
            return
        self.counts["expired"] += 1
        self._judge_part(request, expected, got)

    def _judge(self, request: Request, expected: Outcome, got: Outcome) -> None:
        self.counts["completed"] += 1
        if wrong := difference(expected, got):
            self._harmed(f"{request.kind}: {wrong} {got.message:.120}")

    def _judge_part(self, request: Request, expected: Outcome, got: Outcome) -> None:
        """What came before the client gave up must be the beginning of what would have come."""
        for index, output in got.outputs.items():
            whole = expected.outputs[index].token_ids if index in expected.outputs else []
            if output.token_ids != whole[: len(output.token_ids)]:
                self._harmed(f"{request.kind}: [{index}] {len(output.token_ids)} tokens are not how it begins")

    def _harmed(self, what: str) -> None:
        self.counts["harmed"] += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(what)


def known_kinds(known: Sequence[tuple[Request, Outcome]]) -> int:
    """How many shapes of requests there are."""
    return len({request.kind for request, _ in known})
