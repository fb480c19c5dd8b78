"""Ports that tests give to services."""

import socket
import subprocess
import sys

import pytest

from tests.fakes.network.ports import free_port, take

TAKES = "import sys; from tests.fakes.network.ports import take; print([take(int(port)) for port in sys.argv[1:]])"


def test_a_port_is_free_is_none_of_those_of_connections_and_is_given_once() -> None:
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    assert max(ports) < 20_000
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_port_whose_service_is_down_is_no_other_processs() -> None:
    port = free_port()
    told = subprocess.run([sys.executable, "-c", TAKES, str(port), "1"], check=True, capture_output=True, text=True)
    assert told.stdout.strip() == "[False, True]"
    assert take(port)


def test_a_port_in_use_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        used, free = listener.getsockname()[1], free_port()
        monkeypatch.setattr("tests.fakes.network.ports._untried", iter([used, free]))
        assert free_port() == free
