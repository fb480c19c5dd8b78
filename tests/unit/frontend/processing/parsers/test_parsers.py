"""Answers in pieces: content, reasoning and calls do not depend on how the text was cut."""

import importlib.metadata
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_common.errors import ConfigError
from penstock_frontend.processing.parsers import registry
from penstock_frontend.processing.parsers.base import AnswerParser, ToolCallDelta
from penstock_frontend.processing.parsers.deepseek import (
    DeepSeekR1ReasoningParser,
    DeepSeekV3ToolParser,
    DeepSeekV31ToolParser,
)
from penstock_frontend.processing.parsers.gemma3 import Gemma3ToolParser
from penstock_frontend.processing.parsers.glm45 import Glm45ToolParser
from penstock_frontend.processing.parsers.gpt_oss import GptOssReasoningParser, GptOssToolParser
from penstock_frontend.processing.parsers.granite import GraniteReasoningParser, GraniteToolParser
from penstock_frontend.processing.parsers.hermes import HermesToolParser
from penstock_frontend.processing.parsers.kimi_k2 import KimiK2ToolParser
from penstock_frontend.processing.parsers.llama3_json import Llama3JsonToolParser
from penstock_frontend.processing.parsers.llama4_pythonic import Llama4PythonicToolParser
from penstock_frontend.processing.parsers.mistral import MistralReasoningParser, MistralToolParser
from penstock_frontend.processing.parsers.phi4 import Phi4ToolParser
from penstock_frontend.processing.parsers.qwen3_coder import Qwen3CoderToolParser
from penstock_frontend.processing.parsers.reasoning_tags import Qwen3ReasoningParser
from tests.fakes.models.chat_templates import CHATML, LLAMA

Answer = tuple[str, str, list[tuple[str, str]]]
PARSERS = ["hermes", "llama3_json"]


def parser(tool: str, *, prompt: str = "") -> AnswerParser:
    tools = {"hermes": HermesToolParser, "llama3_json": Llama3JsonToolParser}
    return AnswerParser(Qwen3ReasoningParser(prompt), tools[tool]() if tool != "none" else None)


def joined(pieces: Sequence[str], tool: str, *, prompt: str = "") -> Answer:
    """Join the deltas as a client does: content, reasoning, and the names and arguments of calls."""
    answer = parser(tool, prompt=prompt)
    content, reasoning = "", ""
    calls: list[ToolCallDelta] = []
    for index, piece in enumerate(pieces):
        delta = answer.push(piece, ended=index == len(pieces) - 1)
        content += delta.content
        reasoning += delta.reasoning
        for call in delta.tool_calls:
            if call.index == len(calls):
                assert call.name, "the first piece of a call has its name"
                calls.append(call)
                continue
            before = calls[call.index]
            assert (call.index, call.id, call.name) == (len(calls) - 1, before.id, "")
            calls[-1] = ToolCallDelta(
                index=call.index, id=call.id, name=before.name, arguments=before.arguments + call.arguments
            )
    assert len({call.id for call in calls}) == len(calls)
    return content, reasoning, [(call.name, call.arguments) for call in calls]


