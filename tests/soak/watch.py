"""Resource use of the processes, sampled from outside, and checks that it has not grown."""

import asyncio
import contextlib
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import httpx
import msgspec
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.processes import Service

IDLE = "idle"


class Held(msgspec.Struct, frozen=True):
    """Sample of the resource use of one process.

    Attributes:
        at: Time of the sample, in seconds since the run began.
        tasks: Number of asyncio tasks, from the process's metrics.
        phase: Phase of the run.
        children: Number of child processes.
        media_mib: Processed media in the cache, in MiB.
        encoder_usage: Used share of the encoder cache, 0 to 1.
        leased_blocks: Blocks leased to other engines.
        arena_blocks: Blocks that are being sent to other engines.
        host_usage: Used share of the host memory tier, 0 to 1.
        disk_usage: Used share of the disk tier, 0 to 1.
    """

    at: float
    service: str
    pid: int
    rss_mib: float
    fds: int
    threads: int
    tasks: int
    phase: str
    children: int = 0
    media_mib: float = 0.0
    encoder_usage: float = 0.0
    leased_blocks: float = 0.0
    arena_blocks: float = 0.0
    host_usage: float = 0.0
    disk_usage: float = 0.0


class Tolerance(msgspec.Struct, frozen=True):
    """Allowed increase of a quantity between the idle samples after the warm-up and at the end: an amount or a fraction."""

    most: float
    share: float = 0.0

    def allows(self, start: float, end: float) -> bool:
        """Return whether the increase is within the tolerance."""
        return end - start <= max(self.most, self.share * start)


TOLERANCES: Mapping[str, Tolerance] = {
    "rss_mib": Tolerance(16, 0.08),  # allocators do not return their peak memory
    "fds": Tolerance(4),  # some connections close later
    "threads": Tolerance(4),  # thread pools start threads on first use
    "tasks": Tolerance(3),
    "children": Tolerance(0),
}


class Growth(msgspec.Struct, frozen=True):
    """Growth of one quantity of a process that lived for the entire run. ``per_minute`` is the slope under load, by least
    squares.
    """

    service: str
    what: str
    start: float
    end: float
    per_minute: float
    allowed: bool


class Watch:
    """Samples the resource use of services. ``phase`` is the phase of new samples: IDLE while there are no requests."""

    def __init__(self, services: Mapping[str, Service]) -> None:
        self.services = services
        self._began = time.monotonic()
        self.phase = ""
        self.samples: list[Held] = []

    async def run(self, interval: float) -> None:
        """Sample until cancelled."""
        while True:
            await self.sample()
            await asyncio.sleep(interval)

    async def sample(self) -> None:
        """Take a sample of each running service. Services that are frozen, starting, or just ended are skipped."""
        async with httpx.AsyncClient(timeout=1, verify=False, trust_env=False) as http:
            found = await asyncio.gather(*(self._sample(http, name) for name in self.services))
        self.samples += [held for held in found if held is not None]

    async def _sample(self, http: httpx.AsyncClient, name: str) -> Held | None:
        service = self.services[name]
        try:
            text = await metrics(http, service)
            tasks = gauge(text, "penstock:asyncio_tasks")
            status, fds = process(service.pid)
        except (httpx.HTTPError, OSError):
            return None
        if "VmRSS:" not in status:  # The process has ended but is still a zombie.
            return None
        rss, threads = (int(re.findall(rf"^{key}:\s+(\d+)", status, re.MULTILINE)[0]) for key in ("VmRSS", "Threads"))
        at = time.monotonic() - self._began
        return Held(
            at,
            name,
            service.pid,
            rss / 1024,
            fds,
            threads,
            int(tasks),
            self.phase,
            children=len(children_of(service.pid)),
            media_mib=_media_bytes(text) / 2**20,
            encoder_usage=gauge(text, "penstock:encoder_cache_usage", 0.0),
            leased_blocks=gauge(text, "penstock:kv_leased_blocks", 0.0),
            arena_blocks=gauge(text, "penstock:kv_arena_blocks", 0.0),
            host_usage=total(text, "penstock:kv_tier_usage_perc", medium="host"),
            disk_usage=total(text, "penstock:kv_tier_usage_perc", medium="disk"),
        )

    def growth(self, busy: str) -> list[Growth]:
        """Return the growth of the processes that were idle before and after the phase ``busy``. Raises RuntimeError if
        there are none.
        """
        by_process: dict[tuple[str, int], list[Held]] = defaultdict(list)
        for held in self.samples:
            by_process[held.service, held.pid].append(held)
        found = []
        for (service, _), samples in by_process.items():
            working = [held for held in samples if held.phase == busy]
            idle = [held for held in samples if held.phase == IDLE]
            if not working or not idle or not idle[0].at < working[0].at < idle[-1].at:
                continue
            before = [held for held in idle if held.at < working[0].at]
            for what, tolerance in TOLERANCES.items():
                start, end = getattr(before[-1], what), getattr(idle[-1], what)
                slope = per_minute([(held.at, getattr(held, what)) for held in working])
                found.append(Growth(service, what, start, end, slope, tolerance.allows(start, end)))
        if not found:
            raise RuntimeError("no process lived throughout")
        return found


def process(pid: int) -> tuple[str, int]:
    """Return the process's status file and its number of open files. Raises FileNotFoundError if the process has ended."""
    folder = Path(f"/proc/{pid}")
    return (folder / "status").read_text(), len(list((folder / "fd").iterdir()))


def children_of(pid: int) -> list[int]:
    """Return the ids of the process's children, started by any of its threads."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process may just have ended
                found += map(int, (thread / "children").read_text().split())
    return found


def per_minute(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope per minute of the regression line through (seconds, value). Returns 0 for fewer than two points."""
    if len(points) < 2:
        return 0.0
    return statistics.linear_regression(*zip(*points, strict=True)).slope * 60


async def metrics(http: httpx.AsyncClient, service: Service) -> str:
    """Return the text of a service's ``/metrics``."""
    response = await http.get(f"http://127.0.0.1:{service.metrics_port}/metrics")
    return response.raise_for_status().text


def gauge(text: str, name: str, default: float | None = None) -> float:
    """Return the sum over the labels. If the metric does not exist, returns ``default``, or raises KeyError if that is
    None.
    """
    if (family := _families(text).get(name)) is not None:
        return sum(sample.value for sample in family.samples)
    if default is None:
        raise KeyError(name)
    return default


def total(text: str, name: str, **labels: str) -> float:
    """Return the sum of all samples with that name and these labels; 0 if there are none."""
    return sum(
        sample.value
        for family in _families(text).values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


@lru_cache(8)
def _families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def _media_bytes(text: str) -> float:
    return gauge(text, "penstock:media_store_bytes", 0.0) or gauge(text, "penstock:receiver_cache_bytes", 0.0)
