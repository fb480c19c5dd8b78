"""Engines that are killed while requests run, and restarted on their ports.

The kills happen after given fractions of the load's tokens.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from tests.chaos.client import Address, Client, send_all
from tests.chaos.outcome import Outcome
from tests.chaos.requests import Request
from tests.fakes.processes import Service
from tests.fakes.systems.cluster import Cluster

Order = Literal["in turn", "random"]
RESTART_AFTER = 1.0


class Kill(msgspec.Struct, frozen=True):
    """Record of one kill.

    Attributes:
        moment: Time of the kill, in monotonic seconds.
        at: Time of the kill, in seconds since the load began.
        running: Number of sequences that were running on the engine.
    """

    engine: str
    moment: float
    at: float
    running: int
    seconds_away: float

    def waits(self, outcomes: Sequence[Outcome]) -> list[float]:
        """Return the longest waits for a message that include the moment of the kill.

        The number of waits is a client-side estimate of the number of sequences that were streaming on the killed
        engine.
        """
        outputs = [output for outcome in outcomes for output in outcome.outputs.values()]
        waits = sorted((wait for output in outputs if (wait := output.wait_across(self.moment))), reverse=True)
        at_once = sum(o.began <= self.moment <= o.began + o.seconds for o in outcomes for _ in o.outputs)
        return waits[: round(self.running * len(waits) / at_once)] if at_once else []


class Run(msgspec.Struct):
    """Result of a load. ``outcomes`` are listed by stream."""

    outcomes: list[list[Outcome]]
    seconds: float
    kills: list[Kill] = []

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all requests."""
        return sum(outcome.num_tokens for stream in self.outcomes for outcome in stream)

    @property
    def finished(self) -> int:
        """Number of streams in which no request failed."""
        return sum(not any(outcome.error for outcome in stream) for stream in self.outcomes)


def address(frontend: Service) -> Address:
    """Return the frontend's address for clients."""
    return Address(frontend.address, frontend.metrics_port)


async def undisturbed(cluster: Cluster, load: Sequence[Sequence[Request]]) -> Run:
    """Run the load without faults."""
    async with Client(*map(address, cluster.frontends)) as client:
        began = time.monotonic()
        outcomes = await send_all(client, load)
        return Run(outcomes, time.monotonic() - began)


class Killer:
    """Kills ``count`` engines, one at a time.

    The kills are spread evenly over the load's tokens, so they do not depend on the machine's speed. The next kill also
    waits until all engines serve again.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        count: int,
        num_tokens: int,
        order: Order = "in turn",
        log: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._cluster = cluster
        self._marks = [num_tokens * (number + 1) / (count + 1) for number in range(count)]
        self._order = order
        self._log = log
        self._tokens = 0
        self._moved = asyncio.Event()
        self._began = time.monotonic()
        self.begun = 0
        self.kills: list[Kill] = []

    def on_tokens(self, count: int) -> None:
        """Record that a client has received ``count`` tokens."""
        self._tokens += count
        if self.begun < len(self._marks) and self._tokens >= self._marks[self.begun]:
            self._moved.set()

    async def run(self) -> None:
        """Kill engines until all kills are done and the last killed engine serves again."""
        rng = random.Random(0)
        for number, mark in enumerate(self._marks):
            while self._tokens < mark:
                self._moved.clear()
                await self._moved.wait()
            engines = self._cluster.engines
            which = number % len(engines) if self._order == "in turn" else rng.randrange(len(engines))
            self.begun += 1
            await self._kill(which)

    async def _kill(self, which: int) -> None:
        engine = self._cluster.engines[which]
        running = (await self._cluster.stats())[which].num_running_reqs
        await engine.kill()
        killed = time.monotonic()
        self._log(f"{killed - self._began:5.1f} s: engine-{which} killed with {running} sequences running")
        await asyncio.sleep(RESTART_AFTER)
        await engine.start()
        await engine.serving()
        await self._cluster.until_engines_are_seen(len(self._cluster.engines))
        away = time.monotonic() - killed
        self.kills.append(Kill(f"engine-{which}", killed, killed - self._began, running, away))


async def with_kills(
    cluster: Cluster,
    load: Sequence[Sequence[Request]],
    expected: Run,
    *,
    kills: int,
    order: Order = "in turn",
    log: Callable[[str], object] = lambda line: None,
) -> Run:
    """Run the load while engines are killed.

    Args:
        expected: Result of the same load without faults.

    Raises:
        RuntimeError: The load ended before the last kill, because it is too small.
    """
    killer = Killer(cluster, count=kills, num_tokens=expected.num_tokens, order=order, log=log)

    def ended(stream: int, number: int, outcome: Outcome) -> None:
        killer.on_tokens(
            max(0, expected.outcomes[stream][number].num_tokens - outcome.num_tokens)
        )  # count the missing tokens of failed requests as received

    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(*map(address, cluster.frontends), on_tokens=killer.on_tokens))
        killing = asyncio.create_task(killer.run())
        stack.callback(killing.cancel)
        began = time.monotonic()
        outcomes = await send_all(client, load, on_end=ended)
        seconds = time.monotonic() - began
        if killer.begun < kills:
            raise RuntimeError(
                f"the load was over within {seconds:.0f} s, after {killer.begun} of {kills} kills: send more"
            )
        await killing
    return Run(outcomes, seconds, killer.kills)
