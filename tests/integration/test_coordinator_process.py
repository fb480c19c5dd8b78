"""``python -m penstock_coordinator`` as a process."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request

import grpc
import pytest

from penstock.coordinator.v1 import messages_pb2 as pb
from penstock.coordinator.v1 import service_pb2_grpc

TIMEOUT = 30


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def start(*args):
    return subprocess.Popen(
        [sys.executable, "-m", "penstock_coordinator", *args], stderr=subprocess.PIPE, text=True, env=os.environ
    )


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
        ("lease_secnds: 3\n", "unknown key 'lease_secnds'; did you mean 'lease_seconds'?"),
        ("lease_seconds: 0\n", "lease_seconds is 0"),
        ("lease_seconds: soon\n", "lease_seconds is 'soon'"),
        ("server: {prot: 1}\n", "unknown key 'server.prot'; did you mean 'port'?"),
        ("- 1\n", "must hold a mapping"),
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
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = service_pb2_grpc.CoordinatorServiceStub(channel)
            hello = pb.FrontendReport(hello=pb.FrontendHello(frontend_id="f", incarnation="1"))
            views = stub.FrontendSession(iter([hello]), wait_for_ready=True, timeout=TIMEOUT)
            assert list(next(views).engines) == []
            commands = stub.EngineSession(iter([REGISTER]), timeout=TIMEOUT)
            assert next(commands).registered.engine_index == 0
            silent = stub.EngineSession(never_sent(channel), timeout=TIMEOUT)
            health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
            assert next(health).status == health_pb2.HealthCheckResponse.SERVING
            with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=TIMEOUT) as page:
                assert b"penstock_coordinator_engines" in page.read()
            process.send_signal(number)
            with pytest.raises(grpc.RpcError):
                next(views)
            _, stderr = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "Traceback" not in stderr
    assert "stopped" in stderr
