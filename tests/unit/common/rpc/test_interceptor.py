"""Compressed messages: a server takes small ones, and decompresses no more of others than its limit."""

import gzip
import zlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc
from penstock_common.config.sections import ServerConfig
from penstock_common.errors import ResourceExhausted
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.interceptor import MAX_DECOMPRESSED_BYTES, decompressed
from penstock_common.rpc.server import RpcServer
from penstock_common.rpc.status import from_rpc_error

NAME = "penstock.inference.v1.InferenceService"


def test_a_message_that_is_not_compressed_is_itself() -> None:
    for data in (b"", b"\x1f", b"\x0a\x1f\x8b"):
        assert decompressed(data) is data


def test_a_compressed_message_is_what_it_was() -> None:
    data = pb.GenerateRequest(request_id="r").SerializeToString()
    assert decompressed(gzip.compress(data), len(data)) == data
    assert decompressed(gzip.compress(b"")) == b""


def test_a_message_of_more_bytes_than_the_limit_is_refused() -> None:
    with pytest.raises(ResourceExhausted, match="more than 1000 bytes after decompression; send the message without"):
        decompressed(gzip.compress(bytes(1001)), 1000)


@pytest.mark.parametrize("spoil", [lambda data: data[:-1], lambda data: data + b"x", lambda data: data[:5] + b"?" * 20])
def test_a_broken_message_is_an_error(spoil: Any) -> None:
    with pytest.raises(zlib.error):
        decompressed(spoil(gzip.compress(b"abc" * 100)))


class Echo(service_pb2_grpc.InferenceServiceServicer):
    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(request_id=str(len(request.request_id)))


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = RpcServer(ServerConfig(host="127.0.0.1", port=0), service_names=[NAME])
    service_pb2_grpc.add_InferenceServiceServicer_to_server(Echo(), server.server)
    port = await server.start()
    async with make_channel(f"127.0.0.1:{port}") as made:
        yield made
    await server.stop(None)


async def answer(channel: grpc.aio.Channel, size: int, compression: grpc.Compression) -> str:
    stub = service_pb2_grpc.InferenceServiceStub(channel)
    call = stub.Generate(pb.GenerateRequest(request_id="r" * size), compression=compression)
    return str((await call.read()).request_id)


@pytest.mark.parametrize("size", [1, 1000, MAX_DECOMPRESSED_BYTES - 100])
@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.NoCompression])
async def test_ordinary_calls_are_answered(channel: grpc.aio.Channel, size: int, compression: grpc.Compression) -> None:
    assert await answer(channel, size, compression) == str(size)


async def test_messages_without_compression_may_be_larger(channel: grpc.aio.Channel) -> None:
    size = 2 * MAX_DECOMPRESSED_BYTES
    assert await answer(channel, size, grpc.Compression.NoCompression) == str(size)


async def test_a_call_with_too_large_a_compressed_message_is_refused(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await answer(channel, 2 * MAX_DECOMPRESSED_BYTES, grpc.Compression.Gzip)
    failed = from_rpc_error(error.value)
    assert (failed.code, failed.reason) == ("RESOURCE_EXHAUSTED", "MESSAGE_TOO_LARGE")
    assert (
        failed.message
        == "a compressed message has more than 4194304 bytes after decompression; send the message without compression"
    )


async def test_other_compression_is_refused_by_name(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await answer(channel, 1000, grpc.Compression.Deflate)
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "deflate" in str(error.value.details())
