"""Campaign against one variant. A new system replaces a broken one, until all requests have been sent."""

import asyncio
import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc

from tests.fuzz.attacks import Attacks, Attempt
from tests.fuzz.findings import Findings
from tests.fuzz.media.hosts import Hosts
from tests.fuzz.neighbour import Itl, Neighbour, between
from tests.fuzz.neighbour_kinds import kinds_of
from tests.fuzz.openapi import schema_storm
from tests.fuzz.storm import Storm
from tests.fuzz.system import Held, System
from tests.fuzz.variants import Variant, variant_of
from tests.fuzz.watch import Incident, Watch

RSS_TOLERANCE, THREADS_TOLERANCE, FDS_TOLERANCE, TASKS_TOLERANCE = 96, 4, 4, 4
"""Allowed growth of a process since the start: MiB of memory, and numbers of threads, descriptors and tasks. Thread
pools and caches fill on demand.
"""
_ROUNDS = 4
_CONFIRMED = 3
"""Maximum number of confirmed causes of one kind. Then the attack is no longer sent to this variant."""
_TRIALS = 40
"""Maximum number of searches for causes."""
_SYSTEMS = 60


class Plan(NamedTuple):
    """Plan of a run.

    Attributes:
        count: Number of hostile requests.
        quiet: Seconds for which the neighbours are measured alone.
        warm: Number of requests before resources are counted.
        attacks: Attacks of the run to send. Empty: all.
    """

    count: int
    rate: float
    at_once: int
    quiet: float
    schema_examples: int
    seed: int
    warm: int = 300
    special: bool = True
    attacks: tuple[str, ...] = ()


class Outcome(NamedTuple):
    """Results of one variant, other than findings."""

    itl: dict[str, Itl]
    before: dict[str, Held]
    after: dict[str, Held]
    peaks: dict[str, int]
    blocks: dict[str, tuple[int, int, list[dict[str, Any]]]]
    systems: int
    muted: list[str]
    logs: dict[str, str]


