"""Load of different requests on an engine in this process: filters, grammars, log-probabilities, shared prefixes.

Each stream sends its next request when the previous one ends. Prompts have different lengths, and half of them begin
with one long prefix.
"""

import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock_common.types.sampling import SamplingParams, StructuredOutput
from penstock_enginecore.executor.uniproc import UniprocExecutor
from tests.benchmarks.engine_targets import InProcessEngine
from tests.benchmarks.gpu import engine, machine, names
from tests.benchmarks.gpu.plans import plan_of
from tests.benchmarks.gpu.shapes import Plan
from tests.device.phases import Row, Settings, Stage

REQUESTS_PER_STREAM = 2
SHORTEST, LONGEST = 0.5, 2.0
"""Lengths of prompts, as multiples of the plan's ``input_len``."""
_REGEX = "[ -~]+"
"""Grammar that allows any number of printable characters, so that only ``max_tokens`` ends an output."""


def stages(settings: Settings) -> list[Stage]:
    """Return a row for each load of ``names.MIXED``."""
    plan, device = plan_of(settings), machine.pick(settings)
    rows = [Row(load, partial(_measure, plan, load), 60.0) for load in names.MIXED]
    return [Stage("engine", rows, partial(_opened, plan, device), 120.0)]


@dataclass(frozen=True)
class Target:
    """A running engine, with the event loop of its requests."""

    runner: asyncio.Runner
    engine: InProcessEngine
    executor: UniprocExecutor

    def told(self) -> dict[str, Any]:
        """Return the names of the kernels, for the record of the build."""
        [worker] = self.executor.collective_rpc("worker_info")
        return {"computing": worker["computing"]}

    @property
    def captures(self) -> int:
        """Number of graphs that the engine has captured."""
        return sum(worker.graphs.captures for worker in self.executor.worker_stats())


@contextlib.contextmanager
def _opened(plan: Plan, device: torch.device) -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        config = engine.config_of(plan, plan.shape.write(Path(folder)), device, longest=LONGEST)
        executor = UniprocExecutor(config)
        target = InProcessEngine(config, executor)
        runner.run(target.__aenter__())
        try:
            yield Target(runner, target, executor)
        finally:
            runner.run(target.__aexit__(None, None, None))


def _measure(plan: Plan, load: str, target: Target) -> dict[str, Any]:
    """Return the median and the 99th percentile of the time between tokens of plain streams, and other figures."""
    target.runner.run(_run(plan, load, target.engine, seed=0))  # computes the shared prefix, and warms up
    before, begun = target.captures, time.perf_counter()
    requests = target.runner.run(_run(plan, load, target.engine, seed=1))
    seconds = time.perf_counter() - begun
    gaps = sorted(gap for each in requests if not each.constrained for gap in each.gaps)
    return {
        "itl_ms": statistics.median(gaps) * 1e3,
        "itl_p99_ms": gaps[int(0.99 * (len(gaps) - 1))] * 1e3,
        "ttft_ms": statistics.median(each.first for each in requests) * 1e3,
        "tokens_per_s": sum(1 + len(each.gaps) for each in requests) / seconds,
        "captured_while_serving": target.captures - before,
    }


@dataclass(frozen=True)
class Timed:
    """Times of one request in seconds: until the first token, and between tokens."""

    first: float
    gaps: list[float]
    constrained: bool


async def _run(plan: Plan, load: str, target: InProcessEngine, seed: int) -> list[Timed]:
    """Run the load on all streams. Returns the times of all requests."""
    shared = _prompt(plan, random.Random("shared"), plan.input_len)

    async def stream(number: int) -> list[Timed]:
        chance = random.Random(f"{seed} {number}")
        found = []
        for _ in range(REQUESTS_PER_STREAM):
            params = params_of(load, number, plan.output_len, chance)
            length = chance.randrange(int(SHORTEST * plan.input_len), int((LONGEST - 1) * plan.input_len))
            prompt = (shared if number % 2 else []) + _prompt(plan, chance, length)
            found.append(await _timed(target, prompt, params))
        return found

    of_streams = await asyncio.gather(*(stream(number) for number in range(max(plan.engine_streams))))
    return [each for some in of_streams for each in some]


def params_of(load: str, stream: int, output_len: int, chance: random.Random) -> SamplingParams:
    """Return the parameters of a request of this stream in one of ``names.MIXED``."""
    given = names.MIXED[load]
    grammar = stream < given.grammars if given.grammars >= 1 else chance.random() < given.grammars
    return SamplingParams(
        temperature=given.filters.temperature,
        top_p=given.filters.top_p,
        top_k=given.filters.top_k,
        seed=chance.randrange(2**31),
        max_tokens=output_len,
        ignore_eos=True,
        logprobs=5 if chance.random() < given.logprobs else None,
        structured_output=StructuredOutput(regex=_REGEX) if grammar else None,
    )


async def _timed(target: InProcessEngine, prompt: list[int], params: SamplingParams) -> Timed:
    last = time.perf_counter()
    first, gaps = 0.0, list[float]()
    async for size in target.sampled(prompt, params):
        now = time.perf_counter()
        if first:
            gaps += [(now - last) / size] * size
        else:
            first = now - last
            gaps += [0.0] * (size - 1)
        last = now
    return Timed(first, gaps, params.structured_output is not None)


def _prompt(plan: Plan, chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(10, plan.shape.vocab) for _ in range(length)]
