"""Requests come under ids that are free, and end with one output each."""

import pytest

from penstock_common.errors import InvalidArgument
from penstock_common.types.outputs import FinishReason, RequestError
from tests.fakes.engines.engine_harness import (
    CLIENT,
    Transcript,
    add,
    assert_nothing_left,
    make_engine,
    make_request,
    run_to_end,
    step,
)
from tests.fakes.engines.fake_executor import oracle_tokens


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
    assert engine.abort(CLIENT, [*ids, "unknown", *ids]) == ids
    assert engine.abort(CLIENT, ids) == []
    assert engine.abort("somebody else", [other.request_id]) == []
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
    engine.abort_client("gone")
    frames = []
    while engine.has_work:
        frames.append(engine.step(lambda: None))
    assert all(set(frame) <= {CLIENT} for frame in frames)
    assert_nothing_left(engine)


def test_abort_all_tells_why():
    engine = make_engine()
    add(engine, make_request(5), make_request(5), client_id="a")
    engine.abort_all(RequestError(code="UNAVAILABLE", message="bye"))
    [frame] = engine.step(lambda: None).values()
    assert [(o.finish_reason, o.error.message) for o in frame.outputs] == [(FinishReason.ABORT, "bye")] * 2
    assert_nothing_left(engine)


def test_workers_hear_of_ended_requests_even_when_nothing_else_runs():
    engine = make_engine()
    run_to_end(engine, make_request(5))
    last = engine.executor.steps[-1]
    assert last.total_num_scheduled_tokens == 0
    assert len(last.finished_request_ids) == 1
