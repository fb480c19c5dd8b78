"""``python -m penstock_coordinator`` as a process."""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.coordinator.v1 import messages_pb2 as pb
from penstock.coordinator.v1 import service_pb2_grpc
from tests.fakes.network.ports import free_port
from tests.fakes.patience import PATIENCE
from tests.fakes.systems.cluster_members import register

TIMEOUT = PATIENCE


def start(*args):
    return subprocess.Popen(
        [sys.executable, "-m", "penstock_coordinator", *args], stderr=subprocess.PIPE, text=True, env=os.environ
    )


@contextlib.contextmanager
def kept_open(*messages):
    """Return a request stream that stays open after its messages."""
    requests = queue.SimpleQueue()
    for message in messages:
        requests.put(message)
    try:
        yield iter(requests.get, None)
    finally:
        requests.put(None)


def assert_ended_as_unavailable(stream):
    with pytest.raises(grpc.RpcError) as e:
        next(stream)
    assert e.value.code() is grpc.StatusCode.UNAVAILABLE
    assert e.value.details() == "the coordinator is shutting down"


def run_to_end(*args):
    process = start(*args)
    try:
        _, stderr = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    return process.returncode, stderr


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("lease_secnds: 3\n", "there is no setting 'lease_secnds'; did you mean 'lease_seconds'?"),
        ("lease_seconds: 0\n", "lease_seconds is 0"),
        ("lease_seconds: soon\n", "lease_seconds is 'soon'"),
        ("server: {prot: 1}\n", "there is no setting 'server.prot'; did you mean 'port'?"),
        ("- 1\n", "must contain a mapping"),
    ],
)
def test_a_wrong_config_file_ends_with_exit_code_2_and_one_line(tmp_path, yaml, message):
    file = tmp_path / "coordinator.yaml"
    file.write_text(yaml)
    code, stderr = run_to_end("--config", str(file))
    assert code == 2
    assert message in stderr
    assert stderr.count("\n") == 1


def test_a_taken_port_ends_with_exit_code_2_and_names_it():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code, stderr = run_to_end("--server.host", "127.0.0.1", "--server.port", str(port))
    assert code == 2
    assert f"127.0.0.1:{port}" in stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_with_streams_open(number):
    port, metrics_port = free_port(), free_port()
    process = start(
        *("--server.host", "127.0.0.1", "--server.port", str(port), "--restart-grace", "0"),
        *("--metrics.host", "127.0.0.1", "--metrics.port", str(metrics_port)),
    )
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, kept_open() as none, kept_open(register()) as one:
            stub = service_pb2_grpc.CoordinatorServiceStub(channel)
            hello = pb.FrontendReport(hello=pb.FrontendHello(frontend_id="f", incarnation="1"))
            views = stub.FrontendSession(iter([hello]), wait_for_ready=True, timeout=TIMEOUT)
            assert list(next(views).engines) == []
            commands = stub.EngineSession(one, timeout=TIMEOUT)
            assert next(commands).registered.engine_index == 0
            assert [engine.engine_id for engine in next(views).engines] == ["engine-0"]
            silent = stub.EngineSession(none, timeout=TIMEOUT)
            health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
            assert next(health).status == health_pb2.HealthCheckResponse.SERVING
            with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=TIMEOUT) as page:
                assert b"penstock_coordinator_engines" in page.read()
            process.send_signal(number)
            for stream in (views, commands, silent):
                assert_ended_as_unavailable(stream)
            _, stderr = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "Traceback" not in stderr
    assert "stopped" in stderr
