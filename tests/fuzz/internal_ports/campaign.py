"""Foreign connections to every internal port of a system, while its streams continue."""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.fakes.patience import PATIENCE
from tests.fakes.systems.cluster import Cluster
from tests.fakes.systems.rank_group import RankGroup
from tests.fuzz.internal_ports import foreign
from tests.fuzz.internal_ports.answering import speaks, still_answers
from tests.fuzz.internal_ports.forming import Forming
from tests.fuzz.internal_ports.steady import Steady
from tests.fuzz.internal_ports.systems import KINDS, Kind, Port, held_by, internal, ports_of, services_of

_MOST_PORTS = 16
"""Maximum number of ports with open foreign connections while a system starts."""


class Limits(msgspec.Struct, frozen=True):
    """Limits of the campaign: ``gap`` of a stream in seconds, and memory ``growth`` of a process in MiB."""

    gap: float = 1.0
    growth: int = 64


class Plan(NamedTuple):
    """Plan of the campaign.

    Attributes:
        connections: Number of concurrent connections of each kind to each port.
        seconds: Seconds for which the connections stay open.
        streams: Number of concurrent streams.
        tokens: Number of tokens of each stream.
        forms: Whether to open the same number of connections to each new port while the system starts.
        patience: Maximum seconds until a stream ends.
    """

    connections: int = 1000
    streams: int = 56
    tokens: int = 60
    seconds: float = 4.0
    systems: tuple[str, ...] = tuple(KINDS)
    kinds: tuple[str, ...] = foreign.KINDS
    forms: bool = True
    patience: float = PATIENCE


class Row(NamedTuple):
    """Results of the connections of one kind to one port, and of the concurrent streams.

    ``growth`` is the memory growth of each service in MiB.
    """

    system: str
    port: Port
    speaks: str
    kind: str
    opened: int
    ended: int
    gap: float
    problems: int
    right: int
    growth: dict[str, float]
    answers: bool

    @property
    def line(self) -> str:
        """Return a line for the table."""
        most = max(self.growth, key=lambda name: self.growth[name])
        return (
            f"{self.system:12} {self.port.service:18} {self.port.port:5} {self.speaks:5} {self.kind:13} {self.opened:5} "
            f"{self.ended:5} {self.gap:7.2f} {self.problems:6} {self.right:6} {self.growth[most]:7.1f} {most:18} "
            f"{'yes' if self.answers else 'NO'}"
        )


HEADER = (
    "system       service             port       kind         opened ended   gap s failed  right  growth of                 "
    "  answers"
)


class Result(msgspec.Struct):
    """Result of the campaign. ``wrong`` has one line per problem; ``formed`` lists the ports that were attacked while
    systems started.
    """

    rows: list[Row] = []
    wrong: list[str] = []
    formed: dict[str, list[str]] = {}


async def run(plan: Plan, limits: Limits, tell: Callable[[str], None] = print) -> Result:
    """Attack all systems, one after the other."""
    result = Result()
    foreign.allow_files(plan.connections * _MOST_PORTS if plan.forms else plan.connections)
    for name in plan.systems:
        with tempfile.TemporaryDirectory() as folder:
            await _System(name, KINDS[name], plan, limits, result, tell).run(Path(folder))
    return result


class _Stopped(Exception):  # noqa: N818 - what the system has
    """The streams have stopped, so nothing more can be tested on this system."""