def parsed(text: str, tool: str = "hermes", *, prompt: str = "") -> Answer:
    return joined([text], tool, prompt=prompt)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain text\n", "plain text\n", []),
        ("a < b <tool> c", "a < b <tool> c", []),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
        ('Let me look.\n\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n', "Let me look.", [("f", "{}")]),
        (
            '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        ('<tool_call>{"arguments": {"a": [1]}, "name": "f"}</tool_call>', "", [("f", '{"a": [1]}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", [("f", "{}")]),
        (r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        (r'<tool_call>{"name": "\u0066", "arguments": {"a": "}\"{"}}</tool_call>', "", [("f", r'{"a": "}\"{"}')]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
            "",
            [("f", '{"a": "</tool_call>"}')],
        ),
        ('<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        (r'<tool_call>{"name": "\ud83d\ude42\ud83d", "arguments": {}}', "", [("🙂\ufffd", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_ca', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call> Done.', "Done.", [("f", "{}")]),
        ('<tool_call>{"id": 7, "name": "f", "arguments": {}, "more": [{}]}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}, "parameters": {"b": 2}}</tool_call>', "", [("f", "{}")]),
        ("so: <tool_call>nothing</tool_call> !", "so: <tool_call>nothing</tool_call> !", []),
        ('<tool_call>{"na', '<tool_call>{"na', []),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        ('<tool_call><tool_call>{"name": "f"}</tool_call>', "<tool_call>", [("f", "{}")]),
    ],
)
def test_hermes_calls_stand_between_tags(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parsed(text) == (content, "", calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain {text}", "plain {text}", []),
        ('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        (' <|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ('{"name": "f", "parameters": {}}; {"name": "g", "arguments": {}}\n', "", [("f", "{}"), ("g", "{}")]),
        ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ('{"a": 1} and more', '{"a": 1} and more', []),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ('{"name": "f", "parameters": {}}; so', "so", [("f", "{}")]),
        ('{"name": "f", "parameters": {}} {"a": 1}', '{"a": 1}', [("f", "{}")]),
        ('{"name": "f"', '{"name": "f"', []),
        (" \n", " \n", []),
    ],
)
def test_llamas_calls_are_bare_json(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parsed(text, "llama3_json") == (content, "", calls)


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("", "<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("", "\n<think>hm </think>yes </think>", "hm", "yes </think>"),
        ("", " no reasoning <think>", "", " no reasoning <think>"),
        ("<think>\n", "hm\n\nhm\n</think>\nyes", "hm\n\nhm", "yes"),
        ("<think>\n\n</think>\n\n", "<think>", "", "<think>"),
        ("", "<think>hm </thin", "hm </thin", ""),
        ("", "<thin", "", "<thin"),
        ("", "  ", "", "  "),
    ],
)
def test_reasoning_stands_before_the_answer(prompt: str, text: str, reasoning: str, content: str) -> None:
    assert parsed(text, "none", prompt=prompt) == (content, reasoning, [])


def test_a_call_inside_the_reasoning_is_none() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parsed(f"<think>{call}</think>{call}") == ("", call, [("f", "{}")])


def test_arguments_are_handed_on_while_they_are_written() -> None:
    answer = parser("hermes")
    assert answer.push('<tool_call>{"name": "f", ').tool_calls == []
    (first,) = answer.push('"arguments": {"a": "x').tool_calls
    (second,) = answer.push("y").tool_calls
    assert (first.name, first.arguments, second.name, second.arguments) == ("f", '{"a": "x', "", "y")
    assert first.id == second.id


def test_no_piece_shows_a_part_of_a_tag() -> None:
    answer = parser("hermes")
    text = 'Hi. \n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
    assert [delta.content for char in text if (delta := answer.push(char)).content] == ["H", "i", "."]


FRAGMENTS = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "{",
        "}",
        "{}",
        '"',
        "\\",
        ",",
        ":",
        ";",
        "<",
        "</",
        "t",
        "ü",
        "null",
        '"name"',
        '"arguments"',
        " ",
        "\n",
        '{"name": "f", "arguments": ',
        '{"a": "}"}',
        '{"name": "g", "parameters": {"b": [1, "\\""]}}',
    ]
)


def cut(text: str, points: Sequence[int]) -> list[str]:
    ends = sorted({point % (len(text) + 1) for point in points} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("tool", [*PARSERS, "none"])
@pytest.mark.parametrize("prompt", ["", "<think>"])
@settings(max_examples=50)
@given(fragments=st.lists(FRAGMENTS, max_size=14), points=st.lists(st.integers(0, 1000), max_size=12))
def test_any_cutting_of_any_text_gives_the_same(
    tool: str, prompt: str, fragments: list[str], points: list[int]
) -> None:
    text = "".join(fragments)
    whole = parsed(text, tool, prompt=prompt)
    assert joined(cut(text, points), tool, prompt=prompt) == whole
    assert joined([*text, ""], tool, prompt=prompt) == whole


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda each: st.lists(each) | st.dictionaries(st.text(), each),
)
CALLS = st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), JSON)), max_size=3)
PLAIN = st.text(st.characters(exclude_characters="<{")).map(str.strip)


@pytest.mark.slow
@settings(max_examples=50)
@given(reasoning=PLAIN, content=PLAIN, calls=CALLS, points=st.lists(st.integers(0, 1000), max_size=8))
def test_what_a_model_wrote_is_found_again(
    reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]], points: list[int]
) -> None:
    text = f"<think>\n{reasoning}\n</think>\n\n{content}"
    for name, arguments in calls:
        text += f'\n<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    found = joined(cut(text, points), "hermes")
    assert found == (content, reasoning, [(name, json.dumps(arguments)) for name, arguments in calls])


