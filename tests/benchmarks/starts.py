"""Waiting times of a user: from ``penstock serve`` to the first token, and for the first token of a long prompt, new or
with a cached prefix.
"""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock_common.rpc.channel import make_channel
from tests.benchmarks.processes import engine, frontend
from tests.benchmarks.public_target import PublicClient
from tests.fakes.network.ports import free_port

START_TIMEOUT = 120.0
_POLL = 0.1
_SERVICES = Path(__file__).parents[2] / "services"
PREFIX_LEN, SUFFIX_LEN = 1024, 8
_VOCAB = 1000
"""Vocabulary size of every model."""


def first_tokens(model: str, rounds: int) -> tuple[float, list[float]]:
    """Return the seconds from the start of ``penstock serve`` to the first token, of a first start and of ``rounds``
    more.

    The first start is as after an installation: the dependencies' Python is compiled, but this project's is not.
    """
    for package in _SERVICES.glob("*/penstock_*"):
        for cache in package.rglob("__pycache__"):
            shutil.rmtree(cache)
    first, *others = (asyncio.run(_first_token(model)) for _ in range(rounds + 1))
    return first, others


async def _first_token(model: str) -> float:
    port = free_port()
    command = [sys.executable, "-m", "penstock_local", "serve", model, "--grpc-port", str(port)]
    command += ["--http-port", str(free_port()), "--admin-port", str(free_port()), "--log-level", "error"]
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *command,
        env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(START_TIMEOUT):
            while not await _serves(f"127.0.0.1:{port}"):
                if process.returncode is not None:
                    raise RuntimeError(f"penstock serve ended with {process.returncode}")
                await asyncio.sleep(_POLL)
            async with PublicClient(f"127.0.0.1:{port}") as client:
                await anext(client.stream([5, 6, 7, 8], 2))
                return time.perf_counter() - began
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


async def _serves(address: str) -> bool:
    async with make_channel(address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)  # its published types lack the methods
        with contextlib.suppress(grpc.aio.AioRpcError):
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=1)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
    return False


def prefix_hits(model: str, threads: int, rounds: int) -> tuple[float, float]:
    """Median milliseconds to the first token of prompts of 1032 tokens: new ones, and others with the same first 1024."""
    return asyncio.run(_prefix_hits(model, threads, rounds))


async def _prefix_hits(model: str, threads: int, rounds: int) -> tuple[float, float]:
    async with _serving(model, threads) as client:
        rng = random.Random(0)
        await _ttft(client, list(_tokens(rng, 64)))
        cold, cached = [], []
        for _ in range(rounds):
            prefix = list(_tokens(rng, PREFIX_LEN))
            cold.append(await _ttft(client, [*prefix, *_tokens(rng, SUFFIX_LEN)]))
            cached += [await _ttft(client, [*prefix, *_tokens(rng, SUFFIX_LEN)]) for _ in range(3)]
        return statistics.median(cold) * 1e3, statistics.median(cached) * 1e3


@contextlib.asynccontextmanager
async def _serving(model: str, threads: int) -> AsyncIterator[PublicClient]:
    async with engine(model, threads) as core, frontend(model, core.address) as front:
        await core.serving()
        await front.serving()
        async with PublicClient(front.address) as client:
            yield client


def _tokens(rng: random.Random, count: int) -> Iterator[int]:
    return (rng.randrange(10, _VOCAB) for _ in range(count))


async def _ttft(client: PublicClient, prompt: list[int]) -> float:
    began = time.perf_counter()
    first = None
    async for _ in client.stream(prompt, 2):
        first = first or time.perf_counter() - began
    assert first is not None
    return first
