"""Checks that a port still works for its own clients."""

import asyncio
import contextlib
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock_common.rpc.channel import make_channel
from tests.fakes.patience import PATIENCE
from tests.fuzz.internal_ports.systems import Port

_QUICK = 5.0
"""Seconds within which an undisturbed gRPC or HTTP port answers."""


async def speaks(port: Port) -> str:
    """Return the port's protocol: gRPC, HTTP, or another protocol over TCP."""
    for spoken in ("gRPC", "HTTP"):
        if await _answers(port, spoken, _QUICK):
            return spoken
    return "TCP"


async def still_answers(port: Port, spoken: str) -> bool:
    """Return whether the port answers as before. Ports with other protocols only have to accept connections."""
    return await _answers(port, spoken, PATIENCE / 10)


async def _answers(port: Port, spoken: str, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError, OSError, grpc.aio.AioRpcError):
        async with asyncio.timeout(seconds):
            match spoken:
                case "gRPC":
                    return await _answers_grpc(port, seconds)
                case "HTTP":
                    return await _answers_http(port)
                case _:
                    _, writer = await asyncio.open_connection(port.host, port.port)
                    writer.close()
                    return True
    return False


async def _answers_grpc(port: Port, seconds: float) -> bool:
    async with make_channel(port.address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        try:
            await health.Check(health_pb2.HealthCheckRequest(), timeout=seconds)
        except grpc.aio.AioRpcError as e:
            # A gRPC server without a health service, or a server that authenticates its callers.
            return e.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED)
    return True


async def _answers_http(port: Port) -> bool:
    reader, writer = await asyncio.open_connection(port.host, port.port)
    try:
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        return (await reader.readline()).startswith(b"HTTP/1.")
    finally:
        writer.close()
