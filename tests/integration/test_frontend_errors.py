"""Wrong input on every public RPC: the error has a status and names the field, and the server continues to serve."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.common.v1 import finish_pb2, tensor_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import Internal, InvalidArgument, NotFound, ResourceExhausted, Unimplemented
from penstock_frontend.config import LimitsConfig
from tests.fakes.engines.fake_engine import FakeEngine, token_at
from tests.fakes.frontends.frontend_server import FrontendServer, collect, failure, make_request
from tests.fakes.models.small_tokenizers import byte_level

VOCAB = byte_level().get_vocab_size()


def ids(*token_ids: int) -> pb.TokenIds:
    return pb.TokenIds(ids=token_ids)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(), "prompt"),
        (make_request(""), "text"),
        (make_request(token_ids=ids()), "token_ids.ids"),
        (make_request(token_ids=ids(1, VOCAB)), "token_ids.ids"),
        (make_request(token_ids=ids(1, 2**32 - 1)), "token_ids.ids"),
        (make_request("x" * 500), "prompt"),
        (make_request(request_id="r" * 257), "request_id"),
        (make_request(cache_salt="s" * 257), "cache_salt"),
        (make_request(temperature=-1), "sampling_params.temperature"),
        (make_request(min_tokens=1000), "sampling_params.min_tokens"),
        (make_request(stop_token_ids=[VOCAB]), "sampling_params.stop_token_ids[0]"),
        (make_request(bad_words=["x", ""]), "sampling_params.bad_words[1]"),
        (make_request(structured_output={"choice": {}}), "sampling_params.structured_output"),
        (make_request(output_kind=99), "sampling_params.output_kind"),
        (make_request(routing=pb.RoutingHints(data_parallel_rank=5)), "routing.data_parallel_rank"),
        (make_request(routing=pb.RoutingHints(tenant="t" * 257)), "routing.tenant"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_wrong_field_of_generate_is_named(
    frontend: FrontendServer, request_: pb.GenerateRequest, field: str
) -> None:
    error = await failure(frontend.stub.Generate(request_))
    assert isinstance(error, InvalidArgument)
    assert error.field == field
    assert await frontend.outputs(max_tokens=1)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (make_request(lora="adapter"), "lora"),
        (
            pb.GenerateRequest(embeds=tensor_pb2.Tensor(dtype=1, shape=[1, 1], shared_memory={"name": "x"})),
            "embeds.inline",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_field_of_a_later_feature_is_refused_by_name(
    frontend: FrontendServer, request_: pb.GenerateRequest, field: str
) -> None:
    error = await failure(frontend.stub.Generate(request_))
    assert isinstance(error, Unimplemented)
    assert error.field == field


@pytest.mark.parametrize(
    ("call", "kind", "field"),
    [
        (lambda stub: stub.Generate(make_request(model="other")), NotFound, "model"),
        (lambda stub: stub.Tokenize(pb.TokenizeRequest(model="other")), NotFound, "model"),
        (lambda stub: stub.Detokenize(pb.DetokenizeRequest(model="other")), NotFound, "model"),
        (lambda stub: stub.GetModel(pb.GetModelRequest(name="other")), NotFound, "name"),
        (lambda stub: stub.GetModel(pb.GetModelRequest()), NotFound, "name"),
        (lambda stub: stub.Tokenize(pb.TokenizeRequest(text="x" * 5_000_000)), InvalidArgument, "text"),
        (lambda stub: stub.Detokenize(pb.DetokenizeRequest(token_ids=[VOCAB])), InvalidArgument, "token_ids"),
    ],
)
async def test_wrong_input_of_other_methods_is_named(
    frontend: FrontendServer, call: Callable[[Any], Any], kind: type[Exception], field: str
) -> None:
    error = await failure(call(frontend.stub))
    assert isinstance(error, kind)
    assert error.field == field


async def test_an_unknown_model_is_answered_with_the_known_one(frontend: FrontendServer) -> None:
    error = await failure(frontend.generate(model="modle"))
    assert error.message == "model is 'modle'; known: model; did you mean 'model'?"


async def test_metadata_that_is_no_number_is_named(frontend: FrontendServer) -> None:
    error = await failure(frontend.stub.Generate(make_request(), metadata=(("x-penstock-priority", "high"),)))
    assert isinstance(error, InvalidArgument)
    assert error.field == "x-penstock-priority"


async def test_the_prompts_length_and_the_limit_are_in_the_message(frontend: FrontendServer) -> None:
    error = await failure(frontend.generate(token_ids=ids(*[1] * 300)))
    assert error.message == "prompt is 300 tokens; max_model_len is 128"
    assert error.reason == "PROMPT_TOO_LONG"


@pytest.mark.parametrize("method", ["LoadLora", "UnloadLora", "ListLoras", "PinLora"])
async def test_calls_about_adapters_are_refused_where_none_are_served(frontend: FrontendServer, method: str) -> None:
    error = await failure(getattr(frontend.admin, method)(getattr(admin_pb, f"{method}Request")()))
    assert isinstance(error, Unimplemented)
    assert error.message == "LoRA adapters are not supported: lora.enabled is false; set lora.enabled to true"


@pytest.mark.parametrize("tenants", [("", ""), ("a", "b")])
async def test_requests_that_clients_call_the_same_run_beside_each_other(model: Path, tenants: tuple[str, str]) -> None:
    engine = FakeEngine(vocab_size=VOCAB, manual=True)
    async with engine, FrontendServer(model, engines=[engine.address]) as frontend:
        routing = [pb.RoutingHints(tenant=tenant) for tenant in tenants]
        calls = [frontend.generate(request_id="same", seed=i, max_tokens=2, routing=r) for i, r in enumerate(routing)]
        await engine.until(lambda e: len(e.running) == 2)
        engine.step()
        calls[0].cancel()
        await engine.until(lambda e: e.aborted)
        engine.step()
        messages = await collect(calls[1])
        assert {message.request_id for message in messages} == {"same"}
        tokens = [token for message in messages for token in message.token_ids]
        assert tokens == [token_at(1, index, vocab_size=VOCAB) for index in range(2)]


async def test_ids_that_clients_chose_cannot_make_two_sequences_the_same_to_an_engine(model: Path) -> None:
    """Relies on the frontend, which appends the request's number and the sequence's index to the client's id."""
    engine = FakeEngine(vocab_size=VOCAB, manual=True)
    async with engine, FrontendServer(model, engines=[engine.address]) as frontend:
        one = asyncio.create_task(collect(frontend.generate(request_id="x-2", seed=5, max_tokens=1)))
        await engine.until(lambda e: len(e.requests) == 1)
        two = asyncio.create_task(collect(frontend.generate(request_id="x", seed=7, n=2, max_tokens=1)))
        await engine.until(lambda e: len(e.requests) == 3)
        assert len(engine.running) == 3
        engine.step()
        assert [list(m.token_ids) for m in await one] == [[token_at(5, 0, vocab_size=VOCAB)]]
        assert len(await two) == 2


