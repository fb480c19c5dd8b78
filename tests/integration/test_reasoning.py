"""Constraints of a reasoning model, through both public APIs: a frontend in front of an engine with random weights."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer

from penstock.common.v1 import control_pb2, finish_pb2, sampling_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ExecutorConfig, ModelConfig
from penstock_enginecore.executor.uniproc import UniprocExecutor
from penstock_enginecore.structured_output.factory import make_grammar_backend
from tests.fakes.engines.engine_server import EngineServer
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import FrontendServer, collect, until_states
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.tiny_models import save_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEMO = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}<|assistant|>"
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)
EOS = 1
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
}
HI: Any = {"role": "user", "content": "hi"}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with random weights, and the demo model's tokenizer with two added tokens."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("reasoning")
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_tokens(["<think>", "</think>"])
    size = tokenizer.get_vocab_size()
    save_tiny_model("llama", directory, vocab_size=size, eos_token_id=EOS, max_position_embeddings=1024)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return directory


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path / "tokenizer.json"))


@pytest.fixture(scope="module")
def bias(tokenizer: Tokenizer) -> dict[int, float]:
    """Return a logit bias towards the ends of reasoning and of objects. Without the bias, random weights would generate
    hundreds of tokens.
    """
    return {tokenizer.token_to_id("</think>"): 6.0, tokenizer.token_to_id("}"): 12.0, EOS: 3.0}


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[EngineServer]:
    config = EngineCoreConfig(
        model=ModelConfig(path=str(path), served_model_name="model", device="cpu"),
        cache=CacheConfig(num_blocks=512),
        executor=ExecutorConfig(num_threads=1),
    )
    server = EngineServer(config, UniprocExecutor(config), make_grammar_backend).start().load()
    yield server
    server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(path: Path, engine: EngineServer) -> AsyncIterator[OpenAIServer]:
    async with openai_server(path, engines=[engine.address]) as server:
        yield server


async def chat(api: OpenAIServer, bias: dict[int, float], **body: Any) -> Any:
    body = {"max_tokens": 400, "temperature": 1.0, "seed": 1, "response_format": FORM, **body}
    logit_bias = {str(token): value for token, value in bias.items()}
    return await api.client.chat.completions.create(
        model="model", messages=[HI], logit_bias=logit_bias, timeout=120, **body
    )


def assert_valid(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"a", "b"}
    assert type(value["a"]) is int
    assert type(value["b"]) is bool


async def test_a_schema_holds_behind_the_reasoning_over_http(api: OpenAIServer, bias: dict[int, float]) -> None:
    answer = await chat(api, bias, n=4)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert_valid(choice.message.content)
    assert any(choice.message.reasoning for choice in answer.choices)


async def test_a_stream_tells_reasoning_and_content_apart(api: OpenAIServer, bias: dict[int, float]) -> None:
    whole = (await chat(api, bias, seed=5)).choices[0].message
    deltas = [chunk.choices[0].delta async for chunk in await chat(api, bias, seed=5, stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == whole.content
    reasoning = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
    assert reasoning == (whole.reasoning or "")


async def test_reasoning_that_the_template_has_ended_is_not_waited_for(
    api: OpenAIServer, bias: dict[int, float]
) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    [choice] = (await chat(api, bias, extra_body=extra)).choices
    assert_valid(choice.message.content)
    assert choice.message.reasoning is None


async def test_reasoning_without_end_ends_as_length(api: OpenAIServer, tokenizer: Tokenizer) -> None:
    [choice] = (await chat(api, {tokenizer.token_to_id("</think>"): -100.0, EOS: 100.0}, max_tokens=20)).choices
    assert (choice.finish_reason, choice.message.content) == ("length", "")
    assert choice.message.reasoning


async def test_a_stop_string_ends_the_reasoning_too(api: OpenAIServer, tokenizer: Tokenizer) -> None:
    [token] = tokenizer.encode("a", add_special_tokens=False).ids
    [choice] = (await chat(api, {token: 100.0}, stop=["aaa"])).choices
    assert (choice.finish_reason, choice.stop_reason, choice.message.content) == ("stop", "aaa", "")


async def test_a_tool_that_must_be_called_is_called_behind_the_reasoning(
    api: OpenAIServer, bias: dict[int, float]
) -> None:
    options: Any = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "response_format": None}
    [choice] = (await chat(api, bias, seed=2, **options)).choices
    call = choice.message.tool_calls[0]
    assert call.function.name == "f"
    assert_valid(call.function.arguments)
    assert choice.message.reasoning


def params(bias: dict[int, float], **fields: Any) -> sampling_pb2.SamplingParams:
    constraint = {"json_schema": json.dumps(SCHEMA)}
    values = {"max_tokens": 400, "temperature": 1.0, "seed": 1, "structured_output": constraint, "logit_bias": bias}
    return sampling_pb2.SamplingParams(**{**values, **fields})


async def test_a_schema_holds_behind_the_reasoning_over_grpc(api: OpenAIServer, bias: dict[int, float]) -> None:
    message = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")], sampling_params=params(bias, n=8))
    content, reasoning = dict.fromkeys(range(8), ""), dict.fromkeys(range(8), "")
    for response in await collect(api.server.stub.Chat(message, timeout=60)):
        content[response.index] += response.content
        reasoning[response.index] += response.reasoning
    for text in content.values():
        assert_valid(text)
    assert any(reasoning.values())


@pytest.mark.parametrize("as_text", [True, False])
async def test_a_prompt_that_has_begun_the_reasoning_goes_on_with_it(
    api: OpenAIServer, bias: dict[int, float], tokenizer: Tokenizer, as_text: bool
) -> None:
    prompt = "Say it.<think>\n"
    ids = pb.TokenIds(ids=tokenizer.encode(prompt, add_special_tokens=False).ids)
    asked: dict[str, Any] = {"text": prompt} if as_text else {"token_ids": ids}
    message = pb.GenerateRequest(**asked, sampling_params=params(bias, seed=3))
    outputs = await collect(api.server.stub.Generate(message, timeout=60))
    reasoning, end, content = "".join(output.text for output in outputs).partition("</think>")
    assert reasoning
    assert end
    assert_valid(content)


async def test_a_prompt_without_a_word_of_reasoning_may_be_answered_at_once(
    api: OpenAIServer, bias: dict[int, float], tokenizer: Tokenizer
) -> None:
    without = {**bias, tokenizer.token_to_id("<think>"): -100.0}
    message = pb.GenerateRequest(text="Say it.", sampling_params=params(without))
    outputs = await collect(api.server.stub.Generate(message, timeout=60))
    assert_valid("".join(output.text for output in outputs))


async def test_a_request_that_moves_in_its_reasoning_is_told_so_again(path: Path, tokenizer: Tokenizer) -> None:
    size = tokenizer.get_vocab_size()
    async with (
        FakeEngine("a", vocab_size=size, max_model_len=512, manual=True) as a,
        FakeEngine("b", vocab_size=size, max_model_len=512, manual=True) as b,
        FrontendServer(path, engines=[a.address, b.address]) as frontend,
    ):
        serving = control_pb2.ENGINE_STATE_SERVING
        await until_states(frontend, {"a": serving, "b": serving})
        message = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")], sampling_params=params({}))
        call = asyncio.create_task(collect(frontend.stub.Chat(message, timeout=60)))
        async with asyncio.timeout(20):
            while not (a.running or b.running):
                await asyncio.sleep(0.005)
        first, second = (a, b) if a.running else (b, a)
        first.step()
        first.step()
        first.break_streams()
        await second.until(lambda e: e.running)
        [moved] = second.requests
        assert (moved.attempt, len(moved.prior_output_token_ids)) == (1, 2)
        assert json.loads(moved.reasoning_parser_kwargs) == {
            "begin_token_id": tokenizer.token_to_id("<think>"),
            "end_token_id": tokenizer.token_to_id("</think>"),
        }
        assert (moved.HasField("reasoning_ended"), moved.reasoning_ended) == (True, False)
        while second.running:
            second.step()
        assert (await call)[-1].finish_reason == finish_pb2.FINISH_REASON_LENGTH


def silent(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a logit bias against every end token, so that only the budget ends the reasoning."""
    pushes = {tokenizer.token_to_id("</think>"): -100.0, EOS: -100.0}
    return {"response_format": None, "bias": pushes, "max_tokens": 40}


