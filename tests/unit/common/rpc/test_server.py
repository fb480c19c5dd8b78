"""The server every service is built on: health, error details, ports."""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc
from penstock_common.config.sections import ServerConfig
from penstock_common.errors import ConfigError, InvalidArgument, ResourceExhausted
from penstock_common.rpc import server
from penstock_common.rpc import server as server_module
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.interceptor import ErrorInterceptor
from penstock_common.rpc.server import RpcServer
from penstock_common.rpc.status import from_rpc_error
from tests.fakes.patience import PATIENCE

NAME = "penstock.inference.v1.InferenceService"
LOOPBACK = ServerConfig(host="127.0.0.1", port=0)


class Failing(service_pb2_grpc.InferenceServiceServicer):
    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        if request.name == "full":
            raise ResourceExhausted("queue is full", retry_after=1.5)
        if request.name == "bug":
            raise ZeroDivisionError("a secret")
        raise InvalidArgument("name is 'x'; it must be 'y'", field="name")

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(text="one")
        raise InvalidArgument("bad", field="text")


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = RpcServer(LOOPBACK, service_names=[NAME])
    service_pb2_grpc.add_InferenceServiceServicer_to_server(Failing(), server.server)
    port = await server.start()
    async with make_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


async def failure(channel: grpc.aio.Channel, name: str) -> grpc.aio.AioRpcError:
    stub = service_pb2_grpc.InferenceServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.GetModel(pb.GetModelRequest(name=name))
    return error.value


async def test_a_wrong_field_arrives_as_a_field_violation(channel: grpc.aio.Channel) -> None:
    error = await failure(channel, "x")
    failed = from_rpc_error(error)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(failed, InvalidArgument)
    assert (failed.field, failed.reason, failed.message) == ("name", "INVALID_FIELD", "name is 'x'; it must be 'y'")


async def test_a_retry_hint_arrives(channel: grpc.aio.Channel) -> None:
    failed = from_rpc_error(await failure(channel, "full"))
    assert isinstance(failed, ResourceExhausted)
    assert failed.retry_after == pytest.approx(1.5)


async def test_an_unexpected_error_is_internal_and_does_not_tell_its_text(channel: grpc.aio.Channel) -> None:
    error = await failure(channel, "bug")
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (error.details() or "")
    assert "the service's log has it as incident" in (error.details() or "")


async def test_an_error_in_the_middle_of_a_stream_keeps_its_details(channel: grpc.aio.Channel) -> None:
    stub = service_pb2_grpc.InferenceServiceStub(channel)
    texts = []
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async for response in stub.Generate(pb.GenerateRequest()):
            texts.append(response.text)
    assert texts == ["one"]
    assert from_rpc_error(error.value).field == "text"


async def test_an_rpc_without_a_handler_is_unimplemented(channel: grpc.aio.Channel) -> None:
    stub = service_pb2_grpc.InferenceServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.ListModels(pb.ListModelsRequest())
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_watchers_see_the_service_become_ready_and_stop() -> None:
    server = RpcServer(LOOPBACK, service_names=[NAME])
    port = await server.start()
    async with make_channel(f"127.0.0.1:{port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=NAME))
        states = health_pb2.HealthCheckResponse
        assert (await watch.read()).status == states.NOT_SERVING
        await server.set_serving(True)
        assert (await watch.read()).status == states.SERVING
        stopping = asyncio.create_task(server.stop(5))
        assert (await watch.read()).status == states.NOT_SERVING
        watch.cancel()
        await stopping


async def test_a_taken_port_is_an_error_that_says_so() -> None:
    first = RpcServer(LOOPBACK, service_names=[])
    port = await first.start()
    second = RpcServer(ServerConfig(host="127.0.0.1", port=port), service_names=[])
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
        await second.start()
    await first.stop(0)
    await second.stop(0)


@pytest.mark.parametrize("method", [f"/{NAME}/GetModel", "/grpc.health.v1.Health/Check"])
@pytest.mark.parametrize("message", [b"\xff", b"\x0a\x02\xff\xfe", b"\x0a\x50cut off"])
async def test_a_message_that_cannot_be_read_is_its_senders_fault(
    channel: grpc.aio.Channel, method: str, message: bytes
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await channel.unary_unary(method)(message)
    failed = from_rpc_error(error.value)
    assert isinstance(failed, InvalidArgument)
    assert failed.reason == "UNREADABLE_MESSAGE"
    assert "the message cannot be read" in failed.message


async def test_an_unreadable_message_of_a_stream_ends_it_behind_the_answers_before_it(
    channel: grpc.aio.Channel,
) -> None:
    good = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    call = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")()
    await call.write(good)
    answer = reflection_pb2.ServerReflectionResponse.FromString(await call.read())
    assert NAME in [service.name for service in answer.list_services_response.service]
    await call.write(b"\xff")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_unreadable_request_of_a_stream_of_answers_is_refused(channel: grpc.aio.Channel) -> None:
    for method in (f"/{NAME}/Generate", "/grpc.health.v1.Health/Watch"):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in channel.unary_stream(method)(b"\xff"):
                pass
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_health_service_can_still_be_watched(channel: grpc.aio.Channel) -> None:
    call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="liveness"))
    assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
    call.cancel()


async def test_a_method_of_health_that_is_not_served_is_unimplemented(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await channel.unary_unary("/grpc.health.v1.Health/List")(b"")
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


_PEER_WITH_A_MESSAGE = """
import asyncio, struct
from penstock_common.rpc.interceptor import ErrorInterceptor
from penstock_common.rpc.server import RpcServer
from penstock_common.config.sections import ServerConfig

async def main():
    server = RpcServer(ServerConfig(host="127.0.0.1", port=0), service_names=[])
    port = await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    goaway = struct.pack(">II", 0, 99) + b"\\x87 words of the peer"
    header = struct.pack(">I", len(goaway))[1:] + bytes([7, 0]) + bytes(4)
    writer.write(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes(3) + bytes([4]) + bytes(5) + header + goaway)
    writer.write(b"\\xff" * 100)  # and no frame at all, which ends the connection
    await writer.drain()
    await reader.read()  # until the server closes the connection
    writer.close()
    await server.stop(0)

asyncio.run(main())
"""


def test_peers_messages_are_not_logged() -> None:
    # The service itself sets this variable.
    mine = {key: value for key, value in os.environ.items() if key != "GRPC_VERBOSITY"}
    run = subprocess.run([sys.executable, "-c", _PEER_WITH_A_MESSAGE], env=mine, capture_output=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stderr.decode(errors="replace")
    assert b"words of the peer" not in run.stdout + run.stderr


async def test_an_error_for_a_client_that_has_gone_ends_the_call_without_a_traceback() -> None:
    class Gone:
        async def abort(self, *_: object, **__: object) -> None:
            raise grpc.aio.InternalError("execute_batch")

    async def refuse(request: object, context: object) -> None:
        raise InvalidArgument("bad", field="text")

    call = ErrorInterceptor()._single(refuse, "/service/Method", "unary")
    with pytest.raises(asyncio.CancelledError):
        await call(pb.GetModelRequest(), Gone())


@pytest.mark.parametrize(
    ("error", "shown"), [(grpc.aio.InternalError("execute_batch"), False), (ValueError("x"), True)]
)
def test_grpcs_own_log_tells_of_defects_but_not_of_clients_that_have_gone(
    error: Exception, shown: bool, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("grpc._cython.cygrpc").error("raised in core", exc_info=error)
    assert ("raised in core" in caplog.text) is shown


@pytest.mark.parametrize("said", [b"", b"PRI * HT", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
async def test_a_connection_that_does_not_greet_is_closed(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_TIMEOUT", 0.3)
    server = RpcServer(LOOPBACK, service_names=[NAME])
    port = await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(said)
    async with asyncio.timeout(PATIENCE):
        while await reader.read(4096):
            pass
    writer.close()
    await server.stop(None)


async def test_the_time_for_a_greeting_is_shorter_than_20_seconds() -> None:
    assert ("grpc.server_handshake_timeout_ms", 15_000) in server_module.server_options(LOOPBACK)


# Sockets that gRPC's server must not pass to child processes.


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def port_of(listening: socket.socket) -> int:
    return int(listening.getsockname()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere listeners are left alone")
class TestAcceptNoMore:
    def test_connections_are_refused_from_then_on(self, listener: socket.socket) -> None:
        port = port_of(listener)
        server.accept_no_more(port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))

    def test_who_listened_waits_for_connections_as_before(self, listener: socket.socket) -> None:
        server.accept_no_more(port_of(listener))
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
        assert not os.get_inheritable(listener.fileno())

    def test_connections_that_are_there_live_on(self, listener: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", port_of(listener))) as client:
            connection, _ = listener.accept()
            with contextlib.closing(connection):
                server.accept_no_more(port_of(listener))
                client.sendall(b"word")
                assert connection.recv(4) == b"word"

    def test_other_ports_are_left_alone(self, listener: socket.socket) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            server.accept_no_more(port_of(other))
            socket.create_connection(("127.0.0.1", port_of(listener))).close()


def test_the_other_side_reads_to_the_end_when_output_ends(listener: socket.socket) -> None:
    with socket.create_connection(("127.0.0.1", port_of(listener))) as client:
        connection, _ = listener.accept()
        with contextlib.closing(connection):
            connection.sendall(b"last words")
            server.end_output(port_of(listener))
            client.settimeout(10)
            assert client.recv(100) == b"last words"
            assert client.recv(100) == b""