class Campaign:
    """Campaign against one variant. If ``again`` is set, only requests with these numbers are sent, each alone."""

    def __init__(
        self,
        variant: Variant,
        plan: Plan,
        attacks: Attacks,
        findings: Findings,
        again: tuple[int, ...] = (),
        hosts: Hosts | None = None,
    ) -> None:
        self._variant = variant
        self._plan = plan
        self._attacks = attacks
        self._findings = findings
        self._again = again
        self._hosts = hosts
        self._marks: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self._gaps: list[tuple[float, float]] = []
        self._muted: set[str] = set()
        self._causes: Counter[tuple[str, str]] = Counter()
        self._of_kind: Counter[str] = Counter()
        self._to_try: deque[tuple[list[Incident], list[Attempt]]] = deque()
        self._trials = 0
        self._sent = 0
        self._attempts = self._numbers()
        self._peaks: dict[str, int] = {}
        self._before: dict[str, Held] = {}
        self._after: dict[str, Held] = {}
        self._blocks: dict[str, tuple[int, int, list[dict[str, Any]]]] = {}
        self._logs: dict[str, str] = {}

    async def run(self) -> Outcome:
        """Run the campaign. Failures of the system raise nothing."""
        self._findings.variant = self._variant.name
        systems, failed = 0, 0
        done = False
        while not done and systems < _SYSTEMS and failed < 2:
            systems += 1
            try:
                async with System(self._variant, self._hosts) as system:
                    done = await self._beside_neighbours(system)
            except (RuntimeError, TimeoutError, AssertionError, grpc.aio.AioRpcError) as e:
                failed += 1
                lines = [line for line in str(e).splitlines() if line.strip()]
                self._findings.add("the system", f"does not serve: {type(e).__name__}: {' '.join(lines[-1:])}")
        itl = {name: between(self._gaps, spans) for name, spans in self._marks.items()}
        muted = sorted(self._muted)
        return Outcome(itl, self._before, self._after, self._peaks, self._blocks, systems, muted, self._logs)

    def _numbers(self) -> Iterator[Attempt]:
        """Yield the numbers of the variant's requests in order, except for attacks with enough confirmed causes."""
        number = -1
        while self._sent < self._plan.count:
            number += 1
            if variant_of(number, self._attacks.turns) != self._variant.name:
                continue
            attempt = self._attacks.make(number)
            if self._plan.attacks and not attempt.attack.startswith(self._plan.attacks):
                continue
            self._sent += 1
            if attempt.attack not in self._muted:
                yield attempt

    async def _beside_neighbours(self, system: System) -> bool:
        """Send requests while neighbours run.

        Returns whether all requests were sent; otherwise a new system is needed.
        """
        errors: list[str] = []
        told = errors.append
        await system.answers()
        await system.warm_up()
        neighbour = Neighbour(
            system.frontend.address, system.http_port, kinds_of(self._variant), on_error=lambda error: told(error)
        )
        async with neighbour, Watch(system, neighbour) as watch:
            told = watch.neighbour_error
            storm_of = Storm(
                system, watch, self._attacks, self._findings, rate=self._plan.rate, at_once=self._plan.at_once
            )
            async with storm_of as storm:
                usable = await self._against(system, watch, storm)
            self._gaps += neighbour.gaps
            for name, peak in watch.peaks.items():
                self._peaks[name] = max(peak, self._peaks.get(name, 0))
        self._blocks = system.blocks()
        self._logs = system.logs()
        if not usable:
            return False
        async with Storm(system, watch, self._attacks, self._findings, rate=self._plan.rate, at_once=4) as storm:
            await self._last(system, watch, storm)
        return True

    async def _against(self, system: System, watch: Watch, storm: Storm) -> bool:
        """Send hostile requests. Returns whether all were sent and the system is still usable."""
        if self._again:
            for number in self._again:
                await self._one_again(watch, storm, self._attacks.make(number))
            return True
        while self._to_try:
            if not await self._trial(watch, storm, *self._to_try.popleft()):
                return False
        if not await self._storm(watch, storm, self._plan.warm):
            return False
        self._before = system.held()
        step = max(1, (self._plan.count - self._sent) // _ROUNDS)
        for _ in range(_ROUNDS):
            if self._sent >= self._plan.count:
                break
            await self._span("undisturbed", asyncio.sleep(self._plan.quiet / _ROUNDS))
            await self._span("beside cheap valid requests", storm.valid(int(self._plan.quiet * 30 / _ROUNDS)))
            start = time.monotonic()
            usable = await self._storm(watch, storm, step)
            self._marks["beside hostile requests"].append((start, time.monotonic()))
            if not usable:
                return False
        if not await self._storm(watch, storm, self._plan.count):  # the remaining requests
            return False
        if self._plan.special:
            await storm.special()
            await watch.settle()
            for incident in watch.take():
                self._findings.add("special cases", incident.what)
        return not watch.down

    async def _span(self, name: str, work: Any) -> None:
        start = time.monotonic()
        await work
        self._marks[name].append((start, time.monotonic()))

    async def _storm(self, watch: Watch, storm: Storm, count: int) -> bool:
        """Send ``count`` requests, and look for causes whenever something happens. Return whether the system is still
        usable.
        """
        until = min(self._sent + count, self._plan.count)
        while self._sent < until:
            suspects = await storm.hostile(self._attempts, until - self._sent)
            if not await self._judge(watch, storm, suspects):
                return False
            print(self._progress(), flush=True)
        return True

    async def _judge(self, watch: Watch, storm: Storm, suspects: list[Attempt]) -> bool:
        """Look for the causes of the incidents."""
        incidents = watch.take()
        if incidents:
            self._to_try.append((incidents, suspects))
        late, storm.late = storm.late, []
        for attempt in late:
            self._to_try.append(
                ([Incident("no answer", "no answer in time, nor when nobody else is there")], [attempt])
            )
        if watch.down or any(incident.worn for incident in incidents):
            return False
        while self._to_try:
            if not await self._trial(watch, storm, *self._to_try.popleft()):
                return False
        return True

    async def _trial(self, watch: Watch, storm: Storm, incidents: list[Incident], suspects: list[Attempt]) -> bool:
        """Send the suspects again, one at a time, until every incident has happened again. Returns whether the system
        is still usable.
        """
        numbers = [attempt.number for attempt in suspects]
        left = {incident.kind: incident for incident in incidents}
        suspects = [attempt for attempt in suspects if attempt.attack not in self._muted]
        known = all(self._of_kind[kind] >= 3 * _CONFIRMED for kind in left)
        if not known and self._trials < _TRIALS:
            self._trials += 1
            print(f"{len(suspects)} suspects are tried again: {', '.join(left)}", flush=True)
            while suspects and left:
                attempt = suspects.pop(0)
                found, usable = await self._happens_again(watch, storm, attempt, late="no answer" in left)
                if any(each.kind in left for each in found) or not usable:
                    self._convict(found, attempt)
                left = {kind: incident for kind, incident in left.items() if kind not in {each.kind for each in found}}
                if not usable:
                    if left and suspects:
                        self._to_try.append(([*left.values()], suspects))
                    return False
        for incident in left.values():
            if incident.kind != "no answer":  # a missing answer may come from the load of other requests
                self._findings.happened(incident.kind, incident.what, numbers, sure=False)
        return True

    async def _happens_again(
        self, watch: Watch, storm: Storm, attempt: Attempt, *, late: bool
    ) -> tuple[list[Incident], bool]:
        """Send the request again. Return the incidents, and whether the system is still usable."""
        watch.take()
        end = await storm.one(attempt.patient() if late else attempt)
        storm.late = []
        await watch.settle()
        found = watch.take()
        if late and end.slow:
            found.append(Incident("no answer", "no answer in time, nor when nobody else is there"))
        return found, not watch.down and not any(each.worn for each in found)

    def _convict(self, incidents: list[Incident], attempt: Attempt) -> None:
        """Stop sending an attack to this variant once it has caused enough incidents of one kind."""
        shown = f"{attempt.attack}: {attempt.target} {attempt.shown}"
        for incident in incidents:
            self._findings.happened(incident.kind, incident.what, [attempt.number], shown, attempt.size)
            self._of_kind[incident.kind] += 1
            self._causes[incident.kind, attempt.attack] += 1
            if self._causes[incident.kind, attempt.attack] >= _CONFIRMED:
                self._muted.add(attempt.attack)

    async def _one_again(self, watch: Watch, storm: Storm, attempt: Attempt) -> None:
        watch.take()
        end = await storm.one(attempt)
        await watch.settle(1.5)
        print(f"number {attempt.number}: {attempt.attack}: {attempt.target} ended as {end}\n  {attempt.shown}")
        self._convict(watch.take(), attempt)

    async def _last(self, system: System, watch: Watch, storm: Storm) -> None:
        """Run the last checks, without neighbours: the OpenAPI document, control calls, and leaked resources."""
        seed, examples = self._plan.seed, self._plan.schema_examples
        if examples:
            for wrong in await schema_storm(system.http_port, self._findings, examples=examples, seed=seed):
                self._findings.add("schemathesis", wrong)
        if not self._again:
            await storm.control(max(30, self._plan.count // 250))
        with contextlib.suppress(OSError, grpc.aio.AioRpcError):
            for left in await system.until_idle():
                self._findings.add("left behind", left)
            await system.answers()
        if kept := system.temporary_files() - system.temporary:
            self._findings.add("left behind", f"{len(kept)} temporary files: {sorted(kept)[:5]}")
        watch.look()
        for incident in watch.take():
            self._findings.happened(incident.kind, incident.what)
        if self._before and not watch.down:
            await asyncio.sleep(2.5)
            self._after = system.held()
            for name, leak in _leaks(self._before, self._after):
                self._findings.add(f"leak in {name}", leak)

    def _progress(self) -> str:
        moment = time.strftime("%H:%M:%S")
        return f"{moment} {self._variant.name}: {self._sent} of {self._plan.count}, {self._findings.kinds} kinds of findings"


def _leaks(before: dict[str, Held], after: dict[str, Held]) -> Iterator[tuple[str, str]]:
    tolerances = (RSS_TOLERANCE, THREADS_TOLERANCE, FDS_TOLERANCE, TASKS_TOLERANCE)
    for name, old in before.items():
        for what, a, b, more in zip(
            ("MiB", "threads", "fds", "tasks"), old.amounts, after[name].amounts, tolerances, strict=True
        ):
            if b > a + more:
                yield name, f"it holds {b} {what}; it was {a}, and {more} more are allowed"
