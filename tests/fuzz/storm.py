"""The storm: many hostile requests at once, at a bounded rate, each of which can be made again from its seed and number."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from random import Random

import grpc

from penstock_common.rpc.channel import make_channel
from tests.fuzz import http2_garbage, http_calls, rpc_calls
from tests.fuzz.rpc_calls import Case, End
from tests.fuzz.rpcs import CONTROL, Rpc, cheap, rpcs
from tests.fuzz.system import System
from tests.fuzz.tally import Tally

_HTTP_SHARE = 0.25
_GARBAGE_SHARE = 0.01
_CHANNELS = 4
_PATIENCE = 15.0
"""Seconds that a call may take beyond its deadline."""
_CHEAP = ("Tokenize", "Detokenize", "GetModel", "ListModels", "HealthCheck", "GetLoads")


class Storm:
    """``async with Storm(...)``: connections are open. ``rate``: requests per second, at most."""

    def __init__(self, system: System, tally: Tally, *, seed: int, rate: float, at_once: int) -> None:
        self._system = system
        self._tally = tally
        self._seed = seed
        self._rate = rate
        self._at_once = at_once
        self._rpcs = [rpc for rpc in rpcs() if rpc.method not in CONTROL or rpc.port != "admin"]
        self._rpcs = [rpc for rpc in self._rpcs if rpc.method not in ("StartProfile", "StopProfile")]
        self._channels: dict[str, list[grpc.aio.Channel]] = {}
        self._next = 0

    async def __aenter__(self) -> "Storm":
        for name, address in self._system.addresses.items():
            # The client takes any message, so that limits are the server's.
            limit = 2**31 - 1
            self._channels[name] = [make_channel(address, max_message_bytes=limit) for _ in range(_CHANNELS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for channels in self._channels.values():
            for channel in channels:
                await channel.close()

    async def hostile(self, count: int, report: Callable[[], None] = lambda: None) -> None:
        """Send so many hostile requests."""
        await self._paced(count, self._one, report)

    async def valid(self, count: int) -> None:
        """Send so many that are valid and cheap, at the same pace."""
        await self._paced(count, self._valid_one)

    async def one(self, number: int) -> None:
        """Send the hostile request of this number again."""
        await self._one(number)

    async def special(self) -> None:
        """Send what costs more, each once."""
        rng = Random(self._seed)
        for case in http_calls.special_cases(rng):
            self._tally.add(
                f"http {case.path}",
                await http_calls.call(self._system.http_port, case),
                repr(case.raw[:200]),
                len(case.raw),
            )
        for rpc in self._rpcs:
            if rpc.method in ("Generate", "Tokenize", "Session", "EngineSession"):
                case = Case(rpc, [b"\x0a" + b"\xff\xff\xff\x7f", bytes(65 * 1024 * 1024)][1:])
                self._tally.add(rpc.name, await self._call(case, Random(0)), "65 MiB of zeros", 65 * 2**20)

    async def control(self, count: int) -> None:
        """Hostile calls of what puts the system to sleep, then wake it up. Nobody else may be there."""
        chosen = [rpc for rpc in rpcs() if rpc.port == "admin" and rpc.method in CONTROL]
        for number in range(count):
            rng = Random(f"control {self._seed} {number}")
            rpc = rng.choice(chosen)
            case = rpc_calls.make_case(rpc, rng)._replace(cancel=None, timeout=10.0)
            self._tally.add(
                rpc.name, await self._call(case, rng), f"control {number}: {case.sent!r:.500}", len(case.sent[0])
            )
        for method in ("WakeUp", "Resume"):
            rpc = next(rpc for rpc in chosen if rpc.method == method)
            await self._call(Case(rpc, [b""]), Random(0))

    async def _paced(
        self, count: int, one: Callable[[int], Awaitable[None]], report: Callable[[], None] = lambda: None
    ) -> None:
        room = asyncio.Semaphore(self._at_once)
        start, told = time.monotonic(), time.monotonic()
        tasks: set[asyncio.Task[None]] = set()

        async def run(number: int) -> None:
            try:
                await one(number)
            finally:
                room.release()

        for index in range(count):
            await room.acquire()
            task = asyncio.create_task(run(self._next))
            self._next += 1
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if (ahead := start + (index + 1) / self._rate - time.monotonic()) > 0.002:
                await asyncio.sleep(ahead)
            if time.monotonic() - told > 10.0:
                told = time.monotonic()
                report()
        await asyncio.gather(*tasks)

    async def _one(self, number: int) -> None:
        rng = Random(f"{self._seed} {number}")
        how = rng.random()
        if how < _GARBAGE_SHARE:
            address = rng.choice(list(self._system.addresses.values()))
            self._tally.add("(HTTP/2 garbage)", await http2_garbage.connect(address, rng), f"number {number}", 0)
        elif how < _GARBAGE_SHARE + _HTTP_SHARE:
            case = http_calls.make_case(rng)
            end = await http_calls.call(self._system.http_port, case)
            self._tally.add(f"http {case.path}", end, f"number {number}: {case.raw[:1500]!r}", len(case.raw))
        else:
            rpc = rng.choices(self._rpcs, [rpc.weight for rpc in self._rpcs])[0]
            call = rpc_calls.make_case(rpc, rng)
            end = await self._call(call, rng)
            sent = f"number {number}: {call.metadata or ''} {call.sent!r:.1500}"
            self._tally.add(rpc.name, end, sent, sum(map(len, call.sent)))

    async def _valid_one(self, number: int) -> None:
        rng = Random(f"valid {self._seed} {number}")
        if rng.random() < _HTTP_SHARE:
            raw = http_calls.request("POST", "/tokenize", b'{"prompt":"a"}', [])
            end = await http_calls.call(self._system.http_port, http_calls.HttpCase("/tokenize", raw, valid=True))
            self._tally.add("valid http /tokenize", end, "", 0)
            return
        rpc = rng.choice([rpc for rpc in self._rpcs if rpc.method in _CHEAP and rpc.port == "frontend"])
        self._tally.add(f"valid {rpc.name}", await self._call(Case(rpc, cheap(rpc), valid=True), rng), "", 0)

    async def _call(self, case: Case, rng: Random) -> End:
        channel = rng.choice(self._channels[case.rpc.port])
        try:
            return await asyncio.wait_for(rpc_calls.call(channel, case), case.timeout + _PATIENCE)
        except TimeoutError:
            return End("(no end)", f"no end {_PATIENCE} s after its deadline")


__all__ = ["Rpc", "Storm"]
