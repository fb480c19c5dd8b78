"""Run of a server whose adapters change under load, with checks for leaks after the load."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.admin.v1 import service_pb2_grpc as admin_rpc
from penstock_common.rpc.channel import make_channel
from tests.fakes.clients.session_client import connected
from tests.fakes.network.ports import free_port
from tests.fakes.systems.cluster import Cluster
from tests.soak.lora.contents import Answers, Content, make_answers, make_contents
from tests.soak.lora.names import Names
from tests.soak.lora.operator import Operator
from tests.soak.lora.traffic import Traffic
from tests.soak.watch import IDLE, Growth, Watch

CPU_MEMORY = 1024 * 1024
"""Host memory for adapters in bytes. It suffices for about seven adapters of rank 2."""
RANKS = (1, 2, 3, 2)
PREFIXES, TAILS, LENGTHS = 3, 3, (52, 65)
"""Prompts: number of common prefixes (48 tokens, three blocks), number of prompts for each prefix, and prompt lengths.
"""
SHARED = 48
MAX_TOKENS = 32
FIRST_TOKEN, LAST_TOKEN = 300, 2000
NEVER = "never-loaded"
IDLE_TIMEOUT = 30.0
COUNTERS = ("num_preemptions", "num_loads", "num_evictions")
NEEDED = (
    "completed",
    "aborted",
    "answers that tell who they are",
    "answers while a name changed",
    "loads",
    "reloads with other content",
    "unloads",
    "NOT_FOUND",
    "num_preemptions",
    "num_loads",
    "num_evictions",
)
"""Events that must occur at least once for the run to count."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a run.

    ``executor`` is the engines' executor, uniproc or multiproc. If ``growth`` is true, the run compares the resource
    use of the processes at its start and its end.
    """

    model: Path
    seconds: float
    seed: int
    streams: int = 10
    names: int = 10
    contents: int = 16
    max_loras: int = 3
    engines: int = 1
    pause: float = 0.15
    executor: str = "uniproc"
    growth: bool = True


class Result(msgspec.Struct, kw_only=True):
    """Result of a run. ``problems`` lists the violations, as text."""

    counts: Counter[str]
    growth: list[Growth]
    problems: list[str]


class LoraSoak:
    """One run, which writes its adapters into ``folder``."""

    def __init__(self, options: Options, folder: Path, log: Callable[[str], object] = lambda line: None) -> None:
        self._options = options
        self._folder = folder
        self._log = log
        self._problems: list[str] = []
        self._counts: Counter[str] = Counter()

    async def run(self) -> Result:
        """Run the whole soak, from creating the adapters to the leak checks at the end."""
        options = self._options
        contents, answers = await asyncio.to_thread(self._make)
        self._log(f"{len(contents)} contents, {len(answers.askable)} prompts; {answers.needed} tokens tell who answers")
        links = self._folder / "links"
        links.mkdir()
        admin_port = free_port()
        cluster = Cluster(
            options.model,
            engines=options.engines,
            frontend_flags={"admin__port": admin_port, "lora__enabled": "true", "lora__roots": f"[{self._folder}]"},
            cache__num_blocks=30,
            model__max_model_len=128,
            scheduler__max_num_seqs=8,
            scheduler__max_num_batched_tokens=96,
            lora__max_loras=options.max_loras,
            lora__cpu_memory=CPU_MEMORY,
            lora__max_wait=0.5,
            executor__kind=options.executor,
        )
        try:
            async with cluster, make_channel(f"127.0.0.1:{admin_port}") as channel:
                admin = admin_rpc.AdminServiceStub(channel)
                growth = await self._in(cluster, admin, contents, answers, links)
        finally:
            for number, service in enumerate(cluster.services):
                (self._folder / f"service-{number}.log").write_text(service.log())
        self._problems += [f"{g.service}: {g.what} grew from {g.start:g} to {g.end:g}" for g in growth if not g.allowed]
        self._problems += [f"there was no {what}" for what in NEEDED if not self._total(what)]
        return Result(counts=self._counts, growth=growth, problems=self._problems)

    def _make(self) -> tuple[list[Content], Answers]:
        options = self._options
        contents = make_contents(options.model, self._folder / "contents", options.contents, RANKS, options.seed)
        return contents, make_answers(options.model, contents, make_prompts(options.seed), MAX_TOKENS)

    async def _in(
        self, cluster: Cluster, admin: Any, contents: list[Content], answers: Answers, links: Path
    ) -> list[Growth]:
        options, names = self._options, Names()
        pool = [f"adapter-{number}" for number in range(options.names)]
        operators = [
            Operator(admin, names, pool[part::2], contents, links, pause=options.pause, seed=options.seed + part)
            for part in range(2)
        ]
        watch = Watch({"frontend": cluster.frontend, "engine": cluster.engines[0]})
        changing = [asyncio.create_task(operator.run()) for operator in operators]
        try:
            phases = {"warm-up": 0.3, "soak": 0.7} if options.growth else {"soak": 1.0}
            for phase, share in phases.items():
                traffic = Traffic(
                    cluster.stub,
                    names,
                    [*pool, NEVER],
                    answers,
                    streams=options.streams,
                    max_tokens=MAX_TOKENS,
                    seed=options.seed,
                )
                watch.phase = phase
                async with traffic:
                    await self._wait(share * options.seconds, changing, watch, traffic, operators)
                self._counts += traffic.counts
                self._problems += traffic.problems
                if phase == "warm-up":
                    await self._idle(cluster, watch)
            for operator in operators:
                operator.end()
            await asyncio.gather(*changing)
        finally:
            for task in changing:
                task.cancel()
        await self._idle(cluster, watch)
        for operator in operators:
            self._counts += operator.counts
            self._problems += operator.problems
        await self._pins_settle(cluster, admin)
        await self._look(cluster, "with names")
        for operator in operators:
            await operator.unload_all()
            self._problems += [each for each in operator.problems if each not in self._problems]
        await self._gone(cluster)
        return watch.growth(busy="soak") if options.growth else []

    async def _wait(
        self,
        seconds: float,
        changing: list[asyncio.Task[None]],
        watch: Watch,
        traffic: Traffic,
        operators: list[Operator],
    ) -> None:
        """Wait for the given time, or until an operator ends. Errors of an operator are raised."""
        end = said = time.monotonic()
        end += seconds
        while (now := time.monotonic()) < end:
            await asyncio.sleep(min(1.0, end - now))
            await watch.sample()
            for task in changing:
                if task.done():
                    task.result()
            if now - said > 10:
                said = now
                changes = sum((operator.counts for operator in operators), Counter())
                self._log(f"{watch.phase}: {dict(traffic.counts)}; {dict(changes)}")

    async def _idle(self, cluster: Cluster, watch: Watch) -> None:
        """Wait until no request is left, then take a sample of the resource use."""
        try:
            async with asyncio.timeout(IDLE_TIMEOUT):
                while any(s.num_running_reqs or s.num_waiting_reqs or s.kv_cache_usage for s in await cluster.stats()):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            self._problems.append(f"there are requests or blocks left: {await cluster.stats()}")
        if self._options.growth:
            await asyncio.sleep(2.0)
        watch.phase = IDLE
        await watch.sample()

    async def _look(self, cluster: Cluster, when: str) -> list[dict[bytes, bool]]:
        """Add the engines' counters, and check that each engine and its workers have the same adapters.

        Returns the adapters of each engine, with whether each is pinned.
        """
        found = []
        for number, stats in enumerate(await cluster.stats()):
            self._counts += Counter(dict.fromkeys(COUNTERS, 0))
            for name in COUNTERS:
                self._counts[name] = self._counts[name] + getattr(
                    stats if name == "num_preemptions" else stats.lora, name
                )
            if stats.lora.cached_bytes > CPU_MEMORY:
                self._problems.append(f"engine {number} holds {stats.lora.cached_bytes} bytes {when}, of {CPU_MEMORY}")
            if stats.lora.active or stats.lora.num_waiting_reqs or stats.lora.num_loading_reqs:
                self._problems.append(f"engine {number} has adapters in use {when}: {stats.lora}")
            held, workers = await held_by(cluster, number)
            if any(each != held.keys() for each in workers):
                self._problems.append(f"engine {number} holds {held} {when}, its workers {workers}")
            found.append(held)
        return found

    async def _pins_settle(self, cluster: Cluster, admin: Any) -> None:
        """Check that within two seconds the engines have pinned exactly the adapters of the pinned names."""
        loras = (await admin.ListLoras(admin_pb.ListLorasRequest())).loras
        wanted = {each.digest for each in loras if each.pinned}
        pinned: list[set[bytes]] = []
        for _ in range(20):
            found = [(await held_by(cluster, number))[0] for number in range(len(cluster.engines))]
            pinned = [{digest for digest, is_pinned in held.items() if is_pinned} for held in found]
            if all(each == wanted for each in pinned):
                self._counts["pinned at the end"] += len(wanted)
                return
            await asyncio.sleep(0.2)
        self._problems.append(f"engines have pinned {pinned}; names that are pinned mean {wanted}")

    async def _gone(self, cluster: Cluster) -> None:
        """Check that all engines drop all adapters within two seconds, once no name has a meaning."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(IDLE_TIMEOUT):
                while any([(await held_by(cluster, number))[0] for number in range(len(cluster.engines))]):
                    await asyncio.sleep(0.2)
        counts = Counter(self._counts)
        left = await self._look(cluster, "without names")
        self._counts = counts
        if any(left):
            self._problems.append(f"adapters that no name means are still held: {left}")

    def _total(self, what: str) -> int:
        return sum(count for name, count in self._counts.items() if name.startswith(what))


async def held_by(cluster: Cluster, number: int) -> tuple[dict[bytes, bool], list[set[bytes]]]:
    """Return the adapters of an engine by digest, with whether each is pinned, and the digests that each worker holds."""
    async with connected(cluster.engines[number].address, "observer") as client:
        held = {each["digest"]: each["pinned"] for each in await client.utility("list_loras")}
        return held, [set(each) for each in await client.utility("collective_rpc", "held_loras")]


def make_prompts(seed: int) -> list[list[int]]:
    """Return prompts as token ids. Some prompts have common prefixes."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]

    beginnings = [tokens(SHARED) for _ in range(PREFIXES)]
    return [each + tokens(length - SHARED) for each in beginnings for length in LENGTHS for _ in range(TAILS)]
