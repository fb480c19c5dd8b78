"""Turns of tenants, statistics, and schedulers plugged in by name."""

import pytest

from penstock_common.errors import ConfigError
from penstock_enginecore.core.scheduler.base import create_scheduler, register_scheduler
from penstock_enginecore.core.scheduler.scheduler import DefaultScheduler
from tests.fakes.engines.engine_harness import (
    OtherScheduler,
    Transcript,
    add,
    assert_as_expected,
    assert_nothing_left,
    make_engine,
    make_request,
    run_to_end,
    scheduler_context,
    step,
)


@pytest.mark.parametrize("fairness", [True, False])
def test_tenants_take_turns_unless_that_is_off(fairness):
    engine = make_engine(max_num_seqs=1, fairness=fairness)
    flood = [make_request(5, tenant="flood", max_tokens=2, seed=i) for i in range(8)]
    light = [make_request(5, tenant="light", max_tokens=2, seed=i) for i in range(2)]
    transcript = run_to_end(engine, *flood, *light)
    assert_as_expected(engine, transcript, *flood, *light)
    places = [list(transcript.ends).index(request.request_id) for request in light]
    assert places == ([1, 3] if fairness else [8, 9])
    assert_nothing_left(engine)


def test_statistics_follow_the_load():
    engine = make_engine(max_num_seqs=2, num_blocks=11)
    add(engine, *[make_request(8) for _ in range(3)])
    transcript = Transcript()
    step(engine, transcript)
    stats = transcript.frames[0].scheduler_stats
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.step_counter) == (2, 1, 1)
    assert stats.kv_cache_usage == pytest.approx(0.4)
    run_to_end(engine, transcript=transcript)
    assert engine.scheduler.stats().kv_cache_usage == 0


def test_the_step_counter_counts_steps_with_work():
    engine = make_engine()
    engine.step(lambda: None)
    assert engine.scheduler.stats().step_counter == 0
    run_to_end(engine, make_request(5, max_tokens=3))
    assert engine.scheduler.stats().step_counter == 3


def test_another_scheduler_is_plugged_in_by_name_or_path():
    path = "tests.fakes.engines.engine_harness:OtherScheduler"
    register_scheduler("other", path)
    assert isinstance(create_scheduler(scheduler_context(scheduler="other")), OtherScheduler)
    assert isinstance(create_scheduler(scheduler_context(scheduler=path)), OtherScheduler)
    assert type(create_scheduler(scheduler_context())) is DefaultScheduler


def test_an_unknown_scheduler_names_the_nearest():
    with pytest.raises(ConfigError, match=r"scheduler.scheduler is 'defualt'.*did you mean 'default'"):
        create_scheduler(scheduler_context(scheduler="defualt"))


@pytest.mark.parametrize("path", ["no.such.module:Class", "penstock_enginecore.core.scheduler.scheduler:Nothing"])
def test_a_scheduler_that_cannot_be_loaded_says_so(path):
    with pytest.raises(ConfigError, match="cannot be loaded"):
        create_scheduler(scheduler_context(scheduler=path))
