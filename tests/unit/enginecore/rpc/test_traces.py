"""Spans that the engine records for messages on its I/O thread."""

from typing import Any

from penstock_common.types.kv_transfer import KvMedium
from penstock_common.types.outputs import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EventType,
    FinishReason,
    PrefillStats,
    RequestError,
    TokenColumns,
)
from penstock_common.types.request import EngineCoreRequest, RequestContext
from penstock_enginecore.kv_transfer.core.transfer_stats import ABANDONED, PART, WHOLE, Transfer
from penstock_enginecore.rpc.traces import EngineTraces

PARENT = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
NUMBER = 5
EPOCH = 1000.0
"""Wall clock time when the engine's clock is 0."""


class Recorder:
    """A tracer that keeps the recorded spans."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.now = 0.0
        self.traces = EngineTraces(
            self,  # type: ignore[arg-type]  # it begins no spans
            model="m",
            monotonic_clock=lambda: self.now,
            wall_clock=lambda: EPOCH + self.now,
        )

    def record(self, name: str, parent: Any, **span: Any) -> None:
        assert parent == PARENT
        self.spans.append({"name": name, **span})

    def add(self, trace_context: dict[str, str] | None = None) -> None:
        request = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=[1, 2, 3],
            context=RequestContext(trace_context=PARENT if trace_context is None else trace_context),
            request_number=NUMBER,
        )
        self.traces.add("c", request)

    def step_in_columns(self, now: float, *token_ids: int) -> None:
        self.now = now
        columns = TokenColumns()
        columns.add(NUMBER + 1, 0, [7])
        columns.add(NUMBER, 0, token_ids)
        self.traces.take("c", EngineCoreOutputs(tokens=columns, timestamp=now))

    def step(self, now: float, *events: tuple[EventType, float], tokens: int = 0, **fields: Any) -> None:
        self.now = now
        output = EngineCoreOutput(
            request_id="r",
            new_token_ids=[7] * tokens,
            events=[EngineCoreEvent(kind, time) for kind, time in events],
            **fields,
        )
        self.traces.take("c", EngineCoreOutputs(outputs=[output], timestamp=now))

    def times(self) -> list[tuple[str, float, float]]:
        return [(span["name"], span["began"] - EPOCH, span["ended"] - EPOCH) for span in self.spans]


def test_a_requests_phases_are_spans_on_the_clock_on_the_wall() -> None:
    recorder = Recorder()
    recorder.add()
    stats = PrefillStats(num_prompt_tokens=3, num_cached_tokens=2)
    recorder.step(5, (EventType.QUEUED, 1), (EventType.SCHEDULED, 2), tokens=1, prefill_stats=stats)
    recorder.step(6, tokens=2)
    assert recorder.spans == []
    recorder.step(7, tokens=1, finish_reason=FinishReason.STOP)
    assert recorder.times() == [("engine.queue", 1, 2), ("engine.prefill", 2, 5), ("engine.decode", 5, 7)]
    _, prefill, decode = (span["attributes"] for span in recorder.spans)
    assert (prefill["gen_ai.usage.input_tokens"], prefill["penstock.cached_tokens"]) == (3, 2)
    assert (decode["gen_ai.usage.output_tokens"], decode["gen_ai.response.finish_reasons"]) == (4, ["stop"])
    assert len(recorder.traces) == 0


def test_a_preemption_is_an_event_of_the_phase_it_interrupts() -> None:
    recorder = Recorder()
    recorder.add()
    recorder.step(3, (EventType.QUEUED, 1), (EventType.SCHEDULED, 2), tokens=1)
    recorder.step(6, (EventType.PREEMPTED, 4), (EventType.SCHEDULED, 5), tokens=1, finish_reason=FinishReason.LENGTH)
    assert [(name, time - EPOCH) for name, time in recorder.spans[-1]["events"]] == [("preempted", 4), ("scheduled", 5)]
    assert [span["events"] for span in recorder.spans[:-1]] == [[], []]


def test_a_refused_request_has_one_span_with_the_error() -> None:
    recorder = Recorder()
    recorder.add()
    error = RequestError(code="RESOURCE_EXHAUSTED", message="full of secrets")
    recorder.step(1, finish_reason=FinishReason.ERROR, error=error)
    [span] = recorder.spans
    assert (span["name"], span["error"]) == ("engine.queue", "RESOURCE_EXHAUSTED")
    assert "secrets" not in str(span)


def test_a_request_whose_client_has_gone_ends_with_its_session() -> None:
    recorder = Recorder()
    recorder.add()
    recorder.step(3, (EventType.QUEUED, 1), (EventType.SCHEDULED, 2), tokens=1)
    recorder.now = 9
    recorder.traces.client_gone("another")
    assert recorder.spans == []
    recorder.traces.client_gone("c")
    assert recorder.times()[-1] == ("engine.decode", 3, 9)
    assert recorder.spans[-1]["attributes"]["gen_ai.response.finish_reasons"] == ["abort"]


def test_a_request_that_is_not_recorded_is_not_followed() -> None:
    recorder = Recorder()
    recorder.add({})
    recorder.add({"traceparent": PARENT["traceparent"][:-1] + "0"})
    assert len(recorder.traces) == 0
    recorder.step(3, tokens=1, finish_reason=FinishReason.STOP)
    assert recorder.spans == []


def test_tokens_in_columns_count_as_those_of_outputs() -> None:
    recorder = Recorder()
    recorder.add()
    recorder.step(1.0, (EventType.QUEUED, 0.0), (EventType.SCHEDULED, 0.5))
    recorder.step_in_columns(2.0, 7)
    recorder.step_in_columns(3.0, 8, 9)
    recorder.step(4.0, tokens=1, finish_reason=FinishReason.LENGTH)
    assert recorder.times() == [("engine.queue", 0.0, 0.5), ("engine.prefill", 0.5, 2.0), ("engine.decode", 2.0, 4.0)]
    assert recorder.spans[-1]["attributes"]["gen_ai.usage.output_tokens"] == 4


def transfer(headers: dict[str, str] = PARENT, outcome: str = WHOLE, transport: str = "", **changes: Any) -> Transfer:
    medium = KvMedium.PEER if transport else KvMedium.HOST
    return Transfer(headers, medium, transport, 2.0, 2.5, 4, 3, 3000, outcome)._replace(**changes)


def test_a_transfer_of_blocks_is_a_span_of_the_requests_trace() -> None:
    recorder = Recorder()
    recorder.now = 9
    recorder.traces.transferred(transfer(transport="shared_memory"))
    [span] = recorder.spans
    assert recorder.times() == [("engine.kv_transfer", 2.0, 2.5)]
    assert span["attributes"] == {
        "gen_ai.request.model": "m",
        "penstock.kv.medium": "peer",
        "penstock.kv.transport": "shared_memory",
        "penstock.kv.wanted_blocks": 4,
        "penstock.kv.blocks": 3,
        "penstock.kv.bytes": 3000,
        "penstock.kv.outcome": "whole",
    }
    assert span["error"] == ""


def test_the_span_of_a_transfer_that_failed_says_why() -> None:
    recorder = Recorder()
    for outcome in ("lease", PART, ABANDONED):
        recorder.traces.transferred(transfer(outcome=outcome))
    assert [span["error"] for span in recorder.spans] == ["lease", "part", ""]
    assert "penstock.kv.transport" not in recorder.spans[0]["attributes"], "host memory has none"


def test_a_transfer_of_a_request_that_is_not_recorded_has_no_span() -> None:
    recorder = Recorder()
    recorder.traces.transferred(transfer({}))
    recorder.traces.transferred(transfer({"traceparent": PARENT["traceparent"][:-1] + "0"}))
    assert recorder.spans == []
