"""Several steps in flight: the same tokens, an executor that is never idle, results in order."""

import pytest

from penstock_common.types.outputs import FinishReason
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.config.scheduler import STEP_TOKENS
from penstock_enginecore.core.scheduler.output import SchedulerOutput
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
    engine.abort(CLIENT, [request.request_id])
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
    """Prompts that are not split find room, and so does each of the requests that may run."""
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
        ),  # the third would be one too many, the fourth is longer than what begins together
        ({"max_prompt_batch_tokens": 0}, [[9, 8, 4, 19], [1, 9, 8]]),
        ({"max_prompt_batch_tokens": 28}, [[9, 8, 4], [20, 9], [8]]),
    ],
    ids=str,
)
def test_prompts_begin_together_while_they_have_few_tokens(config, steps):
    """A token of each is not counted, as of requests that decode."""
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
    # Beside them it has half as many tokens of a step as prompts that begin together.
    assert [sorted(scheduled.num_scheduled_tokens.values())[-1] for scheduled in executor.steps[1:5]] == [2, 2, 2, 1]
