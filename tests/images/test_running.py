"""The images run with read-only root file systems, as an ordinary user, without capabilities, alone and together."""

import contextlib
import time
from collections.abc import Iterator

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.inference.v1 import messages_pb2, service_pb2_grpc
from tests.fakes.engines.fake_executor import oracle_tokens
from tests.fakes.network.ports import free_port
from tests.fakes.patience import PATIENCE
from tests.images.container import Image, Running

MODEL = "/opt/penstock/demo-model"
VOCAB = 2048


def serving(running: Running, port: int, service: str = "") -> None:
    """Wait until a probe succeeds. Raises AssertionError with the log after a timeout."""
    deadline = time.monotonic() + PATIENCE
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline:
            with contextlib.suppress(grpc.RpcError):
                answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            time.sleep(0.2)
    raise AssertionError(running.log())


def listening(port: int) -> list[str]:
    return [
        "--server.host=127.0.0.1",
        f"--server.port={port}",
        "--metrics.host=127.0.0.1",
        f"--metrics.port={free_port()}",
    ]


@pytest.fixture
def coordinated(coordinator: Image) -> Iterator[str]:
    """Yield the address of a running coordinator. Afterwards, check that the coordinator ends cleanly."""
    port = free_port()
    with coordinator.start(*listening(port)) as running:
        serving(running, port)
        yield f"127.0.0.1:{port}"
        assert running.stop() == 0, running.log()


def generate(coordinator: str, engine: Image, frontend: Image, *flags: str) -> list[int]:
    """Run a system of these images, check that all services end cleanly, and return the tokens of its answer."""
    port, http, own = free_port(), free_port(), free_port()
    engine_flags = [
        *listening(own),
        f"--model.path={MODEL}",
        "--model.served-model-name=demo",
        f"--coordinator.address={coordinator}",
    ]
    engine_flags += [f"--coordinator.advertise=127.0.0.1:{own}", "--cache.kv-cache-memory=64MiB", *flags]
    frontend_flags = [
        "--server.host=127.0.0.1",
        f"--server.port={port}",
        "--http.host=127.0.0.1",
        f"--http.port={http}",
    ]
    frontend_flags += [
        f"--model.path={MODEL}",
        "--model.served-model-name=demo",
        f"--coordinator.address={coordinator}",
    ]
    with engine.start(*engine_flags) as behind, frontend.start(*frontend_flags) as before:
        serving(behind, own)
        serving(before, port, "penstock.inference.v1.InferenceService")
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = service_pb2_grpc.InferenceServiceStub(channel)
            request = messages_pb2.GenerateRequest(model="demo", text="Once")
            request.sampling_params.seed, request.sampling_params.max_tokens = 7, 8
            tokens = [token for piece in stub.Generate(request, timeout=PATIENCE) for token in piece.token_ids]
        assert httpx.get(f"http://127.0.0.1:{http}/v1/models").json()["data"][0]["id"] == "demo"
        assert before.stop() == 0, before.log()
        assert behind.stop() == 0, behind.log()
    return tokens


def test_coordinator_frontend_and_the_oracle_engine_answer_a_request(
    coordinated: str, frontend: Image, oracle_engine: Image
):
    assert generate(coordinated, oracle_engine, frontend) == oracle_tokens(7, 8, VOCAB)


def test_the_engine_with_torch_answers_it_too(coordinated: str, frontend: Image, enginecore: Image):
    tokens = generate(coordinated, enginecore, frontend, "--model.device=cpu", "--executor.num-threads=1")
    assert len(tokens) == 8


def test_the_engines_kernels_are_in_its_image(enginecore: Image):
    done = enginecore.run(
        "python", "-c", "from penstock_enginecore.native.library import open_library; open_library('auto', 1)"
    )
    assert done.returncode == 0, done.stdout


def test_a_service_cannot_write_to_its_own_files(image: Image):
    done = image.run("python", "-c", "open('/usr/share/penstock/sbom.json', 'w')")
    assert "Read-only file system" in done.stdout


def test_a_wrong_setting_is_said_on_standard_error(coordinator: Image):
    with coordinator.start("--lease-seconds=soon") as running:
        assert running.wait() == 2
        assert "lease_seconds is 'soon'" in running.log()
