"""A frontend stops while another one runs: no client's call fails, and every stream has all its tokens."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import requests

from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc
from penstock_client import AsyncClient
from penstock_common.config.sections import ServerConfig
from penstock_frontend.app import servers
from tests.fakes.engines.fake_engine import FakeEngine, token_at
from tests.fakes.frontends.frontend_server import FrontendServer, eventually, make_request
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.network.tcp_balancer import TcpBalancer
from tests.fakes.network.tcp_proxy import TcpProxy
from tests.fakes.patience import PATIENCE
from tests.fakes.processes import Service

VOCAB = byte_level().get_vocab_size()
TOKENS = 24
AGE = 0.5
"""Maximum age of a connection in seconds. It is short, so that connections are replaced often during the test."""
OWN_POOL = ("grpc.use_local_subchannel_pool", 1)

Ask = Callable[[int], Awaitable[Sequence[int]]]
"""Function that sends a request with a seed and returns the received tokens."""
Client = Callable[["Edge"], contextlib.AbstractAsyncContextManager[Ask]]


class Edge:
    """Two frontends with a shared address for gRPC, a shared address for HTTP, and a separate address for each."""

    def __init__(
        self, frontends: Sequence[Service], grpc_port: TcpBalancer, http: TcpBalancer, own: Sequence[TcpProxy]
    ):
        self.frontends = frontends
        self.grpc = grpc_port
        self.http = http
        self.own = own

    def forget(self, number: int) -> None:
        """Send no new connections to a frontend, as Kubernetes Services and DNS do before a pod stops."""
        self.grpc.forget(self.frontends[number].port)
        self.http.forget(self.frontends[number].metrics_port)
        self.own[number].refuse()


@pytest.fixture
async def edge(model: Path) -> AsyncIterator[Edge]:
    """Yield the two frontends. Their drain timeout is as long as a test may run, so it never ends a drain."""
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FakeEngine(vocab_size=VOCAB))
        frontends = [
            await stack.enter_async_context(
                Service(
                    "penstock_frontend",
                    metrics_flag="http.port",
                    model__path=model,
                    model__served_model_name="model",
                    engines=f"[{engine.address}]",
                    admin__port=0,
                    http__host="127.0.0.1",
                    drain_timeout=PATIENCE,
                    server__max_connection_age=AGE,
                    http__max_connection_age=AGE,
                )
            )
            for _ in range(2)
        ]
        await asyncio.gather(*(frontend.serving() for frontend in frontends))
        grpc_port = await stack.enter_async_context(TcpBalancer([f.port for f in frontends]))
        http = await stack.enter_async_context(TcpBalancer([f.metrics_port for f in frontends]))
        own = [TcpProxy(frontend.port) for frontend in frontends]
        for proxy in own:
            await proxy.start()
            stack.push_async_callback(proxy.close)
        yield Edge(frontends, grpc_port, http, own)


def request(seed: int) -> pb.GenerateRequest:
    return make_request(seed=seed, max_tokens=TOKENS, ignore_eos=True, detokenize=False)


async def generated(channel: grpc.aio.Channel, seed: int) -> Sequence[int]:
    call = service_pb2_grpc.InferenceServiceStub(channel).Generate(request(seed), timeout=PATIENCE)
    return [token async for message in call for token in message.token_ids]


@contextlib.asynccontextmanager
async def plain_channel(edge: Edge) -> AsyncIterator[Ask]:
    """Yield a client over a plain channel, without service config and without retries."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{edge.grpc.port}", options=[OWN_POOL]) as channel:
        yield lambda seed: generated(channel, seed)


@contextlib.asynccontextmanager
async def published_channel(edge: Edge) -> AsyncIterator[Ask]:
    """Yield a client that uses the Python client and calls all addresses of a name in turn."""
    addresses = ",".join(f"127.0.0.1:{proxy.port}" for proxy in edge.own)
    async with AsyncClient(f"ipv4:{addresses}", timeout=PATIENCE) as client:

        async def tokens(seed: int) -> Sequence[int]:
            asked = request(seed)
            return [
                token async for piece in client.stream(asked.text, asked.sampling_params) for token in piece.token_ids
            ]

        yield tokens


