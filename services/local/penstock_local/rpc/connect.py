"""Connections of the commands to servers, and readiness checks of the services that a command starts."""

import asyncio
import contextlib
import os
import ssl
from collections.abc import Awaitable, Callable, Mapping

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.coordinator.v1 import messages_pb2, service_pb2_grpc
from penstock_common.config.sections import ClientTlsConfig
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.cluster import view_from_proto
from penstock_common.rpc.credentials import ClientCredentials
from penstock_common.types.cluster import ClusterView

API_KEY = "PENSTOCK_API_KEY"
"""Environment variable with an API key or a token."""
PUBLIC, ADMIN = "PENSTOCK_TLS", "PENSTOCK_ADMIN_TLS"
"""Prefixes of the environment variables with ClientTlsConfig fields, for the public API and the admin API."""
_FIELDS = ("ca", "certificate", "key", "server_name")
VARIABLES = frozenset({API_KEY, *(f"{prefix}_{field.upper()}" for prefix in (PUBLIC, ADMIN) for field in _FIELDS)})


def connect(address: str, *, prefix: str = PUBLIC, environ: Mapping[str, str] = os.environ) -> grpc.aio.Channel:
    """Create a channel to a server. Raises ConfigError for unusable TLS files."""
    tls = ClientTlsConfig(**{field: environ.get(f"{prefix}_{field.upper()}", "") for field in _FIELDS})
    return make_channel(address, credentials=ClientCredentials(tls, field=prefix))


def api_key(environ: Mapping[str, str] = os.environ) -> str:
    """Return the key or token for calls; empty for none."""
    return environ.get(API_KEY, "")


def metadata(environ: Mapping[str, str] = os.environ) -> tuple[tuple[str, str], ...]:
    """Return the key or token as gRPC metadata."""
    return (("authorization", f"Bearer {key}"),) if (key := api_key(environ)) else ()


_TIMEOUT = 2.0
"""Timeout of connection and handshake in seconds. If the server is slower, TLS is not diagnosed."""


async def mismatch(address: str, *, prefix: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return advice if only the client or only the server uses TLS. Empty if client and server agree about TLS, or if
    the server's use of TLS is unknown.

    ``address`` is host:port. ``prefix`` is the prefix of the variables for this connection.
    """
    encrypted = bool(environ.get(f"{prefix}_CA"))
    speaks = await _speaks_tls(address)
    if speaks is None or speaks == encrypted:
        return ""
    if speaks:
        return (
            f"the server at {address} requires TLS: set {prefix}_CA to the CA certificate file of its certificate's "
            "issuer"
        )
    return f"the server at {address} does not use TLS: unset {prefix}_CA"


async def is_http_port(address: str) -> bool:
    """Return whether a server at ``address`` (host:port) answers HTTP/1.1 without TLS. A gRPC port never does."""

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        return (await reader.read(7)).startswith(b"HTTP/1.")

    return bool(await _tried(address, ask))


async def _speaks_tls(address: str) -> bool | None:
    """Return whether a server answers a TLS handshake, or None if no server listens. Certificates are not verified."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])

    async def shake(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            await writer.start_tls(context)
            return True
        except ssl.SSLError as e:
            return "WRONG_VERSION" not in str(e) and "RECORD_LAYER" not in str(e)
        except ConnectionError:
            return False  # The server closed the connection because it could not parse the handshake.

    return await _tried(address, shake)


async def _tried(
    address: str, attempt: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bool]]
) -> bool | None:
    """Run ``attempt`` on a new connection. Returns None if no server listens there or the server is too slow."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or not host or "/" in host:
        return None
    try:
        async with asyncio.timeout(_TIMEOUT):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                return await attempt(reader, writer)
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError):
        return None


# Readiness of services that a command has started, and the engines that the coordinator knows.

SERVICE = "penstock.inference.v1.InferenceService"
"""Name of the public gRPC API."""
_RETRY_SECONDS = 0.05


async def wait_until_serving(address: str, *, secured: bool = False) -> None:
    """Return when ``grpc.health.v1`` at ``address`` reports SERVING for the process.

    Also waits for the server to start. With ``secured``, TLS settings and credentials come from the environment.
    """
    async with connect(address) if secured else make_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            request = health_pb2.HealthCheckRequest()
            watch = stub.Watch(request, wait_for_ready=True, metadata=metadata() if secured else ())  # type: ignore[attr-defined]
            try:
                async for response in watch:
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError as e:
                if e.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            finally:
                watch.cancel()
            await asyncio.sleep(_RETRY_SECONDS)


async def serving(address: str, service: str = "", *, deadline: float) -> bool | None:
    """Return whether ``grpc.health.v1`` at ``address`` reports SERVING for a service, or for the process if ``service``
    is empty.

    Returns None if nothing answers in time, or if the server does not know the service.
    """
    async with connect(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            response = await stub.Check(request, timeout=deadline, metadata=metadata())  # type: ignore[attr-defined]
        except grpc.aio.AioRpcError:
            return None
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


async def cluster_view(address: str, *, deadline: float) -> ClusterView | None:
    """Return the cluster as the coordinator at ``address`` knows it, or None if it does not answer within ``deadline``
    seconds.
    """
    async with make_channel(address) as channel:
        stub = service_pb2_grpc.CoordinatorServiceStub(channel)
        try:
            response = await stub.GetCluster(messages_pb2.GetClusterRequest(), timeout=deadline)
        except grpc.aio.AioRpcError:
            return None  # The coordinator may be restarting.
    return view_from_proto(response.view)
