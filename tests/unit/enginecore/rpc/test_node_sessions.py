"""The sessions between an engine and its other nodes, over loopback."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from penstock_common.config.sections import ServerConfig
from penstock_common.errors import ConfigError, RequestFailed
from penstock_enginecore.config import (
    CacheConfig,
    EngineCoreConfig,
    ExecutorConfig,
    LoraConfig,
    ModelConfig,
    NodesConfig,
)
from penstock_enginecore.rpc import node_client
from penstock_enginecore.rpc.node_client import NodeClient
from penstock_enginecore.rpc.node_listener import NodeListener, config_difference, shared_config
from tests.fakes.network.certificates import Authority
from tests.fakes.patience import PATIENCE

MEETING = "127.0.0.1:1"


def config_of(**nodes: Any) -> EngineCoreConfig:
    return EngineCoreConfig(
        model=ModelConfig(path="m"),
        engine_id="e",
        executor=ExecutorConfig(
            pipeline_parallel_size=3, nodes=NodesConfig(**{"size": 3, "timeout": PATIENCE, "port": 0, **nodes})
        ),
        server=ServerConfig(host="127.0.0.1"),
    )


class Events:
    """Records the engine's events."""

    def __init__(self) -> None:
        self.heard: queue.Queue[tuple[Any, ...]] = queue.Queue()

    def attached(self, index: int) -> None:
        self.heard.put(("attached", index))

    def answered(self, index: int, rank: int, message: bytes) -> None:
        self.heard.put(("answered", index, rank, message))

    def stacks(self, index: int, texts: Mapping[int, str]) -> None:
        self.heard.put(("stacks", index, texts))

    def ended(self, index: int, reason: str) -> None:
        self.heard.put(("ended", index, reason))

    async def next(self) -> tuple[Any, ...]:
        return await asyncio.to_thread(self.heard.get, True, PATIENCE)


class Orders:
    """Records the commands to a node. Answers calls with the call itself."""

    def __init__(self, client: NodeClient, rank: int) -> None:
        self.client, self.rank = client, rank
        self.told: list[Any] = []

    def call(self, message: bytes) -> None:
        self.told.append(message)
        self.client.answer(self.rank, message)

    def expect_ends(self) -> None:
        self.told.append("expect_ends")

    def dump_stacks(self) -> Mapping[int, str]:
        return {self.rank: f"on {threading.current_thread().name}"}


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def listener(events: Events) -> Iterator[NodeListener]:
    listener = NodeListener(config_of(), MEETING, events)
    listener.start()
    yield listener
    listener.end("over")
    listener.stop()


def of_node(listener: NodeListener, index: int = 1, **nodes: Any) -> EngineCoreConfig:
    return config_of(**{"index": index, "leader": f"127.0.0.1:{listener.port}", **nodes})


@pytest_asyncio.fixture
async def node(listener: NodeListener, events: Events) -> AsyncIterator[Orders]:
    client = NodeClient(of_node(listener))
    attached = await client.attach()
    assert (attached.engine_id, attached.meeting) == ("e", MEETING)
    assert await events.next() == ("attached", 1)
    yield Orders(client, 1)


@pytest.mark.asyncio
async def test_calls_come_in_order_and_so_do_answers(listener: NodeListener, events: Events, node: Orders) -> None:
    serving = asyncio.create_task(node.client.serve(node))
    messages = [str(number).encode() * (number % 7) for number in range(1000)]
    for message in messages:
        listener.call(message)
    listener.expect_ends()
    assert [await events.next() for _ in messages] == [("answered", 1, 1, message) for message in messages]
    listener.end()
    await asyncio.wait_for(serving, PATIENCE)
    assert node.told == [*messages, "expect_ends"]
    assert events.heard.empty()  # it was the engine that ended it


@pytest.mark.asyncio
async def test_stacks_are_asked_for_and_told(listener: NodeListener, events: Events, node: Orders) -> None:
    serving = asyncio.create_task(node.client.serve(node))
    listener.dump_stacks()
    kind, index, texts = await events.next()
    assert (kind, index) == ("stacks", 1)
    assert texts[1].startswith("on asyncio_")
    listener.end()
    await serving


@pytest.mark.asyncio
async def test_a_node_hears_why_its_workers_are_given_up(listener: NodeListener, node: Orders) -> None:
    serving = asyncio.create_task(node.client.serve(node))
    listener.end("worker 0 has ended")
    with pytest.raises(RequestFailed, match="worker 0 has ended"):
        await asyncio.wait_for(serving, PATIENCE)


@pytest.mark.asyncio
async def test_the_engine_hears_why_a_nodes_workers_have_ended(
    listener: NodeListener, events: Events, node: Orders
) -> None:
    serving = asyncio.create_task(node.client.serve(node))
    node.client.give_up("worker 1 (pid 7) was killed by SIGKILL")
    assert await events.next() == ("ended", 1, "worker 1 (pid 7) was killed by SIGKILL")
    await asyncio.wait_for(serving, PATIENCE)


