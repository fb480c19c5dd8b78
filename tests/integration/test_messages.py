"""``/v1/messages`` with the published Anthropic client, in front of a fake engine whose output text the test sets."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from penstock.common.v1 import finish_pb2
from penstock_frontend.config import AuthConfig, ModelConfig
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import eventually
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.small_tokenizers import EOS, byte_level, ids_of
from tests.fakes.patience import PATIENCE

TOKENIZER = byte_level()
HI: Any = {"role": "user", "content": "hi"}
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
WEATHER: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln 🙂"}}\n</tool_call>'
CALLS = f'{CALL}\n<tool_call>\n{{"name": "weather", "arguments": {{}}}}\n</tool_call>'
THOUGHTFUL = f"<think>\nA city.\n</think>\n\nLet me look.\n{CALLS}"
RESOURCES = finish_pb2.RequestError(
    code="RESOURCE_EXHAUSTED", message="it needs more than there is", reason="KV_CACHE_TOO_SMALL"
)


OLDER = {"temperature": 0.5, "top_k": 7, "top_p": 0.5}
"""Fields that older clients send."""


class Api:
    """A frontend, and Anthropic's client for the frontend, without retries."""

    def __init__(self, server: OpenAIServer, client: anthropic.AsyncAnthropic) -> None:
        self.server = server
        self.http = server.http
        self.client = client

    async def create(self, *messages: Any, **body: Any) -> Any:
        given = {"max_tokens": 1000, "model": "model", "messages": list(messages) or [HI], **body}
        return await self.client.messages.create(**given)

    async def streamed(self, *messages: Any, **body: Any) -> list[Any]:
        return [event async for event in await self.create(*messages, stream=True, **body)]


@asynccontextmanager
async def serving(
    model: Path | ModelConfig, engine: FakeEngine, key: str = "none", **options: Any
) -> AsyncIterator[Api]:
    async with openai_server(model, engines=[engine.address], **options) as server:
        url = f"http://127.0.0.1:{server.port}"
        plain = anthropic.DefaultAsyncHttpxClient(verify=False)
        async with anthropic.AsyncAnthropic(
            base_url=url, api_key=key, max_retries=0, timeout=PATIENCE, http_client=plain
        ) as client:
            yield Api(server, client)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(vocab_size=TOKENIZER.get_vocab_size(), max_model_len=4096) as engine:
        [engine.eos_token_id] = ids_of(EOS)
        yield engine


@pytest.fixture
async def api(engine: FakeEngine, chatml: Path) -> AsyncIterator[Api]:
    async with serving(chatml, engine) as server:
        yield server


@pytest.fixture
async def stepped(manual: FakeEngine, chatml: Path) -> AsyncIterator[Api]:
    manual.script = lambda _: ids_of("abcdef")
    async with serving(chatml, manual) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(chatml: Path) -> AsyncIterator[Api]:
    """Yield a server for tests that do not change its state."""
    engine = FakeEngine(vocab_size=TOKENIZER.get_vocab_size())
    await engine.start()
    async with serving(chatml, engine) as server:
        yield server
    await engine.kill()


def says(engine: FakeEngine, text: str) -> None:
    engine.script = lambda _: ids_of(text + EOS)


def prompts(engine: FakeEngine) -> list[str]:
    return [TOKENIZER.decode(request.prompt_token_ids, skip_special_tokens=False) for request in engine.requests]


async def test_an_answer_is_a_message(api: Api, engine: FakeEngine) -> None:
    says(engine, "Hello!")
    answer = await api.create(system="Be kind.", metadata={"user_id": "x"}, extra_body=OLDER)
    assert isinstance(answer, anthropic.types.Message)
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "model")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    [block] = answer.content
    assert (block.type, block.text) == ("text", "Hello!")
    assert answer.id.startswith("msg-")
    assert answer._request_id in answer.id
    [prompt] = prompts(engine)
    assert prompt == f"<|im_start|>system\nBe kind.<|im_end|>\n{PROMPT}"
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == len(ids_of(prompt))
    assert answer.usage.output_tokens == len(ids_of("Hello!")) + 1
    params = engine.requests[0].sampling_params
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.5, 7, 0.5, 1000)


