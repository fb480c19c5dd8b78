"""Many concurrent hostile requests at a limited rate. Each request is reproducible from its seed and number."""

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from random import Random

import grpc

from penstock_common.rpc.channel import make_channel
from tests.fuzz import http2_garbage, http_calls, rpc_calls
from tests.fuzz.attacks import Attacks, Attempt
from tests.fuzz.findings import Findings
from tests.fuzz.http_calls import HttpCase
from tests.fuzz.media.attacks import Killing
from tests.fuzz.media.decoders import kill_all, kill_at_work
from tests.fuzz.rpc_calls import Case, End
from tests.fuzz.rpcs import CONTROL, cheap, rpcs
from tests.fuzz.system import System
from tests.fuzz.watch import Watch

_HTTP_SHARE = 0.25
_CHANNELS = 4
_PATIENCE = 15.0
"""Seconds that a call may take beyond its deadline."""
_CHEAP = ("Tokenize", "Detokenize", "GetModel", "ListModels", "HealthCheck", "GetLoads")
_RECENT = 5.0
"""Seconds during which an ended request may still be the cause of an incident."""
_SUSPECTS = 32
_KILLED_WITHIN = 20.0


class Storm:
    """Sender of hostile requests: ``async with Storm(...)``. ``rate`` is the maximum number of requests per second."""

    def __init__(
        self, system: System, watch: Watch, attacks: Attacks, findings: Findings, *, rate: float, at_once: int
    ) -> None:
        self._system = system
        self._watch = watch
        self._attacks = attacks
        self._findings = findings
        self._rate = rate
        self._at_once = at_once
        self._channels: dict[str, list[grpc.aio.Channel]] = {}
        self._flying: dict[int, Attempt] = {}
        self._ended: deque[tuple[float, Attempt]] = deque(maxlen=_SUSPECTS)
        self._faulty: set[int] = set()
        self._killing = asyncio.Lock()
        self.late: list[Attempt] = []
        """Requests without an answer in time."""

    async def __aenter__(self) -> "Storm":
        for name, address in self._system.addresses.items():
            # The client accepts messages of any size, so that only the server's limits apply.
            limit = 2**31 - 1
            self._channels[name] = [make_channel(address, max_message_bytes=limit) for _ in range(_CHANNELS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for channels in self._channels.values():
            for channel in channels:
                await channel.close()

    async def hostile(self, attempts: Iterator[Attempt], count: int) -> list[Attempt]:
        """Send ``count`` hostile requests, or fewer if an incident happens. Returns the suspects of the incident: first
        requests with wrong answers, then the latest requests.
        """
        suspects: dict[int, Attempt] = {}
        self._watch.on_alarm = lambda: suspects.update(self._suspects())
        room = asyncio.Semaphore(self._at_once)
        tasks: set[asyncio.Task[None]] = set()
        start = time.monotonic()

        async def run(attempt: Attempt) -> None:
            try:
                await self.one(attempt)
            finally:
                room.release()

        for index in range(count):
            await room.acquire()
            if self._watch.alarm.is_set() or (attempt := next(attempts, None)) is None:
                break
            task = asyncio.create_task(run(attempt))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if (ahead := start + (index + 1) / self._rate - time.monotonic()) > 0.002:
                await asyncio.sleep(ahead)
        await self._ending(tasks)
        return sorted(suspects.values(), key=lambda attempt: (attempt.number not in self._faulty, -attempt.number))

    async def _ending(self, tasks: set[asyncio.Task[None]]) -> None:
        """Wait for the requests in flight, with a timeout in case the system is gone."""
        while tasks:
            await asyncio.wait(tasks, timeout=1.0)
            if self._watch.down:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _suspects(self) -> dict[int, Attempt]:
        """Return the requests in flight, and those that ended recently."""
        now = time.monotonic()
        recent = [attempt for at, attempt in self._ended if now - at < _RECENT]
        found = {attempt.number: attempt for attempt in [*recent, *self._flying.values()]}
        return {number: found[number] for number in sorted(found, reverse=True)[:_SUSPECTS]}

    async def one(self, attempt: Attempt) -> End:
        """Send one request and record its result."""
        self._flying[attempt.number] = attempt
        try:
            end = await self._send(attempt)
        finally:
            del self._flying[attempt.number]
            self._ended.append((time.monotonic(), attempt))
        if end.slow:
            self.late.append(attempt)
        if end.problem:
            self._faulty.add(attempt.number)
            self._watch.look()
            if self._watch.down:  # the later trial finds the cause
                end = End("(lost)")
        self._findings.ended(attempt.target, end, attempt.number, f"{attempt.attack}: {attempt.shown}", attempt.size)
        return end

    async def _send(self, attempt: Attempt) -> End:
        match attempt.payload:
            case Case() as case:
                return await self._call(case, Random(attempt.number))
            case HttpCase() as case:
                return await http_calls.call(self._system.http_port, case)
            case Killing() as killing:
                return await self._kill(killing, attempt)
            case garbage:
                address = Random(attempt.number).choice(list(self._system.addresses.values()))
                return await http2_garbage.connect(address, garbage)

    async def _kill(self, killing: Killing, attempt: Attempt) -> End:
        """Kill decoders, one request after the other, so that no other request loses two decoders."""
        async with self._killing:
            frontend = self._system.frontend.pid
            if not killing.times:
                kill_all(frontend)
            sent = asyncio.create_task(self._send(attempt._replace(payload=killing.call)))
            killed: list[int] = []
            for _ in range(killing.times):
                kill = asyncio.create_task(kill_at_work(frontend, _KILLED_WITHIN, spared=killed))
                await asyncio.wait((sent, kill), return_when=asyncio.FIRST_COMPLETED)
                if not kill.done():
                    kill.cancel()
                    break
                killed.append(kill.result())
            return await sent

    async def special(self) -> None:
        """Send each expensive request once."""
        for case in http_calls.special_cases(Random(1)):
            end = await http_calls.call(self._system.http_port, case)
            self._findings.ended(f"http {case.path}", end, None, repr(case.raw[:200]), len(case.raw))
        for rpc in self._attacks.rpcs:
            if rpc.method in ("Generate", "Tokenize", "Session", "EngineSession"):
                end = await self._call(Case(rpc, [bytes(65 * 1024 * 1024)]), Random(0))
                self._findings.ended(rpc.name, end, None, "65 MiB of zeros", 65 * 2**20)

    async def control(self, count: int) -> None:
        """Send hostile control calls, such as sleep, and then wake the system up. Runs without other load."""
        chosen = [rpc for rpc in rpcs() if rpc.port == "admin" and rpc.method in CONTROL]
        for number in range(count):
            rng = Random(f"control {number}")
            case = rpc_calls.make_case(rng.choice(chosen), rng)._replace(cancel=None, timeout=10.0)
            end = await self._call(case, rng)
            self._findings.ended(case.rpc.name, end, None, f"control {number}: {case.sent!r:.500}", len(case.sent[0]))
        for method in ("WakeUp", "Resume"):
            rpc = next(rpc for rpc in chosen if rpc.method == method)
            await self._call(Case(rpc, [b""]), Random(0))

    async def valid(self, count: int) -> None:
        """Send ``count`` valid and cheap requests at the same rate."""
        start = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for index in range(count):
                tasks.create_task(self._valid_one(Random(f"valid {index}")))
                if (ahead := start + (index + 1) / self._rate - time.monotonic()) > 0.002:
                    await asyncio.sleep(ahead)

    async def _valid_one(self, rng: Random) -> None:
        if rng.random() < _HTTP_SHARE:
            raw = http_calls.request("POST", "/tokenize", b'{"prompt":"a"}', [])
            end = await http_calls.call(self._system.http_port, HttpCase("/tokenize", raw, valid=True))
            self._findings.ended("valid http /tokenize", end, None, "", 0)
            return
        rpc = rng.choice([rpc for rpc in self._attacks.rpcs if rpc.method in _CHEAP and rpc.port == "frontend"])
        end = await self._call(Case(rpc, cheap(rpc), valid=True), rng)
        self._findings.ended(f"valid {rpc.name}", end, None, "", 0)

    async def _call(self, case: Case, rng: Random) -> End:
        channel = rng.choice(self._channels[case.rpc.port])
        try:
            return await asyncio.wait_for(rpc_calls.call(channel, case), case.timeout + _PATIENCE)
        except TimeoutError:
            return End("(no end)", f"no end {_PATIENCE} s after its deadline")
