"""Monitor of the system during the storm: crashed processes, lost connections, memory growth and long waits."""

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NamedTuple

from tests.fuzz.neighbour import Neighbour
from tests.fuzz.system import Probed, System

EVERY = 0.25
STARVED = 5.0
"""Maximum CPU seconds of an engine until a neighbour's next token. CPU time does not depend on other load."""
HELD = 2000
"""Maximum CPU time in milliseconds for which one callback may block an event loop."""
_DEFECT = re.compile(r"unexpected error|Unexpected \[|\[error *\]|\[critical *\]|never awaited|never retrieved", re.I)
_BY_THE_CLOCK = "the event loop is blocked"
"""Log event that is no defect on a busy machine. ``Watch`` measures the CPU time of blocked loops instead."""
_LOST = re.compile(r"engine lost.*engine-\d|lost their engine|given up")
_WHY = re.compile(r"\w*(?:Error|Exception)\b|larger than max|QUARANTINED|RETRIES_EXHAUSTED|closed|wedged")
_FRAME = re.compile(r"[ \t|+]")
"""Pattern for the beginning of a traceback's lines, except the last one."""
_SAID = re.compile(r"(?:reason|why)=\D{1,60}")
_TIME = re.compile(r"^[0-9:T.Z-]* ?")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Incident(NamedTuple):
    """An incident that no request may cause. ``kind`` is compared to find the cause; ``worn`` means that the system is
    unusable.
    """

    kind: str
    what: str
    worn: bool = False


class Watch:
    """Monitor: ``async with Watch(system, neighbour)``. ``incidents`` has the incidents since the last ``take``."""

    def __init__(self, system: System, neighbour: Neighbour) -> None:
        self._system = system
        self._neighbour = neighbour
        self._seen = {service.service: 0 for service in system.services}
        self._holds = {service.service: 0 for service in system.services}
        self._most: dict[str, int] = {}
        self._since: dict[str, tuple[int, float, list[float]]] = {}
        self._incidents: list[Incident] = []
        self.peaks: dict[str, int] = {}
        self.alarm = asyncio.Event()
        self.on_alarm: Callable[[], None] = lambda: None

    async def __aenter__(self) -> "Watch":
        for service in self._system.services:
            service.forget_peak()
            self._most[service.service] = service.memory("VmRSS") + self._system.variant.peak
        self.look()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def down(self) -> bool:
        """Whether a process has ended."""
        return not all(service.alive for service in self._system.services)

    def take(self) -> list[Incident]:
        """Return the incidents, one per kind."""
        found = {incident.kind: incident for incident in reversed(self._incidents)}
        self._incidents.clear()
        self.alarm.clear()
        return [*found.values()]

    def neighbour_error(self, error: str) -> None:
        """Record that a neighbour got a wrong answer."""
        kind = error.partition(":")[2].strip()[:40] if "another answer" not in error else "another answer"
        self._add(Incident(f"neighbour: {kind}", f"a neighbour's {error}"))

    async def settle(self, seconds: float = 2 * EVERY) -> None:
        """Watch until ended requests cannot cause incidents any more."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await asyncio.sleep(EVERY)
            self.look()

    def look(self) -> None:
        """Check for incidents."""
        for head in self._system.led():
            self._add(Incident("led to a private host", f"the private host was asked: {head}"))
        for service in self._system.services:
            if not service.alive:
                if not any(f"process {service.service} " in known.what for known in self._incidents):
                    end = service.log().strip().splitlines()[-1:]
                    self._add(
                        Incident(
                            f"{_role(service)} ended", f"the process {service.service} has ended: {end}", worn=True
                        )
                    )
                continue
            self._memory(service)
            self._log(service)
            self._loop(service)
        if not self._system.variant.pools:  # with pooling, one step may compute an entire long prompt
            self._starved()

    def _add(self, incident: Incident) -> None:
        self._incidents.append(incident)
        self.alarm.set()
        self.on_alarm()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(EVERY)
            self.look()

    def _memory(self, service: Probed) -> None:
        peak, name = service.memory("VmHWM"), service.service
        self.peaks[name] = max(self.peaks.get(name, 0), peak)
        if peak > self._most[name]:
            self._add(
                Incident(
                    f"memory of {_role(service)}",
                    f"{name} held {peak} MiB; {self._most[name]} MiB are allowed",
                    worn=True,
                )
            )
            service.forget_peak()
            self._most[name] = service.memory("VmRSS") + self._system.variant.peak

    def _log(self, service: Probed) -> None:
        more = service.more_log(self._seen[service.service])
        self._seen[service.service] += len(more)
        for line in _notable(_COLOURS.sub("", more.decode(errors="backslashreplace"))):
            kind = "a session broke" if _LOST.search(line) else f"log of {_role(service)}"
            why = _WHY.findall(line) or _SAID.findall(line) or [_TIME.sub("", line)[:60]]
            self._add(Incident(f"{kind}: {why[-1]}", f"{service.service}: {line}"))

    def _loop(self, service: Probed) -> None:
        holds = self._system.holds(service)
        for block in holds[self._holds[service.service] :]:
            if block["cpu_ms"] > HELD:
                stack = " < ".join(reversed(block["stack"][-4:]))
                what = f"{service.service}: its loop was held for {block['cpu_ms']} ms: {stack}"
                self._add(Incident(f"loop of {_role(service)}", what))
        self._holds[service.service] = len(holds)

    def _starved(self) -> None:
        now = [engine.cpu() for engine in self._system.engines]
        for kind, count in self._neighbour.counts.items():
            last, moment, computed = self._since.get(kind, (-1, 0.0, now))
            used = max(a - b for a, b in zip(now, computed, strict=True))
            waits = count == last and kind in self._neighbour.flowing
            if waits and used <= STARVED:
                continue
            if waits:
                waited = time.monotonic() - moment
                what = f"the neighbour {kind} got nothing for {waited:.1f} s, in which an engine computed {used:.1f} s"
                self._add(Incident("starved", what))
            self._since[kind] = count, time.monotonic(), now


def _role(service: Probed) -> str:
    """Return the service's kind without its number."""
    return service.service.partition("-")[0]


def _notable(text: str) -> Iterator[str]:
    """Return the log lines that report a defect. Of a traceback, return the line with the exception."""
    inside = False
    for line in text.splitlines():
        if "Traceback (most recent call last)" in line:
            inside = True
        elif inside:
            if line.strip() and not _FRAME.match(line):
                inside = False
                yield line[:300]
        elif (_DEFECT.search(line) and _BY_THE_CLOCK not in line) or _LOST.search(line):
            yield line[:400]
