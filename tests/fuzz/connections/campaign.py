"""Thousands of hostile connections, which must not affect neighbours."""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from tests.fakes.patience import PATIENCE
from tests.fuzz.connections.answers import first_answer, judge
from tests.fuzz.connections.client import Connection, Heard
from tests.fuzz.connections.limits import Limits
from tests.fuzz.connections.report import Beside, Outcome
from tests.fuzz.connections.script import Script
from tests.fuzz.connections.scripts import plain_scripts, script_of
from tests.fuzz.connections.system import Amounts, ListeningSystem
from tests.fuzz.findings import Findings
from tests.fuzz.neighbour import Neighbour
from tests.fuzz.neighbour_kinds import kinds_of
from tests.fuzz.rpc_calls import End
from tests.fuzz.watch import Watch

_SHORT = ("health", "short", "short over http")
"""Kinds of neighbours' requests other than streams."""
_RECENT = 96
"""Number of recently ended connections that may have caused an incident."""
_TELL_EVERY = 1000
_RELEASE = 60.0
"""Maximum seconds until a process has freed the resources of closed connections."""


class Plan(NamedTuple):
    """Plan of a campaign.

    Args:
        count: Number of hostile connections.
        seed: Seed, from which connections are made together with their numbers.
        at_once: Maximum number of concurrent connections.
        hold: Maximum duration of a script in seconds.
        patience: Seconds to wait for an answer that must come.
        warm: Number of connections before the resources of each process are first measured.
        quiet: The time for which the neighbours' waits are measured undisturbed, before and after, in seconds each.
        kinds: Prefixes of the kinds to send; empty means all.
        protocols: The protocols to send them over, http or grpc.
        again: The only numbers to send, one after the other; empty means all.
    """

    count: int
    seed: int = 7
    at_once: int = 64
    hold: float = 3.0
    patience: float = PATIENCE
    warm: int = 500
    quiet: float = 0.0
    kinds: tuple[str, ...] = ("",)
    protocols: tuple[str, ...] = ("http", "grpc")
    again: tuple[int, ...] = ()

    def has(self, script: Script) -> bool:
        """Return whether the plan includes the script."""
        return script.kind.startswith(self.kinds) and ("grpc" if script.is_grpc else "http") in self.protocols


