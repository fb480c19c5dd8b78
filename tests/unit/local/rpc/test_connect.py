"""The commands' connections: TLS and credentials from the environment."""

from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock_common.config.sections import ServerConfig
from penstock_common.errors import ConfigError
from penstock_common.rpc.server import RpcServer
from penstock_local.rpc.connect import ADMIN, connect
from tests.fakes.network.certificates import Authority


class Seen(grpc.aio.ServerInterceptor):
    """Notes the authorization of each call."""

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
        await health.Check(health_pb2.HealthCheckRequest())
        watch = health.Watch(health_pb2.HealthCheckRequest())
        async for _ in watch:
            break
        watch.cancel()
    await server.stop(0)
    assert seen.authorization == ["Bearer sk-mine-0123456789"] * 2


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"PENSTOCK_TLS.ca: .*missing.crt"):
        connect("127.0.0.1:1", environ={"PENSTOCK_TLS_CA": str(tmp_path / "missing.crt")})
