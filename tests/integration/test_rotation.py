"""Certificates, authorities and keys are replaced while requests run: no request fails, and new connections use the
new files.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx

from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc as rpc
from penstock_common.config.sections import ServerConfig
from penstock_frontend.config import AuthConfig, HttpConfig
from tests.fakes.engines.fake_engine import FakeEngine, token_at
from tests.fakes.frontends.frontend_server import FrontendServer, eventually, make_request
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.network.certificates import Authority, Identity, replace
from tests.fakes.systems.cluster_members import Engine as EngineMember
from tests.fakes.systems.cluster_members import address_of, running

VOCAB = byte_level().get_vocab_size()
STREAMS = 8
ROUNDS = 3


class Site:
    """A frontend and an engine with mTLS between them and to clients, and API keys.

    Methods replace certificates, authorities and keys.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority("first")
        self.trusted = self.authority.ca
        self.keys = directory / "keys.txt"
        self.key = "sk-first-key-000000"
        self.write_keys(self.key)
        self.engine = self.write("penstock-enginecore")
        self.frontend = self.write("penstock-frontend")

    def write(self, name: str) -> Any:
        """Write new files for this name, issued by the current authority, with the currently trusted authorities."""
        return self.authority.issue(name, ca=self.trusted).write(self.directory / name)

    def write_keys(self, *keys: str) -> None:
        replace(self.keys, "".join(f"{key} name={key[:8]}\n" for key in keys).encode())

    def write_all(self) -> None:
        self.write("penstock-enginecore")
        self.write("penstock-frontend")

    async def rotate(self, number: int) -> tuple[Identity, bytes, str]:
        """Rotate the authority and the key as operators do: trust both, use the new one, then trust only the new one.

        Returns a client's identity, its authority and its key from before the rotation.
        """
        before = self.authority.issue("client"), self.authority.ca, self.key
        new, old_key = Authority(f"of round {number}"), self.key
        self.trusted = self.authority.ca + new.ca
        self.write_all()
        await asyncio.sleep(0.05)
        self.authority, self.key = new, f"sk-key-of-round-{number}-000"
        self.write_keys(old_key, self.key)
        self.write_all()
        await asyncio.sleep(0.05)
        self.trusted = new.ca
        self.write_keys(self.key)
        self.write_all()
        return before


@asynccontextmanager
async def serving(site: Site, model: Path) -> AsyncIterator[tuple[FrontendServer, FakeEngine]]:
    listener = ServerConfig(host="127.0.0.1", port=0, tls=site.frontend.server())
    async with FakeEngine(vocab_size=VOCAB, manual=True, max_model_len=100_000, tls=site.engine.server()) as engine:
        stepping = asyncio.create_task(step(engine))
        try:
            async with FrontendServer(
                model,
                engines=[engine.address],
                client=site.authority.issue("client").write(site.directory / "client").credentials(),
                server=listener,
                admin=listener,
                http=HttpConfig(host="127.0.0.1", port=0, tls=site.frontend.server()),
                engine_tls=site.frontend.client(server_name="penstock-enginecore"),
                auth=AuthConfig(api_keys=str(site.keys)),
            ) as server:
                await server.until_health(serving=True)
                yield server, engine
        finally:
            stepping.cancel()


async def step(engine: FakeEngine) -> None:
    while True:
        engine.step()
        await asyncio.sleep(0.005)


async def tokens_of(server: FrontendServer, seed: int, key: str, going_on: asyncio.Event) -> tuple[list[int], bool]:
    """Read a stream until it ends. Returns the stream's tokens, and whether the tokens are right."""
    metadata = (("authorization", f"Bearer {key}"),)
    request = make_request(seed=seed, max_tokens=50_000, ignore_eos=True)
    call = server.stub.Generate(request, metadata=metadata)
    tokens: list[int] = []
    async for response in call:
        tokens += response.token_ids
        if not going_on.is_set() and len(tokens) >= 100:
            call.cancel()
            break
    return tokens, tokens == [token_at(seed, i, vocab_size=VOCAB) for i in range(len(tokens))]


