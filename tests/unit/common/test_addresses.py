"""Addresses as host:port, in which an IPv6 host stands in brackets."""

import pytest

from penstock_common.addresses import split, with_default_port, with_port


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.0.0.7", "10.0.0.7:1"),
        ("engine.svc", "engine.svc:1"),
        ("fd00::7", "[fd00::7]:1"),
        ("fe80::7%eth0", "[fe80::7%eth0]:1"),
        ("[::]", "[::]:1"),
    ],
)
def test_only_an_ipv6_host_gets_brackets_and_once(host: str, address: str):
    assert with_port(host, 1) == address
    assert split(address) == (host.strip("[]"), 1)


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("10.0.0.7", "10.0.0.7:50052"),
        ("10.0.0.7:9", "10.0.0.7:9"),
        ("engine", "engine:50052"),
        ("fd00::7", "[fd00::7]:50052"),
        ("fd00::7:9", "[fd00::7:9]:50052"),
        ("[fd00::7]", "[fd00::7]:50052"),
        ("[fd00::7]:9", "[fd00::7]:9"),
    ],
)
def test_the_port_is_added_where_there_is_none(given: str, address: str):
    assert with_default_port(given, 50052) == address


@pytest.mark.parametrize(
    "address", ["host", "host:", ":1", "host:0", "host:65536", "host:x", "host:-1", "http://h:1/", ""]
)
def test_an_address_without_a_host_or_a_port_is_refused(address: str):
    with pytest.raises(ValueError, match="must be host:port, with a port from 1 to 65535"):
        split(address)


@pytest.mark.parametrize("address", ["fd00::7:50052", "[fd00::7:50052", "[host]:50052", "a:b:50052"])
def test_an_ipv6_host_without_brackets_is_refused_with_what_it_should_be(address: str):
    with pytest.raises(ValueError, match=r"must have an IPv6 host in brackets, as \[fd00::7\]:50052"):
        split(address)
