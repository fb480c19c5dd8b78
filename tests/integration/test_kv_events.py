"""SubscribeKvEvents: the stream of engines' KV cache events to gateways."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from smg_grpc_proto.generated import common_pb2

from penstock.common.v1 import events_pb2, kv_pb2
from penstock.enginecore.v1 import messages_pb2 as engine_pb
from penstock.inference.v1 import messages_pb2 as inference_pb
from penstock_common.errors import OutOfRange, Unavailable, Unimplemented
from penstock_enginecore.config import LoraConfig as EngineLoraConfig
from penstock_enginecore.lora.core.request import LoadedLora
from penstock_frontend.config import LoraConfig, ModelConfig
from penstock_frontend.dispatch.kv_events import FIRST_SEQUENCE
from tests.fakes.clients.session_client import connected
from tests.fakes.clients.vllm_client import VllmClient
from tests.fakes.engines.engine_harness import make_config
from tests.fakes.engines.engine_server import EngineServer
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.engines.fake_executor import FakeExecutor
from tests.fakes.frontends.frontend_server import FrontendServer, eventually, failure
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.patience import PATIENCE

VOCAB = byte_level().get_vocab_size()


def stored(number: int, parent: int = 0, lora: str = "") -> events_pb2.KvCacheEvent:
    """Return the event for block ``number``, of two tokens, after block ``parent``."""
    block = events_pb2.BlockStored(
        block_hashes=[name(number)],
        parent_block_hash=name(parent) if parent else b"",
        token_ids=[abs(number)] * 2,
        block_size=2,
        lora_name=lora,
    )
    return events_pb2.KvCacheEvent(block_stored=block)


def removed(number: int) -> events_pb2.KvCacheEvent:
    return events_pb2.KvCacheEvent(block_removed=events_pb2.BlockRemoved(block_hashes=[name(number)]))


def on(medium: kv_pb2.KvMedium, event: events_pb2.KvCacheEvent) -> events_pb2.KvCacheEvent:
    """Set the storage medium of an event's blocks, and return the event."""
    getattr(event, str(event.WhichOneof("event"))).medium = medium
    return event


def name(number: int) -> bytes:
    """Return a block hash of 32 bytes whose last eight bytes are ``number``."""
    return b"\xff" * 24 + number.to_bytes(8, "big", signed=True)


def tell(engine: FakeEngine, *events: events_pb2.KvCacheEvent) -> None:
    """Send events from the engine to all its frontends."""
    for session in engine.sessions:
        session.send(outputs=engine_pb.EngineCoreOutputs(kv_events=events))


def caching(engine_id: str = "engine-0", rank: int = 0) -> FakeEngine:
    engine = FakeEngine(engine_id, vocab_size=VOCAB, manual=True, rank=rank)
    engine.ready.capabilities.append("kv_events")
    return engine


@pytest.fixture
async def telling() -> AsyncIterator[FakeEngine]:
    async with caching() as engine:
        yield engine


@pytest.fixture
async def watched(telling: FakeEngine, model: Path) -> AsyncIterator[FrontendServer]:
    async with FrontendServer(model, engines=[telling.address]) as frontend:
        await frontend.until_health(serving=True)
        yield frontend


async def subscribe(frontend: FrontendServer) -> Any:
    """Open a subscription that receives all later events."""
    call = VllmClient(frontend).stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=PATIENCE)
    await call.initial_metadata()
    return call


async def test_changes_come_as_they_happen_under_consecutive_numbers(
    watched: FrontendServer, telling: FakeEngine
) -> None:
    call = await subscribe(watched)
    tell(telling, stored(1), stored(-2, parent=1))
    tell(telling, removed(-2))
    tell(telling, events_pb2.KvCacheEvent(all_blocks_cleared=events_pb2.AllBlocksCleared()))
    first, second, third = [await anext(aiter(call)) for _ in range(3)]
    assert [b.sequence_number for b in (first, second, third)] == [FIRST_SEQUENCE + i for i in (1, 2, 3)]
    assert {b.dp_rank for b in (first, second, third)} == {0}
    assert [e.event_id for b in (first, second, third) for e in b.events] == [1, 2, 3, 4]
    root, child = [event.stored for event in first.events]
    assert not root.HasField("parent_block_hash")
    assert child.parent_block_hash == 1
    assert [(b.block_hash, list(b.token_ids), b.block_size) for b in root.blocks] == [(1, [1, 1], 2)]
    assert list(second.events[0].removed.block_hashes) == [-2]
    assert third.events[0].WhichOneof("data") == "cleared"
    assert first.timestamp > 0


async def test_what_is_on_host_or_disk_is_known_to_the_router_and_not_told_outside(
    watched: FrontendServer, telling: FakeEngine
) -> None:
    call = await subscribe(watched)
    tell(telling, stored(1), on(kv_pb2.KV_MEDIUM_HOST, stored(2, parent=1)), on(kv_pb2.KV_MEDIUM_HOST, removed(1)))
    tell(telling, on(kv_pb2.KV_MEDIUM_DISK, removed(1)))
    tell(telling, stored(3, parent=1))
    first, second = [await anext(aiter(call)) for _ in range(2)]
    assert (first.sequence_number, second.sequence_number) == (FIRST_SEQUENCE + 1, FIRST_SEQUENCE + 2)
    told = [block.block_hash for batch in (first, second) for event in batch.events for block in event.stored.blocks]
    assert told == [1, 3]
    caches = watched.frontend._models[0].assembly.engines._dispatch._choice._caches
    assert caches.num_on(telling.address) == 3, "the block on the host counts"


