"""Soak test: random requests of all shapes with random cancels and deadlines, while engines and the coordinator are
killed and frozen.

Every completed answer is compared with the answer to the same request without faults. At the end of the run, every KV
block must be free and no request may be left. Processes that lived for the entire run must not use more resources than
after the warm-up.

``--kv`` tests KV transfer and offloading. It runs engines of all roles with small host memory and disk tiers. The
requests have long common prefixes, second turns, and prompts given as embeddings. Engines are restarted in turn, a
second frontend is ended, and caches are cleared. The expected answers come from one engine without KV transfer. At the
end there may be no leases, no block streams and no shared memory.

``--towers FAMILY`` adds images, sound or video of a tiny model to half of the requests. Media workers are killed and
media caches are cleared. At the end no media may be left.
"""

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from tests.chaos.client import Client
from tests.chaos.killing import address
from tests.chaos.outages import Known
from tests.fakes.multimodal_models import FAMILIES
from tests.soak.cluster import SoakCluster
from tests.soak.havoc import Havoc
from tests.soak.kv import ROLES, KvCluster
from tests.soak.media import MediaCluster
from tests.soak.plot import plot
from tests.soak.traffic import Traffic, known_kinds
from tests.soak.watch import IDLE, TOLERANCES, Growth, Watch, gauge, metrics

DEMO_MODEL = Path("examples/demo_model/penstock-tiny")
SAMPLE_EVERY, SAY_EVERY = 2.0, 10.0
SETTLE = 3.0
IDLE_TIMEOUT = 60.0
WARM_UP = 0.25
console = Console()


class Soak:
    """One run of the soak.

    Attributes:
        problems: Violations, as text.
        growth: Resource use of the processes at the start and at the end.
    """

    def __init__(self, cluster: SoakCluster, args: argparse.Namespace) -> None:
        self._cluster = cluster
        self._args = args
        self._rng = random.Random(args.seed)
        engines, frontends = (range(len(each)) for each in (cluster.engines, cluster.frontends))
        names = ["coordinator", *(f"engine-{n}" for n in engines), *(f"frontend-{n}" for n in frontends)]
        self.watch = Watch(dict(zip(names, cluster.services, strict=True)))
        self.problems: list[str] = []
        self.growth: list[Growth] = []
        self.counts: dict[str, dict[str, int]] = {}
        self.done: Mapping[str, float] = {}

    async def run(self) -> None:
        """Warm up, check the services, run for the remaining time, and check again."""
        seconds = self._args.minutes * 60
        known = await self._cluster.known(self._args.tokens)
        console.log(f"{len(known)} requests of {known_kinds(known)} shapes; seed {self._args.seed}")
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self.watch.run(SAMPLE_EVERY))
            await self._phase("warm-up", known, seconds * WARM_UP)
            await self._idle()
            await self._phase("soak", known, seconds * (1 - WARM_UP), self._args.accidents)
            await self._idle()
            watching.cancel()
        self.done = await self._cluster.done()
        self.problems += [f"not once: {what}" for what, count in self.done.items() if not count]
        self.growth = self.watch.growth(busy="soak")
        self.problems += [
            f"{g.service}: {g.what} grew from {g.start:g} to {g.end:g}" for g in self.growth if not g.allowed
        ]

    async def _phase(self, name: str, known: Known, seconds: float, accidents: int = 0) -> None:
        """Run a phase for at least ``seconds`` and until ``accidents`` accidents have happened. Slow machines take
        longer per accident.
        """
        log = console.log if self._args.verbose else lambda line: None
        havoc = Havoc(
            self._cluster,
            self._rng,
            pause=self._args.pause,
            log=log,
            more=self._cluster.accidents(self._rng),
            lasting=self._cluster.lasting,
            before=self._cluster.look,
        )
        async with contextlib.AsyncExitStack() as stack:
            traffics = [await stack.enter_async_context(traffic) for traffic in await self._traffics(known, stack)]
            self.watch.phase = name
            raging = asyncio.create_task(havoc.run())
            began = said = time.monotonic()
            while not raging.done():
                left = began + seconds - (now := time.monotonic())
                if left <= 0 and havoc.counts.total() >= accidents:
                    break
                await asyncio.sleep(min(1.0, left) if left > 0 else 1.0)
                if now - said >= SAY_EVERY:
                    said = now
                    console.log(self._line(name, now - began, seconds, counts_of(traffics), havoc))
            havoc.end()
            await raging
            self.watch.phase = ""
        counts = counts_of(traffics)
        console.log(self._line(name, seconds, seconds, counts, havoc))
        self.counts[name] = {**counts, **havoc.counts}
        self.problems += [example for traffic in traffics for example in traffic.examples]
        if counts["harmed"]:
            self.problems.append(f"{name}: {counts['harmed']} of {counts['completed']} requests harmed")

    async def _traffics(self, known: Known, stack: contextlib.AsyncExitStack) -> list[Traffic]:
        """Return the traffic for each frontend, not started. Failures on the first frontend are never excused."""
        made, frontends = [], self._cluster.frontends
        for number, frontend in enumerate(frontends):
            client = await stack.enter_async_context(Client(address(frontend)))
            made.append(
                Traffic(
                    client,
                    known,
                    streams=self._args.streams // len(frontends),
                    rng=self._rng,
                    fresh=self._cluster.fresh,
                    next_turn=self._cluster.next_turn,
                    excuses=self._cluster.excuses if number else lambda outcome: False,
                )
            )
        return made

    def _line(self, name: str, at: float, of: float, counts: Counter[str], havoc: Havoc) -> str:
        parts = ", ".join(f"{counts[key]} {key}" for key in ("completed", "cancelled", "expired", "broken", "harmed"))
        accidents = ", ".join(f"{count} x {what}" for what, count in havoc.counts.items())
        return f"{name} {at / 60:.1f} of {of / 60:.1f} min: {parts}; {accidents or 'no accident yet'}"

    async def _idle(self) -> None:
        """Wait until no request is left, then sample the resource use. Problems are recorded."""
        try:
            async with asyncio.timeout(IDLE_TIMEOUT):
                while left := await self._left():
                    await asyncio.sleep(0.2)
        except TimeoutError:
            self.problems.append(f"still there {IDLE_TIMEOUT:.0f} s after the last request: {left}")
        await asyncio.sleep(SETTLE)
        self.watch.phase = IDLE
        await self.watch.sample()

    async def _left(self) -> str:
        """Describe the resources that requests still hold. Empty if there are none."""
        for number, stats in enumerate(await self._cluster.stats()):
            if stats.num_running_reqs or stats.num_waiting_reqs or stats.kv_cache_usage:
                return f"engine-{number}: {stats}"
        async with httpx.AsyncClient(verify=False, trust_env=False) as http:
            for frontend in self._cluster.frontends:
                if live := gauge(await metrics(http, frontend), "penstock:requests_in_flight"):
                    return f"frontend: {live:.0f} requests in flight"
        return await self._cluster.left()


