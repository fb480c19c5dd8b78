"""The prefix cache of models with recurrent layers: which prefixes hit, and hits that change no token."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.types.outputs import FinishReason
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.states.core.slots import StateStats
from tests.fakes.engines.in_process import answer, build_engine, generate
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model

SPAN = 16
SYSTEM_TOKENS = 2000
INTERVAL = 256
FAMILIES = ("qwen3_5", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "mamba", "mamba2")
BAD_TOKEN = 7
"""Token whose embedding is NaN in a broken model."""

pytestmark = pytest.mark.quick("qwen3_5", "mamba2", "qwen3_5-32", "mamba2-16", "kimi_linear-16", "mamba-32")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp(request.param)
    save_tiny_model(request.param, path, max_position_embeddings=4096)
    return path


def engine_of(path: Path, *, interval: int = INTERVAL, **sections: Any) -> EngineCore:
    cache = {"block_size": SPAN, "num_blocks": None, "kv_cache_memory": 2**25, "state_interval": interval}
    return build_engine(path, cache=cache | sections.pop("cache", {}), **sections)


@pytest.fixture
def engine(model: Path) -> Iterator[EngineCore]:
    made = engine_of(model)
    yield made
    made.shutdown()


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def some_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(BAD_TOKEN + 1, VOCAB_SIZE, (count,), generator=generator).tolist()


def run(engine: EngineCore, prompt: list[int], *, max_tokens: int = 4) -> tuple[list[int], int]:
    """Return the tokens of a request, and the number of prompt tokens that it did not compute."""
    before = engine.scheduler.kv_cache.prefix_stats.hits
    tokens = generate(engine, [("r", prompt, greedy(max_tokens))]).tokens["r"]
    return tokens, engine.scheduler.kv_cache.prefix_stats.hits - before


def stats_of(engine: EngineCore) -> StateStats:
    states = engine.scheduler.kv_cache.states
    assert states is not None
    return states.stats()


def test_a_shared_system_prompt_is_computed_once_twice_up_to_an_interval_and_then_never(engine: EngineCore) -> None:
    for system_tokens, shared in ((SYSTEM_TOKENS, SYSTEM_TOKENS), (SYSTEM_TOKENS - 9, SYSTEM_TOKENS - SPAN)):
        system = some_tokens(system_tokens, seed=system_tokens)
        found = [run(engine, system + some_tokens(40 + user, seed=user), max_tokens=1)[1] for user in range(4)]
        assert found[0] == 0
        assert shared - INTERVAL < found[1] < shared
        assert found[2:] == [shared, shared]
    assert stats_of(engine).num_recomputed_tokens > 0


def test_the_second_turn_of_a_chat_computes_only_the_tokens_behind_the_last_block_of_the_first(
    engine: EngineCore,
) -> None:
    first = some_tokens(500, seed=1)
    tokens, _ = run(engine, first, max_tokens=45)
    _, found = run(engine, [*first, *tokens, *some_tokens(30, seed=2)])
    assert found == (500 + 45 - 1) // SPAN * SPAN


def test_a_turn_that_drops_the_first_answer_computes_at_most_an_interval_of_the_rest(engine: EngineCore) -> None:
    first = some_tokens(700, seed=3)
    run(engine, first, max_tokens=45)
    _, found = run(engine, [*first[:600], *some_tokens(50, seed=4)])
    assert 600 - INTERVAL < found <= 600


@pytest.mark.parametrize("interval", [16, 32])
def test_hits_and_misses_give_the_same_tokens_around_every_snapshot(model: Path, interval: int) -> None:
    """Compute prompts of 1 to 100 tokens alone, then on states that longer and shorter prompts have left."""
    tokens = some_tokens(100, seed=5)
    requests = [(f"{length}", tokens[:length], greedy(5)) for length in range(1, len(tokens) + 1)]
    without = engine_of(model, cache={"enable_prefix_caching": False})
    expected = generate(without, requests).tokens
    assert without.scheduler.kv_cache.prefix_stats.hits == 0
    without.shutdown()
    engine = engine_of(model, interval=interval, scheduler={"max_num_batched_tokens": 64, "max_num_seqs": 16})
    for order in (requests[::-1], requests, requests[1::7]):
        before = engine.scheduler.kv_cache.prefix_stats.hits
        got = generate(engine, order).tokens
        assert got == {name: expected[name] for name in got}
        assert engine.scheduler.kv_cache.prefix_stats.hits > before
    for length in (17, 33, 64, 65, 100):
        _, found = run(engine, tokens[:length])
        assert found == (length - 1) // SPAN * SPAN, length
    engine.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["uniproc", "multiproc"])
def test_steps_in_flight_and_worker_processes_change_no_token(model: Path, kind: str) -> None:
    """Run twice as many requests as there are rows for, in one process and with two steps in flight."""
    requests = [(f"{i}", some_tokens(length, seed=i), greedy(40)) for i, length in enumerate((5, 50, 100, 33, 64, 16))]
    found = []
    for executor in ({}, {"kind": kind, "max_concurrent_batches": 2}):
        engine = engine_of(
            model,
            interval=2 * SPAN,
            scheduler={"max_num_batched_tokens": 40, "max_num_seqs": 3, "async_scheduling": bool(executor)},
            executor=executor,
        )
        assert engine.kv_cache_config.states is not None
        assert engine.kv_cache_config.states.num_requests == 3
        found += [generate(engine, requests).tokens for _ in range(2)]
        assert engine.scheduler.kv_cache.prefix_stats.hits > 0
        assert stats_of(engine).num_used_slots == 0
        engine.shutdown()
    assert found == [found[0]] * 4


def test_reset_sleep_and_wake_forget_states(engine: EngineCore) -> None:
    control = EngineControl(engine)
    prompt = some_tokens(100, seed=6)

    def reset() -> None:
        assert control.reset_prefix_cache()

    def sleep_and_wake() -> None:
        control.sleep(1)
        assert control.is_sleeping()
        control.wake_up()

    expected, _ = run(engine, prompt)
    for forget in (reset, sleep_and_wake):
        assert run(engine, prompt) == (expected, 96)
        forget()
        assert stats_of(engine).num_kept == 0
        assert run(engine, prompt) == (expected, 0)


def test_states_that_are_not_finite_end_the_request_and_are_not_found_again(model: Path) -> None:
    engine = engine_of(model, interval=SPAN, scheduler={"max_num_batched_tokens": 48})
    prompt = some_tokens(120, seed=8)
    expected, _ = run(engine, prompt)
    assert EngineControl(engine).reset_prefix_cache()
    executor: Any = engine.executor
    module = executor._worker.runner._model.module
    with torch.no_grad():
        module.get_input_embeddings().weight[BAD_TOKEN] = torch.nan
    bad = EngineCoreRequest(
        request_id="bad",
        prompt_token_ids=[*prompt[:60], BAD_TOKEN, *prompt[61:]],
        sampling_params=greedy(4),
    )
    for _ in range(2):  # The second time, it begins with the states that the first one left.
        ended = answer(engine, [bad], refused={"bad"})
        assert ended.finish_reasons == {"bad": FinishReason.ERROR}
        assert ended.tokens["bad"] == []
        states = engine.scheduler.kv_cache.states
        assert states is not None
        probe = engine.preprocess("probe", bad)
        assert states.longest(probe.block_hashes, len(probe.block_hashes)) * SPAN == 48
    tokens, found = run(engine, prompt)
    assert (tokens, found) == (expected, 48)
    assert stats_of(engine).num_used_slots == 0
    engine.shutdown()
