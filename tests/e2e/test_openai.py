"""The OpenAI API and Anthropic's API with the demo model, called by published clients, including Node's."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.fakes.clients import node
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.chat_templates import save_chat_model
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "examples/demo_model/penstock-tiny"
NODE_CLIENT = ROOT / "examples/clients/openai-node"
QUESTION: Any = {"role": "user", "content": "What is 12 + 30?"}
TIMEOUT = PATIENCE


@pytest.fixture(scope="module")
def demo_engine() -> Iterator[str]:
    # Imported here, because only one of the test processes runs these tests.
    from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ExecutorConfig, ModelConfig
    from penstock_enginecore.executor.uniproc import UniprocExecutor
    from penstock_enginecore.structured_output.factory import make_grammar_backend
    from tests.fakes.engines.engine_server import EngineServer

    config = EngineCoreConfig(
        model=ModelConfig(path=str(DEMO_MODEL), served_model_name="model", device="cpu"),
        cache=CacheConfig(num_blocks=256),
        executor=ExecutorConfig(num_threads=1),
    )
    server = EngineServer(config, UniprocExecutor(config), make_grammar_backend).start()
    try:
        yield server.load().address
    finally:
        server.stop()


@pytest.fixture
async def demo(demo_engine: str) -> AsyncIterator[OpenAIServer]:
    async with openai_server(DEMO_MODEL, engines=[demo_engine]) as server:
        yield server


async def test_a_chat_answers_and_streams_the_same(demo: OpenAIServer) -> None:
    body: dict[str, Any] = {"model": "model", "messages": [QUESTION], "temperature": 0, "max_tokens": 20}
    whole = await demo.client.chat.completions.create(**body)
    stream = await demo.client.chat.completions.create(**body, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert "42" in text
    assert (text, whole.choices[0].finish_reason) == (whole.choices[0].message.content, "stop")


async def test_a_response_answers_streams_the_same_and_goes_on(demo: OpenAIServer) -> None:
    body: dict[str, Any] = {"model": "model", "temperature": 0, "max_output_tokens": 20}
    whole = await demo.client.responses.create(**body, input="What is 12 + 30?")
    async with demo.client.responses.stream(**body, input="What is 12 + 30?") as stream:
        streamed = await stream.get_final_response()
    assert "42" in whole.output_text
    assert (streamed.output_text, streamed.status) == (whole.output_text, "completed")
    chat = await demo.client.chat.completions.create(
        model="model",
        messages=[QUESTION, {"role": "assistant", "content": whole.output_text}, QUESTION],
        temperature=0,
        max_tokens=20,
    )
    again = await demo.client.responses.create(**body, input="What is 12 + 30?", previous_response_id=whole.id)
    assert again.output_text == chat.choices[0].message.content


async def test_a_message_of_anthropics_answers_and_streams_the_same(demo: OpenAIServer) -> None:
    chat = await demo.client.chat.completions.create(model="model", messages=[QUESTION], temperature=0, max_tokens=20)
    plain = anthropic.DefaultAsyncHttpxClient(verify=False)
    url = f"http://127.0.0.1:{demo.port}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, http_client=plain) as client:
        body: dict[str, Any] = {"model": "model", "messages": [QUESTION], "max_tokens": 20}
        whole: Any = await client.messages.create(**body, extra_body={"temperature": 0})
        async with client.messages.stream(**body, extra_body={"temperature": 0}) as stream:
            text = "".join([piece async for piece in stream.text_stream])
    assert [block.text for block in whole.content] == [text] == [chat.choices[0].message.content]


async def test_a_schema_holds(demo: OpenAIServer) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    answer = await demo.client.chat.completions.create(
        model="model", messages=[QUESTION], response_format=form, max_tokens=200, seed=1, logprobs=True, top_logprobs=1
    )
    person = json.loads(answer.choices[0].message.content or "")
    assert isinstance(person["name"], str)
    assert person["age"] <= 99


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city now",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
"""Example tool of the documentation page."""


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["required", "named"]
)
async def test_a_tool_that_is_asked_for_is_called_and_its_result_is_read(demo: OpenAIServer, choice: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    body: dict[str, Any] = {"model": "model", "tools": [WEATHER], "temperature": 0, "max_tokens": 200}
    answer = await demo.client.chat.completions.create(**body, messages=messages, tool_choice=choice)
    call = (answer.choices[0].message.tool_calls or [])[0]
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    messages += [
        answer.choices[0].message.model_dump(exclude_none=True),
        *(
            {"role": "tool", "tool_call_id": each.id, "content": "21 degrees"}
            for each in answer.choices[0].message.tool_calls or []
        ),
    ]
    again = await demo.client.chat.completions.create(**body, messages=messages)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens


async def test_with_tools_other_questions_are_answered(demo: OpenAIServer) -> None:
    body: dict[str, Any] = {"model": "model", "tools": [WEATHER], "temperature": 0, "max_tokens": 60}
    answer = await demo.client.chat.completions.create(**body, messages=[QUESTION])
    assert answer.choices[0].message.content == "12 + 30 = 42"
    assert not answer.choices[0].message.tool_calls


async def test_a_prompt_is_scored(demo: OpenAIServer) -> None:
    answer = await demo.client.completions.create(
        model="model", prompt="Once upon a time", echo=True, logprobs=1, max_tokens=0, temperature=0
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert answer.choices[0].text == "Once upon a time"
    assert found.token_logprobs is not None
    assert all(value is not None and value <= 0 for value in found.token_logprobs[1:])


async def test_a_schema_that_cannot_be_enforced_is_refused_by_its_place(demo: OpenAIServer) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    with pytest.raises(openai.BadRequestError, match="not") as caught:
        await demo.client.chat.completions.create(model="model", messages=[QUESTION], response_format=form)
    assert caught.value.param == "response_format.json_schema.schema"


async def test_embeddings_of_a_model_that_generates_are_refused_by_name(demo: OpenAIServer) -> None:
    with pytest.raises(openai.BadRequestError, match="the model does not support embed; it supports generate"):
        await demo.client.embeddings.create(model="model", input="x")


@node.needs_node
async def test_the_client_in_node_works(tmp_path: Path) -> None:
    node.install(NODE_CLIENT)
    model = save_chat_model(tmp_path / "model")
    engine = FakeEngine(vocab_size=byte_level().get_vocab_size())
    async with engine, openai_server(model, engines=[engine.address]) as api:
        process = await asyncio.create_subprocess_exec(
            "node",
            "--test",
            str(NODE_CLIENT / "client.test.mjs"),
            env={**os.environ, "OPENAI_BASE_URL": f"http://127.0.0.1:{api.port}/v1"},
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await asyncio.wait_for(process.communicate(), TIMEOUT)
        await engine.until(lambda e: not e.running)
        assert api.num_live == 0
    assert process.returncode == 0, out.decode()
