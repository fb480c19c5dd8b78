"""Several steps in flight: the same tokens, an executor that is never idle, results in order."""

import logging

import pytest

from penstock_common.types.outputs import FinishReason
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.config import ErrorDumpConfig
from penstock_enginecore.config.scheduler import STEP_TOKENS
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.scheduler.failure_bisection import GOOD_STEPS
from penstock_enginecore.core.scheduler.output import SchedulerOutput
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

VOCAB, EOS = 50, 7
ASYNC = {"async_scheduling": True}


def unhurried(**options):
    return FakeExecutor(unhurried=True, **options)


def in_flight(engine):
    return len(engine._steps)


@pytest.mark.parametrize("config", [{}, ASYNC, {"max_concurrent_batches": 3}, {**ASYNC, "max_concurrent_batches": 3}])
def test_tokens_do_not_depend_on_how_many_steps_are_in_flight(config):
    engine = make_engine(unhurried(eos_token_ids=frozenset({3})), num_blocks=30, max_num_seqs=4, **config)
    requests = [make_request(3 + 5 * i, seed=i, max_tokens=4 + 3 * i) for i in range(7)]
    transcript = run_to_end(engine, *requests)
    assert_as_expected(engine, transcript, *requests)
    assert_nothing_left(engine)


def test_the_next_step_is_started_before_the_last_ones_result_is_there():
    engine = make_engine(unhurried(), **ASYNC)
    add(engine, make_request(max_tokens=5))
    transcript = Transcript()
    step(engine, transcript)
    assert in_flight(engine) == 1
    assert not transcript.frames
    step(engine, transcript)
    assert engine.executor.num_steps == 2
    assert transcript.frames, "a full queue waits for its oldest step"


def test_without_asynchronous_scheduling_a_request_waits_for_its_token():
    engine = make_engine(unhurried(), max_concurrent_batches=2)
    add(engine, make_request(max_tokens=5))
    transcript = Transcript()
    step(engine, transcript)
    step(engine, transcript)
    assert engine.executor.num_steps == 1
    assert len(transcript.frames) == 1


def test_no_step_is_run_behind_the_last_token():
    engine = make_engine(unhurried(), **ASYNC)
    run_to_end(engine, make_request(max_tokens=5))
    assert sum(bool(s.num_scheduled_tokens) for s in engine.executor.steps) == 5


def test_a_token_behind_the_end_is_dropped():
    tokens = oracle_tokens(0, 8, 1000)
    engine = make_engine(unhurried(eos_token_ids=frozenset({tokens[3]})), **ASYNC)
    request = make_request(max_tokens=20)
    transcript = run_to_end(engine, request)
    assert transcript.tokens[request.request_id] == tokens[:4]
    assert sum(bool(s.num_scheduled_tokens) for s in engine.executor.steps) == 5
    assert_nothing_left(engine)


def test_an_abort_ends_a_request_whose_steps_are_in_flight():
    engine = make_engine(unhurried(), **ASYNC)
    request = make_request(max_tokens=20)
    add(engine, request)
    transcript = Transcript()
    step(engine, transcript)
    step(engine, transcript)
    engine.scheduler.abort_requests(CLIENT, [request.request_id])
    run_to_end(engine, transcript=transcript)
    assert transcript.reason(request.request_id) is FinishReason.ABORT
    assert_nothing_left(engine)


def test_a_constrained_request_is_sampled_once_its_last_token_is_known():
    executor = FakeExecutor(unhurried=True, vocab_size=VOCAB, eos_token_ids=frozenset({EOS}))
    engine = make_engine(executor, grammars=FakeGrammars(VOCAB, EOS), **ASYNC)
    requests = [
        make_request(4, seed=i, max_tokens=9, structured_output=StructuredOutput(regex="odd:3") if i % 2 else None)
        for i in range(4)
    ]
    transcript = run_to_end(engine, *requests)
    assert_as_expected(engine, transcript, *requests)
    assert_nothing_left(engine)


def test_a_step_without_requests_is_run_in_its_turn_and_changes_nothing():
    engine = make_engine(unhurried(), **ASYNC)
    request = make_request(max_tokens=5)
    add(engine, request)
    transcript = Transcript()
    step(engine, transcript)
    assert not SchedulerOutput().concerns_workers
    engine._steps.start(SchedulerOutput(), lambda: None)
    assert in_flight(engine) == 2
    run_to_end(engine, transcript=transcript)
    assert_as_expected(engine, transcript, request)
    assert not engine.executor.steps[1].num_scheduled_tokens