async def test_minus_one_switches_top_k_off(api: Api, engine: FakeEngine) -> None:
    says(engine, "Hello!")
    await api.create(extra_body={"top_k": -1})
    assert engine.requests[0].sampling_params.top_k == 0


async def test_thoughts_text_and_calls_are_blocks(api: Api, engine: FakeEngine) -> None:
    says(engine, THOUGHTFUL)
    answer = await api.create(tools=[WEATHER], thinking={"type": "enabled"})
    thought, text, first, second = answer.content
    assert (thought.type, thought.thinking.strip(), thought.signature) == ("thinking", "A city.", "")
    assert (text.type, text.text) == ("text", "Let me look.")
    assert (first.type, first.name, first.input) == ("tool_use", "weather", {"city": "Köln 🙂"})
    assert (second.input, first.id != second.id, answer.stop_reason) == ({}, True, "tool_use")
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    alone = await api.create(tools=[WEATHER], tool_choice=choice)
    assert [block.type for block in alone.content] == ["thinking", "text", "tool_use"]


async def test_a_budget_that_cannot_be_held_is_ignored_with_a_warning(api: Api) -> None:
    answer = await api.client.messages.with_raw_response.create(
        model="model", max_tokens=5, messages=[HI], thinking={"type": "enabled", "budget_tokens": 1024}
    )
    assert answer.headers["penstock-warning"].startswith("hint_ignored: thinking.budget_tokens is not enforced")


async def test_a_budget_beside_disabled_thinking_is_refused(api: Api) -> None:
    with pytest.raises(
        anthropic.BadRequestError, match=r"budget_tokens is 7, but thinking\.type is 'disabled'; leave it"
    ):
        await api.create(thinking={"type": "disabled", "budget_tokens": 7})


async def test_a_model_without_thinking_blocks_has_no_thinking_to_bound(chatml: Path, engine: FakeEngine) -> None:
    says(engine, "Hello!")
    plain = ModelConfig(path=str(chatml), served_model_name="model", reasoning_parser="none")
    async with serving(plain, engine) as api:
        answer = await api.create(thinking={"type": "enabled", "budget_tokens": 1})
    assert [block.type for block in answer.content] == ["text"]


async def test_the_events_of_a_stream_are_those_that_the_client_knows(api: Api, engine: FakeEngine) -> None:
    says(engine, THOUGHTFUL)
    events = await api.streamed(tools=[WEATHER])
    kinds = [event.delta.type if event.type == "content_block_delta" else event.type for event in events]
    once = [kind for index, kind in enumerate(kinds) if index == 0 or kinds[index - 1] != kind]
    start, stop = "content_block_start", "content_block_stop"
    assert once == [
        "message_start",
        *(start, "thinking_delta", "signature_delta", stop),
        *(start, "text_delta", stop),
        *(start, "input_json_delta", stop) * 2,
        "message_delta",
        "message_stop",
    ]
    begin, end = events[0].message, events[-2]
    assert (begin.content, begin.stop_reason) == ([], None)
    assert begin.usage.input_tokens == len(ids_of(prompts(engine)[0]))
    assert (end.delta.stop_reason, end.usage.output_tokens) == ("tool_use", len(ids_of(THOUGHTFUL)) + 1)


async def test_a_stream_put_together_by_the_client_is_the_answer_in_one_piece(api: Api, engine: FakeEngine) -> None:
    says(engine, THOUGHTFUL)
    whole = (await api.create(tools=[WEATHER])).to_dict()
    async with api.client.messages.stream(model="model", max_tokens=1000, messages=[HI], tools=[WEATHER]) as stream:
        streamed = (await stream.get_final_message()).to_dict()
    for message in (whole, streamed):
        message.pop("id")
        message.pop("_request_id", None)
        message.pop("stop_details", None)
        for block in message["content"]:
            block.pop("id", None)
    assert streamed == whole


