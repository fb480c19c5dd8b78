"""Well-behaved clients in a separate process. They send requests one after another and check the answers.

``python -m tests.fuzz.neighbour HOST:PORT HTTP_PORT KIND...`` first sends every request without other load and prints
``ready``. Then it continues until its input is closed. Each line it prints is JSON: ``{"ready": true}``, ``{"error":
...}``, or the progress since the last line: ``{"counts": {kind: tokens}, "flowing": [kind, ...], "gaps": [[moment,
seconds], ...], "waits": {kind: seconds}}``.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import grpc

from penstock.inference.v1 import service_pb2_grpc as rpc
from penstock_common.rpc.channel import make_channel
from tests.fakes.patience import PATIENCE
from tests.fuzz.neighbour_kinds import KINDS, VARIETY, Ask

_TELL = 0.25
_PATIENCE = 1.2 * PATIENCE
_START = PATIENCE


class Itl(NamedTuple):
    """Inter-token latencies in milliseconds."""

    p50: float
    p99: float
    longest: float
    count: int


class Neighbour:
    """The neighbour process. It calls ``on_error`` immediately with each error.

    Attributes:
        counts: Number of tokens or vectors by kind.
        flowing: Kinds that have received a part of an answer and wait for the next part.
        waits: Longest wait of each kind in seconds.
    """

    def __init__(self, address: str, http_port: int, kinds: Sequence[str], *, on_error: Callable[[str], None]) -> None:
        self._given = [address, str(http_port), *kinds]
        self._on_error = on_error
        self._process: asyncio.subprocess.Process | None = None
        self._ready = asyncio.Event()
        self.counts: dict[str, int] = {}
        self.flowing: list[str] = []
        self.gaps: list[tuple[float, float]] = []
        self.waits: dict[str, float] = {}

    async def __aenter__(self) -> "Neighbour":
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __name__,
            *self._given,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**24,
        )
        self._reading = asyncio.create_task(self._read())
        async with asyncio.timeout(_START):
            await self._ready.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        await self._reading

    def take_waits(self) -> dict[str, float]:
        """Return the longest waits since the last call."""
        waits, self.waits = self.waits, {}
        return waits

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            told = json.loads(line)
            if "error" in told:
                self._on_error(told["error"])
            elif "ready" in told:
                self._ready.set()
            else:
                self.counts, self.flowing = told["counts"], told["flowing"]
                self.gaps += [(at, gap) for at, gap in told["gaps"]]
                for kind, seconds in told["waits"].items():
                    self.waits[kind] = max(seconds, self.waits.get(kind, 0.0))


def between(gaps: Sequence[tuple[float, float]], spans: Sequence[tuple[float, float]]) -> Itl:
    """Return the latencies in time spans, each with a begin and an end (``time.monotonic``)."""
    chosen = [1e3 * gap for at, gap in gaps if any(start <= at < stop for start, stop in spans)]
    if len(chosen) < 2:
        return Itl(0.0, 0.0, 0.0, len(chosen))
    cuts = statistics.quantiles(chosen, n=100)
    return Itl(cuts[49], cuts[98], max(chosen), len(chosen))


class _Client:
    """The clients of the process."""

    def __init__(self, stub: rpc.InferenceServiceStub, http_port: int) -> None:
        self._stub = stub
        self._http_port = http_port
        self._expected: dict[tuple[str, int], Any] = {}
        self.counts: dict[str, int] = {}
        self.flowing: set[str] = set()
        self.gaps: list[tuple[float, float]] = []
        self.waits: dict[str, float] = {}
        self._waiting: dict[str, float] = {}
        """Start time of the current wait for a part of an answer, by kind."""

    async def learn(self, kind: str) -> None:
        """Record the expected answer, without other load."""
        for number in range(VARIETY):
            self._expected[kind, number] = await self._ask(kind, number)

    async def go_on(self, kind: str) -> None:
        """Repeat the requests of a kind."""
        number = 0
        while True:
            number = (number + 1) % VARIETY
            try:
                answer = await self._ask(kind, number)
            except (grpc.aio.AioRpcError, OSError, ValueError, TimeoutError) as e:
                _tell({"error": f"{kind}: {_reason(e)}"})
                await asyncio.sleep(0.3)
                continue
            expected = self._expected[kind, number]
            if not KINDS[kind].same(answer, expected):
                _tell({"error": f"{kind}: another answer than undisturbed: {_difference(answer, expected)}"})
            await asyncio.sleep(KINDS[kind].pause)

    async def _ask(self, kind: str, number: int) -> Any:
        if KINDS[kind].whole:
            self._waiting[kind] = time.monotonic()

        def came(count: int) -> None:
            now = time.monotonic()
            if kind in self._waiting:
                waited = self._waited(kind, now)
                if KINDS[kind].timed:
                    self.gaps.append((now, waited))
            self._waiting[kind] = now
            self.flowing.add(kind)
            self.counts[kind] = self.counts.get(kind, 0) + count

        try:
            async with asyncio.timeout(_PATIENCE):
                return await KINDS[kind].ask(Ask(self._stub, self._http_port, number, came))
        finally:
            self.flowing.discard(kind)
            self._waiting.pop(kind, None)

    def _waited(self, kind: str, now: float) -> float:
        """Return the seconds since the last part of an answer, and update the longest wait."""
        waited = now - self._waiting[kind]
        self.waits[kind] = max(waited, self.waits.get(kind, 0.0))
        return waited

    async def tell(self) -> None:
        """Print the progress repeatedly."""
        while True:
            await asyncio.sleep(_TELL)
            for kind in self._waiting:
                self._waited(kind, time.monotonic())
            gaps, self.gaps = self.gaps, []
            waits, self.waits = self.waits, {}
            _tell({"counts": self.counts, "flowing": [*self.flowing], "gaps": gaps, "waits": waits})


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"


def _difference(answer: Any, expected: Any) -> str:
    for name, value in expected.items():
        if (got := answer.get(name)) != value:
            at = next((i for i, (a, b) in enumerate(zip(got or (), value, strict=False)) if a != b), -1)
            return f"{name} differs at {at}: {str(got)[:120]} where it was {str(value)[:120]}"
    return f"{[*answer]} where there was {[*expected]}"


def _tell(line: object) -> None:
    print(json.dumps(line), flush=True)


async def _main(address: str, http_port: int, kinds: Sequence[str]) -> None:
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    async with make_channel(address) as channel:
        client = _Client(rpc.InferenceServiceStub(channel), http_port)
        for kind in kinds:
            await client.learn(kind)
        client.gaps.clear()
        client.waits.clear()
        _tell({"ready": True})
        tasks = [asyncio.create_task(work) for work in (client.tell(), *map(client.go_on, kinds))]
        await ended
        for task in tasks:
            task.cancel()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
