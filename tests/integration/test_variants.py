"""Engine variants of one model, which compute different tokens: effects for operators and clients."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.common.v1 import control_pb2
from penstock_common.types.cluster import ClusterView, EngineStatus
from tests.fakes.engines.fake_engine import FakeEngine, token_at
from tests.fakes.frontends.frontend_server import FrontendServer, collect, eventually, until_states
from tests.fakes.models.small_tokenizers import byte_level

VOCAB = byte_level().get_vocab_size()
SERVING = control_pb2.ENGINE_STATE_SERVING


def engine(name: str, dtype: str) -> FakeEngine:
    """Return an engine that runs a step only on command."""
    made = FakeEngine(name, vocab_size=VOCAB, manual=True)
    made.ready.config_hash = f"hash of {dtype}"
    made.ready.config.update({"dtype": dtype, "weights": "w"})
    return made


@pytest.fixture
async def engines() -> AsyncIterator[tuple[FakeEngine, ...]]:
    async with engine("a", "float32") as a, engine("b", "bfloat16") as b, engine("c", "float32") as c:
        yield a, b, c


@pytest.fixture
async def frontend(engines: tuple[FakeEngine, ...], model: Path) -> AsyncIterator[FrontendServer]:
    async with FrontendServer(model, engines=[e.address for e in engines], engine_wait_timeout=10.0) as frontend:
        await until_states(frontend, dict.fromkeys("abc", SERVING))
        yield frontend


def num_variants(frontend: FrontendServer) -> Any:
    registry = frontend.frontend._models[0].assembly.metrics.registry
    return registry.get_sample_value("penstock:engine_variants", {"model_name": "model"})


async def variants(frontend: FrontendServer) -> dict[str, tuple[list[str], dict[str, str]]]:
    cluster = await frontend.admin.GetCluster(admin_pb.GetClusterRequest())
    return {v.config_hash: (list(v.engine_ids), dict(v.differs)) for v in cluster.variants}


MIXTURE = {
    "hash of bfloat16": (["b"], {"dtype": "bfloat16"}),
    "hash of float32": (["a", "c"], {"dtype": "float32"}),
}


async def test_a_mixture_is_told_by_the_operators_api_and_a_metric(frontend: FrontendServer) -> None:
    assert await variants(frontend) == MIXTURE
    assert num_variants(frontend) == 2


async def test_engines_of_a_coordinators_view_are_compared_as_those_of_a_list(
    engines: tuple[FakeEngine, ...], model: Path
) -> None:
    a, b, c = engines
    async with FrontendServer(model, engines=[a.address]) as frontend:
        await until_states(frontend, {"a": SERVING})
        status = {
            index: EngineStatus(engine_id=e.ready.engine_id, incarnation="1", address=e.address, index=index)
            for index, e in enumerate((a, b, c))
        }
        frontend.frontend._models[0].assembly.engines.follow_view(ClusterView(engines=tuple(status.values())))
        await until_states(frontend, dict.fromkeys("abc", SERVING))
        assert await variants(frontend) == MIXTURE


async def test_a_mixture_is_logged_once_for_each_change(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = engine("a", "float32"), engine("b", "bfloat16")
    async with a, b, FrontendServer(model, engines=[a.address, b.address]) as frontend:
        await until_states(frontend, dict.fromkeys("ab", SERVING))
        a.drain()
        await until_states(frontend, {"a": control_pb2.ENGINE_STATE_DRAINING, "b": SERVING})
        await a.kill()
        await eventually(lambda: num_variants(frontend) == 1)
    said = capsys.readouterr().out
    assert said.count("engines have different configurations, so their outputs can differ") == 1
    assert "b: dtype=bfloat16 (hash of bfloat16); a: dtype=float32 (hash of float32)" in said
    assert said.count("all engines have the same configuration again") == 1


async def test_new_requests_go_to_every_variant(frontend: FrontendServer, engines: tuple[FakeEngine, ...]) -> None:
    calls = [frontend.generate(max_tokens=1) for _ in range(6)]
    for each in engines:
        await each.until(lambda e: len(e.running) == 2)
    for each in engines:
        each.step()
    assert all([await collect(call) for call in calls])


async def test_requests_go_on_on_engines_that_compute_the_same(
    frontend: FrontendServer, engines: tuple[FakeEngine, ...]
) -> None:
    a, b, c = engines
    calls = [asyncio.create_task(collect(frontend.generate(max_tokens=3, seed=s, detokenize=False))) for s in range(6)]
    for each in engines:
        await each.until(lambda e: len(e.running) == 2)
    for each in engines:
        each.step()
    await a.kill()
    await c.until(lambda e: len(e.running) == 4)
    assert len(b.running) == 2
    for each in (b, c):
        while each.running:
            each.step()
    for seed, call in enumerate(calls):
        tokens = [token for message in await call for token in message.token_ids]
        assert tokens == [token_at(seed, i, vocab_size=VOCAB) for i in range(3)]
