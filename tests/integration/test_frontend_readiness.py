"""When a frontend says that requests may be sent to it."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock_coordinator.app import Coordinator
from penstock_coordinator.config import CoordinatorConfig
from penstock_frontend.config import CoordinatorClientConfig, LimitsConfig
from penstock_local.rpc.connect import SERVICE, serving
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import LOOPBACK, FrontendServer, collect, eventually
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.patience import PATIENCE

VOCAB = byte_level().get_vocab_size()


async def status(frontend: FrontendServer, service: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(frontend.channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


def admin_address(frontend: FrontendServer) -> str:
    return f"127.0.0.1:{frontend.frontend.admin_port}"


async def test_health_waits_for_the_first_engine_and_follows_none(model: Path) -> None:
    names = ("", "penstock.inference.v1.InferenceService", "vllm.grpc.engine.VllmEngine")
    async with FakeEngine(vocab_size=VOCAB) as engine:
        address, port = engine.address, engine.port
        await engine.kill()
        async with FrontendServer(model, engines=[address], engine_wait_timeout=PATIENCE) as frontend:
            assert [await status(frontend, name) for name in names] == [health_pb2.HealthCheckResponse.NOT_SERVING] * 3
            assert await serving(admin_address(frontend), SERVICE, deadline=PATIENCE) is False
            await engine.start(port)
            for name in names:
                await frontend.until_health(serving=True, service=name)
            assert await serving(admin_address(frontend), SERVICE, deadline=PATIENCE) is True
            await engine.kill()
            await frontend.until_engines(0)
            assert [await status(frontend, name) for name in names] == [health_pb2.HealthCheckResponse.SERVING] * 3
            call = frontend.generate(max_tokens=1)
            await engine.start(port)
            assert await collect(call)
            with pytest.raises(grpc.aio.AioRpcError) as e:
                await status(frontend, "nope")
    assert e.value.code() == grpc.StatusCode.NOT_FOUND


async def test_health_says_when_no_more_requests_may_come_in(manual: FakeEngine, model: Path) -> None:
    limits = LimitsConfig(max_requests=2)
    async with FrontendServer(model, engines=[manual.address], limits=limits) as frontend:
        await frontend.until_health(serving=True)
        calls = [frontend.generate(max_tokens=1) for _ in range(2)]
        await manual.until(lambda e: len(e.running) == 2)
        await frontend.until_health(serving=False)
        assert await status(frontend, "") == health_pb2.HealthCheckResponse.SERVING  # refusals say when to try again
        manual.step()
        assert all([await collect(call) for call in calls])
        await frontend.until_health(serving=True)


async def test_health_says_when_as_many_requests_are_held_as_may_be(model: Path) -> None:
    async with FakeEngine(vocab_size=VOCAB) as engine:
        options = {"engines": [engine.address], "max_held_requests": 1, "engine_wait_timeout": PATIENCE}
        async with FrontendServer(model, **options) as frontend:
            await frontend.until_health(serving=True)
            port = engine.port
            await engine.kill()
            await frontend.until_engines(0)
            call = frontend.generate(max_tokens=1)
            await frontend.until_health(serving=False)
            await engine.start(port)
            assert await collect(call)
            await frontend.until_health(serving=True)


async def test_without_engines_a_frontend_can_be_ready_as_soon_as_it_knows_the_cluster(model: Path) -> None:
    coordinator = Coordinator(CoordinatorConfig(server=LOOPBACK, restart_grace=0.0))
    there = CoordinatorClientConfig(address=f"127.0.0.1:{await coordinator.start()}")
    try:
        async with FrontendServer(model, coordinator=there, ready_without_engines=True) as frontend:
            await frontend.until_health(serving=True)
        async with FrontendServer(model, coordinator=there) as frontend:
            await eventually(lambda: frontend.frontend._coordinator.view is not None)
            assert await status(frontend, "") == health_pb2.HealthCheckResponse.NOT_SERVING
    finally:
        await coordinator.stop()
