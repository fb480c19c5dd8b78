"""Two frontends, one prefill engine and two decode engines as processes, with proxies (cables) between them.

In a cell of the matrix, a request is handed over. At a point of the handoff, a process or the network fails.
"""

import asyncio
import contextlib
import json
import signal
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import grpc
import msgspec

from penstock.common.v1 import finish_pb2, sampling_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.status import from_rpc_error
from penstock_common.tensors.shared_memory import ROOT
from tests.fakes.engines.fake_executor import oracle_tokens
from tests.fakes.engines.kv_points import NAME, VARIABLE, Point
from tests.fakes.engines.transferring_oracle import BLOCK_SIZE
from tests.fakes.engines.worker_faults import installed
from tests.fakes.network.ports import free_port
from tests.fakes.network.tcp_proxy import TcpProxy
from tests.fakes.patience import PATIENCE
from tests.fakes.processes import KEPT, Service

BLOCKS, LENGTH = 13, 12
PROMPT_TOKENS = BLOCKS * BLOCK_SIZE + 5
VOCAB = 2048
POINTS = ("grant", "open", "first block", "middle block", "last block", "copy", "first token")
SILENCE = 0.5
"""Seconds without an answer after which an engine considers the source of blocks lost."""
LEASE = 1.0
Victim = Literal["source", "destination", "frontend", "network", "nobody"]
How = Literal["killed", "restarted", "stopped", "cut off", "black-holed", "left alone"]
ROWS: list[tuple[Victim, How]] = [
    ("nobody", "left alone"),
    *((who, how) for who in ("source", "destination", "frontend") for how in ("killed", "restarted", "stopped")),
    *((who, how) for who in ("source", "destination", "frontend", "network") for how in ("cut off", "black-holed")),
]
KINDS = {"delta": sampling_pb2.OUTPUT_KIND_DELTA, "final": sampling_pb2.OUTPUT_KIND_FINAL}


class Cell(msgspec.Struct, frozen=True):
    """Cell: ``victim`` fails in the way ``how`` when a request with ``n`` outputs of ``kind`` is at ``point``."""

    victim: Victim
    how: How
    point: str
    kind: str
    n: int

    def __str__(self) -> str:
        return f"{self.victim} {self.how}, {self.point}, {self.kind}, n={self.n}"


class Count(msgspec.Struct):
    """Counts of cell outcomes."""

    cells: int = 0
    streams: int = 0
    failed: int = 0
    lost: int = 0
    duplicated: int = 0
    differing: int = 0
    own: int = 0
    """Number of streams that ended because their frontend was killed."""
    left: int = 0
    """Number of cells after which resources were left."""

    def add(self, other: "Count") -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def is_good(self) -> bool:
        """Whether no cell had an error."""
        return not (self.failed or self.lost or self.duplicated or self.differing or self.left)


