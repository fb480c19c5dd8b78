"""Several frontends on one port: the kernel distributes the connections, and each frontend has its own state."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from penstock.inference.v1 import service_pb2_grpc
from penstock_common.config.sections import MetricsConfig, ServerConfig
from penstock_common.errors import ConfigError
from penstock_frontend.config import HttpConfig
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import FrontendServer, collect, make_request
from tests.fakes.network.ports import free_port
from tests.integration.test_frontend_lifecycle import get

CONNECTIONS = 48
"""Number of connections. With two frontends, the chance that one gets all of them is 1 in 2 ** 47."""


class Pair:
    """Two frontends on one gRPC and one HTTP port."""

    def __init__(
        self, frontends: list[FrontendServer], grpc_port: int, http_port: int, metrics_ports: list[int]
    ) -> None:
        self.frontends = frontends
        self.grpc_port = grpc_port
        self.http_port = http_port
        self._metrics_ports = metrics_ports

    async def counts(self, name: str) -> list[float]:
        """Return the value of a counter for each frontend, read from the frontend's separate port."""
        texts = [(await get(port, "/metrics"))[1] for port in self._metrics_ports]
        return [sum(map(float, re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE))) for text in texts]


@contextlib.asynccontextmanager
async def pair(model: Path, engine: FakeEngine) -> AsyncIterator[Pair]:
    grpc_port, http_port, metrics_ports = free_port(), free_port(), [free_port(), free_port()]
    async with contextlib.AsyncExitStack() as stack:
        frontends = [
            await stack.enter_async_context(
                FrontendServer(
                    model,
                    engines=[engine.address],
                    frontend_id=f"frontend-{i}",
                    server=ServerConfig(host="127.0.0.1", port=grpc_port, reuse_port=True, health_port=0),
                    http=HttpConfig(host="127.0.0.1", port=http_port, reuse_port=True),
                    metrics=MetricsConfig(host="127.0.0.1", port=metrics_ports[i]),
                )
            )
            for i in range(2)
        ]
        async with asyncio.timeout(20):
            while not all(frontend.frontend._models[0].assembly.llm.serving for frontend in frontends):
                await asyncio.sleep(0.01)
        yield Pair(frontends, grpc_port, http_port, metrics_ports)


async def test_grpc_connections_reach_every_frontend(model: Path, engine: FakeEngine) -> None:
    async def one(number: int, address: str) -> int:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.primary_user_agent", f"client-{number}")]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            stub = service_pb2_grpc.InferenceServiceStub(channel)
            return len(await collect(stub.Generate(make_request(max_tokens=2), timeout=60)))

    async with pair(model, engine) as both:
        answers = await asyncio.gather(*(one(i, f"127.0.0.1:{both.grpc_port}") for i in range(CONNECTIONS)))
        assert all(answers)
        counts = await both.counts("grpc_server_started_total")
    assert sum(counts) == CONNECTIONS
    assert min(counts) > 0


async def test_http_connections_reach_every_frontend(model: Path, engine: FakeEngine) -> None:
    async with pair(model, engine) as both:
        answers = await asyncio.gather(*(get(both.http_port, "/v1/models") for _ in range(CONNECTIONS)))
        assert {status for status, _ in answers} == {200}
        counts = await both.counts("http_requests_total")
    assert sum(counts) == CONNECTIONS
    assert min(counts) > 0


async def test_one_that_stops_leaves_the_port_to_the_others(model: Path, engine: FakeEngine) -> None:
    async with pair(model, engine) as both:
        gone, left = both.frontends
        gone.frontend.stop()
        await gone.running
        answers = [await get(both.http_port, "/health") for _ in range(8)]
        assert {status for status, _ in answers} == {200}
        assert left.frontend._models[0].assembly.llm.serving


@pytest.mark.parametrize("shares", [(True, False), (False, True), (False, False)])
async def test_a_port_is_shared_by_those_alone_that_both_say_so(model: Path, shares: tuple[bool, bool]) -> None:
    grpc_port, http_port = free_port(), free_port()

    def options(reuse: bool, port: int, http: int) -> dict[str, object]:
        return {
            "engines": ["127.0.0.1:1"],
            "server": ServerConfig(host="127.0.0.1", port=port, reuse_port=reuse),
            "http": HttpConfig(host="127.0.0.1", port=http, reuse_port=reuse),
        }

    first, second = shares
    async with FrontendServer(model, **options(first, grpc_port, http_port)):  # type: ignore[arg-type]
        for given, field in (((grpc_port, 0), "cannot listen on"), ((0, http_port), "http.port")):
            refused = FrontendServer(model, **options(second, *given))  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match=field):
                await refused.__aenter__()
            await refused.frontend.shutdown()