class ConnectionCampaign:
    """Campaign against one system."""

    def __init__(self, plan: Plan, limits: Limits, findings: Findings) -> None:
        self._plan = plan
        self._limits = limits
        self._findings = findings
        self._numbers = iter(plan.again) if plan.again else iter(range(10**9))
        self._flying: set[int] = set()
        self._ended: deque[int] = deque(maxlen=_RECENT)
        self._late: list[int] = []
        self._sent = 0

    async def run(self) -> Outcome:
        """Run the campaign. Once the system serves, its failures raise nothing."""
        self._findings.variant = "connections"
        async with ListeningSystem() as system:
            await system.answers()
            await system.warm_up()
            self._ports = system.ports
            self._known = await self._learn()
            if not self._plan.again:
                await self._beside_neighbours(system, self._plan.warm, judged=False)
            before = system.amounts()
            began = time.monotonic()
            beside = await self._beside_neighbours(system, self._plan.count)
            seconds = time.monotonic() - began - 2 * self._plan.quiet
            after = await self._released(system, before)
            holds = system.blocks()
            logs = system.logs()
        return Outcome(self._findings.count, seconds, beside, before, after, holds, logs)

    async def _learn(self) -> Mapping[str, bytes]:
        """Record the expected answers, without hostile connections."""
        known: dict[str, bytes] = {}
        for name, script in plain_scripts().items():
            heard = await self._heard(script)
            if (problem := judge(script, heard, {}).problem) or not (answer := first_answer(script, heard)):
                raise RuntimeError(f"an undisturbed request ({name}) was not answered: {problem or heard}")
            known[name] = answer
        return known

    async def _beside_neighbours(self, system: ListeningSystem, count: int, *, judged: bool = True) -> Beside:
        """Open ``count`` connections while neighbours run. ``judged`` adds checks of the answers and of the neighbours'
        waits.
        """
        errors: list[str] = []
        kinds = (*kinds_of(system.variant), *_SHORT)
        neighbour = Neighbour(system.frontend.address, system.http_port, kinds, on_error=lambda error: told(error))
        told = errors.append
        async with neighbour, Watch(system, neighbour) as watch:
            told = watch.neighbour_error
            for error in errors:
                told(error)
            quiet = await self._undisturbed(neighbour) if judged else {}
            if self._plan.again:
                await self._one_by_one(watch)
            else:
                await self._at_once(watch, self._sent + count, judged=judged)
                await self._try_again(watch)
            await watch.settle(2.0)
            self._note(watch)
            waits = neighbour.take_waits()
            if judged:
                for kind, seconds in (await self._undisturbed(neighbour)).items():
                    quiet[kind] = max(seconds, quiet.get(kind, 0.0))
            counts = dict(neighbour.counts)
        if judged:
            for exceeded in self._limits.exceeded(waits):
                self._findings.add("neighbours", exceeded)
            for kind in kinds:
                if not counts.get(kind):
                    self._findings.add("neighbours", f"{kind} got nothing at all")
        return Beside(waits, quiet, counts, dict(watch.peaks))

    async def _undisturbed(self, neighbour: Neighbour) -> dict[str, float]:
        """Return the neighbours' longest waits without any hostile connection."""
        neighbour.take_waits()
        await asyncio.sleep(self._plan.quiet)
        return neighbour.take_waits()

    async def _at_once(self, watch: Watch, until: int, *, judged: bool) -> None:
        workers = [asyncio.create_task(self._worker(watch, until, judged=judged)) for _ in range(self._plan.at_once)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()

    async def _worker(self, watch: Watch, until: int, *, judged: bool) -> None:
        while self._sent < until and not watch.down:
            number = next(self._numbers)
            script = script_of(self._plan.seed, number, self._plan.hold)
            if not self._plan.has(script):
                continue
            self._sent += 1
            await self._one(number, script, counts=judged)
            self._note(watch)
            if self._sent % _TELL_EVERY == 0:
                moment = time.strftime("%H:%M:%S")
                print(f"{moment} {self._sent} connections, {self._findings.kinds} kinds of findings", flush=True)

    async def _one(self, number: int, script: Script, *, counts: bool = True) -> End:
        self._flying.add(number)
        try:
            end = judge(script, await self._heard(script), self._known)
        finally:
            self._flying.discard(number)
            self._ended.append(number)
        if end.slow:
            self._late.append(number)
        if counts:
            self._findings.ended(f"{script.port}: {script.kind}", end, number, script.shown, script.size)
        elif end.problem:
            self._findings.add(script.kind, end.problem, [number], script.shown, script.size)
        return end

    async def _heard(self, script: Script) -> Heard:
        return await Connection(script, self._plan.patience).play(self._ports[script.port])

    async def _try_again(self, watch: Watch) -> None:
        """Repeat the connections that timed out, each without other connections."""
        late, self._late = self._late, []
        for number in late:
            if watch.down:
                return
            script = script_of(self._plan.seed, number, self._plan.hold)
            end = judge(script, await self._heard(script), self._known)
            if end.slow:
                late = "neither an answer nor an end in time, nor when no other connection is there"
                self._findings.add(script.kind, late, [number], script.shown, script.size)

    async def _one_by_one(self, watch: Watch) -> None:
        """Send the selected scripts one by one, and print each result."""
        for number in self._numbers:
            script = script_of(self._plan.seed, number, self._plan.hold)
            end = await self._one(number, script)
            await watch.settle(1.5)
            print(f"number {number}: {script.port}: {script.kind} ended as {end}\n  {script.shown}")
            self._note(watch)

    def _note(self, watch: Watch) -> None:
        """Record incidents of the system, with the connections that may have caused them."""
        if watch.alarm.is_set():
            suspects = [*sorted(self._flying), *reversed(self._ended)]
            for incident in watch.take():
                self._findings.happened(incident.kind, incident.what, suspects, sure=False)

    async def _released(self, system: ListeningSystem, before: Mapping[str, Amounts]) -> dict[str, Amounts]:
        """Return the resources of each process, once they are down to the earlier amounts or the time for that is over."""
        if not all(service.alive for service in system.services):
            self._findings.add("the system", "a process has ended, so that nothing can be said of what is left")
            return {}
        for left in await system.until_idle():
            self._findings.add("left behind", left)
        await system.answers()
        until = time.monotonic() + _RELEASE
        while left := [*self._limits.kept(before, after := system.amounts())]:
            if time.monotonic() > until:
                break
            await asyncio.sleep(1.0)
        for each in left:
            self._findings.add("left behind", each)
        return after