async def posted(api: OpenAIServer, path: str, body: dict[str, Any]) -> Any:
    answer = await api.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("budget", [0, 1, 7])
async def test_reasoning_ends_at_its_budget(api: OpenAIServer, tokenizer: Tokenizer, budget: int) -> None:
    end = tokenizer.token_to_id("</think>")
    options = {"thinking_token_budget": budget, "return_token_ids": True}
    answer = await chat(api, n=4, extra_body=options, **silent(tokenizer))
    for choice in answer.choices:
        assert choice.token_ids.index(end) == budget
        assert choice.message.content
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 4


async def test_a_budget_that_is_not_reached_and_minus_one_change_no_token(
    api: OpenAIServer, bias: dict[int, float]
) -> None:
    plain = await chat(api, bias, response_format=None, extra_body={"return_token_ids": True})
    for budget in (400, -1):
        options = {"return_token_ids": True, "thinking_token_budget": budget}
        same = await chat(api, bias, response_format=None, extra_body=options)
        assert same.choices[0].token_ids == plain.choices[0].token_ids


async def test_a_schema_holds_behind_reasoning_that_its_budget_ended(
    api: OpenAIServer, bias: dict[int, float], tokenizer: Tokenizer
) -> None:
    never = {**bias, tokenizer.token_to_id("</think>"): -100.0}
    answer = await chat(api, never, n=4, extra_body={"thinking_token_budget": 3, "return_token_ids": True})
    for choice in answer.choices:
        assert choice.token_ids.index(tokenizer.token_to_id("</think>")) == 3
        assert_valid(choice.message.content)