async def over_grpc(server: FrontendServer, identity: Identity, ca: bytes, key: str) -> str:
    """Make a call on a new connection and return the call's status code."""
    credentials = grpc.ssl_channel_credentials(ca, identity.key, identity.certificate)
    async with grpc.aio.secure_channel(f"127.0.0.1:{server.frontend.port}", credentials) as channel:
        try:
            await rpc.InferenceServiceStub(channel).ListModels(
                pb.ListModelsRequest(), metadata=(("x-api-key", key),), timeout=20
            )
        except grpc.aio.AioRpcError as e:
            return e.code().name
        return "OK"


async def over_http(server: FrontendServer, identity: Identity, ca: bytes, key: str, directory: Path) -> str:
    """Send a request on a new connection. Returns the status, or the failure if there was no answer."""
    files = identity.write(directory)
    context = ssl.create_default_context(cadata=ca.decode())
    context.load_cert_chain(files.certificate, files.key)
    async with httpx.AsyncClient(verify=context) as client:
        try:
            url = f"https://127.0.0.1:{server.frontend.http_port}/v1/models"
            return str((await client.get(url, headers={"x-api-key": key})).status_code)
        except httpx.TransportError:
            return "refused"


async def test_certificates_authorities_and_keys_replaced_under_load_break_nothing(tmp_path: Path, model: Path) -> None:
    site = Site(tmp_path)
    going_on = asyncio.Event()
    going_on.set()
    async with serving(site, model) as (server, engine):
        streams = [asyncio.create_task(tokens_of(server, seed, site.key, going_on)) for seed in range(STREAMS)]
        await engine.until(lambda e: len(e.running) == STREAMS)
        for number in range(ROUNDS):
            identity, ca, key = await site.rotate(number)
            new = site.authority.issue("client")
            scratch = tmp_path / "http"
            # The new files are accepted. The old client certificate, its trusted authority and its key are refused.
            assert await over_grpc(server, new, site.authority.ca, site.key) == "OK"
            assert await over_grpc(server, identity, site.authority.ca, site.key) == "UNAVAILABLE"
            assert await over_grpc(server, new, ca, site.key) == "UNAVAILABLE"
            assert await over_grpc(server, new, site.authority.ca, key) == "UNAUTHENTICATED"
            assert await over_http(server, new, site.authority.ca, site.key, scratch) == "200"
            assert await over_http(server, identity, site.authority.ca, site.key, scratch) == "refused"
            assert await over_http(server, new, ca, site.key, scratch) == "refused"
            assert await over_http(server, new, site.authority.ca, key, scratch) == "401"
            # The session with the engine breaks, and reconnects with the new certificates.
            broken = tuple(engine.sessions)
            engine.break_streams()
            await engine.until(
                lambda e, broken=broken: (
                    len(e.running) == STREAMS and not any(r.session in broken for r in e.running.values())
                ),
                20,
            )
        going_on.clear()
        results = await asyncio.gather(*streams)
    assert [right for _, right in results] == [True] * STREAMS
    assert min(len(tokens) for tokens, _ in results) >= 100


async def test_an_engine_finds_its_coordinator_again_after_both_have_new_certificates(tmp_path: Path) -> None:
    first, second = Authority("first"), Authority("second")
    server = first.issue("penstock-coordinator").write(tmp_path / "coordinator")
    client = first.issue("penstock-enginecore").write(tmp_path / "engine")
    listener = ServerConfig(host="127.0.0.1", port=0, tls=server.server())
    async with running(server=listener) as coordinator:
        port = coordinator.port
        member = EngineMember(address_of(coordinator), credentials=client.credentials())
        session = asyncio.create_task(member.client.run())
        await eventually(lambda: member.client.connected)
        second.issue("penstock-coordinator").write(tmp_path / "coordinator")
        second.issue("penstock-enginecore").write(tmp_path / "engine")
        assert member.client.connected  # existing connections stay open
    await eventually(lambda: not member.client.connected)
    async with running(server=ServerConfig(host="127.0.0.1", port=port, tls=server.server())):
        await eventually(lambda: member.client.connected)
        await member.client.close()
        await session
