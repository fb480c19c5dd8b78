"""``/v1/responses`` with the published OpenAI client and its typed events.

The fake engine's output text is set by the test.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from penstock.common.v1 import finish_pb2
from penstock.common.v1 import structured_output_pb2 as pb
from penstock_frontend.config import ResponsesConfig
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import eventually
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.small_tokenizers import EOS, byte_level, ids_of

TOKENIZER = byte_level()
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln 🙂"}}\n</tool_call>'
CALLS = f'{CALL}\n<tool_call>\n{{"name": "weather", "arguments": {{}}}}\n</tool_call>'
THOUGHTFUL = f"<think>\nA city.\n</think>\n\nLet me look.\n{CALLS}"


RESOURCES = finish_pb2.RequestError(
    code="RESOURCE_EXHAUSTED", message="it needs more than there is", reason="KV_CACHE_TOO_SMALL"
)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(vocab_size=TOKENIZER.get_vocab_size(), max_model_len=4096) as engine:
        [engine.eos_token_id] = ids_of(EOS)
        yield engine


@pytest.fixture
async def api(engine: FakeEngine, chatml: Path) -> AsyncIterator[OpenAIServer]:
    async with openai_server(chatml, engines=[engine.address]) as server:
        yield server


@pytest.fixture
async def stepped(manual: FakeEngine, chatml: Path) -> AsyncIterator[OpenAIServer]:
    async with openai_server(chatml, engines=[manual.address]) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(chatml: Path) -> AsyncIterator[OpenAIServer]:
    """Yield a server for tests that do not change its state."""
    engine = FakeEngine(vocab_size=TOKENIZER.get_vocab_size())
    await engine.start()
    async with openai_server(chatml, engines=[engine.address]) as server:
        yield server
    await engine.kill()


def says(engine: FakeEngine, text: str) -> None:
    engine.script = lambda _: ids_of(text + EOS)


async def create(api: OpenAIServer, given: Any = "hi", *, extra: dict[str, Any] | None = None, **body: Any) -> Any:
    return await api.client.responses.create(
        model="model", input=given, extra_body=extra, **{"max_output_tokens": 1000, **body}
    )


async def streamed(api: OpenAIServer, given: Any = "hi", **body: Any) -> list[Any]:
    return [event async for event in await create(api, given, stream=True, **body)]


def prompts(engine: FakeEngine) -> list[str]:
    return [TOKENIZER.decode(request.prompt_token_ids, skip_special_tokens=False) for request in engine.requests]


async def test_an_answer_is_a_message(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, "Hello!")
    answer = await create(api, instructions="Be kind.", metadata={"a": "b"}, temperature=0.5, user="me")
    assert (answer.object, answer.status, answer.output_text) == ("response", "completed", "Hello!")
    [item] = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert (answer.id.startswith("resp_"), item.id.startswith("msg_")) == (True, True)
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be kind.", {"a": "b"}, 0.5)
    assert (answer.error, answer.incomplete_details, answer.tools, answer.tool_choice) == (None, None, [], "auto")
    assert answer.completed_at >= answer.created_at
    [prompt] = prompts(engine)
    assert prompt == ("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert answer.usage.input_tokens == len(ids_of(prompt))
    assert answer.usage.output_tokens == len(ids_of("Hello!")) + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.output_tokens_details.reasoning_tokens == 0


async def test_reasoning_text_and_calls_are_items(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, THOUGHTFUL)
    answer = await create(api, tools=[WEATHER])
    thought, message, first, second = answer.output
    assert (thought.type, thought.content[0].text.strip(), thought.summary) == ("reasoning", "A city.", [])
    assert (message.type, message.content[0].text) == ("message", "Let me look.")
    assert (first.type, first.name, json.loads(first.arguments)) == ("function_call", "weather", {"city": "Köln 🙂"})
    assert (second.arguments, first.call_id != second.call_id) == ("{}", True)
    assert answer.tools[0].name == "weather"
    alone = await create(api, tools=[WEATHER], parallel_tool_calls=False)
    assert [item.type for item in alone.output] == ["reasoning", "message", "function_call"]


async def test_the_events_of_a_stream_are_those_that_the_client_knows(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, THOUGHTFUL)
    events = await streamed(api, tools=[WEATHER])
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    once = [kind for index, kind in enumerate(kinds) if index == 0 or kinds[index - 1] != kind]
    part = ["response.content_part.added", "response.{}.delta", "response.{}.done", "response.content_part.done"]
    call = ["response.function_call_arguments.delta", "response.function_call_arguments.done"]
    bodies = [[k.format("reasoning_text") for k in part], [k.format("output_text") for k in part], call, call]
    items = [["response.output_item.added", *body, "response.output_item.done"] for body in bodies]
    assert once == ["response.created", "response.in_progress", *itertools.chain(*items), "response.completed"]
    known = openai.types.responses
    classes = {
        "response.created": known.ResponseCreatedEvent,
        "response.reasoning_text.delta": known.ResponseReasoningTextDeltaEvent,
        "response.output_text.delta": known.ResponseTextDeltaEvent,
        "response.function_call_arguments.done": known.ResponseFunctionCallArgumentsDoneEvent,
        "response.output_item.done": known.ResponseOutputItemDoneEvent,
        "response.completed": known.ResponseCompletedEvent,
    }
    for event in events:
        assert isinstance(event, classes.get(event.type, object))
    whole = events[-1].response
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in whole.output] == [item.id for item in done]
    for index, item in enumerate(whole.output):
        deltas = [e.delta for e in events if e.type.endswith(".delta") and e.output_index == index]
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert "".join(deltas) == text
    assert {event.response.id for event in events if hasattr(event, "response")} == {whole.id}


async def test_a_stream_ends_as_the_answer_in_one_piece(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, THOUGHTFUL)
    one = (await create(api, tools=[WEATHER], store=False)).to_dict()
    other = (await streamed(api, tools=[WEATHER], store=False))[-1].response.to_dict()
    for answer in (one, other):
        for item in [answer, *answer["output"]]:
            for name in ("id", "call_id", "created_at", "completed_at"):
                item.pop(name, None)
    assert one == other


async def test_the_clients_stream_helper_puts_the_answer_together(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, "Grüß Gott 🙂")
    async with api.client.responses.stream(model="model", input="hi", max_output_tokens=100) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == "Grüß Gott 🙂"
    assert kinds[-1] == "response.completed"


async def test_a_conversation_may_be_given_as_items(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, THOUGHTFUL)
    first = await create(api, tools=[WEATHER], store=False)
    calls = [item for item in first.output if item.type == "function_call"]
    results: list[Any] = [
        {"type": "function_call_output", "call_id": calls[0].call_id, "output": "rain"},
        {
            "type": "function_call_output",
            "call_id": calls[1].call_id,
            "output": [{"type": "input_text", "text": "sun"}],
        },
    ]
    says(engine, "It rains.")
    question: Any = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    items = [question, *(item.to_dict() for item in first.output), *results]
    second = await create(api, items, tools=[WEATHER])
    assert second.output_text == "It rains."
    _, prompt = prompts(engine)
    assert prompt.count("<|im_start|>assistant") == 2
    assert "<think>\nA city.\n</think>\n\nLet me look.\n<tool_call>" in prompt.replace("\n\n</think>", "\n</think>")
    assert "<tool_response>\nrain\n</tool_response>" in prompt
    assert "<tool_response>\nsun\n</tool_response>" in prompt


async def test_items_without_ids_and_reasoning_without_text_are_taken(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, "x")
    await create(
        api,
        [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": None},
            {"type": "message", "role": "user", "content": "c"},
        ],
    )
    turns = ["user\na", "assistant\nb", "user\nc"]
    assert prompts(engine) == ["".join(f"<|im_start|>{t}<|im_end|>\n" for t in turns) + "<|im_start|>assistant\n"]


async def test_a_response_goes_on_with_an_earlier_one(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, "I am Ada.")
    first = await create(api, "Who are you?", instructions="Be brief.")
    says(engine, "Ada.")
    second = await create(api, "Again?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    third = await create(api, "And again?", previous_response_id=second.id, store=False)
    _, prompt, last = prompts(engine)
    assert "Be brief." not in prompt, "instructions are of one response"
    turns = ["user\nWho are you?", "assistant\nI am Ada.", "user\nAgain?"]
    assert prompt == "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) + "<|im_start|>assistant\n"
    assert last.startswith(prompt + "Ada.<|im_end|>\n")
    with pytest.raises(openai.NotFoundError, match="no such response is stored") as caught:
        await create(api, "x", previous_response_id=third.id)
    assert caught.value.param == "previous_response_id"


async def test_items_of_kept_responses_may_be_named_instead_of_sent(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, THOUGHTFUL)
    first = await create(api, tools=[WEATHER])
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
        for item in first.output
        if item.type == "function_call"
    ]
    question = {"role": "user", "content": "hi"}
    says(engine, "Rain.")
    sent = await create(api, [question, *(item.to_dict() for item in first.output), *results], tools=[WEATHER])
    named = [{"type": "item_reference", "id": item.id} for item in first.output]
    second = await create(api, [question, *named, *results], tools=[WEATHER])
    _, whole, by_name = prompts(engine)
    assert by_name == whole
    kept = await api.client.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in kept.data[1:5]] == [item.type for item in first.output]
    await create(api, [question, {"type": "item_reference", "id": second.output[0].id}])
    assert "Rain." in prompts(engine)[-1]
    for stranger in (named[0]["id"], "msg_x"):
        with pytest.raises(openai.NotFoundError, match="Send the item itself") as caught:
            await create(
                api,
                [question, {"type": "item_reference", "id": stranger}],
                extra_headers={"x-penstock-tenant": "acme"},
            )
        assert caught.value.param == "input[1].id"
    for made in (first, sent, second):
        await api.client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await create(api, [question, named[0]])


async def test_a_response_is_kept_until_it_is_deleted(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, THOUGHTFUL)
    made = await create(api, [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}], tools=[WEATHER])
    assert (await api.client.responses.retrieve(made.id)).to_dict() == made.to_dict()
    newest = await api.client.responses.input_items.list(made.id)
    texts: list[Any] = [item.content for item in newest.data]  # type: ignore[union-attr]
    assert texts == ["two", "one"]
    page = await api.client.responses.input_items.list(made.id, order="asc", limit=1)
    assert ([item.content for item in page.data], page.has_more) == (["one"], True)  # type: ignore[union-attr]
    assert [item async for item in page] == newest.data[::-1]
    await api.client.responses.delete(made.id)
    for call in (api.client.responses.retrieve, api.client.responses.delete, api.client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            await call(made.id)


async def test_responses_with_store_false_are_not_stored(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, "x")
    made = await create(api, store=False)
    assert made.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        await api.client.responses.retrieve(made.id)


async def test_another_tenants_response_is_not_there(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, "x")
    made = await create(api, extra_headers={"x-penstock-tenant": "acme"})
    with pytest.raises(openai.NotFoundError):
        await create(api, previous_response_id=made.id)
    with pytest.raises(openai.NotFoundError):
        await api.client.responses.retrieve(made.id)
    await api.client.responses.retrieve(made.id, extra_headers={"x-penstock-tenant": "acme"})


async def test_two_calls_of_one_request_id_are_two_responses(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, "x")
    raw = [
        await api.client.responses.with_raw_response.create(
            model="model", input="hi", max_output_tokens=9, extra_headers={"x-request-id": "mine"}
        )
        for _ in range(2)
    ]
    assert [answer.headers["x-request-id"] for answer in raw] == ["mine", "mine"]
    assert raw[0].parse().id != raw[1].parse().id


async def test_a_server_may_keep_none(engine: FakeEngine, chatml: Path) -> None:
    says(engine, "x")
    http = {"responses": ResponsesConfig(max_stored=0)}
    async with openai_server(chatml, engines=[engine.address], http=http) as api:
        made = await create(api)
        assert made.to_dict()["store"] is False
        for body in ({"store": True}, {"previous_response_id": made.id}):
            with pytest.raises(openai.BadRequestError, match=r"http.responses.max_stored is 0"):
                await create(api, **body)
        with pytest.raises(openai.BadRequestError, match="stores no responses"):
            await api.client.responses.retrieve(made.id)


async def test_a_response_in_the_making_is_cancelled(stepped: OpenAIServer, manual: FakeEngine) -> None:
    manual.script = lambda _: ids_of("abcdef")
    starting = asyncio.create_task(create(stepped, stream=True))
    await manual.until(lambda e: e.running)
    manual.step()
    stream = await starting
    created = await anext(aiter(stream))
    response_id = created.response.id
    assert (await stepped.client.responses.retrieve(response_id)).status == "in_progress"
    assert (await stepped.client.responses.cancel(response_id)).status == "cancelled"
    *_, last = [event async for event in stream]
    assert (last.type, last.response.status, last.response.output_text) == ("response.incomplete", "cancelled", "a")
    await manual.until(lambda e: not e.running)
    with pytest.raises(openai.BadRequestError, match="has already ended"):
        await stepped.client.responses.cancel(response_id)
    assert stepped.num_live == 0


async def test_a_client_that_hangs_up_leaves_nothing(stepped: OpenAIServer, manual: FakeEngine) -> None:
    manual.script = lambda _: ids_of("abcdef")
    starting = asyncio.create_task(create(stepped, stream=True))
    await manual.until(lambda e: e.running)
    manual.step()
    stream = await starting
    response_id = (await anext(aiter(stream))).response.id
    await stream.close()
    await manual.until(lambda e: e.aborted)
    await eventually(lambda: stepped.num_live == 0)
    with pytest.raises(openai.NotFoundError):
        await stepped.client.responses.retrieve(response_id)


async def test_an_error_in_the_middle_is_the_last_event(stepped: OpenAIServer, manual: FakeEngine) -> None:
    manual.script = lambda _: ids_of("abcdef")
    reading = asyncio.create_task(streamed(stepped))
    await manual.until(lambda e: e.running)
    manual.step()
    await eventually(lambda: manual.num_steps == 1)
    manual.finish_all(finish_pb2.FINISH_REASON_ERROR, RESOURCES)
    last = (await reading)[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.message == "it needs more than there is"


async def test_a_truncated_response_is_incomplete(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, "Hello!")
    answer = await create(api, max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    assert (await streamed(api, max_output_tokens=2))[-1].type == "response.incomplete"


async def test_a_form_of_the_text_is_a_constraint(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, "{}")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    await create(api, text={"format": {"type": "json_schema", "name": "x", "schema": schema}})
    await create(api, text={"format": {"type": "json_object"}})
    await create(api, text={"format": {"type": "text"}})
    first, second, third = (request.sampling_params.structured_output for request in engine.requests)
    assert json.loads(first.json_schema) == schema
    assert second == pb.StructuredOutput(json_object=True)
    assert not third.WhichOneof("constraint")


async def test_a_tool_that_must_be_called_is_a_constraint(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, CALL)
    for choice in ("required", {"type": "function", "name": "weather"}):
        answer = await create(api, tools=[WEATHER], tool_choice=choice)
        assert [item.type for item in answer.output] == ["function_call"]
    assert all(request.sampling_params.structured_output.structural_tag for request in engine.requests)
    await create(api, tools=[WEATHER], tool_choice="none")
    assert "weather" not in prompts(engine)[-1]


async def test_log_probabilities_are_those_of_the_text(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, "<think>\nA.\n</think>\n\nJa 🙂")
    answer = await create(api, include=["message.output_text.logprobs"], top_logprobs=2)
    thought, message = answer.output
    tokens = message.content[0].logprobs
    assert b"".join(bytes(token.bytes) for token in tokens).decode().strip() == "Ja 🙂"
    assert {len(token.top_logprobs) for token in tokens} == {2}
    events = await streamed(api, top_logprobs=2)
    deltas = [e.logprobs for e in events if e.type == "response.output_text.delta"]
    assert [token.token for logprobs in deltas for token in logprobs] == [token.token for token in tokens]
    assert thought.type == "reasoning"


async def test_reasoning_is_asked_for_and_counted(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, "<think>\nA.\n</think>\n\nJa")
    answer = await create(api, reasoning={"effort": "low", "summary": "auto"}, include=["reasoning.encrypted_content"])
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    assert answer.reasoning.effort == "low"
    hidden = await create(api, extra={"include_reasoning": False})
    assert [item.type for item in hidden.output] == ["message"]
    assert hidden.usage.output_tokens_details.reasoning_tokens > 0
    await create(api, reasoning={"effort": "none"})
    assert prompts(engine)[-1].endswith("<think>\n\n</think>\n\n")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": []}, "input", None),
        ({"input": 5}, "input", None),
        ({"input": [{"role": "user", "content": "a"}, {"type": "x_call"}]}, "input[1].type", None),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id", None),
        ({"input": [{"type": "custom_tool_call", "call_id": "c"}]}, "input[0].name", None),
        ({"input": [{"content": "a"}]}, "input[0].role", "input[0].role is not set"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id", None),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url", None),
        ({"input": [{"role": "user", "content": [{"type": "input_smell"}]}]}, "input[0].content[0].type", None),
        ({"input": [{"role": "boss", "content": "a"}]}, "input[0].role", None),
        ({"background": True}, "background", "background is true; only false is supported"),
        ({"truncation": "x"}, "truncation", "truncation is 'x'; only 'disabled' is supported"),
        ({"conversation": "c"}, "conversation", "conversation is not supported; use previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt", "prompt is not supported; use input"),
        ({"max_tool_calls": 1}, "max_tool_calls", "max_tool_calls is not supported; leave it out"),
        (
            {"response_format": {"type": "json_object"}, "text": {"format": {"type": "json_object"}}},
            "response_format",
            "text.format and response_format both constrain the output; set only one of them",
        ),
        ({"n": 2}, "n", "n is 2; only 1 is supported"),
        ({"include": ["x"]}, "include[0]", None),
        ({"max_output_tokens": 0}, "max_output_tokens", None),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "tools[0].name is empty"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice is 'required', but there are no tools; set tools"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", None),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", None),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", None),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "text.format.schema is not set"),
        ({"reasoning": {"effort": "banana"}}, "reasoning.effort", None),
        ({"temperature": -1}, "temperature", None),
        ({"model": "other"}, "model", None),
        ({"previous_response_id": "resp_x"}, "previous_response_id", None),
    ],
    ids=str,
)
async def test_a_wrong_field_is_named(shared: OpenAIServer, body: Any, param: str, message: str | None) -> None:
    for stream in (False, True):
        response = await shared.http.post("/v1/responses", json={"input": "hi", "stream": stream, **body})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (
            404 if set(body) & {"model", "previous_response_id"} or param == "input[0].id" else 400,
            param,
        )
        assert message in (None, error["message"])
    assert shared.num_live == 0


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=none"])
async def test_a_page_that_is_none_is_refused(shared: OpenAIServer, query: str) -> None:
    made = await create(shared, max_output_tokens=1)
    response = await shared.http.get(f"/v1/responses/{made.id}/input_items?{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, query.partition("=")[0])
