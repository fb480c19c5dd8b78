"""One request gives one connected trace over frontend and engine. Requests without tracing produce no spans."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.config.sections import TracingConfig
from penstock_enginecore.config import ModelConfig
from penstock_frontend.config import HttpConfig
from tests.fakes.engines.engine_harness import make_config
from tests.fakes.engines.engine_server import EngineServer
from tests.fakes.engines.fake_executor import FakeExecutor
from tests.fakes.frontends.frontend_server import FrontendServer, collect, failure, make_request
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.network.otlp_receiver import OtlpReceiver, ReceivedSpan

VOCAB = byte_level().get_vocab_size()
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{CALLER}-01", f"00-{TRACE}-{CALLER}-00"
GENERATE = "penstock.inference.v1.InferenceService/Generate"
ENGINE_SPANS = ["engine.queue", "engine.prefill", "engine.decode"]


@pytest.fixture
async def receiver() -> AsyncIterator[OtlpReceiver]:
    async with OtlpReceiver() as receiver:
        yield receiver


@asynccontextmanager
async def services(receiver: OtlpReceiver, model: Path, **options: Any) -> AsyncIterator[FrontendServer]:
    """Yield a frontend and an engine that export spans to the receiver. All spans have arrived when the block ends."""
    tracing = TracingConfig(endpoint=receiver.endpoint)
    config = msgspec.structs.replace(make_config(), model=ModelConfig(path="model"), tracing=tracing)
    engine = EngineServer(config, FakeExecutor(vocab_size=VOCAB))
    await asyncio.to_thread(lambda: engine.start().load())
    try:
        async with FrontendServer(model, engines=[engine.address], **({"tracing": tracing} | options)) as frontend:
            await frontend.until_health(serving=True)
            yield frontend
    finally:
        await asyncio.to_thread(engine.stop)


def by_name(receiver: OtlpReceiver) -> dict[str, ReceivedSpan]:
    assert len({span.name for span in receiver.spans}) == len(receiver.spans), "each span once"
    return {span.name: span for span in receiver.spans}


async def test_a_request_is_one_connected_trace_from_its_callers_span_to_the_engines(
    receiver: OtlpReceiver, model: Path
) -> None:
    async with services(receiver, model) as frontend:
        call = frontend.stub.Generate(make_request(max_tokens=3, request_id="r1"), metadata=[("traceparent", SAMPLED)])
        await collect(call)
    spans = by_name(receiver)
    assert sorted(spans) == sorted([GENERATE, "frontend.request", *ENGINE_SPANS])
    assert {span.trace for span in receiver.spans} == {TRACE}
    assert spans[GENERATE].parent == CALLER
    assert spans["frontend.request"].parent == spans[GENERATE].id
    assert {spans[name].parent for name in ENGINE_SPANS} == {spans["frontend.request"].id}
    assert {span.service for span in receiver.spans} == {"penstock-frontend", "penstock-enginecore"}
    assert {spans[name].service for name in ENGINE_SPANS} == {"penstock-enginecore"}


async def test_the_phases_of_an_engines_request_follow_one_another(receiver: OtlpReceiver, model: Path) -> None:
    async with services(receiver, model) as frontend:
        await frontend.outputs(max_tokens=3)
    queue, prefill, decode = (receiver.named(name) for name in ENGINE_SPANS)
    assert queue.began <= queue.ended == prefill.began <= prefill.ended == decode.began <= decode.ended


async def test_spans_say_what_was_asked_for_and_what_came(receiver: OtlpReceiver, model: Path) -> None:
    async with services(receiver, model) as frontend:
        await frontend.outputs(token_ids=pb.TokenIds(ids=range(6)), max_tokens=3, temperature=0.5, request_id="r1")
    request, decode = receiver.named("frontend.request"), receiver.named("engine.decode")
    first = request.attributes.pop("gen_ai.latency.time_to_first_token")
    assert first > 0
    assert request.attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.id": "r1",
        "gen_ai.request.model": "model",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.input_tokens": 6,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["length"],
    }
    assert decode.attributes["gen_ai.usage.output_tokens"] == 3
    assert decode.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert receiver.named("engine.prefill").attributes["gen_ai.usage.input_tokens"] == 6


async def test_the_messages_trace_context_comes_before_the_metadatas(receiver: OtlpReceiver, model: Path) -> None:
    other = f"00-{'1' * 32}-{'2' * 16}-01"
    request = make_request(max_tokens=1, routing=pb.RoutingHints(trace_context={"traceparent": other}))
    async with services(receiver, model) as frontend:
        await collect(frontend.stub.Generate(request, metadata=[("traceparent", SAMPLED)]))
    assert {span.trace for span in receiver.spans} == {"1" * 32}
    assert receiver.named(GENERATE).parent == "2" * 16


async def test_a_trace_that_its_caller_does_not_record_is_not_recorded(receiver: OtlpReceiver, model: Path) -> None:
    async with services(receiver, model) as frontend:
        await collect(frontend.stub.Generate(make_request(max_tokens=1), metadata=[("traceparent", NOT_SAMPLED)]))
    assert receiver.spans == []


async def test_a_sample_ratio_of_zero_records_only_what_callers_record(receiver: OtlpReceiver, model: Path) -> None:
    tracing = TracingConfig(endpoint=receiver.endpoint, sample_ratio=0.0)
    async with services(receiver, model, tracing=tracing) as frontend:
        await frontend.outputs(max_tokens=1)
        await collect(frontend.stub.Generate(make_request(max_tokens=1), metadata=[("traceparent", SAMPLED)]))
    assert {span.trace for span in receiver.spans} == {TRACE}


async def test_each_sequence_of_a_request_has_spans_in_the_engine(receiver: OtlpReceiver, model: Path) -> None:
    async with services(receiver, model) as frontend:
        await frontend.outputs(max_tokens=2, n=2)
    parent = receiver.named("frontend.request")
    decodes = [span for span in receiver.spans if span.name == "engine.decode"]
    assert [span.parent for span in decodes] == [parent.id] * 2
    assert parent.attributes["gen_ai.usage.output_tokens"] == 4


async def test_a_failed_request_is_an_error_with_its_code(receiver: OtlpReceiver, model: Path) -> None:
    async with services(receiver, model) as frontend:
        await failure(frontend.generate(token_ids=pb.TokenIds(ids=[VOCAB])))
    assert receiver.named("frontend.request").error == "INVALID_ARGUMENT"
    # OpenTelemetry's conventions do not count client errors as errors of the server's span.
    assert receiver.named(GENERATE).error == ""
    assert receiver.named(GENERATE).attributes["rpc.grpc.status_code"] == 3


async def test_http_requests_are_traced_except_scrapes_and_probes(receiver: OtlpReceiver, model: Path) -> None:
    async with services(receiver, model, http=HttpConfig(host="127.0.0.1", port=0)) as frontend:
        port = frontend.frontend.http_port
        for path in ("/health", "/metrics", "/nothing"):
            await get(port, path, headers=f"traceparent: {SAMPLED}\r\n")
    [span] = receiver.spans
    assert (span.name, span.parent) == ("GET /nothing", CALLER)
    assert span.attributes["http.response.status_code"] == 404


async def test_a_collector_that_is_away_disturbs_no_request(model: Path) -> None:
    nowhere = OtlpReceiver()
    nowhere.endpoint = "127.0.0.1:1"
    async with services(nowhere, model) as frontend:
        outputs = await frontend.outputs(max_tokens=3)
    assert sum(len(output.token_ids) for output in outputs) == 3


async def get(port: int, path: str, *, headers: str = "") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n".encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer
