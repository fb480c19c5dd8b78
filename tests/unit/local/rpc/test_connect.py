"""The commands' connections: TLS and credentials from the environment."""

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock_common.config.sections import ServerConfig
from penstock_common.errors import ConfigError
from penstock_common.rpc.server import RpcServer
from penstock_local.rpc.admin import AdminClient
from penstock_local.rpc.client import ServerUnreachableError, TlsMismatchError, WrongAddressError, client_of
from penstock_local.rpc.connect import ADMIN, connect, is_http_port, metadata, mismatch
from tests.fakes.network.certificates import Authority


class Seen(grpc.aio.ServerInterceptor):
    """Records the authorization of each call."""

    def __init__(self) -> None:
        self.authorization: list[object] = []

    async def intercept_service(self, continuation, handler_call_details):
        self.authorization.append(dict(handler_call_details.invocation_metadata).get("authorization"))
        return await continuation(handler_call_details)


@pytest.mark.parametrize("prefix", ["PENSTOCK_TLS", ADMIN])
async def test_the_environment_says_which_authority_and_key(prefix: str, tmp_path: Path) -> None:
    authority = Authority()
    files = authority.issue("penstock-frontend").write(tmp_path / "server")
    own = authority.issue("me").write(tmp_path / "client")
    seen = Seen()
    server = RpcServer(ServerConfig(host="127.0.0.1", tls=files.server()), service_names=[], interceptors=[seen])
    port = await server.start()
    environ = {
        f"{prefix}_CA": own.ca,
        f"{prefix}_CERTIFICATE": own.certificate,
        f"{prefix}_KEY": own.key,
        f"{prefix}_SERVER_NAME": "penstock-frontend",
        "PENSTOCK_API_KEY": "sk-mine-0123456789",
    }
    async with connect(f"127.0.0.1:{port}", prefix=prefix, environ=environ) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest(), metadata=metadata(environ))
        watch = health.Watch(health_pb2.HealthCheckRequest(), metadata=metadata(environ))
        async for _ in watch:
            break
        watch.cancel()
    await server.stop(0)
    assert seen.authorization == ["Bearer sk-mine-0123456789"] * 2


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"PENSTOCK_TLS.ca: .*missing.crt"):
        connect("127.0.0.1:1", environ={"PENSTOCK_TLS_CA": str(tmp_path / "missing.crt")})


# A server that requires TLS gets another error than a missing server.

WITH_TLS = {"PENSTOCK_TLS_CA": "ca.crt"}


@pytest.fixture(params=["one way", "mutual"])
def encrypted(request: pytest.FixtureRequest, tmp_path: Path) -> ServerConfig:
    files = Authority().issue("penstock-frontend").write(tmp_path)
    return ServerConfig(host="127.0.0.1", tls=files.server(mutual=request.param == "mutual"))


async def test_a_client_without_tls_is_told_to_set_the_authority(encrypted: ServerConfig) -> None:
    server = RpcServer(encrypted, service_names=[])
    address = f"127.0.0.1:{await server.start()}"
    try:
        assert f"{address} requires TLS: set PENSTOCK_TLS_CA" in await mismatch(
            address, prefix="PENSTOCK_TLS", environ={}
        )
        assert await mismatch(address, prefix="PENSTOCK_TLS", environ=WITH_TLS) == ""
        with pytest.raises(TlsMismatchError, match="set PENSTOCK_TLS_CA"):
            async with client_of(address) as client:
                await client.models()
        async with AdminClient(address) as admin:
            with pytest.raises(TlsMismatchError, match="set PENSTOCK_ADMIN_TLS_CA"):
                await admin.cluster(deadline=30)
    finally:
        await server.stop(0)


async def test_a_client_with_tls_is_told_that_the_server_has_none() -> None:
    server = RpcServer(ServerConfig(host="127.0.0.1"), service_names=[])
    address = f"127.0.0.1:{await server.start()}"
    try:
        said = await mismatch(address, prefix="PENSTOCK_TLS", environ=WITH_TLS)
        assert said == f"the server at {address} does not use TLS: unset PENSTOCK_TLS_CA"
        assert await mismatch(address, prefix="PENSTOCK_TLS", environ={}) == ""
    finally:
        await server.stop(0)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "dns:///somewhere:1", "unix:/tmp/x", "nonsense"])
async def test_of_what_is_not_there_nothing_is_said(address: str) -> None:
    assert await mismatch(address, prefix="PENSTOCK_TLS", environ={}) == ""


async def test_no_server_at_all_is_unreachable() -> None:
    with pytest.raises(ServerUnreachableError, match="no connection to 127.0.0.1:9"):
        async with client_of("127.0.0.1:9") as client:
            await client.models()


async def test_an_http_port_is_told_apart_with_the_address_to_give() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        with pytest.raises(
            WrongAddressError, match="is an HTTP port; --address takes the gRPC API, 127.0.0.1:50051 unless"
        ):
            async with client_of(address) as client:
                await client.models()
        async with AdminClient(address) as admin:
            with pytest.raises(
                WrongAddressError, match="--admin-address takes the admin gRPC API, 127.0.0.1:50053 unless"
            ):
                await admin.cluster(deadline=30)
    with pytest.raises(WrongAddressError, match="is a URL; --address takes the gRPC API, 127.0.0.1:50051 unless"):
        async with client_of(f"http://{address}") as client:
            await client.models()


async def test_a_grpc_port_is_no_http_port() -> None:
    server = RpcServer(ServerConfig(host="127.0.0.1"), service_names=[])
    address = f"127.0.0.1:{await server.start()}"
    try:
        assert not await is_http_port(address)
    finally:
        await server.stop(0)
