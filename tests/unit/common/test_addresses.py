"""Addresses as host:port, with IPv6 hosts in brackets."""

import contextlib
import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from penstock_common import addresses
from penstock_common.addresses import resolve, split, take_both_families, with_default_port, with_port
from penstock_common.config.sections import MetricsConfig, ServerConfig
from penstock_common.errors import ConfigError
from penstock_common.metrics_server import MetricsServer
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.server import RpcServer
from tests.fakes.network.ports import free_port
from tests.fakes.patience import PATIENCE


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
    with pytest.raises(ValueError, match=r"must have an IPv6 host in brackets, such as \[fd00::7\]:50052"):
        split(address)


# Addresses that listeners bind to: one IP family, or both with "::".


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback address")


@pytest.mark.parametrize(
    ("host", "family", "address"),
    [
        ("127.0.0.1", socket.AF_INET, "127.0.0.1"),
        ("0.0.0.0", socket.AF_INET, "0.0.0.0"),
        ("::1", socket.AF_INET6, "::1"),
        ("[::1]", socket.AF_INET6, "::1"),
        ("::", socket.AF_INET6, "::"),
    ],
)
@needs_ipv6
def test_a_host_is_an_address_of_its_family(host: str, family: socket.AddressFamily, address: str) -> None:
    found, resolved = resolve(host, 1)
    assert (found, resolved[:2]) == (family, (address, 1))


def test_all_addresses_are_those_of_ipv4_where_the_kernel_has_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_has_ipv6", lambda: False)
    assert resolve("::", 1) == (socket.AF_INET, ("0.0.0.0", 1))
    with contextlib.closing(socket.socket()) as listener:
        take_both_families(listener)  # has no effect on this listener


@needs_ipv6
def test_metrics_on_all_addresses_are_read_over_either_family() -> None:
    server = MetricsServer(MetricsConfig(host="::", port=(port := free_port())), CollectorRegistry())
    try:
        for host in ("127.0.0.1", "[::1]"):
            with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=PATIENCE) as answer:
                assert answer.status == 200
    finally:
        server.stop()


@needs_ipv6
@pytest.mark.parametrize("host", ["::", "[::]", "0.0.0.0"])
async def test_grpc_on_all_addresses_is_reached_over_either_family(host: str) -> None:
    server = RpcServer(ServerConfig(host=host, port=free_port()), service_names=[])
    port = await server.start()
    for client in ("127.0.0.1", "[::1]"):
        async with make_channel(f"{client}:{port}") as channel:
            await channel.channel_ready()
    await server.stop(0)


@needs_ipv6
async def test_a_port_that_is_taken_on_ipv6_is_named_with_its_address() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on \[::1\]:{port}: Address already in use"):
            await RpcServer(ServerConfig(host="::1", port=port), service_names=[]).start()
