"""Reuse of computed prefixes, through the engine. The fake executor checks that reused blocks hold the right prefix."""

import msgspec
import pytest

from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.engine_core import EngineCore
from tests.fakes.engines.engine_harness import (
    CLIENT,
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

PROMPT = list(range(100, 116))  # four blocks of four


def cached_tokens(engine, request):
    transcript = run_to_end(engine, request)
    assert_as_expected(engine, transcript, request)
    return transcript.outputs[request.request_id][0].prefill_stats.num_cached_tokens


def test_a_full_hit_leaves_exactly_the_last_token_and_shares_every_block():
    engine = make_engine()
    assert cached_tokens(engine, make_request(PROMPT, max_tokens=1)) == 0
    add(engine, make_request(PROMPT, max_tokens=1))
    scheduled = engine.scheduler.schedule()
    [new] = scheduled.new_requests
    assert new.num_computed_tokens == 15
    assert scheduled.num_scheduled_tokens == {new.request_id: 1}
    assert len(new.block_ids[0]) == 4
    assert engine.scheduler.kv_cache.pool.num_free_blocks == 63 - 4


def test_a_full_hit_works_while_the_first_request_still_runs():
    engine = make_engine()
    first, second = make_request(PROMPT, max_tokens=30), make_request(PROMPT, max_tokens=30, seed=5)
    transcript = Transcript()
    add(engine, first)
    step(engine, transcript)
    run_to_end(engine, second, transcript=transcript)
    assert transcript.outputs[second.request_id][0].prefill_stats.num_cached_tokens == 15
    assert_as_expected(engine, transcript, first, second)
    assert_nothing_left(engine)


def test_a_partial_hit_reuses_whole_blocks():
    engine = make_engine()
    cached_tokens(engine, make_request(PROMPT))
    assert cached_tokens(engine, make_request([*PROMPT[:11], 7, 7, 7])) == 8


def test_output_tokens_are_reusable_too():
    engine = make_engine()
    request = make_request(PROMPT, max_tokens=9)
    tokens = run_to_end(engine, request).tokens[request.request_id]
    # The last token was never computed, so the blocks are full up to 24 tokens.
    assert cached_tokens(engine, make_request([*PROMPT, *tokens, 1, 1, 1])) == 24


def test_another_salt_finds_nothing():
    engine = make_engine()
    cached_tokens(engine, make_request(PROMPT, cache_salt="a"))
    assert cached_tokens(engine, make_request(PROMPT, cache_salt="b")) == 0
    assert cached_tokens(engine, make_request(PROMPT)) == 0
    assert cached_tokens(engine, make_request(PROMPT, cache_salt="a")) == 15


def test_a_request_may_skip_reading_but_still_fills_the_cache():
    engine = make_engine()
    assert cached_tokens(engine, make_request(PROMPT, skip_reading_prefix_cache=True)) == 0
    assert cached_tokens(engine, make_request(PROMPT, skip_reading_prefix_cache=True)) == 0
    assert cached_tokens(engine, make_request(PROMPT)) == 15


def test_switched_off_it_neither_reads_nor_counts():
    engine = make_engine(prefix_caching=False)
    assert cached_tokens(engine, make_request(PROMPT)) == 0
    assert cached_tokens(engine, make_request(PROMPT)) == 0
    assert engine.scheduler.stats().prefix_cache_queries == 0


def test_nothing_is_findable_before_it_is_computed():
    engine = make_engine()
    add(engine, make_request(PROMPT), make_request(PROMPT))
    scheduled = engine.scheduler.schedule()
    assert [new.num_computed_tokens for new in scheduled.new_requests] == [0, 0]


def test_an_abort_during_the_step_leaves_its_blocks_unfindable():
    engine = make_engine()
    request = make_request(PROMPT)
    add(engine, request)
    engine.step(lambda: engine.scheduler.abort_requests(CLIENT, [request.request_id]))
    while engine.has_work:
        engine.step(lambda: None)
    assert cached_tokens(engine, make_request(PROMPT)) == 0


def test_eviction_takes_cached_blocks_when_free_ones_run_out():
    engine = make_engine(num_blocks=9)
    cached_tokens(engine, make_request(PROMPT, max_tokens=1))
    cached_tokens(engine, make_request(list(range(500, 528)), max_tokens=2))
    assert cached_tokens(engine, make_request(PROMPT, max_tokens=1)) < 15
    assert_nothing_left(engine)


def test_reset_forgets_everything_but_not_under_a_running_request():
    engine = make_engine()
    transcript = Transcript()
    add(engine, make_request(PROMPT))
    step(engine, transcript)
    assert not EngineControl(engine).reset_prefix_cache()
    run_to_end(engine, transcript=transcript)
    assert EngineControl(engine).reset_prefix_cache()
    assert cached_tokens(engine, make_request(PROMPT)) == 0


def test_statistics_count_tokens_once_per_request():
    engine = make_engine()
    run_to_end(engine, make_request(PROMPT))
    run_to_end(engine, make_request(PROMPT))
    stats = engine.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (32, 15)


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_full_hits_at_every_block_size(block_size):
    engine = make_engine(block_size=block_size)
    cached_tokens(engine, make_request(PROMPT))
    assert cached_tokens(engine, make_request(PROMPT)) == 15


# Engines with layers of different windows. The fake executor checks the contents of every window.


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
    assert most <= 26 + 2  # without windows, both groups would need 26 blocks
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
