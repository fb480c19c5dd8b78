"""Outputs of a step: those sent in columns, and those sent as messages of their own."""

import pytest

from penstock_common.lora_registry import LoraHeld
from penstock_common.types.outputs import (
    EngineCoreOutputs,
    EventType,
    Logprobs,
    LoraStats,
    SchedulerStats,
    SpecDecodingStats,
)
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.request import Request, RequestStatus
from penstock_enginecore.core.scheduler.state import ClientOutputs


def running(request_id: str, number: int, *, client: str = "c") -> Request:
    """Return a request whose prompt is computed, and whose start was sent."""
    core = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(max_tokens=100),
        request_number=number,
    )
    request = Request(core, client_id=client, max_model_len=100)
    request.prefill_reported = True
    return request


def say(clients: ClientOutputs, request: Request, *token_ids: int, **fields: object) -> None:
    request.all_token_ids.extend(token_ids)
    clients.add_tokens(request, list(token_ids), **fields)  # type: ignore[arg-type]


def taken(clients: ClientOutputs, client: str = "c") -> EngineCoreOutputs:
    return clients.take(SchedulerStats(), 1.0)[client]


def test_tokens_of_numbered_requests_go_in_columns() -> None:
    clients, first, second = ClientOutputs(), running("a", 3), running("b", 4)
    say(clients, first, 10)
    say(clients, second, 20)
    taken(clients)
    say(clients, first, 11)
    say(clients, second, 21, 22)
    outputs = taken(clients)
    assert outputs.outputs == []
    assert outputs.tokens is not None
    assert list(outputs.tokens.rows()) == [(3, 1, [11]), (4, 1, [21, 22])]


def test_tokens_of_requests_without_a_number_are_outputs() -> None:
    clients, request = ClientOutputs(), running("a", 0)
    say(clients, request, 10)
    outputs = taken(clients)
    assert outputs.tokens is None
    assert [(o.request_id, o.offset, o.new_token_ids) for o in outputs.outputs] == [("a", 0, [10])]


@pytest.mark.parametrize(
    "fields", [{"logprobs": Logprobs()}, {"prompt_logprobs": Logprobs()}], ids=lambda f: next(iter(f))
)
def test_tokens_with_more_to_say_are_outputs(fields: dict[str, object]) -> None:
    clients, request = ClientOutputs(), running("a", 3)
    say(clients, request, 10, **fields)
    outputs = taken(clients)
    assert outputs.tokens is None
    assert [o.new_token_ids for o in outputs.outputs] == [[10]]


def test_tokens_with_an_event_are_outputs() -> None:
    clients, request = ClientOutputs(), running("a", 3)
    request.record_event(EventType.PREEMPTED, 1.0)
    say(clients, request, 10)
    assert [event.type for output in taken(clients).outputs for event in output.events] == [EventType.PREEMPTED]


def test_the_first_and_the_last_output_of_a_request_are_outputs() -> None:
    clients, request = ClientOutputs(), running("a", 3)
    request.prefill_reported, request.num_cached_tokens = False, 0
    say(clients, request, 10)
    first = taken(clients)
    say(clients, request, 11)
    second = taken(clients)
    request.status = RequestStatus.FINISHED_STOPPED
    clients.add_end(request, [])
    last = taken(clients)
    assert [len(frame.outputs) for frame in (first, second, last)] == [1, 0, 1]
    assert last.finished_requests == ["a"]


def test_a_row_says_how_many_drafts_were_verified_for_it() -> None:
    clients, drafted, other = ClientOutputs(), running("a", 3), running("b", 4)
    say(clients, other, 20)
    say(clients, drafted, 10, 11, num_drafts=5)
    outputs = taken(clients)
    assert outputs.outputs == []
    assert outputs.tokens is not None
    assert list(outputs.tokens.drafted()) == [(3, 5, 1)]


def test_an_output_of_a_step_that_verified_drafts_says_what_came_of_them_until_then() -> None:
    clients, request = ClientOutputs(), running("a", 3)
    request.spec_stats = SpecDecodingStats()
    request.spec_stats.count(5, 1)
    say(clients, request, 10, 11, logprobs=Logprobs(), num_drafts=5)
    say(clients, request, 12, logprobs=Logprobs())
    request.spec_stats.count(2, 0)
    with_drafts, without = taken(clients).outputs
    expected = SpecDecodingStats(
        num_drafts=1, num_draft_tokens=5, num_accepted_tokens=1, num_accepted_tokens_per_pos=[1, 0, 0, 0, 0]
    )
    assert with_drafts.spec_decoding_stats == expected
    assert without.spec_decoding_stats is None


def test_no_row_stands_before_an_earlier_output_of_its_request() -> None:
    clients, request, other = ClientOutputs(), running("a", 3), running("b", 4)
    say(clients, request, 10, logprobs=Logprobs())
    say(clients, request, 11)
    say(clients, other, 20)
    outputs = taken(clients)
    assert [(o.request_id, o.offset) for o in outputs.outputs] == [("a", 0), ("a", 1)]
    assert outputs.tokens is not None
    assert list(outputs.tokens.rows()) == [(4, 0, [20])]


def test_a_request_that_ends_in_the_step_of_a_row_ends_behind_it() -> None:
    clients, request = ClientOutputs(), running("a", 3)
    say(clients, request, 10)
    request.status = RequestStatus.FINISHED_ABORTED
    clients.add_end(request, [])
    outputs = taken(clients)
    assert outputs.tokens is not None
    assert list(outputs.tokens.rows()) == [(3, 0, [10])]
    assert [o.offset for o in outputs.outputs] == [1]


def test_a_token_that_is_none_is_refused() -> None:
    clients, request = ClientOutputs(), running("a", 3)
    with pytest.raises(OverflowError):
        say(clients, request, -1)


def test_each_client_has_columns_of_its_own() -> None:
    clients = ClientOutputs()
    say(clients, running("a", 1, client="c"), 10)
    say(clients, running("a", 1, client="d"), 20)
    frames = clients.take(SchedulerStats(), 1.0)
    rows = {client: list(frame.tokens.rows()) for client, frame in frames.items() if frame.tokens is not None}
    assert rows == {"c": [(1, 0, [10])], "d": [(1, 0, [20])]}


def test_a_client_is_told_which_adapters_there_are_when_that_has_changed() -> None:
    clients = ClientOutputs()
    requests = {"c": running("a", 1), "d": running("b", 2, client="d")}

    def told(version: int, *names: str) -> dict[str, int | None]:
        for name in names:
            say(clients, requests[name], 10)
        stats = SchedulerStats(lora=LoraStats(max_loras=1, held=LoraHeld(version=version)))
        frames = clients.take(stats, 1.0)
        loras = {name: frame.scheduler_stats.lora for name, frame in frames.items() if frame.scheduler_stats}
        return {name: None if lora is None or lora.held is None else lora.held.version for name, lora in loras.items()}

    assert told(1, "c") == {"c": 1}
    assert told(1, "c", "d") == {"c": None, "d": 1}
    assert told(2, "c", "d") == {"c": 2, "d": 2}
    clients.forget("c")
    assert told(2, "c", "d") == {"c": 2, "d": None}
