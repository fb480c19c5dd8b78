"""The coordinator as a process, with engines and frontends as real gRPC streams on the loopback interface.

One process has the engines and another has the frontends. The parent measures the coordinator's processor time.
Frontends search the received bytes for the names of new engines; decoding of views is not measured here.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from penstock.coordinator.v1 import messages_pb2 as pb
from penstock_common.rpc.channel import make_channel
from tests.benchmarks.coordinator.fleet import MODEL, quantile, register, report
from tests.fakes.processes import Service

METHOD = "/penstock.coordinator.v1.CoordinatorService/"
STREAMS_PER_CHANNEL = 50
NEWCOMER = "newcomer"
NEWCOMERS_EVERY = 0.5
REPORT_INTERVAL = 0.1
"""Seconds between two reports of an engine, unless the coordinator tells it otherwise."""
LIMIT = 90.0
"""Timeout in seconds for connecting all clients, and for their end."""


class Engines:
    """Engine streams, which register and send reports at the coordinator's interval."""

    def __init__(self, address: str, count: int) -> None:
        self._address, self._count = address, count
        self._channels = [make_channel(address) for _ in range(count // STREAMS_PER_CHANNEL + 1)]
        self.num_reports = 0
        self.registered = 0
        self.joined: dict[str, float] = {}

    async def run(self, seconds: float) -> dict[str, Any]:
        """Register the engines and report for ``seconds``. Returns counts of the work done."""
        tasks = [asyncio.create_task(self._engine(number)) for number in range(self._count)]
        while self.registered < self._count:
            await asyncio.sleep(0.1)
        print("up", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        before, began = self.num_reports, time.monotonic()
        number = 0
        while time.monotonic() < began + seconds:
            name = f"{NEWCOMER}-{number}"
            tasks.append(asyncio.create_task(self._newcomer(name, self._count + number)))
            number += 1
            await asyncio.sleep(NEWCOMERS_EVERY)
        reports = (self.num_reports - before) / (time.monotonic() - began)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return {"reports_per_second": reports, "joined": self.joined}

    def _call(self, number: int) -> Any:
        return self._channels[number // STREAMS_PER_CHANNEL % len(self._channels)].stream_stream(
            METHOD + "EngineSession",
            request_serializer=pb.EngineReport.SerializeToString,
            response_deserializer=pb.EngineCommand.FromString,
        )()

    async def _engine(self, number: int) -> None:
        call = self._call(number)
        await call.write(register(number))
        await call.read()
        self.registered += 1
        interval = [REPORT_INTERVAL]
        listening = asyncio.create_task(self._listen(call, interval))
        try:
            step = 0
            await asyncio.sleep(number % 97 / 97 * interval[0])
            while True:
                step += 1
                await call.write(report(number, step))
                self.num_reports += 1
                await asyncio.sleep(interval[0])
        finally:
            listening.cancel()

    async def _listen(self, call: Any, interval: list[float]) -> None:
        while isinstance(command := await call.read(), pb.EngineCommand):
            if command.HasField("report_interval"):
                interval[0] = max(command.report_interval.seconds, REPORT_INTERVAL)

    async def _newcomer(self, name: str, number: int) -> None:
        call = self._call(number)
        message = register(number)
        message.register.engine_id = name
        await asyncio.sleep(0.05)
        self.joined[name] = time.monotonic()
        await call.write(message)
        await call.read()
        await asyncio.Event().wait()


class Frontends:
    """Frontend streams, which read views."""

    def __init__(self, address: str, count: int) -> None:
        self._count = count
        self._channels = [make_channel(address) for _ in range(count // STREAMS_PER_CHANNEL + 1)]
        self.num_bytes = self.num_views = self.up = 0
        self.seen: dict[str, list[float]] = {}

    async def run(self, seconds: float) -> dict[str, Any]:
        """Read views for ``seconds``. Returns counts, and the times at which new engines were seen."""
        tasks = [asyncio.create_task(self._frontend(number)) for number in range(self._count)]
        while self.up < self._count:
            await asyncio.sleep(0.1)
        print("up", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        num_bytes, num_views, began = self.num_bytes, self.num_views, time.monotonic()
        await asyncio.sleep(seconds)
        took = (time.monotonic() - began) * self._count
        result = {
            "bytes_per_second": (self.num_bytes - num_bytes) / took,
            "views_per_second": (self.num_views - num_views) / took,
        }
        await asyncio.sleep(2.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return result | {"seen": self.seen}

    async def _frontend(self, number: int) -> None:
        call: Any = self._channels[number // STREAMS_PER_CHANNEL].stream_stream(
            METHOD + "FrontendSession", request_serializer=pb.FrontendReport.SerializeToString
        )()
        await call.write(pb.FrontendReport(hello=hello(number)))
        wanted = views = 0
        while isinstance(data := await call.read(), bytes):
            self.up += views == 0
            views += 1
            self.num_bytes += len(data)
            self.num_views += 1
            while f"{NEWCOMER}-{wanted}".encode() in data:
                self.seen.setdefault(f"{NEWCOMER}-{wanted}", []).append(time.monotonic())
                wanted += 1


def hello(number: int) -> pb.FrontendHello:
    """Return the first message of a frontend."""
    views = pb.ViewSubscription(deltas=True, model=MODEL)
    return pb.FrontendHello(frontend_id=f"frontend-{number}", incarnation="1", views=views)


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(engines: int, frontends: int, seconds: float) -> dict[str, float]:
    """Run the coordinator and two client processes. Returns the results; times are in seconds."""
    service = Service("penstock_coordinator", restart_grace=0, lease_seconds=60)
    sides: list[Any] = []
    async with asyncio.timeout(seconds + LIMIT):
        await service.start()
        try:
            await service.serving()
            address = f"127.0.0.1:{service.port}"
            for kind, count in (("engines", engines), ("frontends", frontends)):
                sides.append(await _start(kind, address, count, seconds))
                await _line(sides[-1], "up")
            before, began = processor_seconds(service.pid), time.monotonic()
            for side in sides:
                side.stdin.write(b"go\n")
            told = await _line(sides[0])
            share = (processor_seconds(service.pid) - before) / (time.monotonic() - began)
            read = await _line(sides[1])
            for side in sides:
                await side.wait()
        finally:
            await service.kill()
            for side in sides:
                if side.returncode is None:
                    side.kill()
            service.remove_log()
    lags = [at - told["joined"][name] for name, times in read["seen"].items() for at in times]
    last = [max(times) - told["joined"][name] for name, times in read["seen"].items() if len(times) == frontends]
    return {
        "core_share": share,
        "bytes_per_second": read["bytes_per_second"],
        "views_per_second": read["views_per_second"],
        "reports_per_second": told["reports_per_second"],
        "lag_p50": quantile(lags, 0.5),
        "lag_p99": quantile(lags, 0.99),
        "everywhere_p50": quantile(last, 0.5),
        "everywhere_max": max(last, default=float("nan")),
        "newcomers_everywhere": len(last) / max(len(told["joined"]), 1),
    }


async def _start(side: str, address: str, count: int, seconds: float) -> Any:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.benchmarks.coordinator.streams",
        *(side, address, str(count), str(seconds)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**26,
    )


async def _line(process: Any, expected: str = "") -> Any:
    line = (await process.stdout.readline()).decode().strip()
    if not line or (expected and line != expected):
        raise RuntimeError(f"the clients said {line!r}")
    return line if expected else json.loads(line)


def main() -> None:
    """Run a process with client streams."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["engines", "frontends"])
    parser.add_argument("address")
    parser.add_argument("count", type=int)
    parser.add_argument("seconds", type=float)
    arguments = parser.parse_args()

    async def run() -> dict[str, Any]:
        kind = Engines if arguments.side == "engines" else Frontends
        return await kind(arguments.address, arguments.count).run(arguments.seconds)

    print(json.dumps(asyncio.run(run())), flush=True)


if __name__ == "__main__":
    main()
