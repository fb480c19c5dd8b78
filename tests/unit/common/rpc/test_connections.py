"""The open connections of a gRPC server."""

import asyncio

import grpc

from penstock_common.config.sections import ServerConfig
from penstock_common.rpc.server import Connections, RpcServer
from tests.fakes.frontends.frontend_server import eventually
from tests.fakes.patience import PATIENCE

OWN_POOL = [("grpc.use_local_subchannel_pool", 1)]


async def serving(max_connection_age: float = 0.0) -> RpcServer:
    config = ServerConfig(host="127.0.0.1", port=0, max_connection_age=max_connection_age)
    server = RpcServer(config, service_names=[])
    await server.start()
    return server


def channel(server: RpcServer) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=OWN_POOL)


async def test_each_server_has_its_own_and_each_connection_a_number() -> None:
    one, other = await serving(), await serving()
    async with channel(one) as first, channel(one) as second, channel(other) as third, asyncio.timeout(PATIENCE):
        await asyncio.gather(*(each.channel_ready() for each in (first, second, third)))
        await eventually(lambda: (len(one.connections()), len(other.connections())) == (2, 1))
        there = one.connections()
        await second.close()
        await eventually(lambda: len(one.connections()) == 1)
        assert one.connections() < there
    await eventually(lambda: not one.connections())
    await asyncio.gather(one.stop(0), other.stop(0))


async def test_a_connection_of_age_is_replaced_by_its_client() -> None:
    server = await serving(max_connection_age=0.05)
    async with channel(server) as client, asyncio.timeout(PATIENCE):
        seen: set[int] = set()
        while len(seen) < 3:
            await client.channel_ready()  # the channel reconnects
            seen |= server.connections()
            await asyncio.sleep(0.005)
    await server.stop(0)


async def test_a_server_that_is_gone_has_none() -> None:
    server = grpc.aio.server()
    connections = Connections()
    del server
    assert connections.open() == frozenset()
