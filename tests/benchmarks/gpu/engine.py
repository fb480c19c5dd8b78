"""An engine in this process, and the same behind a frontend and two hops of gRPC, under a closed loop of streams."""

import asyncio
import contextlib
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch

from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ModelConfig
from tests.benchmarks import load
from tests.benchmarks.engine_targets import InProcessEngine
from tests.benchmarks.gpu.shapes import BLOCK_SIZE, Plan
from tests.benchmarks.load import Load, Stream
from tests.benchmarks.processes import frontend
from tests.benchmarks.public_target import PublicClient
from tests.fakes.processes import Service

ROUNDS = 3


def measure(plan: Plan, device: torch.device) -> dict[str, Any]:
    """Medians of tokens per second and times to tokens, by target and number of streams."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measure(plan, plan.shape.write(Path(folder)), device))


async def _measure(plan: Plan, path: Path, device: torch.device) -> dict[str, Any]:
    config = _config(plan, path, device)
    async with contextlib.AsyncExitStack() as stack:
        in_process = await stack.enter_async_context(InProcessEngine(config))
        process = await stack.enter_async_context(_process(config))
        await process.serving()
        service = await stack.enter_async_context(frontend(str(path), process.address))
        await service.serving()
        public = await stack.enter_async_context(PublicClient(service.address))
        targets: dict[str, Stream] = {"in-process": in_process.stream, "over gRPC": public.stream}
        found: dict[str, Any] = {name: {} for name in targets}
        for streams in plan.engine_streams:
            for name, results in (await _in_turn(plan, streams, targets)).items():
                found[name][str(streams)] = msgspec.to_builtins(load.median(results))
    return found


async def _in_turn(plan: Plan, streams: int, targets: dict[str, Stream]) -> dict[str, list[load.Result]]:
    """After a round to warm up."""
    item = Load(streams=streams, requests=streams, input_len=plan.input_len, output_len=plan.output_len)
    results: dict[str, list[load.Result]] = {name: [] for name in targets}
    for number in range(ROUNDS + 1):
        for name, stream in targets.items():
            prompts = load.prompts(item, plan.shape.vocab, seed=number)
            result = await load.run(stream, item, prompts)
            if number:
                results[name].append(result)
    return results


def _config(plan: Plan, path: Path, device: torch.device) -> EngineCoreConfig:
    """With a KV cache for the largest load, so that two engines fit one device."""
    blocks = 1 + max(plan.engine_streams) * (-(-(plan.input_len + plan.output_len) // BLOCK_SIZE) + 1)
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
    """The same engine as a process."""
    return Service(
        "penstock_enginecore",
        model__path=config.model.path,
        model__load_format=config.model.load_format,
        model__dtype=config.model.dtype,
        model__device=config.model.device,
        cache__kv_cache_memory=config.cache.kv_cache_memory,
    )