@pytest.mark.parametrize(
    ("template", "tool", "reasoning"),
    [
        (CHATML, HermesToolParser, Qwen3ReasoningParser),
        (LLAMA, Llama3JsonToolParser, None),
        (CHATML.replace('"arguments"', "<function="), None, Qwen3ReasoningParser),
        (CHATML.replace('"arguments"', "<function=...> <parameter=...>"), Qwen3CoderToolParser, Qwen3ReasoningParser),
        (CHATML.replace('"arguments"', "<arg_key>...</arg_key>"), Glm45ToolParser, Qwen3ReasoningParser),
        (LLAMA.replace("<|start_header_id|>", "<|header_start|>"), Llama3JsonToolParser, None),
        ("<|header_start|>system<|header_end|> Use exact format: [func_name1(a=b)]", Llama4PythonicToolParser, None),
        ("<start_of_turn>user", None, None),
        ("<start_of_turn>user Example Format: [func_name1(a=b)]", Gemma3ToolParser, None),
        ('{{ "[AVAILABLE_TOOLS] [" }} {{ "[TOOL_CALLS] [" }}', MistralToolParser, None),
        ('{{ "[TOOL_CALLS]" + name + "[ARGS]" }} [THINK] [/THINK]', MistralToolParser, MistralReasoningParser),
        (
            "<｜Assistant｜><think> </think> <｜tool▁calls▁begin｜> ```json",
            DeepSeekV3ToolParser,
            DeepSeekR1ReasoningParser,
        ),
        (
            "{% if not thinking %}<｜Assistant｜></think>{% endif %} <｜tool▁calls▁begin｜>",
            DeepSeekV31ToolParser,
            Qwen3ReasoningParser,
        ),
        ("<|im_system|>tool_declare<|im_middle|>", KimiK2ToolParser, None),
        ("<|tool_calls_section_begin|> <think></think>", KimiK2ToolParser, Qwen3ReasoningParser),
        ("<|start|>system<|message|> <|channel|>analysis<|message|>", GptOssToolParser, GptOssReasoningParser),
        ("<|start_of_role|>system<|end_of_role|> <|tool_call|>", GraniteToolParser, None),
        (
            "<|start_of_role|> <|tool_call|> <think></think> <response></response>",
            GraniteToolParser,
            GraniteReasoningParser,
        ),
        ("<|system|> functools[{...}]", Phi4ToolParser, None),
        ("", None, None),
    ],
)
def test_parsers_are_picked_by_the_chat_template(template: str, tool: type | None, reasoning: type | None) -> None:
    assert registry.pick(tool="auto", reasoning="auto", template=template) == (tool, reasoning)


def test_parsers_are_picked_by_name() -> None:
    assert registry.pick(tool="llama3_json", reasoning="none", template=CHATML) == (Llama3JsonToolParser, None)


def test_an_unknown_parser_is_a_config_error_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError,
        match="model.tool_parser is 'hermis'; known: auto, none, deepseek_v3, .*, hermes, .*; did you mean 'hermes'",
    ):
        registry.pick(tool="hermis", reasoning="none", template="")
    with pytest.raises(ConfigError, match="model.reasoning_parser is 'x'; known: auto, none, deepseek_r1, "):
        registry.pick(tool="none", reasoning="x", template="")


class Plugin(HermesToolParser):
    """A parser from another distribution."""


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> list[importlib.metadata.EntryPoint]:
    points: list[importlib.metadata.EntryPoint] = []
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    return points


def point(name: str, value: str) -> importlib.metadata.EntryPoint:
    return importlib.metadata.EntryPoint(name, value, registry.ENTRY_POINTS)


def test_a_plugin_is_found_by_its_name(plugins: list[importlib.metadata.EntryPoint], monkeypatch: Any) -> None:
    monkeypatch.setattr(json, "Plugin", Plugin, raising=False)
    plugins.append(point("mine", "json:Plugin"))
    assert registry.pick(tool="mine", reasoning="none", template="").tool is Plugin


@pytest.mark.parametrize("value", ["json:loads", "json:nothing", "no_such_module_at_all:x"])
def test_a_plugin_that_is_none_is_a_config_error(plugins: list[importlib.metadata.EntryPoint], value: str) -> None:
    plugins.append(point("mine", value))
    with pytest.raises(ConfigError, match="plugin 'mine' of penstock.parsers"):
        registry.pick(tool="auto", reasoning="none", template="")
