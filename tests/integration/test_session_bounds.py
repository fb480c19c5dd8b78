"""Limits on an engine's memory for untrusted sessions, over real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import grpc
import pytest

from penstock.common.v1 import tensor_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock.enginecore.v1 import service_pb2_grpc
from penstock_common.rpc import handshake
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.handshake import ANNOUNCED_SINCE
from penstock_common.rpc.status import from_rpc_error
from penstock_common.tensors.chunks import MAX_TENSOR_BYTES, MAX_UNANNOUNCED_BYTES
from penstock_enginecore.config import SessionsConfig
from tests.fakes.engines.engine_harness import make_config
from tests.fakes.engines.engine_server import EngineServer, wait_until
from tests.fakes.engines.fake_executor import FakeExecutor

MIB = 1024 * 1024
LIMITS = SessionsConfig(max_sessions=5, max_tensor_bytes=64 * MIB)


class Client:
    """A session whose messages the test writes itself."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = service_pb2_grpc.EngineCoreServiceStub(channel).Session()

    async def hello(self, revision: int = ANNOUNCED_SINCE) -> pb.Ready:
        await self.call.write(pb.SessionRequest(hello=pb.Hello(protocol_revision=revision, frontend_id="f")))
        first = await self.call.read()
        assert isinstance(first, pb.SessionResponse)
        return first.ready

    async def send(self, transfer_id: int, size: int, *, announce: bool = True) -> None:
        for offset in range(0, size, MIB):
            chunk = tensor_pb2.TensorChunk(transfer_id=transfer_id, offset=offset, data=bytes(min(MIB, size - offset)))
            chunk.size = size if announce and not offset else 0
            await self.call.write(pb.SessionRequest(tensor_chunk=chunk))

    async def heard(self) -> None:
        """Wait until the engine has read all sent messages."""
        await self.call.write(pb.SessionRequest(utility=pb.UtilityCall(call_id=1, method="nothing is called so")))
        while True:
            message = await self.call.read()
            assert isinstance(message, pb.SessionResponse), message
            frames = [message.outputs, *message.frames.frames]
            if any(frame.HasField("utility_output") for frame in frames):
                return


Connect = Callable[[], Client]


@pytest.fixture
def server() -> Iterator[EngineServer]:
    made = EngineServer(make_config(sessions=LIMITS), FakeExecutor())
    yield made.start().load()
    made.stop()


@pytest.fixture
async def connect(server: EngineServer) -> AsyncIterator[Connect]:
    channels: list[grpc.aio.Channel] = []

    def open_session() -> Client:
        channels.append(make_channel(server.address))
        return Client(channels[-1])

    yield open_session
    for channel in channels:
        await channel.close()


async def test_chunks_that_no_request_refers_to_are_bounded_over_all_sessions(
    server: EngineServer, connect: Connect
) -> None:
    pool, strangers = server.io.sessions.tensors, [connect() for _ in range(4)]
    for each in strangers:
        await each.hello()
        for transfer_id in range(5):
            await each.send(transfer_id, 5 * MIB)
        await each.heard()
        assert pool.num_bytes <= LIMITS.max_tensor_bytes
    assert pool.num_bytes > LIMITS.max_tensor_bytes // 2
    for each in strangers:
        each.call.cancel()
    # The engine's thread removes a session before it drops the session's chunks.
    await asyncio.to_thread(wait_until, lambda: not len(server.io.sessions) and not pool.num_bytes)


async def test_more_sessions_than_the_limit_are_refused_and_one_that_ends_makes_room(
    server: EngineServer, connect: Connect
) -> None:
    sessions = [connect() for _ in range(LIMITS.max_sessions)]
    for each in sessions:
        await each.hello()
    late = connect()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await late.hello()
    failed = from_rpc_error(error.value)
    assert (failed.code, failed.reason) == ("RESOURCE_EXHAUSTED", "TOO_MANY_SESSIONS")
    assert failed.message == "5 sessions are open; the limit is sessions.max_sessions, 5"
    sessions[0].call.cancel()
    await asyncio.to_thread(wait_until, lambda: len(server.io.sessions) < LIMITS.max_sessions)
    assert (await connect().hello()).model == "fake"


async def test_a_tensor_that_a_frontend_of_this_release_does_not_announce_is_not_held(
    server: EngineServer, connect: Connect
) -> None:
    client = connect()
    await client.hello()
    await client.send(1, 5 * MIB, announce=False)
    await client.heard()
    assert server.io.sessions.tensors.num_bytes == 0


async def test_frontends_of_the_last_release_may_send_tensors_and_are_told_a_smaller_limit(
    server: EngineServer, connect: Connect
) -> None:
    old, new = connect(), connect()
    limit = min(MAX_UNANNOUNCED_BYTES, LIMITS.max_tensor_bytes)
    assert (await old.hello(ANNOUNCED_SINCE - 1)).max_tensor_bytes == limit
    assert (await new.hello()).max_tensor_bytes == min(MAX_TENSOR_BYTES, LIMITS.max_tensor_bytes)
    await old.send(1, 5 * MIB, announce=False)
    await old.heard()
    assert server.io.sessions.tensors.num_bytes > 5 * MIB


async def test_a_session_without_hello_ends(
    server: EngineServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "FIRST_MESSAGE_TIMEOUT", 0.05)
    silent = connect()
    await silent.call.wait_for_connection()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await silent.call.read()
        await silent.call.code()
        raise AssertionError(await silent.call.details())
    failed = from_rpc_error(error.value)
    assert (failed.code, failed.field) == ("DEADLINE_EXCEEDED", "hello")