@pytest.mark.asyncio
async def test_the_engine_hears_that_a_connection_broke(events: Events, node: Orders) -> None:
    serving = asyncio.create_task(node.client.serve(node))
    await asyncio.sleep(0)
    serving.cancel()
    assert await events.next() == ("ended", 1, "the connection to this node broke")


@pytest.mark.asyncio
async def test_a_node_may_wait_otherwise(listener: NodeListener) -> None:
    await NodeClient(of_node(listener, timeout=7.0, port=9)).attach()


@pytest.mark.asyncio
async def test_a_node_that_computes_otherwise_is_told_which_setting_differs(listener: NodeListener) -> None:
    config = msgspec.structs.replace(of_node(listener), model=ModelConfig(path="m", dtype="float32"))
    with pytest.raises(RequestFailed, match='model.dtype is "float32" on the node and "auto" on the engine') as refused:
        await NodeClient(config).attach()
    assert refused.value.reason == "CONFIGURATIONS_DIFFER"


@pytest.mark.asyncio
async def test_a_node_of_another_version_is_refused(listener: NodeListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_client, "service_version", lambda: "0.0.9")
    with pytest.raises(RequestFailed, match=r"node 1 has version 0.0.9, but the engine has version \d") as refused:
        await NodeClient(of_node(listener)).attach()
    assert refused.value.reason == "VERSIONS_DIFFER"


@pytest.mark.asyncio
async def test_an_index_that_is_taken_is_refused(listener: NodeListener, node: Orders) -> None:
    with pytest.raises(RequestFailed, match="node 1 is already attached"):
        await NodeClient(of_node(listener)).attach()


@pytest.mark.asyncio
async def test_an_index_that_the_engine_has_not_is_refused(listener: NodeListener) -> None:
    with pytest.raises(
        RequestFailed, match="executor.nodes.index is 0; nodes other than the engine's node have indices from 1 to 2"
    ):
        await NodeClient(of_node(listener, 0)).attach()


@pytest.mark.asyncio
async def test_an_engine_that_is_not_there_is_waited_for(events: Events) -> None:
    late = NodeListener(config_of(), MEETING, events)
    late.start()
    port = late.port
    late.stop()
    config = config_of(index=1, leader="127.0.0.1", port=port)
    attaching = asyncio.create_task(NodeClient(config).attach())
    await asyncio.sleep(0.2)
    assert not attaching.done()
    again = NodeListener(config_of(port=port), MEETING, events)
    again.start()
    await asyncio.wait_for(attaching, PATIENCE)
    again.end()
    again.stop()


@pytest.mark.asyncio
async def test_a_node_gives_up_when_its_time_is_over() -> None:
    config = config_of(index=1, leader="127.0.0.1:1", timeout=1.0)
    with pytest.raises(RequestFailed, match=r"127.0.0.1:1 \(executor.nodes.leader\) was not reached within 1 s"):
        await NodeClient(config).attach()


@pytest.mark.asyncio
async def test_with_tls_only_engines_of_the_authority_attach(events: Events, tmp_path: Path) -> None:
    authority = Authority()
    engine = authority.issue("penstock-enginecore", "127.0.0.1").write(tmp_path / "engine")
    frontend = authority.issue("penstock-frontend").write(tmp_path / "frontend")
    config = msgspec.structs.replace(config_of(), server=ServerConfig(host="127.0.0.1", tls=engine.server()))
    listener = NodeListener(config, MEETING, events)
    listener.start()
    name = "penstock-enginecore"
    await NodeClient(of_node(listener, tls=engine.client(server_name=name))).attach()
    with pytest.raises(RequestFailed, match="the peer's certificate has the names penstock-frontend"):
        await NodeClient(of_node(listener, 2, tls=frontend.client(server_name=name))).attach()
    listener.end()
    listener.stop()


def test_settings_of_each_node_are_its_own() -> None:
    ours = shared_config(config_of())
    assert "executor.nodes.size" in ours
    assert not {key for key in ours if key.startswith(("executor.nodes.tls", "executor.nodes.leader", "server."))}
    theirs = shared_config(msgspec.structs.replace(config_of(index=2), cache=CacheConfig(block_size=32)))
    assert config_difference(ours, theirs) == ("cache.block_size", "16", "32")
    theirs = shared_config(msgspec.structs.replace(config_of(index=2), lora=LoraConfig(max_loras=4)))
    assert config_difference(ours, theirs) == ("lora.max_loras", "0", "4")
    assert config_difference(ours, ours) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 2}, "executor.nodes.size is 2 and executor.pipeline_parallel_size is 3"),
        ({"size": 65}, "executor.nodes.size is 65"),
        ({"index": 3}, "executor.nodes.index is 3, but executor.nodes.size is 3; nodes are 0 to 2"),
        ({"leader": "a:b:c"}, "executor.nodes.leader is 'a:b:c'"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**settings)
