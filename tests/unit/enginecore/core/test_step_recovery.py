"""A step that fails in Python: the request that fails it is found and ended, all others give what they would have given."""

import logging

import pytest

from penstock_common.types.outputs import FinishReason
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.config import ErrorDumpConfig
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.scheduler.failure_bisection import GOOD_STEPS
from penstock_enginecore.core.steps_in_flight import MAX_UNEXPLAINED_FAILURES, EngineDeadError
from tests.fakes.engines.engine_harness import (
    CLIENT,
    Transcript,
    add,
    assert_as_expected,
    assert_nothing_left,
    make_engine,
    make_request,
    run_to_end,
    step,
)
from tests.fakes.engines.fake_executor import FakeExecutor, oracle_tokens
from tests.fakes.engines.fake_grammars import FakeGrammars

MODES = [
    {},
    {"async_scheduling": True},
    {"max_concurrent_batches": 3},
    {"async_scheduling": True, "max_concurrent_batches": 3},
    {"prefix_caching": False},
    {"num_blocks": 16},
    {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
]


def name(key):
    return key.split("#")[0]


def poisoned(*, at=1):
    """A step fails that computes the ``at``-th token, or one behind it, of a request whose id begins with poison."""

    def fails(scheduled):
        after = scheduled.num_tokens_after
        return any(name(key).startswith("poison") and count >= at for key, count in after.items())

    return fails


def assert_ended_by_incident(transcript, request_id):
    end = transcript.ends[request_id]
    assert end.finish_reason is FinishReason.ERROR
    assert (end.error.code, end.error.reason) == ("INTERNAL", "STEP_FAILED")
    assert "incident" in end.error.message


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("config", MODES)
@pytest.mark.parametrize("at", [1, 5, 9])
def test_the_poisoned_request_ends_and_its_neighbours_are_unharmed(config, late, at):
    executor = FakeExecutor(fails=poisoned(at=at), fails_late=late, unhurried=late)
    engine = make_engine(executor, **config)
    good = [make_request(3 + 4 * i, seed=i, max_tokens=4 + 5 * i) for i in range(5)]
    bad = make_request(6, request_id="poison", max_tokens=30)
    transcript = run_to_end(engine, *good[:3], bad, *good[3:])
    assert_as_expected(engine, transcript, *good)
    assert_ended_by_incident(transcript, "poison")
    assert_nothing_left(engine)


@pytest.mark.parametrize("config", MODES)
@pytest.mark.parametrize("num_poisoned", [2, 4, 7])
def test_several_poisoned_requests_are_all_found(config, num_poisoned):
    engine = make_engine(FakeExecutor(fails=poisoned(at=4), fails_late=True, unhurried=True), **config)
    good = [make_request(2 + i, seed=i, max_tokens=12) for i in range(7)]
    bad = [make_request(3 + i, request_id=f"poison{i}") for i in range(num_poisoned)]
    mixed = [request for pair in zip(good, bad + [None] * 7, strict=False) for request in pair if request is not None]
    transcript = run_to_end(engine, *mixed)
    assert_as_expected(engine, transcript, *good)
    for request in bad:
        assert_ended_by_incident(transcript, request.request_id)
    assert_nothing_left(engine)


def test_a_request_that_is_alone_in_a_failing_step_is_blamed_at_once():
    executor = FakeExecutor(fails=poisoned())
    engine = make_engine(executor)
    transcript = run_to_end(engine, make_request(request_id="poison"))
    assert_ended_by_incident(transcript, "poison")
    assert executor.num_failures == 1


def test_a_poisoned_newcomer_costs_its_neighbours_two_failed_steps():
    executor = FakeExecutor(fails=poisoned())
    engine = make_engine(executor)
    good = [make_request(seed=i, max_tokens=20) for i in range(6)]
    add(engine, *good)
    transcript = Transcript()
    step(engine, transcript)
    run_to_end(engine, make_request(request_id="poison"), transcript=transcript)
    assert_as_expected(engine, transcript, *good)
    assert executor.num_failures == 2


def test_the_stack_is_logged_once_with_the_number_that_the_client_gets(caplog):
    engine = make_engine(FakeExecutor(fails=poisoned()))
    with caplog.at_level(logging.ERROR):
        transcript = run_to_end(engine, *(make_request(seed=i) for i in range(5)), make_request(request_id="poison"))
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.__dict__["request"] == "poison"
    assert record.__dict__["incident"] in transcript.ends["poison"].error.message
    assert "the fake model cannot compute this" in caplog.text
    assert "fake model" not in transcript.ends["poison"].error.message


def test_the_step_of_the_poisoned_request_is_kept_in_a_file(tmp_path):
    config = ErrorDumpConfig(directory=str(tmp_path / "dumps"))
    engine = make_engine(FakeExecutor(fails=poisoned()), error_dump=config)
    run_to_end(engine, make_request(), make_request(request_id="poison"))
    [file] = (tmp_path / "dumps").iterdir()
    assert "poison" in file.read_text()


def test_requests_that_come_during_the_trial_are_served_beside_it():
    """The suspect on trial has a long prompt: others do not wait for all of it."""
    executor = FakeExecutor(fails=poisoned(at=60))
    engine = make_engine(
        executor, max_num_batched_tokens=8, long_prefill_token_threshold=4, max_num_seqs=4, prefix_caching=False
    )
    add(engine, make_request(64, request_id="poison"), make_request(64, seed=1, request_id="other"))
    transcript = Transcript()
    while not executor.num_failures:
        step(engine, transcript)
    late = make_request(2, seed=7, max_tokens=3)
    add(engine, late)
    while late.request_id not in transcript.ends:
        step(engine, transcript)
    assert "poison" not in transcript.ends
    assert transcript.tokens[late.request_id] == oracle_tokens(7, 3, 1000)


def test_a_failure_that_does_not_come_again_ends_nobody():
    failures = iter([True])
    engine = make_engine(FakeExecutor(fails=lambda step: len(step.num_scheduled_tokens) > 1 and next(failures, False)))
    requests = [make_request(seed=i) for i in range(4)]
    transcript = run_to_end(engine, *requests)
    assert_as_expected(engine, transcript, *requests)
    assert_nothing_left(engine)


def test_a_step_that_fails_of_no_single_request_ends_the_engine_in_the_end():
    def fails(scheduled):
        return sum(name(key).startswith("half") for key in scheduled.num_scheduled_tokens) == 2

    executor = FakeExecutor(fails=fails)
    engine = make_engine(executor, max_num_seqs=4)
    add(engine, *(make_request(4, request_id=f"half{i}", max_tokens=100) for i in range(2)))
    with pytest.raises(EngineDeadError, match="cannot compute this"):
        while True:
            engine.step(lambda: None)
    assert executor.num_failures == MAX_UNEXPLAINED_FAILURES + 1


def test_rare_failures_without_a_culprit_do_not_add_up():
    executor = FakeExecutor(model_max_len=256)
    count = {"steps": 0}

    def fails(scheduled):
        together = len(scheduled.num_scheduled_tokens) == 2
        count["steps"] += together
        return together and count["steps"] % (GOOD_STEPS + 20) == GOOD_STEPS + 19

    executor.fails = fails
    engine = make_engine(executor, num_blocks=200)
    for round_number in range(MAX_UNEXPLAINED_FAILURES + 2):
        requests = [make_request(4, seed=10 * round_number + i, max_tokens=200) for i in range(2)]
        transcript = run_to_end(engine, *requests)
        assert_as_expected(engine, transcript, *requests)
    assert executor.num_failures > MAX_UNEXPLAINED_FAILURES


def test_an_executor_that_computes_nothing_any_more_ends_the_engine():
    engine = make_engine(FakeExecutor(fail_at_step=2))
    add(engine, make_request(seed=1), make_request(seed=2))
    with pytest.raises(EngineDeadError, match="the fake device is gone"):
        while True:
            engine.step(lambda: None)


def test_a_failing_step_without_requests_ends_the_engine():
    engine = make_engine(FakeExecutor(fails=lambda step: not step.num_scheduled_tokens))
    add(engine, make_request(max_tokens=1))
    with pytest.raises(EngineDeadError, match="cannot compute this"):
        while True:
            engine.step(lambda: None)


def test_a_suspect_that_its_client_aborts_is_forgotten():
    engine = make_engine(FakeExecutor(fails=poisoned()))
    good = [make_request(seed=i, max_tokens=12) for i in range(3)]
    add(engine, *good, make_request(request_id="poison0"), make_request(request_id="poison1"))
    transcript = Transcript()
    step(engine, transcript)
    assert engine.abort(CLIENT, ["poison0", "poison1"]) == ["poison0", "poison1"]
    run_to_end(engine, transcript=transcript)
    assert transcript.reason("poison0") is FinishReason.ABORT
    assert_as_expected(engine, transcript, *good)
    assert_nothing_left(engine)


def test_a_pause_finds_the_failed_step_in_flight():
    """A utility takes in what is in flight, and meets the failure."""
    engine = make_engine(
        FakeExecutor(fails=poisoned(), fails_late=True, unhurried=True), async_scheduling=True, max_concurrent_batches=3
    )
    good = make_request(max_tokens=12)
    add(engine, good, make_request(request_id="poison"))
    transcript = Transcript()
    step(engine, transcript)
    control = EngineControl(engine)
    control.pause("keep")
    assert engine.scheduler.stats().num_running_reqs == 0
    control.resume()
    run_to_end(engine, transcript=transcript)
    assert_as_expected(engine, transcript, good)
    assert_ended_by_incident(transcript, "poison")


@pytest.mark.parametrize("config", MODES[:4])
def test_a_constrained_neighbour_keeps_its_grammar(config):
    executor = FakeExecutor(
        vocab_size=50, eos_token_ids=frozenset({7}), fails=poisoned(at=8), fails_late=True, unhurried=True
    )
    engine = make_engine(executor, grammars=FakeGrammars(50, 7), **config)
    good = make_request(seed=3, max_tokens=12, structured_output=StructuredOutput(regex="even"))
    bad = make_request(request_id="poison", max_tokens=12)
    transcript = run_to_end(engine, good, bad)
    assert_as_expected(engine, transcript, good)
    assert_ended_by_incident(transcript, "poison")
    assert_nothing_left(engine)


def test_a_preempted_suspect_is_found_when_blocks_are_short():
    engine = make_engine(FakeExecutor(fails=poisoned(at=20)), num_blocks=12)
    good = [make_request(8, seed=i, max_tokens=20) for i in range(4)]
    bad = make_request(8, request_id="poison", max_tokens=24)
    transcript = run_to_end(engine, *good, bad)
    assert_as_expected(engine, transcript, *good)
    assert_ended_by_incident(transcript, "poison")
    assert_nothing_left(engine)