class Rig:
    """Rig: ``async with Rig(model, folder, transport)``. ``expected``: tokens of the sequences, by prompt and seed."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        transport: str,
        *,
        engine: str = "tests.fakes.engines.transferring_oracle",
        expected: Callable[[Sequence[int], int], list[int]] = lambda _, seed: oracle_tokens(seed, LENGTH, VOCAB),
        **flags: Any,
    ) -> None:
        self.problems: list[str] = []
        self._model = model
        self._expected = expected
        self._socket = folder / "points"
        self._num_requests = 0
        self._has_struck = False
        self._at: Callable[[Point], Awaitable[None]] | None = None
        found = installed(folder / "plugin", NAME, "tests.fakes.engines.kv_points")
        self.engines = [
            Service(
                engine,
                metrics_flag="metrics.port",
                model__path=model,
                engine_id=f"engine-{number}",
                role=role,
                cache__block_size=BLOCK_SIZE,
                cache__num_blocks=400,
                cache__min_load_tokens=1,
                executor__num_threads=1,
                kv_transfer__transport=transport,
                **({} if transport == "grpc" else {"kv_transfer__arena": "1MiB"}),
                kv_transfer__silence=SILENCE,
                kv_transfer__lease=LEASE,
                plugins=json.dumps([NAME]),
                **flags,
            )
            for number, role in enumerate(("prefill", "decode", "decode"))
        ]
        self.source = self.engines[0]
        self._pulled_from: list[TcpProxy] = []
        for each in self.engines:
            each.environment = {**found, VARIABLE: str(self._socket)}
            port = free_port()
            cable = TcpProxy(port)
            self._pulled_from.append(cable)
            each.add_flag("kv-transfer.port", port)
            each.add_flag("kv-transfer.advertise", f"127.0.0.1:{cable.port}")
        self._cables = [[TcpProxy(each.port) for each in self.engines] for _ in range(2)]
        """Cables of sessions, by frontend and engine."""
        self.frontends = [
            Service(
                "penstock_frontend",
                metrics_flag="http.port",
                model__path=model,
                frontend_id=f"frontend-{number}",
                engines=json.dumps([f"127.0.0.1:{cable.port}" for cable in cables]),
                http__host="127.0.0.1",
                disaggregation__min_prefill_tokens=2 * BLOCK_SIZE,
                disaggregation__overflow="false",
                detection__silence=0.3,
                detection__probe_timeout=1.0,
                **(KEPT | {"admin__port": 0}),
            )
            for number, cables in enumerate(self._cables)
        ]
        self._tasks: dict[Service, float] = {}
        """Number of asyncio tasks of each service while no request runs."""

    @property
    def services(self) -> list[Service]:
        return [*self.engines, *self.frontends]

    async def __aenter__(self) -> "Rig":
        async with contextlib.AsyncExitStack() as stack:
            server = await asyncio.start_unix_server(self._listen, self._socket)
            stack.callback(server.close)
            for cable in self._all_cables:
                await cable.start()
                stack.push_async_callback(cable.close)
            for service in self.services:
                await service.start()
                stack.push_async_callback(_end, service)
            await self._whole()
            await self._clean()
            for service in self.services:
                self._tasks[service] = (await self._metrics(service))["penstock:asyncio_tasks"]
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def _all_cables(self) -> list[TcpProxy]:
        return [*self._pulled_from, *(cable for cables in self._cables for cable in cables)]

    # A cell.

    async def cell(self, cell: Cell) -> Count:
        """Run the cell. Errors are added to ``problems``."""
        await self._whole()
        before = await self._moved()
        segments = {service: _segments(service.pid) for service in self.engines}
        pids = {service: service.pid for service in self.engines}
        self._has_struck, struck = False, asyncio.Event()
        self._at = lambda point: self._reached(cell, point, struck)
        prompt, seed = self._prompt(), 100 * self._num_requests
        stream = asyncio.create_task(self._ask(0, prompt, seed, cell))
        beside = asyncio.create_task(self._ask(1, prompt[-BLOCK_SIZE:], seed, cell))
        count = Count(cells=1)
        async with asyncio.timeout(PATIENCE):
            await self._until(lambda: struck.is_set() or (stream.done() and not self._has_struck))
            if not struck.is_set():
                self._wrong(cell, count, "left", f"the request never came to the point: {await stream}")
            await self._recover(cell, stream)
            outcome, neighbour = await stream, await beside
        self._at = None
        await self._heal()
        if cell.victim == "nobody" or (cell.point == "first token" and cell.victim in ("frontend", "network")):
            moved = [after - start for after, start in zip(await self._moved(), before, strict=True)]
            # A request that loses its session may resume on the other engine, which also does not have the prompt's
            # blocks.
            takers = 2 if cell.victim == "frontend" and cell.how in ("cut off", "black-holed", "stopped") else 1
            if moved not in [[engines * BLOCKS] * 2 for engines in range(1, takers + 1)]:
                self._wrong(cell, count, "left", f"{BLOCKS} blocks were missing, and given and taken were {moved}")
        if cell.victim == "frontend" and cell.how in ("killed", "restarted"):
            self._judge_own(cell, count, outcome, prompt, seed)
            outcome = await self._ask(0 if cell.how == "restarted" else 1, prompt, seed, cell)
        self._judge(cell, count, outcome, prompt, seed)
        self._judge(cell, count, neighbour, prompt[-BLOCK_SIZE:], seed)
        await self._leftovers(cell, count, pids, segments)
        return count

    async def _reached(self, cell: Cell, point: Point, struck: asyncio.Event) -> None:
        if self._has_struck or not _is(cell, point):
            return
        self._has_struck = True
        await self._strike_at(cell, point)
        struck.set()

    async def _strike_at(self, cell: Cell, point: Point) -> None:
        at_source = point.pid == self.source.pid
        taker = next((each for each in self.engines if each.alive and each.pid == point.pid), None)
        if taker is None:
            return
        destinations = [each for each in self.engines if each is not self.source] if at_source else [taker]
        match cell.victim:
            case "source":
                await self._strike(cell.how, self.source, [cables[0] for cables in self._cables])
            case "destination":
                number = self.engines.index(destinations[0])
                await self._strike(cell.how, destinations[0], [cables[number] for cables in self._cables])
            case "frontend":
                await self._strike(cell.how, self.frontends[0], self._cables[0], pulls=False)
            case "network":
                await self._strike(cell.how, self.source, [])

    async def _strike(self, how: How, service: Service, cables: Sequence[TcpProxy], *, pulls: bool = True) -> None:
        every = [*cables, self._pulled_from[0]] if pulls else list(cables)
        match how:
            case "killed":
                await service.kill()
            case "restarted":
                await service.kill()
                await service.start()
            case "stopped":
                service.send_signal(signal.SIGSTOP)
            case "cut off":
                for cable in every:
                    cable.cut()
            case "black-holed":
                for cable in every:
                    cable.unplug()

    async def _recover(self, cell: Cell, stream: "asyncio.Task[Any]") -> None:
        """Wait until the other processes have handled the failure, then resume the process."""
        if cell.how not in ("stopped", "black-holed"):
            return
        if cell.victim != "frontend":
            await stream
        else:
            await self._until_metrics(self.source, lambda found: not found["penstock:kv_leases"])
            if cell.how == "black-holed":
                await self._until_engines(0, lambda number: number < len(self.engines))
        for cable in self._all_cables:
            cable.plug_in()
        for service in self.services:
            if service.alive:
                service.send_signal(signal.SIGCONT)

    async def _heal(self) -> None:
        for service in self.services:
            if not service.alive:
                await service.start()
        await self._whole()

    # Requests.

    def _prompt(self) -> list[int]:
        """Return a prompt that shares no prefix with other prompts."""
        self._num_requests += 1
        number = self._num_requests
        return [10 + (number * 7919 + place * (31 + number)) % 2000 for place in range(PROMPT_TOKENS)]

    async def _ask(self, frontend: int, prompt: Sequence[int], seed: int, cell: Cell) -> Any:
        """Return the messages of an answer, and its error or None."""
        params = sampling_pb2.SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=LENGTH,
            ignore_eos=True,
            detokenize=False,
            n=cell.n,
            output_kind=KINDS[cell.kind],
        )
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling_params=params)
        messages: list[pb.GenerateResponse] = []
        async with make_channel(self.frontends[frontend].address) as channel:
            call = service_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=PATIENCE)
            try:
                async for message in call:
                    messages.append(message)
            except grpc.aio.AioRpcError as e:
                return messages, from_rpc_error(e)
        return messages, None

    def _judge(self, cell: Cell, count: Count, outcome: Any, prompt: Sequence[int], seed: int) -> None:
        messages, error = outcome
        count.streams += cell.n
        if error is not None:
            self._wrong(cell, count, "failed", f"{error}", cell.n)
            return
        for index in range(cell.n):
            of_it = [message for message in messages if message.index == index]
            tokens = [token for message in of_it for token in message.token_ids]
            wanted = self._expected(prompt, seed + index)
            if len(tokens) < len(wanted):
                self._wrong(cell, count, "lost", f"{tokens} for {wanted}")
            elif len(tokens) > len(wanted):
                self._wrong(cell, count, "duplicated", f"{tokens} for {wanted}")
            elif tokens != wanted:
                self._wrong(cell, count, "differing", f"{tokens} for {wanted}")
            elif [m.finish_reason for m in of_it if m.finish_reason] != [finish_pb2.FINISH_REASON_LENGTH]:
                self._wrong(cell, count, "differing", f"ended otherwise: {of_it}")

    def _judge_own(self, cell: Cell, count: Count, outcome: Any, prompt: Sequence[int], seed: int) -> None:
        """Check that the output sent by a killed frontend is correct."""
        messages, error = outcome
        count.own += cell.n
        for index in range(cell.n):
            tokens = [token for message in messages if message.index == index for token in message.token_ids]
            if tokens != self._expected(prompt, seed + index)[: len(tokens)]:
                self._wrong(cell, count, "differing", f"{tokens} before the frontend was killed")
        if error is None:
            self._wrong(cell, count, "left", "the frontend was killed, and its stream ended well")

    def _wrong(self, cell: Cell, count: Count, kind: str, what: str, number: int = 1) -> None:
        setattr(count, kind, getattr(count, kind) + number)
        self.problems.append(f"{cell}: {kind}: {what}")

    # Leftovers.

    async def _leftovers(
        self, cell: Cell, count: Count, pids: dict[Service, int], segments: dict[Service, set[str]]
    ) -> None:
        try:
            async with asyncio.timeout(PATIENCE / 10):
                await self._clean()
        except TimeoutError:
            left = [(service.module, await self._left_at(service)) for service in self.services]
            self._wrong(cell, count, "left", f"{left}, tasks before: {list(self._tasks.values())}")
        for service in self.engines:
            gone = service.pid != pids[service]
            if gone and (kept := segments[service] & _segments_of_all()):
                self._wrong(cell, count, "left", f"shared memory of an engine that was killed: {kept}")
            if "AssertionError" in service.log() or "Traceback" in service.log():
                self._wrong(cell, count, "left", service.log()[-3000:])

    async def _clean(self) -> None:
        """Wait until no service has resources of requests."""
        for service in self.services:
            while await self._left_at(service):
                await asyncio.sleep(0.02)

    async def _left_at(self, service: Service) -> dict[str, float]:
        found = await self._metrics(service)
        names = _OF_ENGINES if service in self.engines else _OF_FRONTENDS
        left = {name: found[name] for name in names if found[name]}
        if (tasks := found["penstock:asyncio_tasks"]) > self._tasks.get(service, tasks):
            left["penstock:asyncio_tasks"] = tasks
        return left

    async def _moved(self) -> list[float]:
        """Return the number of blocks that the source has sent, and the numbers that the other engines have received."""
        given, *taken = [(await self._metrics(each)) for each in self.engines]
        return [
            given.get("penstock:kv_transfer_blocks_total out", 0.0),
            sum(each.get("penstock:kv_transfer_blocks_total in", 0.0) for each in taken),
        ]

    async def _metrics(self, service: Service) -> dict[str, float]:
        """Return the sums of each metric's series. Sums of one direction have it as a suffix of the name."""
        return await asyncio.to_thread(_scrape, f"http://127.0.0.1:{service.metrics_port}/metrics")

    async def _until_metrics(self, service: Service, condition: Callable[[dict[str, float]], bool]) -> None:
        while not condition(await self._metrics(service)):
            await asyncio.sleep(0.02)

    async def _whole(self) -> None:
        """Wait until all running services serve, and all frontends are connected to all engines."""
        async with asyncio.timeout(PATIENCE):
            for service in self.services:
                await service.serving()
            for number in range(len(self.frontends)):
                await self._until_engines(number, lambda count: count == len(self.engines))

    async def _until_engines(self, frontend: int, condition: Callable[[int], bool]) -> None:
        async with make_channel(self.frontends[frontend].address) as channel:
            stub = service_pb2_grpc.InferenceServiceStub(channel)
            while True:
                models = (await stub.ListModels(pb.ListModelsRequest())).models
                if condition(models[0].num_engines):
                    return
                await asyncio.sleep(0.02)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.005)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # the service may have been killed
            while line := await reader.readline():
                if self._at is not None:
                    await self._at(msgspec.json.decode(line, type=Point))
                writer.write(b"\n")
                await writer.drain()
        writer.close()


