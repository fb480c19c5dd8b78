"""Conversations to prompts: what the template is given, and what is refused."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock_common.config.reread import Reread
from penstock_common.errors import InvalidArgument
from penstock_common.types.request import RequestContext
from penstock_frontend.call_types import ChatMessage, ChatRequest, ContentPart, Tool, ToolCall
from penstock_frontend.config import LimitsConfig, ModelConfig
from penstock_frontend.processing.chat.rendering import ChatRenderer
from penstock_frontend.processing.chat.templates import ChatTemplates, load_chat_templates
from penstock_frontend.processing.parsers import registry
from penstock_frontend.processing.prompts.tokenizer import load_model_files
from tests.fakes.models.chat_templates import LLAMA, save_chat_model

DEMO = Path(__file__).parents[5] / "examples" / "demo_model" / "penstock-tiny"
HI = ChatMessage(role="user", content="hi")
WEATHER = Tool(name="weather", description="Tells it.", parameters={"type": "object", "properties": {"city": {}}})
CALL = ChatMessage(role="assistant", tool_calls=[ToolCall(id="1", name="weather", arguments='{"city": "Köln"}')])
LIMITS = LimitsConfig(max_prompt_length=2000)

Prompt = Callable[..., Any]


class Renderer:
    def __init__(self, model: Path, *, tool_parser: str = "auto") -> None:
        config = ModelConfig(path=str(model))
        self.tokenizer = load_model_files(config, num_threads=1).tokenizer
        self.renderer = ChatRenderer(
            load_chat_templates(config), self.tokenizer, Reread(LIMITS), tool_parser=tool_parser
        )

    async def prompt(self, *messages: ChatMessage, **fields: Any) -> str:
        prompt = (await self.renderer.render(ChatRequest(messages=messages, **fields))).prompt
        assert isinstance(prompt, str)
        return prompt


@pytest.fixture
async def chatml(tmp_path: Path) -> AsyncIterator[Renderer]:
    renderer = Renderer(save_chat_model(tmp_path))
    yield renderer
    renderer.tokenizer.close()


@pytest.fixture
async def llama(tmp_path: Path) -> AsyncIterator[Renderer]:
    renderer = Renderer(save_chat_model(tmp_path, LLAMA))
    yield renderer
    renderer.tokenizer.close()


async def test_a_conversation_becomes_a_prompt_that_opens_the_assistants_turn(chatml: Renderer) -> None:
    prompt = await chatml.prompt(ChatMessage(role="system", content="Be kind."), HI)
    assert prompt == ("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


async def test_the_turn_is_not_opened_when_that_is_not_wanted(chatml: Renderer) -> None:
    assert (await chatml.prompt(HI, add_generation_prompt=False)).endswith("hi<|im_end|>\n")


async def test_everything_but_the_prompt_goes_on_unchanged(chatml: Renderer) -> None:
    context = RequestContext(external_request_id="r", tenant="t", trace_context={"traceparent": "x"})
    rendered = await chatml.renderer.render(ChatRequest(messages=[HI], sampling={"n": 2}, context=context))
    assert rendered.context is context
    assert rendered.sampling == {"n": 2}
    assert not rendered.add_special_tokens


async def test_parts_are_joined_line_by_line(chatml: Renderer) -> None:
    parts = [ContentPart(type="text", text="a"), ContentPart(type="text", text="b")]
    assert "user\na\nb<|im_end|>" in await chatml.prompt(ChatMessage(role="user", content=parts))


async def test_calls_answers_and_reasoning_reach_the_template(chatml: Renderer) -> None:
    answer = ChatMessage(role="tool", content="rain", tool_call_id="1")
    thought = ChatMessage(role="assistant", content="It rains.", reasoning="look outside")
    prompt = await chatml.prompt(HI, CALL, answer, thought)
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>' in prompt
    assert "<tool_response>\nrain\n</tool_response>" in prompt
    assert "<think>\nlook outside\n</think>\n\nIt rains." in prompt


async def test_tools_are_told_to_the_model_unless_it_must_not_call_them(chatml: Renderer) -> None:
    line = json.dumps(
        {
            "type": "function",
            "function": {"name": "weather", "description": "Tells it.", "parameters": WEATHER.parameters},
        }
    )
    assert line in await chatml.prompt(HI, tools=[WEATHER])
    assert "weather" not in await chatml.prompt(HI, tools=[WEATHER], tool_choice="none")


@pytest.mark.parametrize("tool_parser", ["auto", "none"])
async def test_tools_that_the_template_cannot_show_are_refused(tmp_path: Path, tool_parser: str) -> None:
    plain = Renderer(save_chat_model(tmp_path, "{{ messages[0].content }}"), tool_parser=tool_parser)
    with pytest.raises(InvalidArgument) as error:
        await plain.prompt(HI, tools=[WEATHER])
    assert error.value.field == "tools"
    assert error.value.message.startswith("tools: the model's chat template does not show them to the model")
    names = ", ".join(registry.tool_parser_names())
    assert error.value.message.endswith(f"--set frontend.model.tool_parser=..., which is one of: {names}")


async def test_tools_that_must_not_be_called_need_not_be_shown(tmp_path: Path) -> None:
    plain = Renderer(save_chat_model(tmp_path, "{{ messages[0].content }}"))
    assert await plain.prompt(HI, tools=[WEATHER], tool_choice="none") == "hi"


async def test_with_a_parser_by_name_messages_may_tell_of_the_tools(tmp_path: Path) -> None:
    plain = Renderer(save_chat_model(tmp_path, "{{ messages[0].content }}"), tool_parser="hermes")
    assert await plain.prompt(HI, tools=[WEATHER]) == "hi"


async def test_more_variables_reach_the_template(chatml: Renderer) -> None:
    assert (await chatml.prompt(HI, template_kwargs={"enable_thinking": False})).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("content", ["It is", "It is ", "is", ""])
async def test_the_last_message_is_continued_where_it_ends(chatml: Renderer, content: str) -> None:
    last = ChatMessage(role="assistant", content=content)
    prompt = await chatml.prompt(HI, ChatMessage(role="assistant", content=content), last, continue_final_message=True)
    assert prompt.endswith(f"<|im_end|>\n<|im_start|>assistant\n{content}")


async def test_a_continued_message_is_trimmed_where_the_template_trims(llama: Renderer) -> None:
    last = ChatMessage(role="assistant", content=" It is ")
    assert (await llama.prompt(HI, last, continue_final_message=True)).endswith("<|end_header_id|>\n\nIt is")


async def test_a_template_that_leaves_the_last_message_out_cannot_continue_it(chatml: Renderer) -> None:
    with pytest.raises(InvalidArgument, match="does not write the last message's content") as error:
        renderer = ChatRenderer(
            ChatTemplates({"default": "{{ messages[0].content }}"}, {}), chatml.tokenizer, Reread(LIMITS)
        )
        await renderer.render(ChatRequest(messages=[HI, CALL], continue_final_message=True))
    assert error.value.field == "continue_final_message"


async def test_llamas_conversations_begin_with_its_own_token(llama: Renderer) -> None:
    prompt = await llama.prompt(HI, CALL)
    assert prompt.startswith("<s><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>")
    assert '{"name": "weather", "parameters": {"city": "Köln"}}<|eot_id|>' in prompt


async def test_what_a_template_raises_is_told(llama: Renderer) -> None:
    call = ToolCall(name="f")
    with pytest.raises(InvalidArgument, match="only supports single tool-calls at once"):
        await llama.prompt(HI, ChatMessage(role="assistant", tool_calls=[call, call]))


async def test_the_demo_model_has_a_template() -> None:
    demo = Renderer(DEMO)
    assert await demo.prompt(HI) == "<s><|user|>hi<|end|><|assistant|>"
    demo.tokenizer.close()


async def test_arguments_that_are_no_object_are_shown_as_a_text(chatml: Renderer) -> None:
    calls = [ToolCall(name="f", arguments='{"city": "a')]
    prompt = await chatml.prompt(HI, ChatMessage(role="assistant", tool_calls=calls))
    assert r'{"INVALID_JSON": "{\"city\": \"a"}' in prompt


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [HI, ChatMessage(role="root")]}, "messages[1].role"),
        (
            {"messages": [ChatMessage(role="user", content=[ContentPart(type="image_url")])]},
            "messages[0].content[0].type",
        ),
        ({"messages": [ChatMessage(role="user", tool_calls=CALL.tool_calls)]}, "messages[0].tool_calls"),
        (
            {"messages": [HI, ChatMessage(role="assistant", tool_calls=[ToolCall(name="")])]},
            "messages[1].tool_calls[0].name",
        ),
        ({"messages": [HI, ChatMessage(role="user", content="x" * 2000)]}, "messages[1].content"),
        ({"messages": [HI], "tools": [WEATHER, Tool(name="")]}, "tools[1].name"),
        ({"messages": [HI], "tools": [WEATHER, WEATHER]}, "tools[1].name"),
        (
            {
                "messages": [
                    ChatMessage(role="assistant", tool_calls=[ToolCall(name="f", arguments=r'{"a": "\ud800"}')])
                ]
            },
            "messages",
        ),
        ({"messages": [HI], "continue_final_message": True}, "continue_final_message"),
        ({"messages": [HI], "template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_wrong_is_named(chatml: Renderer, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        await chatml.renderer.render(ChatRequest(**fields))
    assert error.value.field == field
