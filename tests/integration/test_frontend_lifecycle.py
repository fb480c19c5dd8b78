"""The frontend as a process: start, HTTP, signals, draining, and configuration errors."""

import asyncio
import os
import signal
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from penstock.inference.v1 import service_pb2_grpc
from penstock_common.config.sections import ServerConfig
from penstock_common.errors import ConfigError, Unavailable
from penstock_coordinator.app import Coordinator
from penstock_coordinator.config import CoordinatorConfig
from penstock_frontend.app import servers
from penstock_frontend.config import CoordinatorClientConfig, HttpConfig, LimitsConfig
from penstock_local.rpc.connect import SERVICE, serving
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import LOOPBACK, FrontendServer, collect, eventually, failure, make_request
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.network.ports import free_port
from tests.fakes.patience import PATIENCE


async def get(port: int, path: str) -> tuple[int, str]:
    def fetch() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as e:
            with e:
                return e.code, e.read().decode()

    return await asyncio.to_thread(fetch)


async def start_process(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock_frontend", *arguments, stderr=asyncio.subprocess.PIPE
    )


async def output_of(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
    async with asyncio.timeout(PATIENCE):
        _, stderr = await process.communicate()
    return process.returncode, stderr.decode()


async def test_a_stopping_frontend_serves_on_while_anything_runs(manual: FakeEngine, model: Path) -> None:
    async with FrontendServer(model, engines=[manual.address], http=HttpConfig(host="127.0.0.1", port=0)) as frontend:
        reader = asyncio.create_task(collect(frontend.generate(max_tokens=2)))
        await manual.until(lambda e: e.running)
        assert (await get(frontend.frontend.http_port, "/health"))[0] == 200
        frontend.frontend.stop()
        await frontend.until_health(serving=False)
        late = asyncio.create_task(collect(frontend.generate(max_tokens=1)))
        await manual.until(lambda e: len(e.running) == 2)
        assert await get(frontend.frontend.http_port, "/health") == (503, "not serving: draining\n")
        manual.step()
        manual.step()
        assert await reader
        assert await late
        await frontend.running


async def test_a_stopping_frontend_waits_for_connections_that_are_moved(engine: FakeEngine, model: Path) -> None:
    server = ServerConfig(host="127.0.0.1", port=0, max_connection_age=3600.0)
    async with FrontendServer(model, engines=[engine.address], server=server, drain_timeout=PATIENCE) as frontend:
        assert await frontend.outputs(max_tokens=1)
        frontend.frontend.stop()
        await eventually(lambda: not frontend.frontend._readiness.ready)
        for _ in range(3):
            assert await frontend.outputs(max_tokens=1)
        await frontend.channel.close()
        await frontend.running


async def test_a_watch_of_the_health_does_not_hold_up_the_end(
    model: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeps the connection of a health watch open. After GOAWAY, the connection accepts no other calls."""
    monkeypatch.setattr(servers, "QUIET", 0.0)
    server = ServerConfig(host="127.0.0.1", port=0, max_connection_age=0.05)
    async with FrontendServer(model, engines=[engine.address], server=server, drain_timeout=PATIENCE) as frontend:
        stub: Any = health_pb2_grpc.HealthStub(frontend.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=""))
        assert await watch.read()
        frontend.frontend.stop()
        await frontend.running


async def test_requests_longer_than_the_drain_timeout_end_as_unavailable(manual: FakeEngine, model: Path) -> None:
    async with FrontendServer(model, engines=[manual.address], drain_timeout=0.05) as frontend:
        reader = asyncio.create_task(failure(frontend.generate()))
        await manual.until(lambda e: e.running)
        frontend.frontend.stop()
        error = await reader
        assert isinstance(error, Unavailable)
        assert error.reason == "SHUTTING_DOWN"
        assert error.message == "this frontend is shutting down: the drain_timeout of 0.05 s has passed"
        await frontend.running
        await manual.until(lambda e: not e.running)


async def test_a_second_signal_ends_what_runs(manual: FakeEngine, model: Path) -> None:
    async with FrontendServer(model, engines=[manual.address], drain_timeout=PATIENCE) as frontend:
        reader = asyncio.create_task(failure(frontend.generate()))
        await manual.until(lambda e: e.running)
        frontend.frontend.stop()
        frontend.frontend.stop()
        error = await reader
        assert error.message == "this frontend is shutting down: the process was told to stop twice"
        await frontend.running


async def test_a_drain_that_is_too_short_to_move_connections_is_warned_of(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ServerConfig(host="127.0.0.1", port=0, max_connection_age=60.0)
    async with FrontendServer(model, engines=["127.0.0.1:1"], server=server, drain_timeout=60.0):
        pass
    assert "drain_timeout is too short for all clients to move to another frontend" in capsys.readouterr().out


async def test_a_request_that_waits_for_an_engine_ends_with_the_frontend(model: Path) -> None:
    async with FrontendServer(model, engines=["127.0.0.1:1"], drain_timeout=0.05) as frontend:
        reader = asyncio.create_task(failure(frontend.generate()))
        await eventually(lambda: frontend.frontend._models[0].assembly.llm._live)
        frontend.frontend.stop()
        error = await reader
    assert isinstance(error, Unavailable)
    assert error.reason == "SHUTTING_DOWN"


async def test_metrics_are_served_under_the_names_of_the_field(manual: FakeEngine, model: Path) -> None:
    async with FrontendServer(model, engines=[manual.address], http=HttpConfig(host="127.0.0.1", port=0)) as frontend:
        reader = asyncio.create_task(collect(frontend.generate(max_tokens=1)))
        await manual.until(lambda e: e.running)
        status, during = await get(frontend.frontend.http_port, "/metrics")
        manual.step()
        await reader
        _, after = await get(frontend.frontend.http_port, "/metrics")
    assert status == 200
    assert 'penstock:requests_in_flight{model_name="model"} 1.0' in during
    assert 'vllm:request_success_total{engine="engine-0",finished_reason="length",model_name="model"} 1.0' in after
    assert 'vllm:generation_tokens_total{engine="engine-0",model_name="model"} 1.0' in after
    assert 'penstock:requests_in_flight{model_name="model"} 0.0' in after


async def test_reflection_lists_the_public_service(model: Path) -> None:
    async with FrontendServer(model, engines=["127.0.0.1:1"]) as frontend:
        channel: Any = frontend.channel
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        make: Any = reflection_pb2.ServerReflectionRequest
        request = make(list_services="")
        call = stub.ServerReflectionInfo(iter([request]))
        names = [s.name async for m in call for s in m.list_services_response.service]
    assert "penstock.inference.v1.InferenceService" in names
    assert "penstock.admin.v1.AdminService" not in names


async def test_a_taken_http_port_is_a_config_error(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = FrontendServer(model, engines=["127.0.0.1:1"], http=HttpConfig(host="127.0.0.1", port=port))
        with pytest.raises(ConfigError, match=f"http.port {port}"):
            await server.__aenter__()
        with capture_logs() as logs:
            await server.frontend.shutdown()
        assert "frontend is draining" not in [log["event"] for log in logs]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_process_serves_and_ends_cleanly_on_a_signal(
    manual: FakeEngine, model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    grpc_port, admin_port, http_port = free_port(), free_port(), free_port()
    config = tmp_path / "frontend.yaml"
    config.write_text(
        f"model: {{path: {model}}}\nengines: ['{manual.address}']\n"
        f"server: {{host: 127.0.0.1, port: {grpc_port}}}\nadmin: {{port: {admin_port}}}\n"
        f"http: {{host: 127.0.0.1, port: {http_port}}}\n"
    )
    process = await start_process("--config", str(config), "--server.max-connection-age", "0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        stub = service_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(make_request(max_tokens=1), wait_for_ready=True, timeout=PATIENCE)
        await manual.until(lambda e: e.running, limit=PATIENCE)
        process.send_signal(number)
        manual.step()
        assert [message async for message in call]
    code, log = await output_of(process)
    assert code == 0, log
    assert "frontend stopped" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "model is required"),
        (("--model.path", "/nowhere", "--engines", "[a:1]"), "model.path is '/nowhere': there is no such directory"),
        (("--model.path", "{model}"), "coordinator.address or engines is required"),
        (("--model.path", "{model}", "--engines", "[a:1]", "--server.port", "{port}"), "Choose a free port"),
    ],
)
async def test_a_wrong_configuration_is_one_line_and_exit_code_2(
    model: Path, arguments: tuple[str, ...], message: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        values = {"model": model, "port": taken.getsockname()[1]}
        process = await start_process(*(a.format(**values) for a in arguments), "--log.level", "error")
        code, log = await output_of(process)
    assert code == 2
    assert message in log
    assert log.startswith("penstock_frontend: ")
    assert log.count("\n") == 1


async def test_the_frontend_runs_where_torch_cannot_be_imported() -> None:
    code = "import sys; sys.modules.update(torch=None, transformers=None); import penstock_frontend.__main__"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=dict(os.environ))
    async with asyncio.timeout(PATIENCE):
        assert await process.wait() == 0


async def test_an_open_health_watch_is_told_and_does_not_hold_up_the_end(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with FrontendServer(model, engines=["127.0.0.1:1"]) as frontend:
        stub: Any = health_pb2_grpc.HealthStub(frontend.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=""))
        first = await watch.read()
        frontend.frontend.stop()
        await frontend.running
    assert first.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert "Traceback" not in capfd.readouterr().err


# When a frontend says that requests may be sent to it.

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
        # Refusals contain the time of the next retry.
        assert await status(frontend, "") == health_pb2.HealthCheckResponse.SERVING
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
            await eventually(lambda: frontend.frontend._models[0].coordinator.view is not None)
            assert await status(frontend, "") == health_pb2.HealthCheckResponse.NOT_SERVING
    finally:
        await coordinator.stop()
