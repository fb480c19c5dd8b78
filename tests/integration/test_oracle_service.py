"""The oracle service can replace the enginecore in the chart: config file, variables, probes and shutdown."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock_common.rpc.channel import make_channel
from tests.chart.rendering import DEMO, release
from tests.fakes.clients.session_client import connected
from tests.fakes.engines.fake_executor import oracle_tokens
from tests.fakes.network.ports import free_port
from tests.fakes.processes import Service
from tests.fakes.systems.cluster_members import Frontend, address_of, alive, running

pytestmark = pytest.mark.slow

MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo_model" / "penstock-tiny"
VOCAB = 2048
POD = "demo-penstock-enginecore-5d9f"
POD_IP = "10.244.1.7"

StartEngine = Callable[..., Service]


@pytest.fixture
def chart_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StartEngine:
    """Return a function that starts an engine with the config file and the variables of the chart's pod.

    Only paths and addresses belong to this machine.
    """
    of_the_pod = {"metadata.name": POD, "status.podIP": POD_IP}
    for name, entry in release(DEMO).env("enginecore").items():
        if name.startswith("PENSTOCK_"):
            field = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            monkeypatch.setenv(name, entry.get("value", of_the_pod.get(field, "")).replace("$(POD_IP)", POD_IP))

    def make(coordinator: str = "", **changes: Any) -> Service:
        config = release(DEMO).config("enginecore")
        config["model"]["path"] = str(MODEL)
        config["coordinator"]["address"] = coordinator
        if not coordinator:  # without a coordinator the chart sets no address to advertise
            monkeypatch.delenv("PENSTOCK_COORDINATOR__ADVERTISE", raising=False)
        config["metrics"]["port"] = free_port()
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(config | changes))
        service = Service("tests.fakes.engines.oracle_service", config=file)
        service.metrics_port = config["metrics"]["port"]
        return service

    return make


async def test_it_serves_with_the_charts_config_until_it_is_told_to_stop(chart_engine: StartEngine) -> None:
    async with chart_engine() as engine:
        await engine.serving()
        async with make_channel(engine.address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            for probe in ("startup", "liveness", "penstock.enginecore.v1.EngineCoreService"):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=probe))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING, probe
        async with httpx.AsyncClient() as client:
            page = await client.get(f"http://127.0.0.1:{engine.metrics_port}/metrics")
        assert "vllm:num_requests_running" in page.text
        assert await engine.stop() == 0, engine.log()


async def test_its_tokens_are_known_and_another_one_goes_on_with_them(chart_engine: StartEngine) -> None:
    expected = oracle_tokens(7, 24, VOCAB)
    async with chart_engine() as engine:
        await engine.serving()
        async with connected(engine.address) as session:
            session.tokens["b"] = expected[:9]
            await session.add("a", seed=7, max_tokens=24)
            await session.add("b", seed=7, max_tokens=24, prior_output_token_ids=expected[:9], attempt=1)
            await session.until_ended("a", "b")
            assert session.tokens == {"a": expected, "b": expected}


async def test_it_registers_under_the_pods_name_and_address(chart_engine: StartEngine) -> None:
    async with running() as coordinator, chart_engine(address_of(coordinator)) as engine:
        frontend = Frontend(address_of(coordinator))
        async with alive(frontend):
            view = await frontend.engines(POD)
            assert view.engines[0].address == f"{POD_IP}:{engine.port}"


async def test_the_load_time_is_the_operators_choice_and_probes_wait_for_it(
    chart_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORACLE_LOAD_SECONDS", "3600")
    async with chart_engine() as engine:
        async with make_channel(engine.address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(service="startup"), wait_for_ready=True)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        # Like a real engine that is loading, because there is nothing to drain.
        assert await engine.stop() == -signal.SIGTERM


async def test_what_is_wrong_ends_it_with_a_line_and_the_enginecores_exit_codes(
    chart_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with chart_engine(model={"path": str(tmp_path)}) as engine:
        assert await engine.ended() == 1
        assert f"oracle-engine: model.path is '{tmp_path}'" in engine.log()
    monkeypatch.setenv("ORACLE_STEP_SECONDS", "fast")
    async with chart_engine() as engine:
        assert await engine.ended() == 2
        assert "oracle-engine: ORACLE_STEP_SECONDS is 'fast'" in engine.log()
