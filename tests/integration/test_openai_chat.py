"""``/v1/chat/completions`` with the published OpenAI client, in front of a fake engine whose output text the test sets."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.common.v1 import finish_pb2
from penstock.common.v1 import structured_output_pb2 as pb
from tests.fakes.engines.fake_engine import FakeEngine, logprob_of
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.chat_templates import save_chat_model
from tests.fakes.models.small_tokenizers import EOS, byte_level, ids_of

TOKENIZER = byte_level()
HI: Any = {"role": "user", "content": "hi"}
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = 'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln 🙂"}}\n</tool_call>'
CALLS = CALL + '\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(vocab_size=TOKENIZER.get_vocab_size(), max_model_len=4096) as engine:
        [engine.eos_token_id] = ids_of(EOS)
        yield engine


@pytest.fixture
async def api(engine: FakeEngine, chatml: Path) -> AsyncIterator[OpenAIServer]:
    async with openai_server(chatml, engines=[engine.address]) as server:
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


async def chat(api: OpenAIServer, *messages: Any, extra: dict[str, Any] | None = None, **body: Any) -> Any:
    body = {"max_tokens": 1000, **body}
    return await api.client.chat.completions.create(
        model="model", messages=list(messages) or [HI], extra_body=extra, **body
    )


async def streamed(api: OpenAIServer, *messages: Any, **body: Any) -> list[Any]:
    return [chunk async for chunk in await chat(api, *messages, stream=True, **body)]


async def test_an_answer_is_the_assistants_message(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, "Hello!")
    answer = await chat(api)
    [choice] = answer.choices
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert (choice.message.role, choice.message.content, choice.message.tool_calls) == ("assistant", "Hello!", None)
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert answer.usage.prompt_tokens == len(ids_of(PROMPT))
    assert answer.usage.completion_tokens == len(ids_of("Hello!")) + 1
    assert list(engine.requests[0].prompt_token_ids) == ids_of(PROMPT)


async def test_a_stream_begins_with_the_role_and_joins_to_the_answer(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, "Grüß Gott 🙂")
    chunks = await streamed(api, n=2, stream_options={"include_usage": True})
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for index in (0, 1):
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert [choice.delta.role for choice in own] == ["assistant", *[None] * (len(own) - 1)]
        assert "".join(choice.delta.content or "" for choice in own) == "Grüß Gott 🙂"
        assert [choice.finish_reason for choice in own] == [*[None] * (len(own) - 1), "stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 2 * (len(ids_of("Grüß Gott 🙂")) + 1)


async def test_calls_of_tools_end_as_tool_calls(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, CALLS)
    [choice] = (await chat(api, tools=[WEATHER])).choices
    first, second = choice.message.tool_calls
    assert (first.type, first.function.name, json.loads(first.function.arguments)) == (
        "function",
        "weather",
        {"city": "Köln 🙂"},
    )
    assert second.function.arguments == "{}"
    assert first.id != second.id
    assert (choice.message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
    says(engine, CALLS.removeprefix("Let me look.\n"))
    [choice] = (await chat(api, tools=[WEATHER])).choices
    assert choice.message.content is None


async def test_calls_are_streamed_in_pieces_that_the_client_puts_together(
    api: OpenAIServer, engine: FakeEngine
) -> None:
    says(engine, CALLS)
    async with api.client.chat.completions.stream(
        model="model", messages=[HI], tools=[WEATHER], max_tokens=1000
    ) as stream:
        final = await stream.get_final_completion()
    [choice] = final.choices
    found = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    assert found == [("weather", '{"city": "Köln 🙂"}'), ("weather", "{}")]
    assert (choice.message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
    pieces = [c.choices[0].delta.tool_calls for c in await streamed(api, tools=[WEATHER]) if c.choices]
    heads = [(p.index, p.type) for piece in pieces if piece for p in piece if p.id is not None]
    assert heads == [(0, "function"), (1, "function")]


async def test_without_parallel_calls_the_first_counts(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, CALLS)
    [choice] = (await chat(api, tools=[WEATHER], parallel_tool_calls=False)).choices
    assert len(choice.message.tool_calls) == 1


async def test_reasoning_is_told_apart_under_both_names(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, "<think>\nWhere?\n</think>\n\nThere.")
    [choice] = (await chat(api)).choices
    assert (choice.message.content, choice.message.reasoning, choice.message.reasoning_content) == (
        "There.",
        "Where?",
        "Where?",
    )
    deltas = [c.choices[0].delta for c in await streamed(api)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Where?"
    assert "".join(delta.content or "" for delta in deltas) == "There."
    [choice] = (await chat(api, extra={"include_reasoning": False})).choices
    assert (choice.message.reasoning, hasattr(choice.message, "reasoning_content")) == (None, False)


async def test_a_part_of_a_character_has_its_own_bytes(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, "naïve 你 🙂")
    [choice] = (await chat(api, logprobs=True, top_logprobs=1)).choices
    found = choice.logprobs.content
    assert any("\ufffd" in entry.token for entry in found)
    assert b"".join(bytes(entry.bytes) for entry in found).decode() == f"{choice.message.content}</s>"
    chunks = await streamed(api, logprobs=True, top_logprobs=1)
    pieces = [c.choices[0].logprobs for c in chunks]
    assert [entry.bytes for piece in pieces if piece for entry in piece.content] == [entry.bytes for entry in found]
    assert all(top.bytes is not None for entry in found for top in entry.top_logprobs)


async def test_a_tool_that_must_be_called_is_a_constraint(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, CALL)
    await chat(api, tools=[WEATHER], tool_choice="required")
    await chat(api, tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "weather"}})
    for request in engine.requests:
        tag = json.loads(request.sampling_params.structured_output.structural_tag)
        assert "weather" in json.dumps(tag)
    await chat(api, tools=[WEATHER], tool_choice="none")
    assert not engine.requests[-1].sampling_params.HasField("structured_output")


async def test_tools_that_the_template_cannot_show_are_refused(engine: FakeEngine, tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path, "{{ messages[0].content }}")
    async with openai_server(folder, engines=[engine.address]) as api:
        for path in ("/v1/chat/completions", "/tokenize"):
            response = await api.http.post(path, json={"messages": [HI], "tools": [WEATHER]})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "tools")
            assert "--set frontend.model.tool_parser=..., which is one of: deepseek_v3, " in error["message"]
        says(engine, "x")
        await chat(api, tools=[WEATHER], tool_choice="none")


async def test_arguments_of_a_tool_that_must_be_called_have_the_blanks_that_are_asked_for(
    api: OpenAIServer, engine: FakeEngine
) -> None:
    says(engine, CALL)
    await chat(
        api, tools=[WEATHER], tool_choice="required", extra={"structured_outputs": {"json_whitespace": "compact"}}
    )
    constraint = engine.requests[0].sampling_params.structured_output
    assert constraint.structural_tag
    assert constraint.json_whitespace == pb.JSON_WHITESPACE_COMPACT


async def test_a_conversation_with_tools_is_rendered(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, "Sunny.")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    await chat(api, *messages, tools=[WEATHER])
    prompt = TOKENIZER.decode(engine.requests[0].prompt_token_ids)
    for part in ("Be brief.", '"name": "weather"', '"city": "Köln"', "<tool_response>\nsunny", "<think>\nhm"):
        assert part in prompt


async def test_a_schema_of_the_response_is_enforced_to_the_letter(api: OpenAIServer, engine: FakeEngine) -> None:
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
    says(engine, '{"b": 1}')
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    await chat(api, response_format=form)
    sent = engine.requests[0].sampling_params.structured_output.json_schema
    assert json.dumps(json.loads(sent)) == json.dumps(schema)
    await chat(api, response_format={"type": "text"})
    assert not engine.requests[1].sampling_params.HasField("structured_output")


async def test_log_probabilities_have_bytes_and_the_likeliest(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, "the fox")
    [choice] = (await chat(api, logprobs=True, top_logprobs=2)).choices
    first = choice.logprobs.content[0]
    [token, *_] = ids_of("the fox")
    assert first.logprob == logprob_of(token)
    assert first.bytes == list(first.token.encode())
    assert [entry.logprob for entry in first.top_logprobs] == [logprob_of(0), logprob_of(1)]
    chunks = await streamed(api, logprobs=True)
    pieces = [c.choices[0].logprobs for c in chunks]
    tokens = [entry.token for piece in pieces if piece for entry in piece.content]
    assert tokens == [entry.token for entry in choice.logprobs.content]


async def test_token_ids_of_prompt_and_answer_are_returned_when_asked(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, "the fox")
    extra = {"return_token_ids": True, "prompt_logprobs": 0}
    answer = await chat(api, extra=extra)
    assert answer.prompt_token_ids == ids_of(PROMPT)
    assert answer.choices[0].token_ids == ids_of("the fox" + EOS)
    assert len(answer.prompt_logprobs) == len(answer.prompt_token_ids)
    chunks = await streamed(api, extra={"return_token_ids": True})
    assert chunks[0].prompt_token_ids == ids_of(PROMPT)
    assert [i for c in chunks for i in c.choices[0].token_ids] == answer.choices[0].token_ids


async def test_limits_and_template_arguments_reach_their_places(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, "No.")
    await chat(api, max_completion_tokens=7, extra={"chat_template_kwargs": {"enable_thinking": False}})
    [seen] = engine.requests
    assert seen.sampling_params.max_tokens == 7
    assert TOKENIZER.decode(seen.prompt_token_ids).endswith("<think>\n\n</think>\n\n")


async def test_unsupported_fields_may_have_their_neutral_value(api: OpenAIServer, engine: FakeEngine) -> None:
    says(engine, "No.")
    nothing = {
        "echo": False,
        "functions": [],
        "documents": [],
        "chat_template": "",
        "top_logprobs": 0,
        "logprobs": False,
    }
    assert (await chat(api, extra=nothing)).choices[0].message.content == "No."


async def test_a_conversation_is_tokenized_with_its_template(api: OpenAIServer) -> None:
    answer = (await api.http.post("/tokenize", json={"messages": [HI]})).json()
    assert answer["tokens"] == ids_of(PROMPT)
    answer = (await api.http.post("/tokenize", json={"messages": [HI], "prompt": "x"})).json()
    assert answer["error"]["message"] == "exactly one of prompt and messages must be set"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "function_call": {}}]}, "messages[0].function_call.name"),
        ({"functions": [{}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"chat_template": "x"}, "chat_template"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": ""}}]}, "tools[0].custom.name"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}, "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tool_choice": {"function": {"name": ""}}, "tools": [WEATHER]}, "tool_choice.function.name"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 5, "max_completion_tokens": 3}, "min_tokens"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
    ],
    ids=str,
)
async def test_a_wrong_field_is_named(shared: OpenAIServer, body: dict[str, Any], param: str) -> None:
    response = await shared.http.post("/v1/chat/completions", json={"messages": [HI], **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert "sampling_params" not in error["message"]


async def test_an_engine_s_refusal_names_the_field_that_the_client_has_set(
    api: OpenAIServer, engine: FakeEngine
) -> None:
    engine.refusal = finish_pb2.RequestError(
        code="INVALID_ARGUMENT",
        message="sampling_params.logprobs is 21; it must be from 0 to 20",
        field="sampling_params.logprobs",
    )
    body = {"messages": [HI], "logprobs": True, "top_logprobs": 21}
    response = await api.http.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "top_logprobs")
    assert error["message"] == "top_logprobs is 21; it must be from 0 to 20"


async def test_a_model_without_a_template_says_so(model: Path, engine: FakeEngine) -> None:
    async with openai_server(model, engines=[engine.address]) as api:
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            await chat(api)


PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "weather", "arguments": {"city": "ä🙂"}}']
PIECES += ["a", "你好", "\n", " ", "<", "}"]


async def test_streams_add_up_to_the_whole_for_any_text(api: OpenAIServer, engine: FakeEngine) -> None:
    loop = asyncio.get_running_loop()

    @settings(max_examples=30, suppress_health_check=list(HealthCheck))
    @given(
        parts=st.lists(st.sampled_from(PIECES), max_size=12),
        stop=st.lists(st.sampled_from(["a", "好", "call", "\n\n"]), max_size=2),
        tokens_per_step=st.integers(1, 6),
    )
    def check(parts: list[str], stop: list[str], tokens_per_step: int) -> None:
        asyncio.run_coroutine_threadsafe(compare("".join(parts), stop, tokens_per_step), loop).result(20)

    async def compare(text: str, stop: list[str], tokens_per_step: int) -> None:
        says(engine, text)
        engine.tokens_per_step = tokens_per_step
        whole = (await chat(api, tools=[WEATHER], stop=stop)).choices[0]
        choices = [c.choices[0] for c in await streamed(api, tools=[WEATHER], stop=stop)]
        assert "".join(c.delta.content or "" for c in choices) == (whole.message.content or "")
        reasoning = "".join(getattr(c.delta, "reasoning", None) or "" for c in choices)
        assert reasoning == (whole.message.reasoning or "")
        calls: dict[int, list[str]] = {}
        for piece in (piece for c in choices for piece in c.delta.tool_calls or ()):
            call = calls.setdefault(piece.index, ["", ""])
            call[0] += piece.function.name or ""
            call[1] += piece.function.arguments or ""
        expected = [[call.function.name, call.function.arguments] for call in whole.message.tool_calls or ()]
        assert list(calls.values()) == expected
        assert choices[-1].finish_reason == whole.finish_reason

    await asyncio.to_thread(check)
