"""Start of a complete engine from a checkpoint with files, as a user starts it: with the default size of the KV cache.

The other phases use ``load_format: dummy``, in which each weight has its own memory. Weights that are read from files
share large segments, so the memory that remains for the KV cache differs.
"""

import asyncio
import contextlib
import gc
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ModelConfig
from penstock_enginecore.executor.uniproc import UniprocExecutor
from tests.benchmarks import load
from tests.benchmarks.engine_targets import InProcessEngine
from tests.benchmarks.gpu import machine
from tests.benchmarks.gpu.plans import plan_of
from tests.benchmarks.gpu.shapes import BLOCK_SIZE, Plan
from tests.benchmarks.load import Load
from tests.device.phases import Row, Settings, Stage

MEMORY = Path("/dev/shm")
"""Folder in memory, where reading is fastest."""
STREAMS, OUTPUT = 8, 8
CPU_MEMORY = 2**24
"""Size of the KV cache on a CPU in bytes. There, the default would take a part of the tests' machine."""


def stages(settings: Settings) -> list[Stage]:
    """Return one row for the start of the engine and a few answers. Its stage writes the checkpoint."""
    plan, device = plan_of(settings), machine.pick(settings)
    return [Stage("files", [Row("start", partial(_start, plan, device), 120.0)], partial(_files, plan, device), 120.0)]


@contextlib.contextmanager
def _files(plan: Plan, device: torch.device) -> Iterator[Path]:
    """Write a checkpoint with random weights, if possible to a folder in memory."""
    needed = 2 * plan.shape.step_weights * plan.shape.number_bytes
    in_memory = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > needed
    with tempfile.TemporaryDirectory(dir=MEMORY if in_memory else None) as folder:
        path = plan.shape.write(Path(folder))
        models: Any = AutoModelForCausalLM
        with device:
            model = models.from_config(AutoConfig.from_pretrained(path), dtype=getattr(torch, plan.shape.dtype))
        model.save_pretrained(path)
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        yield path


def _start(plan: Plan, device: torch.device, path: Path) -> dict[str, Any]:
    """Return the seconds until the engine is ready, the KV cache, free memory, and graphs that answers captured.

    ``unused_share`` is the memory that the engine may use but does not, as a fraction of the KV cache.
    """
    config = EngineCoreConfig(
        model=ModelConfig(path=str(path), dtype=plan.shape.dtype, device="cuda" if device.type == "cuda" else "cpu"),
        cache=CacheConfig(block_size=BLOCK_SIZE, kv_cache_memory=None if device.type == "cuda" else CPU_MEMORY),
    )
    begun = time.perf_counter()
    executor = UniprocExecutor(config)
    engine = InProcessEngine(config, executor)
    found: dict[str, Any] = {"s": time.perf_counter() - begun}
    [worker] = executor.collective_rpc("worker_info")
    found["computing"] = worker["computing"]
    [before] = executor.worker_stats()
    found["kv_cache_bytes"] = before.kv_cache_bytes
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        unused = free - (1 - config.cache.memory_utilization) * total
        found |= {"free_bytes": free, "unused_share": unused / before.kv_cache_bytes}
    found["tokens_per_s"] = asyncio.run(_answers(plan, engine))
    [after] = executor.worker_stats()
    found["captured_while_serving"] = after.graphs.captured - before.graphs.captured
    return found


async def _answers(plan: Plan, engine: InProcessEngine) -> float:
    """Return the tokens per second of a few requests with random prompts. Stops the engine."""
    item = Load(streams=STREAMS, requests=2 * STREAMS, input_len=plan.input_len, output_len=OUTPUT)
    async with engine:
        result = await load.run(engine.stream, item, load.prompts(item, plan.shape.vocab, seed=0))
    return result.tokens_per_s
