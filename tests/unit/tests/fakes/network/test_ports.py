"""Ports that tests give to services."""

import itertools
import socket

from tests.fakes.network.ports import free_port, lane


def test_processes_that_run_tests_at_once_share_no_port() -> None:
    lanes = [set(lane(f"gw{number}")) for number in range(16)]
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(lanes, 2))
    assert lane("") == lane("gw0")


def test_a_port_is_free_is_none_of_those_of_connections_and_is_given_once() -> None:
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    assert max(ports) < 20_000
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_port_that_somebody_listens_on_is_not_given() -> None:
    given = set()
    first = free_port()
    with socket.create_server(("127.0.0.1", first)):
        while (port := free_port()) not in given:
            given.add(port)
    assert first not in given
