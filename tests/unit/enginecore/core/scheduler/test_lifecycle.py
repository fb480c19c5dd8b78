"""Requests come under ids that are free, and end with one output each."""

import pytest

from penstock_common.errors import InvalidArgument
from penstock_common.types.outputs import FinishReason, RequestError
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.core.request import RequestStatus
from penstock_enginecore.core.scheduler.lifecycle import DeadlineQueue
from tests.fakes.engines.engine_harness import (
    CLIENT,
    FakeClock,
    Transcript,
    add,
    assert_as_expected,
    assert_nothing_left,
    make_engine,
    make_request,
    prepared,
    run_to_end,
    step,
)
from tests.fakes.engines.fake_executor import oracle_tokens
from tests.fakes.engines.fake_grammars import FakeGrammars


def test_an_id_in_use_is_refused_per_client_and_free_again_after_the_end():
    engine = make_engine()
    request = make_request(5, request_id="same")
    add(engine, request)
    with pytest.raises(InvalidArgument, match="'same' is already in use") as e:
        add(engine, request)
    assert e.value.field == "request_id"
    add(engine, request, client_id="other")
    outputs = {}
    while engine.has_work:
        for client, frame in engine.step(lambda: None).items():
            outputs.setdefault(client, []).extend(t for o in frame.outputs for t in o.new_token_ids)
    assert outputs == {CLIENT: oracle_tokens(0, 8, 1000), "other": oracle_tokens(0, 8, 1000)}
    add(engine, request)


def test_aborts_end_waiting_and_running_requests_with_one_output_each():
    engine = make_engine(max_num_seqs=1)
    running, waiting, other = (make_request(5, max_tokens=50) for _ in range(3))
    transcript = Transcript()
    add(engine, running, waiting, other)
    step(engine, transcript)
    ids = [running.request_id, waiting.request_id]
    assert engine.scheduler.abort_requests(CLIENT, [*ids, "unknown", *ids]) == ids
    assert engine.scheduler.abort_requests(CLIENT, ids) == []
    assert engine.scheduler.abort_requests("somebody else", [other.request_id]) == []
    run_to_end(engine, transcript=transcript)
    assert [transcript.reason(i) for i in ids] == [FinishReason.ABORT] * 2
    assert transcript.reason(other.request_id) is FinishReason.LENGTH
    assert_nothing_left(engine)


def test_a_client_that_goes_takes_its_requests_along_silently():
    engine = make_engine()
    add(engine, make_request(5), make_request(5), client_id="gone")
    stays = make_request(5)
    add(engine, stays)
    engine.step(lambda: None)
    engine.scheduler.abort_client("gone")
    frames = []
    while engine.has_work:
        frames.append(engine.step(lambda: None))
    assert all(set(frame) <= {CLIENT} for frame in frames)
    assert_nothing_left(engine)


def test_abort_all_tells_why():
    engine = make_engine()
    add(engine, make_request(5), make_request(5), client_id="a")
    engine.scheduler.abort_all(RequestError(code="UNAVAILABLE", message="bye"))
    [frame] = engine.step(lambda: None).values()
    assert [(o.finish_reason, o.error.message) for o in frame.outputs] == [(FinishReason.ABORT, "bye")] * 2
    assert_nothing_left(engine)


def test_workers_hear_of_ended_requests_even_when_nothing_else_runs():
    engine = make_engine()
    run_to_end(engine, make_request(5))
    last = engine.executor.steps[-1]
    assert last.total_num_scheduled_tokens == 0
    assert len(last.finished_request_ids) == 1


# Requests in any state end when their deadline has passed.


def test_an_expired_waiting_request_ends_before_it_costs_a_prefill():
    clock = FakeClock()
    engine = make_engine(clock=clock, max_num_seqs=1)
    late = make_request(5, deadline=clock.now + 5)
    transcript = Transcript()
    add(engine, make_request(5, max_tokens=50), late)
    step(engine, transcript)
    clock.now += 5
    run_to_end(engine, transcript=transcript)
    end = transcript.ends[late.request_id]
    assert end.finish_reason is FinishReason.ABORT
    assert end.error.code == "DEADLINE_EXCEEDED"
    assert sum(len(scheduled.new_requests) for scheduled in engine.executor.steps) == 1