async def _end(service: Service) -> None:
    if service.alive:
        await service.kill()
    service.remove_log()


_OF_ENGINES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "penstock:kv_leases",
    "penstock:kv_leased_blocks",
    "penstock:kv_pulls",
    "penstock:kv_arena_blocks",
)
_OF_FRONTENDS = ("penstock:requests_in_flight", "penstock:requests_held")


def _is(cell: Cell, point: Point) -> bool:
    """Return whether a request is at the cell's point."""
    match cell.point:
        case "grant":
            return point.name == ("given" if cell.victim == "destination" else "granted")
        case "open":
            return point.name == "opened"
        case "first block":
            return point.name == "block" and point.number == 1
        case "middle block":
            return point.name == "block" and point.number == (point.total + 1) // 2
        case "last block":
            return point.name == "block" and point.number == point.total
        case "copy":
            return point.name == "copy"
        case _:
            return point.name == "token"


def _segments(pid: int) -> set[str]:
    """Return the files in shared memory that a process has open."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if (name := link.readlink()).name.startswith("penstock-") and name.parent == ROOT:
                found.add(name.name)
    return found


def _segments_of_all() -> set[str]:
    return {path.name for path in ROOT.iterdir()}


def _scrape(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url) as response:
        lines = response.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith("#") or not line:
            continue
        series, _, value = line.rpartition(" ")
        name, _, labels = series.partition("{")
        names = [name]
        if 'direction="' in labels:
            names.append(name + " " + labels.partition('direction="')[2].partition('"')[0])
        for each in names:
            found[each] = found.get(each, 0.0) + float(value)
    return found
