"""Every hop between Penstock's services and to its clients, with mTLS: a running server, a peer that it serves, and
actions of a stranger.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.admin.v1 import service_pb2_grpc as admin_rpc
from penstock.coordinator.v1 import service_pb2_grpc as coordinator_rpc
from penstock.enginecore.v1 import messages_pb2 as engine_pb
from penstock.enginecore.v1 import service_pb2_grpc as engine_rpc
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc as rpc
from penstock.keda import externalscaler_pb2 as scaler_pb
from penstock.keda import externalscaler_pb2_grpc as scaler_rpc
from penstock_common.config.sections import ServerConfig
from penstock_frontend.config import HttpConfig
from tests.fakes.engines.engine_harness import make_config
from tests.fakes.engines.engine_server import EngineServer
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.engines.fake_executor import FakeExecutor
from tests.fakes.frontends.frontend_server import FrontendServer
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.network.certificates import Authority, Files, Identity
from tests.fakes.patience import PATIENCE
from tests.fakes.systems.cluster_members import HELLO, address_of, register, running

Attempt = Callable[[Identity | None, bytes], Awaitable[str]]
"""Call with a certificate or None, and a trusted CA (empty: without TLS). Returns the name of the resulting code."""
Alive = Callable[[], Awaitable[None]]


class Hop:
    """Connection between two services. ``right``: name that the server accepts. ``attempt``: see Attempt.

    ``alive`` raises an error if the existing stream of the peer is no longer served.
    """

    def __init__(self, right: str, attempt: Attempt, alive: Alive) -> None:
        self.right = right
        self.attempt = attempt
        self.alive = alive


class Sites:
    """Directory with the certificate files of a test's services."""

    def __init__(self, authority: Authority, directory: Path, model: Path) -> None:
        self.authority = authority
        self.model = model
        self._directory = directory

    def files(self, name: str) -> Files:
        """Write a certificate for this name, and return its files."""
        return self.authority.issue(name).write(self._directory / name)


@contextlib.asynccontextmanager
async def client_to_frontend(sites: Sites) -> AsyncIterator[Hop]:
    async with _frontend(sites) as (frontend, alive):
        yield Hop("anyone", _grpc(frontend.frontend.port, _list_models), alive)


@contextlib.asynccontextmanager
async def client_to_frontend_http(sites: Sites) -> AsyncIterator[Hop]:
    async with _frontend(sites) as (frontend, alive):
        port = frontend.frontend.http_port

        async def attempt(identity: Identity | None, ca: bytes) -> str:
            context: ssl.SSLContext | bool = False
            if ca:
                context = ssl.create_default_context(cadata=ca.decode())
                if identity is not None:
                    files = identity.write(sites._directory / "http-client")
                    context.load_cert_chain(files.certificate, files.key)
            async with httpx.AsyncClient(verify=context) as client:
                try:
                    answer = await client.get(f"http{'s' if ca else ''}://127.0.0.1:{port}/v1/models")
                except httpx.TransportError:
                    return "UNAVAILABLE"
                return "OK" if answer.status_code == 200 else str(answer.status_code)

        yield Hop("anyone", attempt, alive)


@contextlib.asynccontextmanager
async def operator_to_frontend(sites: Sites) -> AsyncIterator[Hop]:
    async with _frontend(sites) as (frontend, alive):
        yield Hop("penstock-operator", _grpc(frontend.frontend.admin_port, _get_cluster), alive)


@contextlib.asynccontextmanager
async def frontend_to_engine(sites: Sites) -> AsyncIterator[Hop]:
    tls = sites.files("penstock-enginecore").server()
    config = msgspec.structs.replace(make_config(), server=ServerConfig(tls=tls))
    server = EngineServer(config, FakeExecutor(vocab_size=1000)).start().load()
    try:
        credentials = sites.files("penstock-frontend").credentials()
        async with credentials.channel(server.address, []) as channel:
            call = engine_rpc.EngineCoreServiceStub(channel).Session()
            await call.write(engine_pb.SessionRequest(hello=engine_pb.Hello(protocol_revision=1, frontend_id="n")))
            assert (await call.read()).HasField("ready")
            ids = iter(range(1000))

            async def alive() -> None:
                await call.write(
                    engine_pb.SessionRequest(utility=engine_pb.UtilityCall(call_id=next(ids), method="is_sleeping"))
                )
                while not (await call.read()).outputs.HasField("utility_output"):
                    pass

            yield Hop("penstock-frontend", _grpc(server.io.port, _session), alive)
    finally:
        server.stop()


@contextlib.asynccontextmanager
async def frontend_to_coordinator(sites: Sites) -> AsyncIterator[Hop]:
    async with _coordinator(sites) as (port, alive):
        yield Hop("penstock-frontend", _grpc(port, _frontend_session), alive)


@contextlib.asynccontextmanager
async def engine_to_coordinator(sites: Sites) -> AsyncIterator[Hop]:
    async with _coordinator(sites) as (port, alive):
        yield Hop("penstock-enginecore", _grpc(port, _engine_session), alive)