def test_an_expired_running_request_ends_and_its_tokens_stay_valid():
    clock = FakeClock()
    engine = make_engine(clock=clock)
    request = make_request(5, max_tokens=50, deadline=clock.now + 5)
    add(engine, request)
    for _ in range(3):
        engine.step(lambda: None)
    clock.now += 10
    [frame] = engine.step(lambda: None).values()
    [output] = frame.outputs
    assert (output.offset, output.new_token_ids, output.finish_reason) == (3, [], FinishReason.ABORT)
    assert "after 3 output tokens" in output.error.message
    assert_nothing_left(engine)


def test_a_request_that_arrives_expired_costs_no_prefill():
    clock = FakeClock()
    engine = make_engine(clock=clock)
    late = make_request(5, deadline=clock.now - 1)
    transcript = run_to_end(engine, late)
    assert transcript.ends[late.request_id].error.code == "DEADLINE_EXCEEDED"
    assert not [scheduled for scheduled in engine.executor.steps if scheduled.new_requests]
    assert_nothing_left(engine)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_place_in_the_queue_does_not_save_an_expired_request(policy):
    clock = FakeClock()
    engine = make_engine(clock=clock, max_num_seqs=1, policy=policy)
    late = [make_request(5, deadline=clock.now + 5, priority=-i, tenant=f"t{i % 3}") for i in range(7)]
    others = [make_request(5, tenant=f"t{i % 3}", max_tokens=2, seed=i) for i in range(3)]
    mixed = [late[0], others[0], *late[1:4], others[1], *late[4:], others[2]]
    add(engine, *mixed)
    clock.now += 5
    transcript = run_to_end(engine)
    assert all(transcript.ends[request.request_id].error.code == "DEADLINE_EXCEEDED" for request in late)
    assert sum(len(scheduled.new_requests) for scheduled in engine.executor.steps) == len(others)
    assert_as_expected(engine, transcript, *others)


def test_a_request_that_expires_while_its_grammar_compiles_is_never_scheduled():
    clock = FakeClock()
    grammars = FakeGrammars(1000, 999, manual=True)
    engine = make_engine(clock=clock, grammars=grammars)
    late = make_request(5, deadline=clock.now + 5, structured_output=StructuredOutput(regex="odd:3"))
    transcript = Transcript()
    add(engine, late)
    step(engine, transcript)
    clock.now += 5
    step(engine, transcript)
    assert transcript.ends[late.request_id].error.code == "DEADLINE_EXCEEDED"
    grammars.compile_all()
    run_to_end(engine, transcript=transcript)
    assert not [scheduled for scheduled in engine.executor.steps if scheduled.new_requests]
    assert_nothing_left(engine)


def test_the_next_deadline_is_that_of_a_living_request():
    clock = FakeClock()
    engine = make_engine(clock=clock)
    first, second = make_request(5, deadline=1010.0), make_request(5, deadline=1020.0)
    add(engine, second, first, make_request(5))
    assert engine.time_to_next_deadline() == 10
    engine.scheduler.abort_requests(CLIENT, [first.request_id])
    assert engine.time_to_next_deadline() == 20
    engine.scheduler.abort_requests(CLIENT, [second.request_id])
    assert engine.time_to_next_deadline() is None


def test_ended_requests_do_not_pile_up_among_the_deadlines():
    deadlines = DeadlineQueue()
    for i in range(1000):
        request = prepared(make_request(5, deadline=2000.0 + i))
        deadlines.add(request)
        request.status = RequestStatus.FINISHED_ABORTED
        deadlines.discard(request)
    assert len(deadlines) < 100
