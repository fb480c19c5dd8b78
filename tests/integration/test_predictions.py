"""Predictions and drafts in clients' answers, in front of an engine that outputs several tokens per step."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.common.v1 import stats_pb2
from penstock.enginecore.v1 import messages_pb2 as engine_pb
from penstock.inference.v1 import messages_pb2 as pb
from penstock_client import AsyncClient
from penstock_client import SamplingParams as ClientSampling
from penstock_common.errors import InvalidArgument
from tests.fakes.engines.fake_engine import FakeEngine, token_at
from tests.fakes.frontends.frontend_server import FrontendServer, failure, make_request
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.small_tokenizers import byte_level, ids_of

TOKENIZER = byte_level()
VOCAB = TOKENIZER.get_vocab_size()
HI: Any = [{"role": "user", "content": "hi"}]


def drafts(output: engine_pb.EngineCoreOutput) -> engine_pb.EngineCoreOutput:
    """Add statistics to the last output: seven drafted tokens, of which four were accepted."""
    if output.finish_reason:
        output.spec_decoding_stats.CopyFrom(
            stats_pb2.SpecDecodingStats(num_drafts=2, num_draft_tokens=7, num_accepted_tokens=4)
        )
    return output


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(vocab_size=VOCAB, max_model_len=128) as engine:
        yield engine


@pytest.fixture
async def api(engine: FakeEngine, chatml: Path) -> AsyncIterator[OpenAIServer]:
    async with openai_server(chatml, engines=[engine.address]) as server:
        yield server


async def test_a_prediction_reaches_the_engine_as_what_goes_on_behind_the_prompt(
    frontend: FrontendServer, engine: FakeEngine
) -> None:
    await frontend.outputs("hello", max_tokens=2, prediction=pb.Prediction(text=" world"))
    await frontend.outputs("hello", max_tokens=2, prediction=pb.Prediction(token_ids=pb.TokenIds(ids=[5, 6])))
    await frontend.outputs("hello", max_tokens=2, num_speculative_tokens=0)
    first, second, third = engine.requests
    assert list(first.prediction_token_ids) == ids_of(" world")  # without the begin-of-sequence token
    assert list(second.prediction_token_ids) == [5, 6]
    assert not third.prediction_token_ids
    assert third.sampling_params.HasField("num_speculative_tokens")
    assert not first.sampling_params.HasField("num_speculative_tokens")


async def test_all_sequences_of_a_request_share_its_prediction(frontend: FrontendServer, engine: FakeEngine) -> None:
    await frontend.outputs("hello", n=3, seed=1, max_tokens=2, prediction=pb.Prediction(text="abc"))
    assert [list(request.prediction_token_ids) for request in engine.requests] == [ids_of("abc")] * 3


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"prediction": pb.Prediction()}, "prediction", "prediction is not set: give text or token_ids"),
        (
            {"prediction": pb.Prediction(text="")},
            "prediction.text",
            "prediction.text is empty: there is no prediction",
        ),
        (
            {"prediction": pb.Prediction(token_ids=pb.TokenIds())},
            "prediction.token_ids.ids",
            "prediction.token_ids.ids is empty: there is no prediction",
        ),
        (
            {"prediction": pb.Prediction(token_ids=pb.TokenIds(ids=[1, VOCAB]))},
            "prediction.token_ids.ids",
            f"prediction.token_ids.ids[1] is {VOCAB}; it must be below the vocabulary size, {VOCAB}",
        ),
        (
            {"prediction": pb.Prediction(token_ids=pb.TokenIds(ids=[1] * 129))},
            "prediction",
            "prediction is 129 tokens; max_model_len is 128",
        ),
        (
            {"prediction": pb.Prediction(text="a" * 9000)},
            "prediction.text",
            "prediction.text has 9000 characters; for max_model_len 128, at 64 characters a token, the limit is 8192",
        ),
        (
            {"num_speculative_tokens": 33},
            "sampling_params.num_speculative_tokens",
            "sampling_params.num_speculative_tokens is 33; it must be from 0 to 32",
        ),
    ],
    ids=str,
)
async def test_a_wrong_prediction_is_named(
    frontend: FrontendServer, fields: dict[str, Any], field: str, message: str
) -> None:
    error = await failure(frontend.stub.Generate(make_request("hello", **fields)))
    assert isinstance(error, InvalidArgument)
    assert (error.field, error.message) == (field, message)


@pytest.mark.parametrize("tokens_per_step", [2, 5, 40])
@pytest.mark.parametrize("fields", [{}, {"stop": ("e", "th")}, {"logprobs": 1}, {"stream_interval": 4}], ids=str)
async def test_an_engine_that_gives_several_tokens_at_once_gives_the_same(
    frontend: FrontendServer, engine: FakeEngine, fields: dict[str, Any], tokens_per_step: int
) -> None:
    single = await frontend.outputs("hello", seed=3, max_tokens=30, **fields)
    engine.tokens_per_step = tokens_per_step
    several = await frontend.outputs("hello", seed=3, max_tokens=30, **fields)
    for name in ("text", "token_ids"):
        one, many = ([part for output in outputs for part in getattr(output, name)] for outputs in (single, several))
        assert one == many
    one, many = ([value for output in outputs for value in output.logprobs.logprobs] for outputs in (single, several))
    assert one == many
    assert (single[-1].usage, single[-1].finish_reason, single[-1].stop_reason) == (
        several[-1].usage,
        several[-1].finish_reason,
        several[-1].stop_reason,
    )


async def test_usage_has_the_drafts_in_every_protocol(engine: FakeEngine, api: OpenAIServer) -> None:
    engine.mangle = drafts
    outputs = await api.server.outputs("hello", seed=1, max_tokens=8)
    usage = outputs[-1].usage
    assert (usage.completion_tokens, usage.accepted_draft_tokens, usage.rejected_draft_tokens) == (8, 4, 3)
    answer = await api.client.completions.create(model="model", prompt="hello", max_tokens=8, n=2)
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (8, 6)
    stream = await api.client.chat.completions.create(
        model="model", messages=HI, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    details = [chunk async for chunk in stream][-1].usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (4, 3)


async def test_without_drafts_usage_says_nothing_of_them(api: OpenAIServer) -> None:
    answer = await api.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2})
    assert "completion_tokens_details" not in answer.json()["usage"]


@pytest.mark.parametrize(
    "content", ["def f(): pass", [{"type": "text", "text": "def f()"}, {"type": "text", "text": ": pass"}]], ids=str
)
async def test_openais_prediction_is_taken(api: OpenAIServer, engine: FakeEngine, content: Any) -> None:
    prediction: Any = {"type": "content", "content": content}
    await api.client.chat.completions.create(model="model", messages=HI, max_tokens=2, prediction=prediction)
    extra = {"prediction": prediction, "num_speculative_tokens": 3}
    await api.client.completions.create(model="model", prompt="x", max_tokens=2, extra_body=extra)
    await api.client.responses.create(model="model", input="hi", max_output_tokens=2, extra_body=extra)
    assert [list(request.prediction_token_ids) for request in engine.requests] == [ids_of("def f(): pass")] * 3
    assert [request.sampling_params.num_speculative_tokens for request in engine.requests] == [0, 3, 3]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"prediction": {"type": "text", "content": "a"}},
            "prediction.type",
            "prediction.type is 'text'; it must be 'content'",
        ),
        (
            {"prediction": {"type": "content", "content": ""}},
            "prediction.content",
            "prediction.content is empty: there is no prediction",
        ),
        (
            {"prediction": {"type": "content", "content": []}},
            "prediction.content",
            "prediction.content is empty: there is no prediction",
        ),
        (
            {"prediction": {"type": "content", "content": [{"type": "image_url"}]}},
            "prediction.content[0].type",
            "prediction.content[0].type is 'image_url'; only 'text' is supported",
        ),
        (
            {"prediction": {"type": "content", "content": "a" * 200}},
            "prediction",
            "prediction is 200 tokens; max_model_len is 128",
        ),
        ({"prediction": {"type": "content"}}, "prediction.content", None),
        ({"prediction": "a"}, "prediction", None),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens", None),
        (
            {"num_speculative_tokens": 50},
            "num_speculative_tokens",
            "num_speculative_tokens is 50; it must be from 0 to 32",
        ),
    ],
    ids=str,
)
async def test_what_is_wrong_with_openais_prediction_is_named(
    api: OpenAIServer, path: str, fields: dict[str, Any], param: str, message: str | None
) -> None:
    prompt = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}.get(path, {"messages": HI})
    answer = await api.http.post(path, json={**prompt, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message is None or error["message"] == message


async def test_the_client_has_both(frontend: FrontendServer, engine: FakeEngine) -> None:
    engine.mangle = drafts
    async with AsyncClient(f"127.0.0.1:{frontend.frontend.port}") as client:
        sampling = ClientSampling(seed=1, max_tokens=8, num_speculative_tokens=4)
        [output] = await client.generate("hello", sampling, prediction="abc")
        [again] = await client.generate("hello", sampling, prediction=[7, 8])
    assert output.token_ids == again.token_ids == [token_at(1, i, vocab_size=VOCAB) for i in range(8)]
    assert output.usage is not None
    assert (output.usage.accepted_draft_tokens, output.usage.rejected_draft_tokens) == (4, 3)
    assert [list(request.prediction_token_ids) for request in engine.requests] == [ids_of("abc"), [7, 8]]
    assert engine.requests[0].sampling_params.num_speculative_tokens == 4