async def test_results_of_tools_are_the_next_turn(api: Api, engine: FakeEngine) -> None:
    says(engine, THOUGHTFUL)
    first = await api.create(tools=[WEATHER])
    one, two = (block for block in first.content if block.type == "tool_use")
    results = [
        {"type": "tool_result", "tool_use_id": one.id, "content": "rain"},
        {"type": "tool_result", "tool_use_id": two.id, "content": [{"type": "text", "text": "sun"}], "is_error": False},
        {"type": "text", "text": "Well?"},
    ]
    says(engine, "It rains.")
    turns = [HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = await api.create(*turns, tools=[WEATHER])
    assert second.content[0].text == "It rains."
    prompt = prompts(engine)[-1]
    assert "A city." in prompt.partition("<|im_start|>assistant")[2]
    assert prompt.count("<tool_call>\n{") == 3, "one of the tools' description, two of the calls"
    order = ["<tool_response>\nrain\n</tool_response>", "<tool_response>\nsun\n</tool_response>", "user\nWell?"]
    places = [prompt.index(part) for part in order]
    assert places == sorted(places)


async def test_an_answer_goes_on_with_what_was_begun(api: Api, engine: FakeEngine) -> None:
    says(engine, " Ada.")
    answer = await api.create(HI, {"role": "assistant", "content": "I am"})
    assert answer.content[0].text == " Ada."
    assert prompts(engine) == [f"{PROMPT}I am"]


async def test_what_the_system_says_stands_first_and_nothing_of_billing(api: Api, engine: FakeEngine) -> None:
    says(engine, "x")
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "Be kind."}]
    await api.create(HI, {"role": "system", "content": "Be brief."}, system=system)
    assert prompts(engine) == [f"<|im_start|>system\nBe kind.\nBe brief.<|im_end|>\n{PROMPT}"]


