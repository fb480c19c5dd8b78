"""Throughput of several workers on two cores: ``python -m tests.benchmarks.parallel_engines --model DIR``.

An engine with two workers of one thread each is compared with one worker of two threads, with the same kernels. The
engines run in this process, in turn, for several rounds; results are medians. Pipeline stages are measured with manual
and automatic layer partitions, and without splitting decodes over microbatches. Each row has the largest worker's share
of the weights, and the idle share of the most idle stage.
"""

import argparse
import asyncio
import statistics
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from unittest import mock

import msgspec
from rich.console import Console
from rich.table import Table

from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ExecutorConfig, KernelsConfig, ModelConfig
from penstock_enginecore.core.request import Request
from penstock_enginecore.core.scheduler import scheduler
from penstock_enginecore.core.scheduler.token_budget import DecodeShare
from penstock_enginecore.executor.factory import make_executor
from tests.benchmarks import load
from tests.benchmarks.engine_targets import KV_CACHE_MEMORY, InProcessEngine
from tests.benchmarks.load import Load


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table.

    Attributes:
        layers: Number of layers of each stage. If empty, the engine chooses.
        dealt: Whether decodes are distributed over microbatches.
    """

    name: str
    tensor: int = 1
    pipeline: int = 1
    layers: tuple[int, ...] = ()
    decoder: bool = True
    dealt: bool = True


TENSOR = (
    Row(name="one worker, two threads"),
    Row(name="TP 2", tensor=2),
    Row(name="one worker, packed layers", decoder=False),
    Row(name="TP 2, packed layers", tensor=2, decoder=False),
)
PIPELINE = (
    Row(name="one worker, two threads"),
    Row(name="PP 2", pipeline=2),
    Row(name="PP 2, 7 and 5 layers", pipeline=2, layers=(7, 5)),
    Row(name="PP 2, decodes not dealt out", pipeline=2, dealt=False),
)
"""Rows for pipeline parallelism, for a model of 12 layers."""


class Found(msgspec.Struct, frozen=True):
    """Tokens per second, bytes of weights of the largest worker, and the idle fraction of the most idle stage."""

    tokens_per_s: float
    weight_bytes: int
    idle: float


def config_of(model: str, row: Row) -> EngineCoreConfig:
    """Return the configuration of a row, with two threads in total."""
    workers = row.tensor * row.pipeline
    return EngineCoreConfig(
        model=ModelConfig(path=model, device="cpu"),
        cache=CacheConfig(kv_cache_memory=KV_CACHE_MEMORY),
        executor=ExecutorConfig(
            num_threads=max(1, 2 // workers),
            tensor_parallel_size=row.tensor,
            pipeline_parallel_size=row.pipeline,
            stage_layers=row.layers,
        ),
        kernels=KernelsConfig(decoder=row.decoder),
    )


async def measure(model: str, row: Row, item: Load, seed: int) -> Found:
    """Measure a new engine after a warm-up."""
    with _dealing(row.dealt):
        config = config_of(model, row)
        executor = make_executor(config)
        async with InProcessEngine(config, executor) as engine:
            warm = msgspec.structs.replace(item, requests=min(item.requests, 4), output_len=4)
            await load.run(engine.stream, warm, load.prompts(warm, engine.vocab_size, seed=seed + 1000))
            result = await load.run(engine.stream, item, load.prompts(item, engine.vocab_size, seed=seed))
            await asyncio.sleep(1.5)  # workers report their statistics with a delay of a second
            stats = executor.worker_stats()
    return Found(
        result.tokens_per_s,
        max(worker.weight_bytes for worker in stats),
        max(worker.stage_idle or 0.0 for worker in stats),
    )


def _dealing(dealt: bool) -> AbstractContextManager[object]:
    whole = partial(_whole_share, DecodeShare)
    return nullcontext() if dealt else mock.patch.object(scheduler, "DecodeShare", whole)


def _whole_share(
    share: type[DecodeShare], requests: list[Request], step: int, _num_stages: int, *, early: bool
) -> DecodeShare:
    """Return a share with all decoding requests, as with one stage."""
    return share(requests, step, 1, early=early)


def main() -> None:
    """Print a table for each kind."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.parallel_engines")
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-len", type=int, default=32)
    options = parser.parse_args()
    console = Console()
    for rows, streams in ((TENSOR, 16), (PIPELINE, 32)):
        item = Load(streams=streams, requests=3 * streams, input_len=64, output_len=options.output_len)
        found: dict[Row, list[Found]] = {row: [] for row in rows}
        for seed in range(options.rounds):
            for row, each in found.items():
                each.append(asyncio.run(measure(options.model, row, item, seed)))
                console.log(f"{row.name}, {streams} streams: {each[-1].tokens_per_s:.1f} tokens/s")
        table = Table(title=f"{streams} streams, {item.input_len} tokens in, {item.output_len} out; medians")
        for column in ("engine", "tokens/s", "of the first", "weights of the largest worker", "most idle stage"):
            table.add_column(column, justify="left" if column == "engine" else "right")
        first = statistics.median(each.tokens_per_s for each in found[rows[0]])
        whole = found[rows[0]][0].weight_bytes
        for row, results in found.items():
            speed = statistics.median(each.tokens_per_s for each in results)
            idle = statistics.median(each.idle for each in results)
            share = results[0].weight_bytes / whole
            idle_text = f"{idle:.0%}" if row.pipeline > 1 else ""
            table.add_row(row.name, f"{speed:.1f}", f"{speed / first:.0%}", f"{share:.0%}", idle_text)
        console.print(table)


if __name__ == "__main__":
    main()