@contextlib.asynccontextmanager
async def scaler_to_coordinator(sites: Sites) -> AsyncIterator[Hop]:
    async with _coordinator(sites) as (port, alive):
        yield Hop("penstock-scaler", _grpc(port, _metric_spec), alive)


HOPS: dict[str, Callable[[Sites], contextlib.AbstractAsyncContextManager[Hop]]] = {
    "client to frontend": client_to_frontend,
    "client to frontend over HTTP": client_to_frontend_http,
    "operator to frontend": operator_to_frontend,
    "frontend to engine": frontend_to_engine,
    "frontend to coordinator": frontend_to_coordinator,
    "engine to coordinator": engine_to_coordinator,
    "scaler to coordinator": scaler_to_coordinator,
}


@contextlib.asynccontextmanager
async def _frontend(sites: Sites) -> AsyncIterator[tuple[FrontendServer, Alive]]:
    """Run a frontend with a stream that continues at each ``alive``."""
    tls = sites.files("penstock-frontend").server()
    listener = ServerConfig(host="127.0.0.1", port=0, tls=tls)
    neighbour = sites.files("neighbour").credentials()
    async with (
        FakeEngine(vocab_size=byte_level().get_vocab_size(), manual=True, max_model_len=4096) as engine,
        FrontendServer(
            sites.model,
            engines=[engine.address],
            client=neighbour,
            server=listener,
            admin=listener,
            http=HttpConfig(host="127.0.0.1", port=0, tls=tls),
        ) as frontend,
    ):
        await frontend.until_health(serving=True)
        stream = aiter(frontend.generate(max_tokens=1000, ignore_eos=True, timeout=None))
        await engine.until(lambda e: e.running)

        async def alive() -> None:
            reading = asyncio.ensure_future(anext(stream))
            async with asyncio.timeout(PATIENCE):
                while not reading.done():  # no text is sent for half a character
                    engine.step()
                    await asyncio.sleep(0.002)
            found = reading.result()
            assert found.token_ids or found.text, (
                found
            )  # the text ends before an incomplete character of its last token

        yield frontend, alive


@contextlib.asynccontextmanager
async def _coordinator(sites: Sites) -> AsyncIterator[tuple[int, Alive]]:
    """Run a coordinator with a session of an engine. ``alive`` registers one more engine."""
    tls = sites.files("penstock-coordinator").server()
    async with running(server=ServerConfig(host="127.0.0.1", port=0, tls=tls)) as coordinator:
        credentials = sites.files("penstock-enginecore").credentials()
        async with credentials.channel(address_of(coordinator), []) as channel:
            stub = coordinator_rpc.CoordinatorServiceStub(channel)
            neighbour = stub.EngineSession()
            await neighbour.write(register("neighbour"))
            await neighbour.read()

            async def alive() -> None:
                assert not neighbour.done()
                call = stub.EngineSession()
                await call.write(register("another"))
                assert (await call.read()).HasField("registered")
                call.cancel()

            yield coordinator.port, alive


def _grpc(port: int, call: Callable[[grpc.aio.Channel], Awaitable[Any]]) -> Attempt:
    async def attempt(identity: Identity | None, ca: bytes) -> str:
        address = f"127.0.0.1:{port}"
        if not ca:
            channel = grpc.aio.insecure_channel(address)
        else:
            key, certificate = (identity.key, identity.certificate) if identity else (None, None)
            channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca, key, certificate))
        async with channel:
            try:
                await call(channel)
            except grpc.aio.AioRpcError as e:
                return e.code().name
            return "OK"

    return attempt


async def _list_models(channel: grpc.aio.Channel) -> None:
    await rpc.InferenceServiceStub(channel).ListModels(pb.ListModelsRequest())


async def _get_cluster(channel: grpc.aio.Channel) -> None:
    await admin_rpc.AdminServiceStub(channel).GetCluster(admin_pb.GetClusterRequest())


async def _session(channel: grpc.aio.Channel) -> None:
    hello = engine_pb.SessionRequest(hello=engine_pb.Hello(protocol_revision=1, frontend_id="stranger"))
    await _greet(engine_rpc.EngineCoreServiceStub(channel).Session(), hello)


async def _frontend_session(channel: grpc.aio.Channel) -> None:
    await _greet(coordinator_rpc.CoordinatorServiceStub(channel).FrontendSession(), HELLO)


async def _engine_session(channel: grpc.aio.Channel) -> None:
    await _greet(coordinator_rpc.CoordinatorServiceStub(channel).EngineSession(), register("stranger"))


async def _metric_spec(channel: grpc.aio.Channel) -> None:
    await scaler_rpc.ExternalScalerStub(channel).GetMetricSpec(scaler_pb.ScaledObjectRef())


async def _greet(call: Any, message: Any) -> None:
    """Start a session. Raises AioRpcError if the session is refused."""
    with contextlib.suppress(grpc.aio.UsageError):  # refused before the write
        await call.write(message)
    await call.read()
    call.cancel()