async def test_the_end_has_its_reason(api: Api, engine: FakeEngine) -> None:
    says(engine, "one two three")
    cut = await api.create(max_tokens=2)
    assert cut.stop_reason == "max_tokens"
    stopped = await api.create(stop_sequences=[" two"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", " two", "one")


async def test_a_tool_that_must_be_called_is_a_constraint(api: Api, engine: FakeEngine) -> None:
    says(engine, CALL)
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        answer = await api.create(tools=[WEATHER], tool_choice=choice)
        assert [block.type for block in answer.content] == ["tool_use"]
    assert all(request.sampling_params.structured_output.structural_tag for request in engine.requests)
    await api.create(tools=[WEATHER], tool_choice={"type": "none"})
    assert "weather" not in prompts(engine)[-1]


async def test_a_form_of_the_answer_is_a_constraint(api: Api, engine: FakeEngine) -> None:
    says(engine, "{}")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await api.create(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(engine.requests[0].sampling_params.structured_output.json_schema) == schema


async def test_thinking_can_be_turned_off(api: Api, engine: FakeEngine) -> None:
    says(engine, "x")
    await api.create(thinking={"type": "disabled"})
    assert prompts(engine)[0].endswith("<think>\n\n</think>\n\n")


async def test_tokens_are_counted(api: Api, engine: FakeEngine) -> None:
    says(engine, "x")
    body: dict[str, Any] = {"messages": [HI], "system": [{"type": "text", "text": "Be kind."}], "tools": [WEATHER]}
    counted = await api.client.messages.count_tokens(model="model", **body)
    assert engine.requests == []
    answer = await api.create(**body)
    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


async def test_a_client_that_hangs_up_ends_the_work(stepped: Api, manual: FakeEngine) -> None:
    starting = asyncio.create_task(stepped.create(stream=True))
    await manual.until(lambda e: e.running)
    manual.step()
    stream = await starting
    await stream.close()
    await manual.until(lambda e: e.aborted)
    waiting = asyncio.create_task(stepped.create())
    await manual.until(lambda e: e.running)
    waiting.cancel()
    await manual.until(lambda e: not e.running)
    await eventually(lambda: stepped.server.num_live == 0)


async def test_the_models_are_listed_for_anthropics_client(api: Api) -> None:
    [model] = [each async for each in await api.client.models.list()]
    assert (model.id, model.display_name, model.type, model.lifecycle) == ("model", "model", "model", "active")
    assert model.max_input_tokens
    assert model.created_at.tzinfo is not None
    assert await api.client.models.retrieve("model") == model
    with pytest.raises(anthropic.NotFoundError):
        await api.client.models.retrieve("other")
    for wrong in ({"limit": 0}, {"after_id": "other"}):
        with pytest.raises(anthropic.BadRequestError, match=next(iter(wrong))):
            await api.client.models.list(**wrong)  # type: ignore[arg-type]
    # OpenAI's clients get OpenAI's format from the same path.
    assert (await api.http.get("/v1/models")).json()["object"] == "list"


async def test_an_error_in_the_middle_is_raised_by_the_client(stepped: Api, manual: FakeEngine) -> None:
    reading = asyncio.create_task(stepped.streamed())
    await manual.until(lambda e: e.running)
    manual.step()
    await eventually(lambda: manual.num_steps == 1)
    manual.finish_all(finish_pb2.FINISH_REASON_ERROR, RESOURCES)
    with pytest.raises(anthropic.APIStatusError, match="needs more than there is") as caught:
        await reading
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "rate_limit_error")


async def test_a_key_is_asked_for_in_the_protocols_own_header(engine: FakeEngine, chatml: Path, tmp_path: Path) -> None:
    says(engine, "x")
    (tmp_path / "keys.txt").write_text("sk-alice-0123456789 name=alice tenant=acme\n")
    options: dict[str, Any] = {"auth": AuthConfig(api_keys=str(tmp_path / "keys.txt"))}
    async with serving(chatml, engine, "sk-alice-0123456789", **options) as api:
        await api.create()
        assert engine.requests[0].tenant == "acme"
    async with serving(chatml, engine, "sk-wrong-0123456789", **options) as api:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await api.create()
        body: Any = caught.value.body
        assert body["error"]["type"] == "authentication_error"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": "hi"}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"messages": [{"role": "boss", "content": "a"}]}, "messages[0].role is 'boss'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].source.type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages[0].content[0].source",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [HI, {"role": "assistant", "content": [{"type": "tool_use"}]}, HI]},
            "messages[1].content[0].name",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"name": ""}]}, "tools[0].name is empty"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type is 'some'; known: auto, any, none, tool"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice names 'x'"),
        ({"thinking": {"type": "deep"}}, "thinking.type is 'deep'"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported; use tools"),
        ({"container": "c"}, "container is not supported; use tools"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"messages": [{"role": "user", "content": "a " * 300}]}, "messages"),
    ],
    ids=str,
)
async def test_a_wrong_field_is_named(shared: Api, body: Any, told: str) -> None:
    given = {"model": "model", "max_tokens": 5, "messages": [HI], **body}
    paths = ["/v1/messages", *(["/v1/messages/count_tokens"] if set(body) & {"system", "mcp_servers"} else [])]
    for path in paths:
        for stream in (False, True):
            response = await shared.http.post(path, json={**given, "stream": stream})
            answer = response.json()
            assert (response.status_code, answer["type"]) == (400, "error")
            assert answer["error"]["type"] == "invalid_request_error"
            assert told in answer["error"]["message"]
            assert answer["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert shared.server.num_live == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_errors_are_those_that_the_client_knows(shared: Api) -> None:
    with pytest.raises(anthropic.BadRequestError, match="tools"):
        await shared.create(tools=[{"name": "", "input_schema": {}}])
    with pytest.raises(anthropic.NotFoundError, match="other"):
        await shared.create(model="other")
    wrong = await shared.http.get("/v1/messages")
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