async def test_a_late_subscriber_begins_with_what_is_cached_now(watched: FrontendServer, telling: FakeEngine) -> None:
    early = await subscribe(watched)
    tell(telling, stored(1, lora="pirate"), stored(2, parent=1, lora="pirate"), stored(3))
    tell(telling, removed(3))
    for _ in range(2):
        await anext(aiter(early))
    late = await subscribe(watched)
    tell(telling, stored(4, parent=2))
    state, change = [await anext(aiter(late)) for _ in range(2)]
    (run,) = [event.stored for event in state.events]
    assert [block.block_hash for block in run.blocks] == [1, 2]
    assert run.lora_name == "pirate"
    assert not change.events[0].stored.HasField("lora_name")
    assert [list(block.token_ids) for block in run.blocks] == [[1, 1], [2, 2]]
    assert (state.sequence_number, change.sequence_number) == (FIRST_SEQUENCE + 2, FIRST_SEQUENCE + 3)


@pytest.fixture
async def adapting() -> AsyncIterator[EngineServer]:
    """Yield an engine with a fake executor. It has an adapter at /a and publishes KV cache events, in blocks of four
    tokens.
    """
    executor = FakeExecutor(vocab_size=VOCAB)
    executor.adapters["/a"] = LoadedLora(bytes(range(1, 17)), 8, ("q_proj",), 2**20)
    server = EngineServer(make_config(enable_kv_events=True, lora=EngineLoraConfig(max_loras=2)), executor)
    await asyncio.to_thread(lambda: server.start().load())
    yield server
    await asyncio.to_thread(server.stop)


async def test_blocks_of_an_adapter_have_its_name_from_the_engine_to_the_gateway(
    adapting: EngineServer, model: Path
) -> None:
    prompt = list(range(10))
    options = {
        "model": ModelConfig(path=str(model), served_model_name="fake"),
        "lora": LoraConfig(adapters={"pirate": "/a", "corsair": "/a"}),
    }
    async with (
        connected(adapting.address) as session,
        FrontendServer(model, engines=[adapting.address], **options) as frontend,
    ):
        await frontend.until_engines(1)
        call = await subscribe(frontend)
        # The last request reuses the blocks of the first one, because both names refer to the same adapter.
        for adapter in ({"lora": "pirate"}, {}, {"lora": "corsair"}):
            await frontend.outputs(token_ids=inference_pb.TokenIds(ids=prompt), max_tokens=1, **adapter)
        assert await session.utility("reset_prefix_cache") is True
        await session.until(lambda: any(event.HasField("all_blocks_cleared") for event in session.kv_events))
        *told, _ = session.kv_events
        events: list[Any] = []
        while not events or events[-1].WhichOneof("data") != "cleared":
            events += (await anext(aiter(call))).events
    engines = [event.block_stored for event in told]
    assert [(list(run.token_ids), run.lora_name) for run in engines] == [(prompt[:8], "pirate"), (prompt[:8], "")]
    assert len({block_hash for run in engines for block_hash in run.block_hashes}) == 4
    *gateways, _ = [event.stored for event in events]
    read = [([token for block in run.blocks for token in block.token_ids], run.lora_name) for run in gateways]
    assert read == [(prompt[:8], "pirate"), (prompt[:8], "")]
    assert [run.HasField("lora_name") for run in gateways] == [True, False]
    assert len({block.block_hash for run in gateways for block in run.blocks}) == 4


async def test_every_engine_is_a_rank_with_numbers_of_its_own(model: Path) -> None:
    a, b = caching("a"), caching("b")  # both engines report rank 0
    async with a, b, FrontendServer(model, engines=[a.address, b.address]) as frontend:
        await eventually(lambda: frontend.frontend._models[0].assembly.engines.view.num_engines == 2)
        call = await subscribe(frontend)
        tell(a, stored(1))
        batches = [await anext(aiter(call))]
        tell(b, stored(2))
        batches.append(await anext(aiter(call)))
        assert [(x.dp_rank, x.sequence_number) for x in batches] == [
            (0, FIRST_SEQUENCE + 1),
            (1, FIRST_SEQUENCE + 1),
        ]


async def test_the_blocks_of_an_engine_that_goes_away_are_removed(watched: FrontendServer, telling: FakeEngine) -> None:
    call = await subscribe(watched)
    tell(telling, stored(1), stored(2))
    await anext(aiter(call))
    await telling.kill()
    batch = await anext(aiter(call))
    assert list(batch.events[0].removed.block_hashes) == [1, 2]
    assert batch.sequence_number == FIRST_SEQUENCE + 2


async def test_a_subscription_that_ends_is_forgotten(watched: FrontendServer, telling: FakeEngine) -> None:
    call = await subscribe(watched)
    feed: Any = watched.frontend._models[0].assembly.engines._pool._listener._kv_events
    assert len(feed._subscriptions) == 1
    call.cancel()
    await eventually(lambda: not feed._subscriptions)


async def test_resuming_is_out_of_range(watched: FrontendServer) -> None:
    request = common_pb2.SubscribeKvEventsRequest(start_sequence_number=7)
    error = await failure(VllmClient(watched).stub.SubscribeKvEvents(request))
    assert isinstance(error, OutOfRange)
    assert "set it to 0" in error.message


async def test_engines_that_tell_nothing_are_named_as_the_reason(frontend: FrontendServer) -> None:
    error = await failure(VllmClient(frontend).stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()))
    assert isinstance(error, Unimplemented)
    assert "cache.enable_kv_events" in error.message


async def test_without_an_engine_a_subscription_is_unavailable_not_refused(model: Path) -> None:
    async with FrontendServer(model, engines=["127.0.0.1:1"]) as frontend:
        error = await failure(VllmClient(frontend).stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()))
    assert isinstance(error, Unavailable)