async def test_requests_beyond_the_limit_are_refused_with_a_delay(model: Path) -> None:
    engine = FakeEngine(vocab_size=VOCAB, manual=True)
    limits = LimitsConfig(max_requests=2)
    async with engine, FrontendServer(model, engines=[engine.address], limits=limits) as frontend:
        calls = [frontend.generate(max_tokens=1) for _ in range(2)]
        await engine.until(lambda e: len(e.running) == 2)
        error = await failure(frontend.generate())
        assert isinstance(error, ResourceExhausted)
        assert error.retry_after == 1.0
        engine.step()
        for call in calls:
            assert [m async for m in call]


async def test_an_engines_refusal_reaches_the_client_with_all_details(
    engine: FakeEngine, frontend: FrontendServer
) -> None:
    engine.refusal = finish_pb2.RequestError(
        code="RESOURCE_EXHAUSTED", message="the queue is full", field="prompt", reason="QUEUE_FULL", retry_after=2.5
    )
    error = await failure(frontend.generate())
    assert isinstance(error, ResourceExhausted)
    assert (error.message, error.field, error.reason, error.retry_after) == (
        "the queue is full",
        "prompt",
        "QUEUE_FULL",
        2.5,
    )
    engine.refusal = None
    assert await frontend.outputs(max_tokens=1)


async def test_a_request_that_fails_again_and_again_without_details_is_given_up(
    frontend: FrontendServer, engine: FakeEngine
) -> None:
    engine.mangle = lambda output: type(output)(
        request_id=output.request_id, attempt=output.attempt, finish_reason=finish_pb2.FINISH_REASON_ERROR
    )
    error = await failure(frontend.generate())
    assert isinstance(error, Internal)
    assert error.reason == "QUARANTINED"
    assert error.message.endswith("Last loss: the engine failed while it computed this request")
    assert [request.attempt for request in engine.requests] == [0, 1, 2]