@pytest.mark.parametrize("config", [ASYNC, {**ASYNC, "max_concurrent_batches": 3}])
def test_steps_are_started_before_the_device_has_begun_the_one_before(config):
    executor = FakeExecutor(late=True)
    engine = make_engine(executor, **config)
    requests = [make_request(3 + 5 * i, seed=i, max_tokens=6) for i in range(3)]
    add(engine, requests[0])
    transcript = Transcript()
    started = config.get("max_concurrent_batches", 2)
    for _ in range(started - 1):
        step(engine, transcript)
    assert in_flight(engine) == started - 1
    assert executor.num_steps == 0
    run_to_end(engine, *requests[1:], transcript=transcript)
    assert_as_expected(engine, transcript, *requests)
    assert_nothing_left(engine)


@pytest.mark.parametrize(("config", "ahead"), [({}, True), ({"async_scheduling": False}, False)], ids=str)
def test_where_the_model_runs_ahead_so_does_the_engine_unless_it_is_told_not_to(config, ahead):
    engine = make_engine(FakeExecutor(late=True, runs_ahead=True), **config)
    add(engine, make_request(max_tokens=5))
    transcript = Transcript()
    step(engine, transcript)
    assert in_flight(engine) == (1 if ahead else 0)
    assert bool(transcript.frames) is not ahead
    run_to_end(engine, transcript=transcript)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_num_batched_tokens": None}, 24),
        ({"max_num_batched_tokens": None, "max_num_seqs": 30}, 30),
        ({"max_num_batched_tokens": None, "enable_chunked_prefill": False}, 90),
        ({"max_num_batched_tokens": 40}, 40),
    ],
    ids=str,
)
def test_steps_are_as_large_as_the_model_has_use_for_unless_told_otherwise(config, tokens):
    """A step has room for prompts that are not split, and for a token of each request that may run."""
    executor = FakeExecutor(step_tokens=24)
    engine = make_engine(executor, **config)
    add(engine, make_request(90, max_tokens=1))
    run_to_end(engine)
    assert max(scheduled.total_num_scheduled_tokens for scheduled in executor.steps) == tokens
    assert engine.config.scheduler.max_num_batched_tokens == (tokens if tokens < 90 else STEP_TOKENS)


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (
            {},
            [[9, 8], [4], [20], [9, 8]],
        ),  # a third prompt would exceed the limit, and the fourth prompt is too long to start together with others
        ({"max_prompt_batch_tokens": 0}, [[9, 8, 4, 19], [1, 9, 8]]),
        ({"max_prompt_batch_tokens": 28}, [[9, 8, 4], [20, 9], [8]]),
    ],
    ids=str,
)
def test_prompts_begin_together_while_they_have_few_tokens(config, steps):
    """One token of each prompt is not counted, like the tokens of decoding requests."""
    executor = FakeExecutor(prompt_batch_tokens=18)
    engine = make_engine(executor, max_num_batched_tokens=40, **config)
    for first, length in enumerate((9, 8, 4, 20, 9, 8)):
        add(engine, make_request([100 + first, *range(length - 1)], max_tokens=1))
    run_to_end(engine)
    counts = [list(scheduled.num_scheduled_tokens.values()) for scheduled in executor.steps]
    assert [each for each in counts if each] == steps


def test_requests_that_decode_keep_no_prompt_from_beginning():
    executor = FakeExecutor(prompt_batch_tokens=4)
    engine = make_engine(executor, max_num_batched_tokens=40)
    for first in range(7):
        add(engine, make_request([100 + first], max_tokens=8))
    transcript = Transcript()
    step(engine, transcript)
    add(engine, make_request([200, *range(6)], max_tokens=1))
    run_to_end(engine, transcript=transcript)
    # Together with them, the prompt gets half the tokens that prompts get when they start together.
    assert [sorted(scheduled.num_scheduled_tokens.values())[-1] for scheduled in executor.steps[1:5]] == [2, 2, 2, 1]


# A step that fails in Python: the engine finds and ends the faulty request. Tokens of other requests do not change.

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
    """Return a function that tells whether a step fails.

    A step fails if it computes the ``at``-th or a later token of a request whose id begins with poison.
    """

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


def test_a_failure_that_does_not_recur_ends_no_request():
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
    assert engine.scheduler.abort_requests(CLIENT, ["poison0", "poison1"]) == ["poison0", "poison1"]
    run_to_end(engine, transcript=transcript)
    assert transcript.reason("poison0") is FinishReason.ABORT
    assert_as_expected(engine, transcript, *good)
    assert_nothing_left(engine)


def test_a_pause_finds_the_failed_step_in_flight():
    """A utility finishes the steps in flight and meets the failure."""
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
