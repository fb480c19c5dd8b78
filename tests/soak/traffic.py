"""Random requests, some of which are cancelled, and checks of their answers."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType

from tests.chaos.client import Client
from tests.chaos.media import salted
from tests.chaos.outages import Known
from tests.chaos.outcome import Outcome, difference
from tests.chaos.requests import Request

CANCELLED, DEADLINE = 0.15, 0.1
"""Fractions of requests that the client cancels, and that have a deadline."""
NEXT_TURN = 0.5
"""Probability that a client sends the follow-up request after an answer, where a follow-up exists."""
REFUSED = 0.5
"""Seconds that a stream waits while its frontend does not serve."""
PATIENCE = 1.5
"""Maximum seconds until a client cancels."""
MAX_EXAMPLES = 20


class Traffic:
    """Random requests of a catalogue on concurrent streams, while a block runs: ``async with Traffic(...)``.

    At the end of the block, each stream finishes its current request. Most requests run to their end. The other requests
    are cancelled, or have a deadline that may pass.

    Attributes:
        counts: Number of requests by result: completed, cancelled, expired, broken, harmed.
        examples: Descriptions of harmed requests.
    """

    def __init__(
        self,
        client: Client,
        known: Known,
        *,
        streams: int,
        rng: random.Random,
        fresh: float = 0.0,
        next_turn: Callable[[Request], tuple[Request, Outcome] | None] = lambda request: None,
        excuses: Callable[[Outcome], bool] = lambda outcome: False,
    ) -> None:
        """Args:
        fresh: Share of the requests that get a cache salt of their own.
        next_turn: Returns the follow-up to one of ``known``, with its expected outcome.
        excuses: Returns True if an accident explains the outcome of a failed request.
        """
        self._client = client
        self._known = known
        self._streams = streams
        self._rng = rng
        self._fresh = fresh
        self._next_turn = next_turn
        self._excuses = excuses
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
            salt = f"{self._rng.getrandbits(64):x}" if self._rng.random() < self._fresh else ""
            following = self._next_turn(request)
            went_well = await self._send(salted(request, salt), expected)
            if following is not None and went_well and self._rng.random() < NEXT_TURN:
                await self._send(salted(following[0], salt), following[1])

    async def _send(self, request: Request, expected: Outcome) -> bool:
        """Send a request. Returns whether the answer was complete and right."""
        share = self._rng.random()
        if share < CANCELLED:
            return await self._cancelled(request, expected)
        if share < CANCELLED + DEADLINE:
            return await self._with_deadline(request, expected)
        return await self._judge(request, expected, await self._client.send(request))

    async def _cancelled(self, request: Request, expected: Outcome) -> bool:
        outcome = Outcome()
        task = asyncio.create_task(self._client.send(request, into=outcome))
        await asyncio.wait([task], timeout=self._rng.uniform(0, PATIENCE))
        if task.done():
            return await self._judge(request, expected, task.result())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.counts["cancelled"] += 1
        self._judge_part(request, expected, outcome)
        return False

    async def _with_deadline(self, request: Request, expected: Outcome) -> bool:
        got = await self._client.send(request, seconds=self._rng.uniform(0.01, PATIENCE))
        if got.error != "DEADLINE_EXCEEDED":
            return await self._judge(request, expected, got)
        self.counts["expired"] += 1
        self._judge_part(request, expected, got)
        return False

    async def _judge(self, request: Request, expected: Outcome, got: Outcome) -> bool:
        if got.error and got.error != expected.error and self._excuses(got):
            self.counts["broken"] += 1
            self._judge_part(request, expected, got)
            await asyncio.sleep(REFUSED)
            return False
        self.counts["completed"] += 1
        wrong = difference(expected, got)
        if wrong:
            self._harmed(f"{request.kind}: {wrong} {got.message:.120}")
        return not wrong

    def _judge_part(self, request: Request, expected: Outcome, got: Outcome) -> None:
        """Check that the tokens received before the client cancelled are a prefix of the expected tokens."""
        for index, output in got.outputs.items():
            whole = expected.outputs[index].token_ids if index in expected.outputs else []
            if output.token_ids != whole[: len(output.token_ids)]:
                self._harmed(f"{request.kind}: [{index}] {len(output.token_ids)} tokens are not how it begins")

    def _harmed(self, what: str) -> None:
        self.counts["harmed"] += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(what)


def known_kinds(known: Sequence[tuple[Request, Outcome]]) -> int:
    """Return the number of kinds of requests."""
    return len({request.kind for request, _ in known})