async def test_reasoning_that_the_template_has_ended_has_no_budget(api: OpenAIServer, tokenizer: Tokenizer) -> None:
    extra = {"thinking_token_budget": 2, "return_token_ids": True, "chat_template_kwargs": {"enable_thinking": False}}
    [choice] = (await chat(api, extra_body=extra, **silent(tokenizer))).choices
    assert tokenizer.token_to_id("</think>") not in choice.token_ids


async def test_a_budget_holds_in_messages_responses_and_completions(api: OpenAIServer, tokenizer: Tokenizer) -> None:
    bias = {str(token): push for token, push in silent(tokenizer)["bias"].items()}
    said = {"model": "model", "max_tokens": 30, "messages": [HI]}
    thinking = {"type": "enabled", "budget_tokens": 5}
    message = await posted(api, "/v1/messages", {**said, "thinking": thinking})
    thought = message["content"][0]
    assert thought["type"] == "thinking"
    response = await posted(
        api,
        "/v1/responses",
        {
            "model": "model",
            "input": "hi",
            "max_output_tokens": 30,
            "seed": 1,
            "logit_bias": bias,
            "thinking_token_budget": 5,
        },
    )
    # In usage, the tag that ends the reasoning counts as a reasoning token.
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 6
    options = {"logit_bias": bias, "thinking_token_budget": 5, "return_token_ids": True, "max_tokens": 30, "seed": 1}
    text = await posted(api, "/v1/completions", {"model": "model", "prompt": "Say it.<think>\n", **options})
    assert text["choices"][0]["token_ids"].index(tokenizer.token_to_id("</think>")) == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_counts_the_tokens_of_reasoning(api: OpenAIServer, tokenizer: Tokenizer, stream: bool) -> None:
    end, body = (
        tokenizer.token_to_id("</think>"),
        {"model": "model", "messages": [HI], "max_tokens": 40, "n": 3, "seed": 2},
    )
    asked = {**body, "logit_bias": {str(end): 6.0}, "return_token_ids": True}
    whole = await posted(api, "/v1/chat/completions", asked)
    ids = [choice["token_ids"] for choice in whole["choices"]]
    ended = [of.index(end) + 1 if end in of else len(of) for of in ids]
    assert 3 < sum(ended) < sum(map(len, ids))
    usage = whole["usage"]
    if stream:
        chunks = [
            json.loads(line.removeprefix("data: "))
            for line in (
                await api.http.post(
                    "/v1/chat/completions",
                    json={**asked, "stream": True, "stream_options": {"include_usage": True}},
                )
            ).text.splitlines()
            if line.startswith("data: {")
        ]
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        usage = chunks[-1]["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == sum(ended)
    assert usage["completion_tokens"] == sum(map(len, ids))


async def test_a_budget_holds_over_grpc(api: OpenAIServer, tokenizer: Tokenizer) -> None:
    asked = sampling_pb2.SamplingParams(
        max_tokens=30, seed=1, logit_bias=silent(tokenizer)["bias"], thinking_token_budget=4
    )
    message = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")], sampling_params=asked)
    outputs = await collect(api.server.stub.Chat(message, timeout=60))
    token_ids = [token for output in outputs for token in output.token_ids]
    assert token_ids.index(tokenizer.token_to_id("</think>")) == 4
