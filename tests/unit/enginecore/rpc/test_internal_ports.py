"""The shared secret on the port of an engine's nodes and on the port of blocks."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from penstock.kvtransfer.v1 import messages_pb2 as kv_pb
from penstock.kvtransfer.v1 import service_pb2_grpc as kv_grpc
from penstock.worker.v1 import messages_pb2 as pb
from penstock.worker.v1 import service_pb2_grpc
from penstock_common.config.sections import ServerConfig, TlsConfig
from penstock_common.errors import ConfigError, Unauthenticated
from penstock_common.rpc import handshake
from penstock_common.rpc.call_authorization import NONCE_KEY, PROOF_KEY, TOKEN_KEY, PortSecret
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.status import from_rpc_error
from penstock_common.security.shared_secret import SharedSecret
from penstock_enginecore.config import EngineCoreConfig, ExecutorConfig, ModelConfig, NodesConfig, ParallelConfig
from penstock_enginecore.rpc.internal_ports import LoopThread, checked_secret
from penstock_enginecore.rpc.node_client import NodeClient
from penstock_enginecore.rpc.node_listener import PORT_PURPOSE, NodeListener
from tests.fakes.kv_engines import FakeKvEngine, content, names_of
from tests.fakes.patience import PATIENCE

SECRET, OTHER = b"s" * 32, b"o" * 32


class Events:
    """Records the nodes that attached."""

    def __init__(self) -> None:
        self.indices: list[int] = []

    def attached(self, index: int) -> None:
        self.indices.append(index)

    def answered(self, index: int, rank: int, message: bytes) -> None:
        pass

    def stacks(self, index: int, texts: Mapping[int, str]) -> None:
        pass

    def ended(self, index: int, reason: str) -> None:
        pass


Secret = Callable[[bytes | None], ParallelConfig]


@pytest.fixture
def secret(tmp_path: Path) -> Secret:
    """Write a secret into a file, and return the section that names the file."""

    def make(value: bytes | None) -> ParallelConfig:
        if value is None:
            return ParallelConfig()
        path = tmp_path / value[:1].decode()
        path.write_bytes(value)
        path.chmod(0o600)
        return ParallelConfig(secret_file=str(path))

    return make


def config_of(parallel: ParallelConfig, server: ServerConfig | None = None, **nodes: Any) -> EngineCoreConfig:
    return EngineCoreConfig(
        model=ModelConfig(path="m"),
        engine_id="e",
        executor=ExecutorConfig(
            pipeline_parallel_size=3, nodes=NodesConfig(**{"size": 3, "timeout": PATIENCE, "port": 0, **nodes})
        ),
        parallel=parallel,
        server=server or ServerConfig(host="127.0.0.1"),
    )


Listen = Callable[[bytes | None], tuple[NodeListener, Events]]


@pytest.fixture
def listen(secret: Secret) -> Iterator[Listen]:
    made = []

    def start(value: bytes | None) -> tuple[NodeListener, Events]:
        events = Events()
        listener = NodeListener(config_of(secret(value)), "127.0.0.1:1", events)
        listener.start()
        made.append(listener)
        return listener, events

    yield start
    for listener in made:
        listener.end()
        listener.stop()


def at(port: int, parallel: ParallelConfig) -> EngineCoreConfig:
    return config_of(parallel, index=1, leader=f"127.0.0.1:{port}")


@pytest.mark.asyncio
@pytest.mark.parametrize("value", [SECRET, None])
async def test_a_node_of_the_same_secret_attaches(listen: Listen, secret: Secret, value: bytes | None) -> None:
    listener, events = listen(value)
    assert (await NodeClient(at(listener.port, secret(value))).attach()).engine_id == "e"
    assert events.indices == [1]


@pytest.mark.asyncio
@pytest.mark.parametrize(("value", "reason"), [(None, "SECRET_MISSING"), (OTHER, "SECRET_WRONG")])
async def test_a_node_of_another_secret_is_refused(
    listen: Listen, secret: Secret, value: bytes | None, reason: str
) -> None:
    listener, events = listen(SECRET)
    with pytest.raises(
        Unauthenticated, match=r"the caller does not have the secret in parallel\.secret_file"
    ) as refused:
        await NodeClient(at(listener.port, secret(value))).attach()
    assert (refused.value.reason, events.indices) == (reason, [])


@pytest.mark.asyncio
async def test_the_token_of_another_port_is_worth_nothing(listen: Listen) -> None:
    listener, _ = listen(SECRET)
    other = PortSecret(SharedSecret(SECRET), "kv_transfer").metadata()
    async with make_channel(f"127.0.0.1:{listener.port}") as channel:
        call = service_pb2_grpc.WorkerServiceStub(channel).NodeSession(metadata=other)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
    assert from_rpc_error(error.value).reason == "SECRET_WRONG"


@pytest.mark.asyncio
async def test_a_node_sends_nothing_to_an_engine_that_does_not_know_the_secret(listen: Listen, secret: Secret) -> None:
    listener, events = listen(None)
    with pytest.raises(
        Unauthenticated, match="but parallel.secret_file is not set in this process; give both sides the same secret"
    ) as refused:
        await NodeClient(at(listener.port, secret(SECRET))).attach()
    assert (refused.value.reason, events.indices) == ("SECRET_NOT_SET", [])


class Impostor(service_pb2_grpc.WorkerServiceServicer, kv_grpc.KvTransferServiceServicer):
    """A server that has seen a token and an answer to another nonce. It records the clients' messages."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.tokens: list[str] = []

    async def NodeSession(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        sent = dict(context.invocation_metadata())
        self.tokens.append(sent[TOKEN_KEY])
        assert sent[NONCE_KEY]
        answer = PortSecret(SharedSecret(SECRET), PORT_PURPOSE).proof("another nonce")
        await context.send_initial_metadata(((PROOF_KEY, answer),))
        async for message in request_iterator:
            self.heard.append(message)
            yield pb.NodeCommand(attached=pb.Attached(engine_id="e"))


@pytest.mark.asyncio
async def test_an_answer_to_another_nonce_proves_nothing(secret: Secret) -> None:
    impostor, server = Impostor(), grpc.aio.server()
    service_pb2_grpc.add_WorkerServiceServicer_to_server(impostor, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        with pytest.raises(Unauthenticated, match="the server does not have the secret"):
            await NodeClient(at(port, secret(SECRET))).attach()
    finally:
        await server.stop(None)
    assert (impostor.heard, len(impostor.tokens)) == ([], 1)


@pytest.mark.asyncio
async def test_a_session_without_attach_ends(listen: Listen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "FIRST_MESSAGE_TIMEOUT", 0.05)
    listener, _ = listen(None)
    async with make_channel(f"127.0.0.1:{listener.port}") as channel:
        call = service_pb2_grpc.WorkerServiceStub(channel).NodeSession()
        with pytest.raises(grpc.aio.AioRpcError, match="the first message, attach, did not arrive within") as error:
            await call.read()
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


ANYWHERE = ServerConfig(host="0.0.0.0")


def test_an_external_port_requires_the_secret_or_client_certificates(secret: Secret) -> None:
    for server in (ANYWHERE, msgspec.structs.replace(ANYWHERE, tls=TlsConfig(certificate="c", key="k"))):
        with pytest.raises(ConfigError, match=r"server\.host is '0\.0\.0\.0'.*parallel\.secret_file.*server\.tls\.ca"):
            NodeListener(config_of(secret(None), server), "127.0.0.1:1", Events())
        with pytest.raises(ConfigError, match=r"parallel\.secret_file.*server\.tls\.ca"):
            FakeKvEngine("a", server=server)
    assert checked_secret(config_of(secret(SECRET), ANYWHERE), PORT_PURPOSE) is not None
    both = msgspec.structs.replace(ANYWHERE, tls=TlsConfig(certificate="c", key="k", ca="a"))
    assert checked_secret(config_of(secret(None), both), PORT_PURPOSE) is None


def until(condition: Callable[[], Any]) -> None:
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up, "it never came to be"
        threading.Event().wait(0.01)


@pytest.mark.parametrize(
    ("source_has", "target_has", "failure"),
    [
        (SECRET, SECRET, ""),
        (SECRET, None, "refused"),
        (SECRET, OTHER, "refused"),
        (None, SECRET, "refused"),
    ],
)
def test_blocks_go_between_engines_of_one_secret(
    secret: Secret, source_has: bytes | None, target_has: bytes | None, failure: str
) -> None:
    with ExitStack() as stack:
        source = stack.enter_context(FakeKvEngine("a", parallel=secret(source_has)))
        target = stack.enter_context(FakeKvEngine("b", parallel=secret(target_has)))
        names = names_of("prompt", 3)
        request = target.request(source.grant(names, time.monotonic()))
        target.peers.opened(request)
        found = target.fetch(request, names).wait()
        target.peers.closed(request)
        if failure:
            assert found == {}
            until(lambda: target.counts.failures[failure] == 1)
            assert (source.num_read, source.counts.num_blocks.total()) == (0, 0)
        else:
            assert found == {name: content(name, source.block_bytes) for name in names}


@pytest.mark.asyncio
async def test_a_stranger_pulls_nothing(secret: Secret) -> None:
    with FakeKvEngine("a", parallel=secret(SECRET)) as source:
        lease = source.grant(names_of("prompt", 3), time.monotonic())
        async with make_channel(f"127.0.0.1:{source.transfer.port}") as channel:
            call = kv_grpc.KvTransferServiceStub(channel).Pull()
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.write(kv_pb.PullRequest(open=kv_pb.Open(lease_id=lease.lease_id)))
                await call.read()
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await asyncio.to_thread(lambda: source.transfer.num_pulls) == (0, 0)


# An event loop in a separate thread.


def test_running_calls_end_with_the_loop() -> None:
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("task")

    async def begin() -> asyncio.Task[None]:
        task = asyncio.create_task(forever())
        await asyncio.sleep(0)
        return task

    thread = LoopThread("test")
    thread.start()
    task = thread.run(begin())
    thread.stop()
    assert ended == ["task"]
    assert task.cancelled()
    assert thread.loop.is_closed()
