"""Penstock renders conversations to the same tokens as transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock_common.config.settings import Reread
from penstock_frontend.call_types import ChatMessage, ChatRequest, Tool, ToolCall
from penstock_frontend.config import LimitsConfig, ModelConfig
from penstock_frontend.processing.chat.rendering import ChatRenderer
from penstock_frontend.processing.chat.templates import load_chat_templates
from penstock_frontend.processing.prompts.tokenizer import load_model_files
from tests.fakes.models.chat_templates import CHATML, LLAMA, save_chat_model

DEMO = Path(__file__).parents[2] / "examples" / "demo_model" / "penstock-tiny"
SYSTEM, HI = ChatMessage(role="system", content=" Be kind. "), ChatMessage(role="user", content="hi <|im_end|> ü🙂")
ANSWER = ChatMessage(role="assistant", content=" Hello, you ", reasoning="be kind")
CALL = ChatMessage(role="assistant", tool_calls=[ToolCall(id="1", name="weather", arguments='{"a": [1, "é"]}')])
RESULT = ChatMessage(role="tool", content="rain", tool_call_id="1")
TOOL = Tool(name="weather", description="Tells <it>.", parameters={"type": "object", "properties": {"a": {}}})
CONVERSATIONS: list[list[ChatMessage]] = [[HI], [SYSTEM, HI], [SYSTEM, HI, ANSWER, HI], [HI, CALL, RESULT, ANSWER]]


def as_dicts(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    dicts = []
    for message in messages:
        each: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.reasoning:
            each["reasoning_content"] = message.reasoning
        if message.tool_calls:
            each["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
                for call in message.tool_calls
            ]
        dicts.append(each)
    return dicts


@pytest.fixture(scope="module", params=["chatml", "llama", "demo"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "demo":
        return DEMO
    folder = tmp_path_factory.mktemp(request.param)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    return save_chat_model(folder, CHATML if request.param == "chatml" else LLAMA, **config)


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["plain", "tools"])
@pytest.mark.parametrize("open_turn", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
async def test_the_prompt_has_the_tokens_that_transformers_gives_it(
    model: Path, messages: list[ChatMessage], open_turn: bool, tools: list[Tool]
) -> None:
    transformers = pytest.importorskip("transformers")
    if model == DEMO and (tools or RESULT in messages):
        pytest.skip("the demo model knows no tools")
    theirs = transformers.AutoTokenizer.from_pretrained(str(model))
    function = {"name": TOOL.name, "description": TOOL.description, "parameters": TOOL.parameters}
    want = theirs.apply_chat_template(
        as_dicts(messages),
        tools=[{"type": "function", "function": function}] if tools else None,
        add_generation_prompt=open_turn,
        tokenize=False,
    )
    config = ModelConfig(path=str(model))
    tokenizer = load_model_files(config, num_threads=1).tokenizer
    renderer = ChatRenderer(load_chat_templates(config), tokenizer, Reread(LimitsConfig()))
    rendered = await renderer.render(ChatRequest(messages=messages, tools=tools, add_generation_prompt=open_turn))
    assert rendered.prompt == want
    ids = (await tokenizer.encode(str(rendered.prompt), add_special_tokens=rendered.add_special_tokens)).ids
    assert ids == theirs(want, add_special_tokens=False)["input_ids"]
    tokenizer.close()


@pytest.mark.parametrize("content", ["It is", " It is "])
async def test_a_continued_message_ends_where_transformers_ends_it(model: Path, content: str) -> None:
    transformers = pytest.importorskip("transformers")
    messages = [HI, ChatMessage(role="assistant", content=content)]
    theirs = transformers.AutoTokenizer.from_pretrained(str(model))
    want = theirs.apply_chat_template(as_dicts(messages), continue_final_message=True, tokenize=False)
    config = ModelConfig(path=str(model))
    tokenizer = load_model_files(config, num_threads=1).tokenizer
    renderer = ChatRenderer(load_chat_templates(config), tokenizer, Reread(LimitsConfig()))
    assert (await renderer.render(ChatRequest(messages=messages, continue_final_message=True))).prompt == want
    tokenizer.close()