@contextlib.asynccontextmanager
async def sessions(edge: Edge) -> AsyncIterator[Ask]:
    """Yield a client that sends several requests on each stream, and then opens the next stream."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{edge.grpc.port}", options=[OWN_POOL]) as channel:
        stub = service_pb2_grpc.InferenceServiceStub(channel)

        async def ask(seed: int) -> Sequence[int]:
            call = stub.GenerateSession(timeout=PATIENCE)
            tokens: list[int] = []
            for number in range(3):
                tokens.clear()
                message = request(seed)
                message.request_id = str(number)
                await call.write(pb.GenerateSessionRequest(generate=message))
                while isinstance(response := await call.read(), pb.GenerateSessionResponse):
                    assert not response.HasField("error"), response
                    tokens += response.output.token_ids
                    if response.output.finish_reason:
                        break
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            return tokens

        yield ask


def body(seed: int) -> dict[str, Any]:
    return {
        "model": "model",
        "prompt": "hi",
        "seed": seed,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
    }


@contextlib.asynccontextmanager
async def over_httpx(edge: Edge) -> AsyncIterator[Ask]:
    """Yield an httpx client, which reuses connections and never retries."""
    url = f"http://127.0.0.1:{edge.http.port}"
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, trust_env=False) as client:

        async def ask(seed: int) -> Sequence[int]:
            response = await client.post("/v1/completions", json=body(seed))
            response.raise_for_status()
            return [int(token) for token in response.json()["choices"][0]["token_ids"]]

        yield ask


@contextlib.asynccontextmanager
async def over_openai(edge: Edge) -> AsyncIterator[Ask]:
    """Yield OpenAI's published client, with streams and without retries."""
    url = f"http://127.0.0.1:{edge.http.port}/v1"
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=url, api_key="none", max_retries=0, timeout=PATIENCE, http_client=http
    ) as client:

        async def ask(seed: int) -> Sequence[int]:
            extra = {"ignore_eos": True, "return_token_ids": True}
            stream = await client.completions.create(
                model="model", prompt="hi", seed=seed, max_tokens=TOKENS, stream=True, extra_body=extra
            )
            chunks = [chunk async for chunk in stream]
            found = [choice.model_dump().get("token_ids") or [] for chunk in chunks for choice in chunk.choices]
            return list(itertools.chain.from_iterable(found))

        yield ask


@contextlib.asynccontextmanager
async def over_requests(edge: Edge) -> AsyncIterator[Ask]:
    """Yield a client of the ``requests`` library, whose connections stay open as long as its session."""
    url = f"http://127.0.0.1:{edge.http.port}/v1/completions"
    with requests.Session() as session:
        session.trust_env = False

        async def ask(seed: int) -> Sequence[int]:
            response = await asyncio.to_thread(session.post, url, json=body(seed), timeout=PATIENCE)
            response.raise_for_status()
            return [int(token) for token in response.json()["choices"][0]["token_ids"]]

        yield ask


CLIENTS: Sequence[Client] = [plain_channel, published_channel, sessions, over_httpx, over_openai, over_requests]


class Load:
    """Two clients of each kind. Each client makes calls one after the other until ``end`` is called."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._over = False
        self._tasks = [asyncio.create_task(self._run(client)) for client in CLIENTS for _ in range(2)]
        self._seeds = itertools.count(1)
        self.done = [0] * len(self._tasks)
        self.wrong: list[str] = []

    async def _run(self, client: Client) -> None:
        number = self._tasks.index(asyncio.current_task())  # type: ignore[arg-type]
        async with client(self._edge) as ask:
            while not self._over:
                seed = next(self._seeds)
                try:
                    tokens = await ask(seed)
                except Exception as e:
                    self.wrong.append(f"{client.__name__}: {e!r}")
                else:
                    if list(tokens) != [token_at(seed, i, vocab_size=VOCAB) for i in range(TOKENS)]:
                        self.wrong.append(f"{client.__name__}: seed {seed} got {tokens}")
                self.done[number] += 1

    async def next_calls(self, count: int) -> None:
        """Wait until each client has finished ``count`` more calls."""
        before = list(self.done)
        await eventually(lambda: all(now - then >= count for now, then in zip(self.done, before, strict=True)))

    async def end(self) -> None:
        """Start no more calls, and wait for the running calls."""
        self._over = True
        await asyncio.gather(*self._tasks)


async def test_no_call_fails_when_a_frontend_leaves_while_another_is_up(edge: Edge) -> None:
    load = Load(edge)
    await load.next_calls(3)
    leaving = edge.frontends[0]
    edge.forget(0)
    stopped = asyncio.create_task(leaving.stop())
    await load.next_calls(3)
    async with asyncio.timeout(PATIENCE):
        assert await stopped == 0, leaving.log()
    await load.next_calls(3)
    await load.end()
    assert load.wrong == []
    assert "ending requests" not in leaving.log()


async def test_the_only_frontend_serves_on_until_its_clients_have_gone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses a single frontend, so that clients always reconnect to it. While draining, the frontend waits longer than
    the pause between two calls on a busy machine.
    """
    monkeypatch.setattr(servers, "QUIET", PATIENCE)
    server = ServerConfig(host="127.0.0.1", port=0, max_connection_age=0.1)
    async with FakeEngine(vocab_size=VOCAB) as engine:
        options = {"engines": [engine.address], "server": server, "drain_timeout": 2 * PATIENCE}
        async with FrontendServer(model, **options) as frontend:
            assert await frontend.outputs(max_tokens=1)
            frontend.frontend.stop()
            await frontend.until_health(serving=False)
            for _ in range(20):
                assert await frontend.outputs(max_tokens=1)
            await frontend.channel.close()
            monkeypatch.setattr(servers, "QUIET", 0.0)
            await frontend.running
