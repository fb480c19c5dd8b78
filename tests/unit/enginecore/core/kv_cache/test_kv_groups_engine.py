"""Engines whose layers differ in their windows. The fake executor checks what every window holds."""

import msgspec
import pytest

from penstock_enginecore.core.engine_core import EngineCore
from tests.fakes.engines.engine_harness import (
    Transcript,
    add,
    assert_as_expected,
    assert_nothing_left,
    make_config,
    make_engine,
    make_request,
    run_to_end,
    step,
)
from tests.fakes.engines.fake_executor import FakeExecutor


def hybrid_engine(windows=(None, 6), **config):
    return make_engine(FakeExecutor(windows=windows, model_max_len=128), **config)


@pytest.mark.parametrize("windows", [(None, 6), (6, 6), (None, 1, 9), (5, 5, 5, None)])
@pytest.mark.parametrize("budget", [5, 32])
def test_long_requests_of_a_hybrid_model_get_their_tokens(windows, budget):
    engine = hybrid_engine(windows, num_blocks=60, max_num_batched_tokens=budget)
    requests = [make_request(3 + 9 * i, seed=i, max_tokens=60) for i in range(4)]
    transcript = run_to_end(engine, *requests)
    assert_as_expected(engine, transcript, *requests)
    assert_nothing_left(engine)


def test_windows_let_more_requests_run_than_full_allocation():
    engine = hybrid_engine((None, 4), num_blocks=200, max_num_batched_tokens=8)
    transcript = Transcript()
    request = make_request(4, max_tokens=100)
    add(engine, request)
    most = 0
    while engine.has_work:
        step(engine, transcript)
        pool = engine.scheduler.kv_cache.pool
        most = max(most, pool.num_usable_blocks - pool.num_free_blocks)
    assert most <= 26 + 2  # full allocation: twice 26
    assert_as_expected(engine, transcript, request)


def test_a_conversation_that_goes_on_hits_far_beyond_the_window():
    engine = hybrid_engine(max_num_batched_tokens=64)
    first = make_request(40, max_tokens=20)
    tokens = run_to_end(engine, first).tokens[first.request_id]
    second = make_request([*range(40), *tokens, 1, 2, 3], max_tokens=20)
    transcript = run_to_end(engine, second)
    assert transcript.outputs[second.request_id][0].prefill_stats.num_cached_tokens == 56
    assert_as_expected(engine, transcript, second)


def test_a_request_of_the_longest_length_runs_alone_in_the_smallest_pool():
    engine = hybrid_engine((None, 9), num_blocks=30, max_num_batched_tokens=7)
    assert engine.max_model_len < 128
    request = make_request(engine.max_model_len - 30, max_tokens=None)
    transcript = run_to_end(engine, request)
    assert_as_expected(engine, transcript, request)
    assert_nothing_left(engine)


def test_an_engine_records_events_when_configured_to():
    config = make_config()
    for enabled in (True, False):
        cache = msgspec.structs.replace(config.cache, enable_kv_events=enabled)
        engine = EngineCore(msgspec.structs.replace(config, cache=cache), FakeExecutor(), progress=lambda line: None)
        run_to_end(engine, make_request(12))
        assert bool(engine.scheduler.kv_cache.take_events()) is enabled
