"""Whether anybody listens at an address."""

import socket

import pytest

from penstock_common.rpc.reconnect import refuses


async def test_a_port_is_refused_only_while_nobody_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert not await refuses(address, within=10.0)
    assert await refuses(address, within=10.0)


async def test_who_accepts_nothing_refuses_nothing() -> None:
    """As a network does that swallows everything: the queue of connections is full."""
    with socket.socket() as listening, socket.socket() as first, socket.socket() as second:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for client in (first, second):
            client.setblocking(False)
            client.connect_ex(listening.getsockname())
        assert not await refuses(f"127.0.0.1:{listening.getsockname()[1]}", within=0.01)


@pytest.mark.parametrize("address", ["nowhere.invalid:1", "127.0.0.1:x", "127.0.0.1"])
async def test_an_address_that_cannot_be_reached_tells_nothing(address: str) -> None:
    assert not await refuses(address, within=0.01)
