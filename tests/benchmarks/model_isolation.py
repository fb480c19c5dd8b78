"""Latency of one model of a frontend while another model of the same frontend is under load.

The engines are processes that compute nothing: each step takes a fixed time and gives every running request one token.
So the load costs time only in the frontend, which all models share. Rounds without and with load alternate, and each
round measures calls of the idle model, one after another on each of a few connections::

    python -m tests.benchmarks.model_isolation --streams 16,64 --rounds 4 --seconds 10

``--prompt-tokens`` is the length of the prompts of the load, which the frontend tokenizes.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml

from penstock.common.v1 import sampling_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc
from penstock_common.rpc.channel import make_channel
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.models.small_tokenizers import byte_level, save_model
from tests.fakes.network.ports import free_port

MODELS = ("loaded", "measured")
MODULE = "tests.benchmarks.model_isolation"


async def run_engine(port: int, model: str, step: float) -> None:
    """Serve as an engine whose steps take ``step`` seconds, until the process is killed."""
    engine = FakeEngine(model, model=model, manual=True, vocab_size=byte_level().get_vocab_size(), max_model_len=32_768)
    engine.ready.max_num_seqs = 256
    await engine.start(port)
    while True:
        await asyncio.sleep(step)
        if engine.running:
            engine.step()


async def call(stub: Any, model: str, text: str, tokens: int) -> float:
    """Generate ``tokens`` tokens, and return the latency in seconds."""
    started = time.perf_counter()
    params = sampling_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True)
    async for _ in stub.Generate(pb.GenerateRequest(model=model, text=text, sampling_params=params)):
        pass
    return time.perf_counter() - started


async def run_load(address: str, streams: int, text: str, tokens: int) -> None:
    """Keep ``streams`` calls of the loaded model running, until the process is killed."""

    async def client() -> None:
        async with make_channel(address) as channel:
            stub: Any = service_pb2_grpc.InferenceServiceStub(channel)
            while True:
                await call(stub, MODELS[0], text, tokens)

    await asyncio.gather(*(client() for _ in range(streams)))


async def measure(address: str, clients: int, seconds: float, tokens: int) -> list[float]:
    """Return the latencies of the calls of the measured model in ``seconds`` seconds."""
    end = time.perf_counter() + seconds

    async def client(number: int) -> list[float]:
        found = []
        async with make_channel(address) as channel:
            stub: Any = service_pb2_grpc.InferenceServiceStub(channel)
            await asyncio.sleep(0.05 * number)
            while time.perf_counter() < end:
                found.append(await call(stub, MODELS[1], "hello world", tokens))
        return found

    return [each for found in await asyncio.gather(*(client(number) for number in range(clients))) for each in found]


@contextlib.asynccontextmanager
async def process(*words: object) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run ``python -m WORDS`` during the block, and kill it at the end."""
    running = await asyncio.create_subprocess_exec(sys.executable, "-m", *map(str, words), env=os.environ)
    try:
        yield running
    finally:
        running.kill()
        await running.wait()


@contextlib.asynccontextmanager
async def system(folder: Path, step: float) -> AsyncIterator[str]:
    """Run a frontend with two models and their engines. Yields the frontend's address."""
    ports, port = [free_port() for _ in MODELS], free_port()
    entries = [
        {"model": {"path": str(save_model(folder / name)), "served_model_name": name}, "engines": [f"127.0.0.1:{each}"]}
        for name, each in zip(MODELS, ports, strict=True)
    ]
    config = {
        **entries[0],
        "models": entries[1:],
        "server": {"host": "127.0.0.1", "port": port, "max_connection_age": 0},
        "admin": {"host": "127.0.0.1", "port": free_port()},
        "http": {"port": -1},
        "log": {"level": "warning"},
        "drain_timeout": 0,
    }
    file = folder / "frontend.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    async with contextlib.AsyncExitStack() as stack:
        for name, each in zip(MODELS, ports, strict=True):
            await stack.enter_async_context(process(MODULE, "--engine", each, "--model", name, "--step", step))
        await stack.enter_async_context(process("penstock_frontend", "--config", file))
        address = f"127.0.0.1:{port}"
        async with make_channel(address) as channel:
            stub: Any = service_pb2_grpc.InferenceServiceStub(channel)
            params = sampling_pb2.SamplingParams(max_tokens=1)
            for name in MODELS:
                request = pb.GenerateRequest(model=name, text="hi", sampling_params=params)
                async for _ in stub.Generate(request, wait_for_ready=True, timeout=60):
                    pass
        yield address


def quantile(values: list[float], fraction: float) -> float:
    """Return the quantile in milliseconds."""
    ordered = sorted(values)
    return 1000 * ordered[min(int(fraction * len(ordered)), len(ordered) - 1)]


async def compare(address: str, streams: int, options: argparse.Namespace) -> None:
    """Measure alternating rounds without and with load, and print the latencies."""
    found: dict[str, list[list[float]]] = {"alone": [], "with load": []}
    load = (MODULE, "--address", address, "--load", streams, "--prompt-tokens", options.prompt_tokens)
    for _ in range(options.rounds):
        found["alone"].append(await measure(address, options.clients, options.seconds, options.tokens))
        async with process(*load, "--tokens", options.load_tokens):
            await asyncio.sleep(3.0)
            found["with load"].append(await measure(address, options.clients, options.seconds, options.tokens))
    p99 = {}
    for name, rounds in found.items():
        every = [value for values in rounds for value in values]
        p99[name] = statistics.median(quantile(values, 0.99) for values in rounds)
        print(
            f"  {name:10} {len(every):5} calls   p50 {quantile(every, 0.5):7.1f} ms   p99 {quantile(every, 0.99):7.1f} ms   "
            f"median of the rounds' p99 {p99[name]:7.1f} ms"
        )
    print(f"  p99 with load / alone: {p99['with load'] / p99['alone']:.3f}", flush=True)


async def main(options: argparse.Namespace) -> None:
    """Run all comparisons."""
    with tempfile.TemporaryDirectory() as folder:
        async with system(Path(folder), options.step) as address:
            for streams in options.streams.split(","):
                print(
                    f"{streams} streams of load, prompts of {options.prompt_tokens} tokens, steps of {options.step} s"
                )
                await compare(address, int(streams), options)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--streams", default="16,64", help="numbers of concurrent calls of the load, with commas")
    made.add_argument("--clients", type=int, default=4, help="concurrent calls of the measured model")
    made.add_argument("--rounds", type=int, default=4)
    made.add_argument("--seconds", type=float, default=10.0, help="duration of a round")
    made.add_argument("--step", type=float, default=0.02, help="seconds per step of an engine")
    made.add_argument("--tokens", type=int, default=32, help="output tokens of the measured calls")
    made.add_argument("--load-tokens", type=int, default=64, help="output tokens of the load's calls")
    made.add_argument("--prompt-tokens", type=int, default=512, help="prompt tokens of the load's calls")
    for name, kind in (("engine", int), ("load", int), ("model", str), ("address", str)):
        made.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    return made


if __name__ == "__main__":
    arguments = parser().parse_args()
    if arguments.engine:
        asyncio.run(run_engine(arguments.engine, arguments.model, arguments.step))
    elif arguments.load:
        prompt = "the quick brown fox " * (arguments.prompt_tokens // 4)
        asyncio.run(run_load(arguments.address, arguments.load, prompt, arguments.tokens))
    else:
        asyncio.run(main(arguments))
