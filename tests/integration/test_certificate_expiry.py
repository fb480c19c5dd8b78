"""Each service exports the expiry times of the certificates of its listeners and connections."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from penstock_common.config.sections import MetricsConfig, ServerConfig
from penstock_enginecore.config import CoordinatorClientConfig
from penstock_frontend.config import CoordinatorClientConfig as FrontendCoordinatorConfig
from penstock_frontend.config import HttpConfig
from tests.fakes.engines.engine_harness import make_config
from tests.fakes.engines.engine_server import EngineServer
from tests.fakes.engines.fake_executor import FakeExecutor
from tests.fakes.frontends.frontend_server import FrontendServer
from tests.fakes.network.certificates import Authority, Files
from tests.fakes.systems.cluster_members import address_of, running


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Authority().issue("penstock-coordinator", "penstock-enginecore", "penstock-frontend").write(tmp_path)


def told(registry: CollectorRegistry) -> set[str]:
    [family] = [each for each in registry.collect() if each.name == "penstock:certificate_expiry_timestamp_seconds"]
    return {sample.labels["field"] for sample in family.samples}


def both(*fields: str) -> set[str]:
    return {f"{field}.{setting}" for field in fields for setting in ("certificate", "ca")}


async def test_the_coordinator_tells_of_its_listeners(files: Files) -> None:
    listener = ServerConfig(host="127.0.0.1", port=0, tls=files.server())
    metrics = MetricsConfig(host="127.0.0.1", port=0, tls=files.server())
    async with running(server=listener, metrics=metrics) as coordinator:
        assert told(coordinator.registry) == both("server.tls", "metrics.tls")


async def test_an_engine_tells_of_its_listener_and_of_its_connection_to_the_coordinator(files: Files) -> None:
    listener = ServerConfig(host="127.0.0.1", port=0, tls=files.server())
    async with running(server=listener) as coordinator:
        config = msgspec.structs.replace(
            make_config(),
            server=listener,
            coordinator=CoordinatorClientConfig(address=address_of(coordinator), tls=files.client()),
        )
        engine = EngineServer(config, FakeExecutor(vocab_size=1000)).start()
        try:
            assert told(engine.io.registry) == both("server.tls", "coordinator.tls")
        finally:
            await asyncio.to_thread(engine.stop)


async def test_a_frontend_tells_of_all_its_listeners_and_connections(files: Files, model: Path) -> None:
    listener = ServerConfig(host="127.0.0.1", port=0, tls=files.server())
    async with (
        running(server=listener) as coordinator,
        FrontendServer(
            model,
            client=files.credentials(),
            server=listener,
            admin=listener,
            http=HttpConfig(host="127.0.0.1", port=0, tls=files.server()),
            metrics=MetricsConfig(host="127.0.0.1", port=0, tls=files.server()),
            coordinator=FrontendCoordinatorConfig(address=address_of(coordinator), tls=files.client()),
            engine_tls=files.client(),
        ) as server,
    ):
        fields = ("server.tls", "admin.tls", "http.tls", "metrics.tls", "coordinator.tls", "engine_tls")
        assert told(server.frontend._models[0].assembly.metrics.registry) == both(*fields)


async def test_without_tls_a_service_tells_nothing() -> None:
    async with running() as coordinator:
        assert told(coordinator.registry) == set()