def counts_of(traffics: Sequence[Traffic]) -> Counter[str]:
    """Return the sum of the counts."""
    return sum((traffic.counts for traffic in traffics), Counter())


def table(growth: list[Growth]) -> Table:
    """Return a table with a row per process and quantity."""
    made = Table(title="held when idle, after the warm-up and at the end")
    for column in ("service", "", "start", "end", "slope per minute while busy", "allowed more", ""):
        made.add_column(column, justify="left" if column in ("service", "") else "right")
    for g in growth:
        tolerance = TOLERANCES[g.what]
        more = f"{max(tolerance.most, tolerance.share * g.start):.0f}"
        verdict = "" if g.allowed else "GREW"
        made.add_row(g.service, g.what, f"{g.start:.0f}", f"{g.end:.0f}", f"{g.per_minute:+.2f}", more, verdict)
    return made


async def soak(args: argparse.Namespace) -> Soak:
    """Run the soak test. Like Ctrl-C, SIGTERM stops the services and then ends the test."""
    if (task := asyncio.current_task()) is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with cluster_of(args) as cluster:
        made = Soak(cluster, args)
        try:
            await made.run()
        finally:
            args.out.mkdir(parents=True, exist_ok=True)
            for name, service in made.watch.services.items():
                (args.out / f"{name}.log").write_text(service.log())
    made.problems += cluster.wrong
    return made


def cluster_of(args: argparse.Namespace) -> SoakCluster:
    """Return the cluster for the command line's options, not started."""
    flags: dict[str, Any] = {"lease_seconds": 3, "kv_cache_memory": "128MiB", "drain_timeout": 2.0}
    if args.kv:
        return KvCluster(args.model, engines=args.engines or len(ROLES), **flags)
    engines = args.engines or 3
    return (
        MediaCluster(args.towers, engines=engines, **flags)
        if args.towers
        else SoakCluster(args.model, engines=engines, **flags)
    )


def main() -> int:
    """Print the resource use and the problems. Returns 1 if there were problems."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long requests are sent")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="checkpoint to serve")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--kv", action="store_true", help="test KV transfer and KV cache offloading")
    kind.add_argument("--towers", choices=FAMILIES, help="serve a tiny model of this family instead, with media")
    parser.add_argument("--streams", type=int, default=24, help="requests at once")
    parser.add_argument("--tokens", type=int, default=80, help="output length, give or take")
    parser.add_argument(
        "--engines", type=int, help="three, or five with --kv; the first, or the first two, are never ended"
    )
    parser.add_argument("--pause", type=float, default=4.0, help="mean seconds between two accidents")
    parser.add_argument(
        "--accidents", type=int, default=0, help=("continue until this many accidents have happened after the warm-up")
    )
    parser.add_argument("--seed", type=int, default=None, help="random seed; a new one by default")
    parser.add_argument("--verbose", action="store_true", help="print a line for every accident")
    parser.add_argument(
        "--out", type=Path, default=Path("build/soak"), help="folder for the plot, the samples and the logs"
    )
    args = parser.parse_args()
    args.seed = random.randrange(2**32) if args.seed is None else args.seed
    done = asyncio.run(soak(args))
    plot(args.out / "soak.png", done.watch.samples)
    results = {
        "seed": args.seed,
        "counts": done.counts,
        "done": done.done,
        "growth": done.growth,
        "problems": done.problems,
    }
    (args.out / "soak.json").write_text(
        json.dumps(msgspec.to_builtins(results | {"samples": done.watch.samples}), indent=1)
    )
    console.print(table(done.growth))
    if done.done:
        console.print(", ".join(f"{count:.0f} {what}" for what, count in done.done.items()))
    console.print(f"plot, samples and logs are in {args.out}")
    for problem in done.problems:
        console.print(problem, style="red", markup=False)
    console.print("failed" if done.problems else "every answer was right, and nothing has grown")
    return 1 if done.problems else 0


if __name__ == "__main__":
    sys.exit(main())
