"""Conversations stay on the engine that has cached their prompts: real engines and a real frontend, small model."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock_common.types.kv_transfer import KvMedium
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ExecutorConfig, ModelConfig
from penstock_enginecore.executor.uniproc import UniprocExecutor
from penstock_enginecore.kv_transfer.core.tiers import TieredConnector
from penstock_frontend.config import ModelConfig as ServedModel
from penstock_frontend.config import RoutingConfig
from penstock_frontend.dispatch.prefix_caches import PrefixCaches
from tests.fakes.engines.engine_server import EngineServer
from tests.fakes.frontends.frontend_server import FrontendServer, eventually
from tests.fakes.network.tcp_proxy import TcpProxy

MODEL = Path(__file__).parents[2] / "examples/demo_model/penstock-tiny"
FIRST = "Once upon a time there was a river that did not want to go to the sea."


class Turn(NamedTuple):
    """A turn of a conversation: the text so far, the engine that answered, and the number of prompt tokens in its
    cache.
    """

    text: str
    engine: str
    cached: int


class Pair:
    """Two engines. ``servers`` maps their addresses to them."""

    def __init__(self, **cache: Any) -> None:
        self.servers = dict(server_at(**cache) for _ in range(2))

    def cached_blocks(self, address: str) -> int:
        scheduler = self.servers[address].engine.scheduler
        return len({found for medium in KvMedium for found in scheduler.kv_cache.cached_blocks(0, 1, medium)})

    def counts(self) -> dict[str, tuple[int, int]]:
        stats = {a: server.engine.scheduler.kv_cache.prefix_stats for a, server in self.servers.items()}
        return {address: (each.queries, each.hits) for address, each in stats.items()}


def server_at(**cache: Any) -> tuple[str, EngineServer]:
    config = EngineCoreConfig(
        model=ModelConfig(path=str(MODEL), served_model_name="model", device="cpu"),
        cache=CacheConfig(**{"block_size": 4, "num_blocks": 256} | cache),
        executor=ExecutorConfig(num_threads=1),
    )
    server = EngineServer(config, UniprocExecutor(config)).start().load()
    return server.address, server


@pytest.fixture(scope="module")
def engines() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    for server in pair.servers.values():
        server.stop()


@pytest.fixture(autouse=True)
def empty_caches(engines: Pair) -> None:
    for server in engines.servers.values():
        server.engine.scheduler.reset_prefix_cache()
        server.engine.scheduler.kv_cache.take_events()  # discard the events, because no frontend is connected


@asynccontextmanager
async def serving(addresses: list[str], **options: Any) -> AsyncIterator[FrontendServer]:
    model = ServedModel(path=str(MODEL), served_model_name="model")
    async with FrontendServer(MODEL, **{"model": model, "engines": addresses, **options}) as frontend:
        await frontend.until_engines(len(addresses))
        yield frontend


def caches_of(frontend: FrontendServer) -> PrefixCaches:
    return frontend.frontend._models[0].assembly.engines._dispatch._choice._caches


async def until_known(frontend: FrontendServer, engines: Pair) -> None:
    await eventually(lambda: all(caches_of(frontend).num_on(a) == engines.cached_blocks(a) for a in engines.servers))


async def say(frontend: FrontendServer, engines: Pair, text: str) -> Turn:
    before = engines.counts()
    outputs = await frontend.outputs(text, temperature=0.0, max_tokens=8, ignore_eos=True)
    answer = "".join(output.text for output in outputs)
    changed = {address: count for address, count in engines.counts().items() if count != before[address]}
    ((address, (_, hits)),) = changed.items()
    return Turn(f"{text}{answer} And then?", address, hits - before[address][1])


async def test_every_turn_goes_to_the_engine_that_has_the_conversation(engines: Pair) -> None:
    async with serving(list(engines.servers)) as frontend:
        talks = [await say(frontend, engines, f"{name}: {FIRST}") for name in ("A", "Bo", "Cla", "Dorothy")]
        assert {talk.engine for talk in talks} == set(engines.servers), "equally loaded ones are taken in turn"
        for _ in range(3):
            await until_known(frontend, engines)
            for number, talk in enumerate(talks):
                talks[number] = await say(frontend, engines, talk.text)
                assert talks[number].engine == talk.engine
                assert talks[number].cached > talk.cached


async def test_conversations_go_back_to_the_engine_whose_host_memory_has_them() -> None:
    small = Pair(num_blocks=80, host_memory=64 << 20, min_load_tokens=4)

    def loaded(address: str) -> int:
        connector = small.servers[address].engine.connector
        assert isinstance(connector, TieredConnector)
        return connector.stats().num_loaded_blocks[KvMedium.HOST]

    try:
        async with serving(list(small.servers)) as frontend:
            talks = [
                await say(frontend, small, f"{name}: {4 * FIRST}") for name in ("A", "Bo", "Cla", "Dorothy", "Emilia")
            ]
            for number in range(6):
                await say(frontend, small, f"{number}, on something else: {4 * FIRST}")
        async with serving(list(small.servers)) as frontend:
            for number, talk in enumerate(talks):
                await until_known(frontend, small)
                before = loaded(talk.engine)
                again = await say(frontend, small, talk.text)
                assert again.engine == talk.engine, f"talk {number}"
                assert loaded(talk.engine) > before, f"talk {number}"
    finally:
        for server in small.servers.values():
            server.stop()


async def test_the_least_loaded_policy_takes_engines_in_turn(engines: Pair) -> None:
    routing = RoutingConfig(policy="least_loaded")
    async with serving(list(engines.servers), routing=routing) as frontend:
        turns = [await say(frontend, engines, FIRST) for _ in range(4)]
        assert [turn.engine for turn in turns[:2]] == [turn.engine for turn in turns[2:]]
        assert turns[0].engine != turns[1].engine
        assert caches_of(frontend).num_blocks == 0


async def test_a_frontend_that_comes_later_knows_what_was_cached_before(engines: Pair) -> None:
    async with serving(list(engines.servers)) as frontend:
        first = await say(frontend, engines, FIRST)
    for _ in range(3):
        async with serving(list(engines.servers)) as frontend:
            await until_known(frontend, engines)
            assert (await say(frontend, engines, first.text)).engine == first.engine


async def test_after_a_broken_session_the_frontend_knows_what_happened_meanwhile(engines: Pair) -> None:
    near, far = engines.servers
    proxy = TcpProxy(int(far.rsplit(":", 1)[1]))
    await proxy.start()
    async with serving([near, f"127.0.0.1:{proxy.port}"]) as frontend, serving([far]) as other:
        caches = caches_of(frontend)
        proxied = f"127.0.0.1:{proxy.port}"
        proxy.refuse()
        proxy.cut()
        await frontend.until_engines(1)
        assert caches.num_on(proxied) == 0
        kept = await say(other, engines, FIRST)
        await proxy.start()
        await frontend.until_engines(2)
        await eventually(lambda: caches.num_on(proxied) == engines.cached_blocks(far) > 0)
        for _ in range(2):
            assert (await say(frontend, engines, kept.text)).engine == far
        assert await other.frontend._models[0].assembly.engines.call_utility("reset_prefix_cache")
        await eventually(lambda: caches.num_on(proxied) == 0)
        assert (await say(frontend, engines, kept.text)).text.startswith(kept.text)
    await proxy.close()


async def test_changes_that_do_not_arrive_cost_hits_and_no_requests(
    engines: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(list(engines.servers)) as frontend:
        first = await say(frontend, engines, FIRST)
        await until_known(frontend, engines)
        monkeypatch.setattr(caches_of(frontend), "apply", lambda *_: None)
        await frontend.frontend._models[0].assembly.engines.call_utility("reset_prefix_cache")
        again = await say(frontend, engines, first.text)
        assert (again.engine, again.cached) == (first.engine, 0)


async def test_a_cache_that_cannot_be_followed_costs_hits_and_no_requests(
    engines: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(list(engines.servers)) as frontend:
        monkeypatch.setattr(caches_of(frontend), "_apply", lambda *_: 1 / 0)
        turns = [await say(frontend, engines, FIRST) for _ in range(4)]
        assert {turn.engine for turn in turns} == set(engines.servers)
        assert caches_of(frontend).num_blocks == 0


async def test_a_conversation_whose_engine_is_gone_goes_on_elsewhere(engines: Pair) -> None:
    address, server = server_at()
    engines.servers[address] = server
    addresses = [next(iter(engines.servers)), address]
    async with serving(addresses) as frontend:
        talk = await say(frontend, engines, FIRST)
        while talk.engine != address:
            talk = await say(frontend, engines, f"No. {talk.text}")
        await eventually(lambda: caches_of(frontend).num_on(address) > 0)
        del engines.servers[address]
        server.stop()
        await frontend.until_engines(1)
        talk = await say(frontend, engines, talk.text)
        assert talk.engine == addresses[0]
        assert caches_of(frontend).num_on(address) == 0
