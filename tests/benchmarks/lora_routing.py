"""Routing of requests with adapters over real engines: ``python -m tests.benchmarks.lora_routing``.

The processes are a coordinator, four engines and two frontends. There are 64 random adapters, and each engine has
memory for 16. Streams use both frontends in turn, with a Zipf or a uniform distribution of adapters, by policy. Engines
count the requests that find their adapter in memory. No times are reported, because all processes share the machine's
cores.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.common.v1 import stats_pb2
from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc as rpc
from penstock_common.rpc.channel import make_channel
from tests.fakes.systems.cluster import Cluster, read

MODEL = Path(__file__).parents[2] / "examples/demo_model/penstock-tiny"
POLICIES = ("round_robin", "least_loaded", "prefix_aware")
FOUND, UNEVEN = 0.9, 1.3
"""Targets of the default policy: minimum share of requests that find their adapter, maximum load relative to the mean.
"""


class Row(NamedTuple):
    """Results of a phase by engine: requests, requests that found their adapter, and loads."""

    asked: list[int]
    found: list[int]
    loads: list[int]

    @property
    def share(self) -> float:
        """Share of all requests that found their adapter in memory."""
        return sum(self.found) / sum(self.asked)

    @property
    def imbalance(self) -> float:
        """Return the largest number of requests of an engine, relative to the mean."""
        return max(self.asked) * len(self.asked) / sum(self.asked)


def popularity(name: str, count: int) -> list[float]:
    """Return the weights of adapters."""
    return [1.0 / rank if name == "Zipf" else 1.0 for rank in range(1, count + 1)]


def adapters_in(folder: Path, options: argparse.Namespace) -> list[Path]:
    """Write random adapters of the same size."""
    flags = [
        "--number",
        str(options.adapters),
        "--rank",
        str(options.rank),
        "--name",
        "a",
        "--strength",
        "0.5",
        "--seed",
        "1",
    ]
    command = [sys.executable, "examples/demo_model/make_adapters.py", str(options.model), str(folder), *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return sorted(folder.iterdir())


class Streams:
    """Sends requests with adapters chosen by weights, ``at_once`` at a time."""

    def __init__(self, stubs: Sequence["rpc.InferenceServiceAsyncStub"], names: Sequence[str], at_once: int) -> None:
        self._stubs = itertools.cycle(stubs)
        self._names = names
        self._at_once = at_once
        self._random = random.Random(0)

    async def ask(self, loras: Iterator[str]) -> None:
        """Send requests one after the other until the adapters are used up."""
        for lora in loras:  # all streams take adapters from the same iterator
            prompt = pb.TokenIds(ids=[self._random.randrange(5, 1000) for _ in range(32)])
            sampling = SamplingParams(temperature=0.0, max_tokens=self._random.randint(4, 28), ignore_eos=True)
            request = pb.GenerateRequest(token_ids=prompt, lora=lora, sampling_params=sampling)
            await read(next(self._stubs).Generate(request))

    async def run(self, weights: Sequence[float], count: int) -> None:
        """Send ``count`` requests."""
        loras = iter(self._random.choices(self._names, weights, k=count))
        async with asyncio.TaskGroup() as group:
            for _ in range(self._at_once):
                group.create_task(self.ask(loras))


@contextlib.asynccontextmanager
async def serving(folders: Sequence[Path], policy: str, options: argparse.Namespace) -> AsyncIterator[Cluster]:
    """Run engines whose memory suffices for ``options.room`` and a half adapters each."""
    size = max(file.stat().st_size for file in folders[0].glob("*.safetensors"))
    cluster = Cluster(
        options.model,
        engines=options.engines,
        frontends=2,
        frontend_flags={
            "lora__adapters": json.dumps({folder.name: str(folder) for folder in folders}),
            "routing__policy": policy,
        },
        lora__max_loras=options.max_loras,
        lora__cpu_memory=int((options.room + 0.5) * size),
    )
    async with cluster:
        yield cluster


def since(before: Sequence[stats_pb2.SchedulerStats], after: Sequence[stats_pb2.SchedulerStats]) -> Row:
    """Return the increase of the engines' counters."""
    fields = ("num_requests", "num_found", "num_loads")
    counts = [
        [getattr(b.lora, name) - getattr(a.lora, name) for a, b in zip(before, after, strict=True)] for name in fields
    ]
    return Row(*counts)


async def measure(folders: Sequence[Path], policy: str, options: argparse.Namespace) -> AsyncIterator[tuple[str, Row]]:
    """Yield results by popularity of the adapters. The first half of each phase is a warm-up and not counted."""
    async with serving(folders, policy, options) as cluster, contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(make_channel(each.address)) for each in cluster.frontends]
        streams = Streams(
            [rpc.InferenceServiceStub(channel) for channel in channels], [f.name for f in folders], options.at_once
        )
        for name in ("Zipf", "even"):
            weights = popularity(name, len(folders))
            await streams.run(weights, options.requests // 2)
            before = await cluster.stats()
            await streams.run(weights, options.requests)
            after = await cluster.stats()
            most = max(each.lora.num_cached for each in after)
            if most > options.room:
                raise RuntimeError(f"an engine holds {most} adapters; there was to be room for {options.room}")
            yield name, since(before, after)


async def table(folders: Sequence[Path], options: argparse.Namespace) -> bool:
    """Print the table. Returns whether the targets are met."""
    met = True
    print("| adapters | policy | found theirs loaded | loads | load, max / mean |\n|---|---|---|---|---|", flush=True)
    for policy in options.policies:
        async for name, row in measure(folders, policy, options):
            if policy == "prefix_aware":
                met = met and row.share >= FOUND and row.imbalance <= UNEVEN
            print(
                f"| {name} | {policy} | {row.share:.1%} | {sum(row.loads)} | {row.imbalance:.2f} |",
                row.asked if options.verbose else "",
                flush=True,
            )
    return met


def main() -> int:
    """Run the benchmark. Returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(description="Adapters found and evenness by policy, with engines as processes.")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--room", type=int, default=16, help="adapters that an engine has memory for")
    parser.add_argument("--max-loras", type=int, default=8)
    parser.add_argument("--requests", type=int, default=1000, help="that are counted, by popularity")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=["round_robin", "prefix_aware"])
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        met = asyncio.run(table(adapters_in(Path(folder), options), options))
    print("targets met" if met else f"TARGETS MISSED: {FOUND:.0%} found, load below {UNEVEN}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
