"""Finding and checking TCP ports."""

import contextlib
import socket

import pytest

from penstock_common.errors import ConfigError
from penstock_local.serving import machine
from penstock_local.serving.machine import check_free, free_ports


def test_free_ports_differ_and_can_be_listened_on() -> None:
    found = free_ports(8)
    assert len(set(found)) == 8
    for port in found:
        check_free("127.0.0.1", port, flag="--grpc-port")


def test_ports_that_are_spoken_for_are_not_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_INTERNAL_PORTS", range(20_000, 20_004))
    monkeypatch.setattr(machine, "why_taken", lambda host, port: None)
    assert sorted(free_ports(9, but={20_001, 20_003})) == [20_000, 20_002]


@pytest.mark.parametrize("held", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("wanted", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_taken_port_is_named_with_the_flag_that_changes_it(held: str, wanted: str) -> None:
    with contextlib.closing(socket.socket()) as other:
        other.bind((held, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on {wanted} .*choose another with --http-port PORT"):
            check_free(wanted, port, flag="--http-port")
