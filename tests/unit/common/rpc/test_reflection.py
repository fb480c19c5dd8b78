"""Server reflection: both versions, and every symbol that tools ask for."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2

from penstock.inference.v1 import service_pb2
from penstock_common.config.sections import ServerConfig
from penstock_common.rpc import reflection
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.server import RpcServer

NAME = "penstock.inference.v1.InferenceService"
Request: Any = reflection_pb2.ServerReflectionRequest
Response: Any = reflection_pb2.ServerReflectionResponse


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = RpcServer(ServerConfig(host="127.0.0.1", port=0), service_names=[NAME])
    port = await server.start()
    async with make_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


async def ask(channel: grpc.aio.Channel, version: str, **request: str) -> Any:
    call = channel.stream_stream(f"/{version}/ServerReflectionInfo")(iter([Request(**request).SerializeToString()]))
    [answer] = [Response.FromString(each) async for each in call]
    return answer


versions = pytest.mark.parametrize("version", [reflection.V1, reflection.V1ALPHA])


@versions
async def test_services_are_listed(channel: grpc.aio.Channel, version: str) -> None:
    answer = await ask(channel, version, list_services="")
    names = [service.name for service in answer.list_services_response.service]
    assert names == sorted([NAME, "grpc.health.v1.Health", reflection.V1, reflection.V1ALPHA])


@versions
@pytest.mark.parametrize(
    ("symbol", "file"),
    [
        (NAME, "penstock/inference/v1/service.proto"),
        (f"{NAME}.Generate", "penstock/inference/v1/service.proto"),
        ("penstock.inference.v1.GenerateRequest", "penstock/inference/v1/messages.proto"),
        ("penstock.inference.v1.GenerateRequest.text", "penstock/inference/v1/messages.proto"),
        ("penstock.inference.v1.GenerateSessionRequest.message", "penstock/inference/v1/messages.proto"),
        ("penstock.common.v1.FinishReason.FINISH_REASON_STOP", "penstock/common/v1/finish.proto"),
        (f"{reflection.V1}.ServerReflectionInfo", "grpc/reflection/v1/reflection.proto"),
    ],
)
async def test_a_symbol_comes_with_its_file_and_what_that_imports(
    channel: grpc.aio.Channel, version: str, symbol: str, file: str
) -> None:
    answer = await ask(channel, version, file_containing_symbol=symbol)
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(each)
        for each in answer.file_descriptor_response.file_descriptor_proto
    ]
    names = {each.name for each in files}
    assert file in names
    assert {dependency for each in files for dependency in each.dependency} <= names


@versions
@pytest.mark.parametrize("symbol", ["", "nothing", f"{NAME}.Nothing", "penstock.inference.v1", f"{NAME}.Generate.x"])
async def test_unknown_symbols_are_not_found(channel: grpc.aio.Channel, version: str, symbol: str) -> None:
    answer = await ask(channel, version, file_containing_symbol=symbol)
    assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_files_are_found_by_their_names(channel: grpc.aio.Channel) -> None:
    answer = await ask(channel, reflection.V1, file_by_filename=service_pb2.DESCRIPTOR.name)
    assert service_pb2.DESCRIPTOR.serialized_pb in answer.file_descriptor_response.file_descriptor_proto