class _System:
    """A running system under attack."""

    def __init__(
        self, name: str, kind: Kind, plan: Plan, limits: Limits, result: Result, tell: Callable[[str], None]
    ) -> None:
        self._name, self._kind, self._plan, self._limits = name, kind, plan, limits
        self._result, self._tell = result, tell

    async def run(self, folder: Path) -> None:
        if self._plan.forms:
            await self._forms(self._kind.make(folder), folder)
        began = time.monotonic()
        try:
            async with self._kind.make(folder) as system:
                await _whole(system)
                self._tell(f"{self._name}: formed in {time.monotonic() - began:.1f} s undisturbed")
                await self._floods(system)
        except _Stopped as e:
            self._wrong(str(e))

    async def _floods(self, system: Cluster) -> None:
        steady = Steady(system, self._kind, self._plan.streams, self._plan.tokens, self._plan.patience)
        await steady.learn()
        async with steady:
            since = time.monotonic()
            await steady.answered(self._plan.streams)
            await asyncio.sleep(self._plan.seconds)
            self._tell(f"{self._name}: undisturbed, the longest gap is {steady.longest_gap(since):.2f} s")
            self._tell(HEADER)
            for port in internal([*ports_of(services_of(system))]):
                spoken = await speaks(port)
                for kind in self._plan.kinds:
                    row = await self._flood(system, steady, port, spoken, kind)
                    self._result.rows.append(row)
                    self._tell(row.line)
                    self._judge(row)
        for what, times in steady.problems.items():
            self._wrong(f"{times} of {steady.num_answers} streams: {what}")

    async def _flood(self, system: Cluster, steady: Steady, port: Port, spoken: str, kind: str) -> Row:
        services = services_of(system)
        before = {name: held_by(service) for name, service in services.items() if service.alive}
        right, problems = steady.right, steady.problems.total()
        steady.forget()
        since = time.monotonic()
        told = await _foreign(port, kind, self._plan.connections, self._plan.seconds)
        try:
            await steady.answered(self._plan.streams)  # begun beside them, or afterwards
        except TimeoutError:
            where = f"{kind} at {port.service}, port {port.port} ({spoken})"
            raise _Stopped(f"{where}: the streams stood still for {self._plan.patience:g} s and more") from None
        return Row(
            system=self._name,
            port=port,
            speaks=spoken,
            kind=kind,
            opened=told["opened"],
            ended=told["ended"],
            gap=steady.longest_gap(since),
            problems=steady.problems.total() - problems,
            right=steady.right - right,
            growth={name: held_by(services[name]) - held for name, held in before.items() if services[name].alive},
            answers=await still_answers(port, spoken),
        )

    def _judge(self, row: Row) -> None:
        where = f"{row.kind} at {row.port.service}, port {row.port.port} ({row.speaks})"
        if row.gap > self._limits.gap:
            self._wrong(f"{where}: a stream stood still for {row.gap:.2f} s; the limit is {self._limits.gap:g} s")
        for name, growth in row.growth.items():
            if growth > self._limits.growth:
                self._wrong(f"{where}: {name} grew by {growth:.0f} MiB; the limit is {self._limits.growth} MiB")
        if not row.answers:
            self._wrong(f"{where}: the port does not answer any more")

    async def _forms(self, system: Cluster, folder: Path) -> None:
        """Start the system while foreign connections are opened to every new port. Then run all streams."""
        began = time.monotonic()
        try:
            services, count = services_of(system), self._plan.connections
            async with Forming(services, folder, count, self._plan.kinds) as forming, system:
                await _whole(system)
                formed = time.monotonic() - began
                steady = Steady(system, self._kind, self._plan.streams, self._plan.tokens, self._plan.patience)
                await steady.learn()
        except (TimeoutError, RuntimeError, AssertionError) as e:
            self._wrong(f"it did not form beside foreign connections: {type(e).__name__}: {str(e)[-800:]}")
            return
        met = [f"{port.service} {port.port}" for port in forming.met]
        self._result.formed[self._name] = met
        self._tell(
            f"{self._name}: formed in {formed:.1f} s; {self._plan.connections} connections met {len(met)} ports: {met}"
        )

    def _wrong(self, what: str) -> None:
        self._result.wrong.append(f"{self._name}: {what}")
        self._tell(f"wrong: {self._result.wrong[-1]}")


async def _whole(system: Cluster) -> None:
    if isinstance(system, RankGroup):
        await system.whole()


async def _foreign(port: Port, kind: str, count: int, seconds: float) -> Any:
    words: Sequence[str] = (port.host, str(port.port), kind, str(count), str(seconds))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", foreign.__name__, *words, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(PATIENCE):
        output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the foreign connections to {port.address} ended with exit code {process.returncode}")
    return json.loads(output)
