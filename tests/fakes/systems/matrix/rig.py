"""Frontend with oracle engines in separate processes, on which the cells of the matrix run one after the other."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock_common.errors import RequestFailed
from penstock_common.types.cluster import EngineState
from tests.fakes.engines.oracle_process import OracleProcess
from tests.fakes.frontends.frontend_server import FrontendServer, collect
from tests.fakes.patience import PATIENCE
from tests.fakes.systems.matrix.failures import Failure
from tests.fakes.systems.matrix.shapes import LENGTH, Shape, plain
from tests.fakes.systems.matrix.verdicts import Verdict, judge

LIMIT = PATIENCE
STEP_SECONDS = 0.005
NEIGHBOUR_LENGTH = 40
CACHED = 2
"""Number of cached prompt tokens that engines report. The engine that is to fail reports another number."""
BUSY = 100_000
"""Number of waiting requests that an engine reports, so that the router chooses another engine."""
CLEAN: dict[str, Any] = {
    "step_seconds": STEP_SECONDS,
    "held": False,
    "stalled": False,
    "packets": "as_they_are",
    "step_age": -1.0,
    "wedged_after": 1.0,
    "faults": [],
    "extra_waiting": BUSY,
}


class Step(msgspec.Struct, frozen=True):
    """Time of the failure in a request: when ``offset`` of its tokens were sent. ``width``: tokens per step."""

    name: str
    offset: int
    width: int = 1

    def __str__(self) -> str:
        return self.name if self.width == 1 else f"{self.name}, {self.width} at a time"


STEPS = [
    Step("on add", 0),
    Step("after the first token", 1),
    Step("mid stream", LENGTH // 2),
    Step("before the last token", LENGTH - 1),
    Step("after the last token", LENGTH),
]
WIDE_STEPS = [
    Step("on add", 0, 4),
    Step("after the first token", 4, 4),
    Step("before the last token", LENGTH - 4, 4),
    Step("after the last token", LENGTH, 4),
]


class CellResult(msgspec.Struct, frozen=True):
    """Result of a cell. ``streams``: streams on the failed engine. ``neighbours``: streams on other engines."""

    failure: str
    step: str
    streams: Sequence[Verdict]
    neighbours: Sequence[Verdict]
    problems: Sequence[str]

    @property
    def wrong(self) -> list[str]:
        """Return all errors of the cell."""
        return [v.problem for v in (*self.streams, *self.neighbours) if v.kind != "right"] + list(self.problems)


class Rig:
    """Rig: ``async with Rig(model, **frontend options)``. Engines fail in turn, and are repaired while other engines
    fail.
    """

    def __init__(self, model: Path, *, engines: int = 4, **options: Any) -> None:
        self.engines = [OracleProcess(f"oracle-{number}", drain_timeout=0.1, **CLEAN) for number in range(engines)]
        self._model = model
        self._options = options
        self._num_cells = 0
        self._turns = itertools.cycle(self.engines)
        self._healing: dict[OracleProcess, asyncio.Task[None]] = {}
        self._running: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> "Rig":
        for engine in self.engines:
            await engine.__aenter__()
        await asyncio.gather(*(engine.serving() for engine in self.engines))
        addresses = [engine.reached_at for engine in self.engines]
        self.frontend = await FrontendServer(self._model, engines=addresses, **self._options).__aenter__()
        for engine in self.engines:
            await self._until(lambda engine=engine: self.serves(engine))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in [*self._healing.values(), *self._running]:
            task.cancel()
        await asyncio.gather(*self._healing.values(), *self._running, return_exceptions=True)
        await self.frontend.__aexit__()
        for engine in self.engines:
            await engine.__aexit__()

    async def cell(self, failure: Failure, step: Step, shapes: Sequence[Shape]) -> CellResult:
        """Start all shapes on one engine, which fails at the step, with other streams on the other engines."""
        victim, others = await self._next_victim()
        neighbours = [plain(7_000 + number, NEIGHBOUR_LENGTH) for number in range(len(others))]
        try:
            self._num_cells += 1
            for engine in self.engines_alive():
                await engine.set(tokens_per_step=step.width, num_cached_tokens=0 if engine is victim else CACHED)
            await self._route_to(others)
            beside = self._begin("beside", neighbours)
            await self._until_added("beside", len(beside))
            await victim.set(held=True)
            await self._route_to([victim])
            struck = self._begin("struck", shapes)
            await self._until_added("struck", sum(len(shape.expected) for shape in shapes))
            if step.offset:
                hold = {"at": "mid_stream", "count": step.offset, "action": "hold"}
                await victim.set(held=False, faults=[hold])
                await victim.until(reached=1)
            await failure.strike(self, victim)
            async with asyncio.timeout(LIMIT):
                outcomes = await asyncio.gather(*struck)
                outcomes_beside = await asyncio.gather(*beside)
            problems = await self._leftovers(victim, failure, step)
            if step.offset >= LENGTH // 2:
                problems += await self._billed_twice(victim, outcomes)
        finally:
            self._healing[victim] = asyncio.create_task(self.heal(victim))
            for task in self._running:
                task.cancel()
            self._running.clear()
        return CellResult(
            failure.name,
            step.name,
            list(itertools.chain(*map(judge, shapes, outcomes))),
            list(itertools.chain(*map(judge, neighbours, outcomes_beside))),
            problems,
        )

    async def heal(self, engine: OracleProcess) -> None:
        """Repair an engine after any failure, and wait until the frontend uses the engine."""
        engine.proxy.plug_in()
        engine.proxy.delay = 0.0
        if engine.alive:
            engine.go_on()
            try:
                await engine.set(**CLEAN)
            except OSError:  # the engine is about to end
                await engine.ended()
        if not engine.alive:
            await engine.restart()
        await self._until(lambda: self.serves(engine))

    async def healed(self) -> None:
        """Wait until all engines are repaired."""
        await asyncio.gather(*self._healing.values())
        self._healing.clear()

    async def until_moved(self, engine: OracleProcess) -> None:
        """Wait until another engine has a request of this engine, or until no request of the cell runs."""
        others = [other for other in self.engines if other is not engine]
        async with asyncio.timeout(LIMIT):
            while not all(task.done() for task in self._running):
                if any(attempt for _, attempt, _ in await self._attempts(others)):
                    return
                await asyncio.sleep(0.02)

    async def sleep(self, seconds: float) -> None:
        """Sleep for the duration of a failure."""
        await asyncio.sleep(seconds)

    def serves(self, engine: OracleProcess) -> bool:
        """Return whether the frontend sends new requests to an engine."""
        status = self._status(engine)
        return status is not None and status.state is EngineState.SERVING

    def engines_alive(self) -> list[OracleProcess]:
        """Return the engines that are not being repaired."""
        return [engine for engine in self.engines if engine not in self._healing]

    async def _next_victim(self) -> tuple[OracleProcess, list[OracleProcess]]:
        """Wait until the engine whose turn it is and another engine work. Return the engine and all other working
        engines.
        """
        victim = next(self._turns)
        if victim in self._healing:
            await self._healing.pop(victim)
        for engine, task in list(self._healing.items()):
            if task.done():
                await self._healing.pop(engine)
        while not (others := [engine for engine in self.engines_alive() if engine is not victim]):
            engine, task = next(iter(self._healing.items()))
            await task
            del self._healing[engine]
        return victim, others

    async def _route_to(self, chosen: Sequence[OracleProcess]) -> None:
        """Let the router use only these engines. An engine that reconnects at this moment may also be used."""
        for engine in self.engines_alive():
            await engine.set(extra_waiting=0 if engine in chosen else BUSY)
        await self._until(
            lambda: all(
                (self._waiting(engine) >= BUSY) != (engine in chosen) for engine in self.engines if self.serves(engine)
            )
        )

    def _waiting(self, engine: OracleProcess) -> int:
        status = self._status(engine)
        return status.num_waiting_reqs if status is not None else 0

    def _status(self, engine: OracleProcess) -> Any:
        cluster = self.frontend.frontend._models[0].assembly.engines.view.cluster()
        return next((status for status in cluster if status.address == engine.reached_at), None)

    async def _until_added(self, prefix: str, count: int) -> None:
        """Wait until engines have ``count`` sequences of this cell's requests whose ids have this prefix."""
        async with asyncio.timeout(LIMIT):
            while (
                sum(name.startswith(self._prefix + prefix) for name, _, _ in await self._attempts(self.engines)) < count
            ):
                await asyncio.sleep(0.005)

    async def _attempts(self, engines: Sequence[OracleProcess]) -> list[Any]:
        """Return id, attempt and number of prior tokens of all requests of this cell on the engines that answer."""
        found = []
        for engine in engines:
            try:
                given = (await engine.state())["attempts"] if engine.alive else []
            except OSError:  # the engine is starting or ending
                continue
            found += [attempt for attempt in given if attempt[0].startswith(self._prefix)]
        return found

    @property
    def _prefix(self) -> str:
        """Return the prefix of the ids of this cell's requests."""
        return f"{self._num_cells}-"

    def _begin(self, prefix: str, shapes: Sequence[Shape]) -> "list[asyncio.Task[Any]]":
        """Start requests. Each task returns its messages, or raises its error."""

        async def outcome(shape: Shape) -> Any:
            try:
                return await collect(self.frontend.stub.Generate(shape.request, timeout=LIMIT))
            except RequestFailed as e:
                return e

        tasks = []
        for number, shape in enumerate(shapes):
            shape.request.request_id = f"{self._prefix}{prefix}-{number}"
            tasks.append(asyncio.create_task(outcome(shape)))
        self._running += tasks
        return tasks

    async def _leftovers(self, victim: OracleProcess, failure: Failure, step: Step) -> list[str]:
        """Return other problems than wrong streams: remaining requests, and requests that moved without need or did not
        move.
        """
        problems = []
        llm = self.frontend.frontend._models[0].assembly.llm
        if llm.num_live or len(llm._outputs):
            problems.append(f"the frontend still has {llm.num_live} requests and {len(llm._outputs)} sequences")
        attempts = await self._attempts(
            self.engines
        )  # an engine that has been repaired meanwhile may have accepted some requests
        for engine in self.engines_alive():
            try:
                async with asyncio.timeout(PATIENCE):
                    while engine.alive and (await engine.state())["num_running"]:
                        await asyncio.sleep(0.01)
            except TimeoutError:
                problems.append(f"{engine.engine_id} still has requests: {(await engine.state())['running']}")
            except OSError:
                if engine is not victim:
                    raise
        moved = {name for name, attempt, _ in attempts if attempt}
        if any(name.startswith(self._prefix + "beside") for name in moved):
            problems.append(f"requests of engines that were well have moved: {sorted(moved)}")
        if failure.name.startswith(("packets twice", "tokens again")) and moved:
            problems.append(f"requests have moved without need: {sorted(moved)}")
        again = [name for name, attempt, prior in attempts if attempt and not prior]
        if step.offset >= LENGTH // 2 and again:
            problems.append(f"requests have begun again from their prompt: {sorted(again)}")
        if failure.moves and 0 < step.offset < LENGTH and not moved:
            problems.append("nothing has moved: the failure did not come about")
        return problems

    async def _billed_twice(self, victim: OracleProcess, outcomes: Sequence[Any]) -> list[str]:
        """Return errors in the cached tokens of the usage. They must be those of the engine that first computed the
        prompt.
        """
        elsewhere = [engine for engine in self.engines if engine is not victim]
        began_elsewhere = {name for name, attempt, _ in await self._attempts(elsewhere) if not attempt}
        ends = [m for outcome in outcomes if isinstance(outcome, list) for m in outcome if m.HasField("usage")]
        wrong = {m.request_id for m in ends if m.usage.cached_tokens and m.request_id not in began_elsewhere}
        return [f"the prompts of {sorted(wrong)} were counted again by a later engine"] if wrong else []

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT):
            while not condition():
                await asyncio.sleep(0.005)


Strike = Callable[[Rig, OracleProcess], Awaitable[None]]
