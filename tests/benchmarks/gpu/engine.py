"""Load on an engine in this process, and on an engine behind a frontend with two gRPC hops.

Each stream sends its next request when the previous one ends.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ModelConfig
from penstock_enginecore.executor.uniproc import UniprocExecutor
from tests.benchmarks import load
from tests.benchmarks.engine_targets import InProcessEngine
from tests.benchmarks.gpu import machine, names
from tests.benchmarks.gpu.plans import plan_of
from tests.benchmarks.gpu.shapes import BLOCK_SIZE, Plan
from tests.benchmarks.load import Load, Stream
from tests.benchmarks.processes import frontend
from tests.benchmarks.public_target import PublicClient
from tests.device.phases import Row, Settings, Stage
from tests.fakes.processes import Service

ROUNDS = 3


def stages(settings: Settings) -> list[Stage]:
    """Return two stages: an engine in this process, and an engine process behind a frontend.

    Rows have medians of the tokens per second, of the time to the first token and of the time per token.
    """
    plan, device = plan_of(settings), machine.pick(settings)
    return [
        Stage(
            target,
            [
                Row(names.engine(target, streams), partial(_measure, plan, streams), 60.0)
                for streams in plan.engine_streams
            ],
            partial(_opened, plan, device, target),
            120.0,
        )
        for target in names.TARGETS
    ]


@dataclass(frozen=True)
class Target:
    """A loaded engine or server, with an event loop that runs during requests."""

    runner: asyncio.Runner
    stream: Stream
    described: dict[str, Any]

    def told(self) -> dict[str, Any]:
        """Return the names of the kernels, for the record of the build."""
        return self.described


@contextlib.contextmanager
def _opened(plan: Plan, device: torch.device, target: str) -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        config = config_of(plan, plan.shape.write(Path(folder)), device)
        stack = contextlib.AsyncExitStack()
        try:
            yield runner.run(
                _in_process(runner, stack, config) if target == names.IN_PROCESS else _over_grpc(runner, stack, config)
            )
        finally:
            runner.run(stack.aclose())


async def _in_process(runner: asyncio.Runner, stack: contextlib.AsyncExitStack, config: EngineCoreConfig) -> Target:
    executor = UniprocExecutor(config)
    engine = InProcessEngine(config, executor)
    [worker] = executor.collective_rpc("worker_info")
    await stack.enter_async_context(engine)
    return Target(runner, engine.stream, {"computing": worker["computing"]})


async def _over_grpc(runner: asyncio.Runner, stack: contextlib.AsyncExitStack, config: EngineCoreConfig) -> Target:
    process = await stack.enter_async_context(_process(config))
    await process.serving()
    service = await stack.enter_async_context(frontend(config.model.path, process.address))
    await service.serving()
    public = await stack.enter_async_context(PublicClient(service.address))
    return Target(runner, public.stream, {})


def _measure(plan: Plan, streams: int, target: Target) -> dict[str, Any]:
    """Return medians of the rounds after a warm-up round."""
    item = Load(streams=streams, requests=streams, input_len=plan.input_len, output_len=plan.output_len)
    results = [
        target.runner.run(load.run(target.stream, item, load.prompts(item, plan.shape.vocab, seed=number)))
        for number in range(ROUNDS + 1)
    ]
    median: dict[str, Any] = msgspec.to_builtins(load.median(results[1:]))
    return median


def config_of(plan: Plan, path: Path, device: torch.device, *, longest: float = 1.0) -> EngineCoreConfig:
    """Return an engine configuration with a KV cache for the largest load. ``longest`` is the length of the longest
    prompt, as a multiple of the plan's ``input_len``.
    """
    length = int(longest * plan.input_len) + plan.output_len
    blocks = 1 + max(plan.engine_streams) * (-(-length // BLOCK_SIZE) + 1)
    memory = blocks * BLOCK_SIZE * plan.shape.kv_bytes_per_token
    return EngineCoreConfig(
        model=ModelConfig(
            path=str(path),
            load_format="dummy",
            dtype=plan.shape.dtype,
            device="cuda" if device.type == "cuda" else "cpu",
        ),
        cache=CacheConfig(kv_cache_memory=max(memory, 2**24), block_size=BLOCK_SIZE),
    )


def _process(config: EngineCoreConfig) -> Service:
    """Return the same engine as a separate process."""
    return Service(
        "penstock_enginecore",
        model__path=config.model.path,
        model__load_format=config.model.load_format,
        model__dtype=config.model.dtype,
        model__device=config.model.device,
        cache__kv_cache_memory=config.cache.kv_cache_memory,
    )
