"""An engine and a frontend as processes of their own, for the length of a benchmark."""

import asyncio
import contextlib
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock_common.rpc.channel import make_channel
from tests.benchmarks.engine_targets import KV_CACHE_MEMORY

START_TIMEOUT = 120.0


def free_port() -> int:
    """A port of the loopback interface nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def engine(model: str, threads: int) -> AsyncIterator[str]:
    """Yields the address of an engine's session port."""
    flags = {
        "model.path": model,
        "cache.kv-cache-memory": KV_CACHE_MEMORY,
        "executor.num-threads": threads,
        "log.level": "warning",
    }
    async with _service("penstock_enginecore", flags) as address:
        yield address


@contextlib.asynccontextmanager
async def frontend(model: str, engine_address: str) -> AsyncIterator[str]:
    """Yields the address of a public port whose requests go to that engine."""
    flags = {
        "model.path": model,
        "engines": f"[{engine_address!r}]",
        "admin.port": 0,
        "http.port": -1,
        "log.level": "warning",
    }
    async with _service("penstock_frontend", flags) as address:
        yield address


@contextlib.asynccontextmanager
async def _service(module: str, flags: dict[str, object]) -> AsyncIterator[str]:
    port = free_port()
    arguments = [
        f"--{key}={value}" for key, value in {**flags, "server.host": "127.0.0.1", "server.port": port}.items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", module, *arguments, stdout=output, stderr=output
            )
        try:
            await _serving(f"127.0.0.1:{port}", process, log)
            yield f"127.0.0.1:{port}"
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()


async def _serving(address: str, process: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(START_TIMEOUT), make_channel(address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)  # its published types lack the methods
        while True:
            if process.returncode is not None:
                raise RuntimeError(
                    f"the service ended with {process.returncode}:\n{await asyncio.to_thread(log.read_text)}"
                )
            with contextlib.suppress(grpc.aio.AioRpcError):
                status = await health.Check(health_pb2.HealthCheckRequest(), timeout=2)
                if status.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            await asyncio.sleep(0.05)
