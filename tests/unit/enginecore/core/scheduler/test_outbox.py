"""What goes in columns, and what as outputs of their own."""

import pytest

from penstock_common.types.logprobs import Logprobs
from penstock_common.types.outputs import EngineCoreOutputs, EventType, SchedulerStats
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.request import Request, RequestStatus
from penstock_enginecore.core.scheduler.outbox import Outbox


def running(request_id: str, number: int, *, client: str = "c") -> Request:
    """A request whose prompt is computed, and that was told."""
    core = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(max_tokens=100),
        request_number=number,
    )
    request = Request(core, client_id=client, max_model_len=100)
    request.prefill_reported = True
    return request


def say(outbox: Outbox, request: Request, *token_ids: int, **fields: object) -> None:
    request.all_token_ids.extend(token_ids)
    outbox.add_tokens(request, list(token_ids), **fields)  # type: ignore[arg-type]


def taken(outbox: Outbox, client: str = "c") -> EngineCoreOutputs:
    return outbox.take(SchedulerStats(), 1.0)[client]


def test_tokens_of_numbered_requests_go_in_columns() -> None:
    outbox, first, second = Outbox(), running("a", 3), running("b", 4)
    say(outbox, first, 10)
    say(outbox, second, 20)
    taken(outbox)
    say(outbox, first, 11)
    say(outbox, second, 21, 22)
    outputs = taken(outbox)
    assert outputs.outputs == []
    assert outputs.tokens is not None
    assert list(outputs.tokens.rows()) == [(3, 1, [11]), (4, 1, [21, 22])]


def test_tokens_of_requests_without_a_number_are_outputs() -> None:
    outbox, request = Outbox(), running("a", 0)
    say(outbox, request, 10)
    outputs = taken(outbox)
    assert outputs.tokens is None
    assert [(o.request_id, o.offset, o.new_token_ids) for o in outputs.outputs] == [("a", 0, [10])]


@pytest.mark.parametrize(
    "fields", [{"num_nans": 1}, {"logprobs": Logprobs()}, {"prompt_logprobs": Logprobs()}], ids=lambda f: next(iter(f))
)
def test_tokens_with_more_to_say_are_outputs(fields: dict[str, object]) -> None:
    outbox, request = Outbox(), running("a", 3)
    say(outbox, request, 10, **fields)
    outputs = taken(outbox)
    assert outputs.tokens is None
    assert [o.new_token_ids for o in outputs.outputs] == [[10]]


def test_tokens_with_an_event_are_outputs() -> None:
    outbox, request = Outbox(), running("a", 3)
    request.record_event(EventType.PREEMPTED, 1.0)
    say(outbox, request, 10)
    assert [event.type for output in taken(outbox).outputs for event in output.events] == [EventType.PREEMPTED]


def test_the_first_and_the_last_output_of_a_request_are_outputs() -> None:
    outbox, request = Outbox(), running("a", 3)
    request.prefill_reported, request.num_cached_tokens = False, 0
    say(outbox, request, 10)
    first = taken(outbox)
    say(outbox, request, 11)
    second = taken(outbox)
    request.status = RequestStatus.FINISHED_STOPPED
    outbox.add_end(request, [])
    last = taken(outbox)
    assert [len(frame.outputs) for frame in (first, second, last)] == [1, 0, 1]
    assert last.finished_requests == ["a"]


def test_no_row_stands_before_an_earlier_output_of_its_request() -> None:
    outbox, request, other = Outbox(), running("a", 3), running("b", 4)
    say(outbox, request, 10, num_nans=1)
    say(outbox, request, 11)
    say(outbox, other, 20)
    outputs = taken(outbox)
    assert [(o.request_id, o.offset) for o in outputs.outputs] == [("a", 0), ("a", 1)]
    assert outputs.tokens is not None
    assert list(outputs.tokens.rows()) == [(4, 0, [20])]


def test_a_request_that_ends_in_the_step_of_a_row_ends_behind_it() -> None:
    outbox, request = Outbox(), running("a", 3)
    say(outbox, request, 10)
    request.status = RequestStatus.FINISHED_ABORTED
    outbox.add_end(request, [])
    outputs = taken(outbox)
    assert outputs.tokens is not None
    assert list(outputs.tokens.rows()) == [(3, 0, [10])]
    assert [o.offset for o in outputs.outputs] == [1]


def test_a_token_that_is_none_is_refused() -> None:
    outbox, request = Outbox(), running("a", 3)
    with pytest.raises(OverflowError):
        say(outbox, request, -1)


def test_each_client_has_columns_of_its_own() -> None:
    outbox = Outbox()
    say(outbox, running("a", 1, client="c"), 10)
    say(outbox, running("a", 1, client="d"), 20)
    frames = outbox.take(SchedulerStats(), 1.0)
    rows = {client: list(frame.tokens.rows()) for client, frame in frames.items() if frame.tokens is not None}
    assert rows == {"c": [(1, 0, [10])], "d": [(1, 0, [20])]}
