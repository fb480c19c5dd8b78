"""Forced tool calls, compiled by the engine's own backend: the parsers can read every output that a constraint allows."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock_enginecore.config import EngineCoreConfig, ModelConfig
from penstock_enginecore.structured_output.backend import XgrammarBackend
from penstock_enginecore.structured_output.factory import make_grammar_backend
from penstock_frontend.call_types import Tool
from penstock_frontend.processing.chat.tool_choice import tool_constraint
from penstock_frontend.processing.parsers import registry
from penstock_frontend.processing.parsers.base import AnswerParser, ToolParser
from penstock_frontend.processing.parsers.hermes import HermesToolParser
from penstock_frontend.processing.parsers.llama3_json import Llama3JsonToolParser
from penstock_frontend.processing.parsers.reasoning_tags import Qwen3ReasoningParser
from tests.fakes.engines.followed import follow_here

MODEL = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"
EOS = 1
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "$defs": {"city": {"enum": ["Köln", "Bonn"]}},
}
TOOLS = [Tool(name="weather", parameters=SCHEMA), Tool(name="now")]
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Bonn"}}'


@pytest.fixture(scope="module")
def backend() -> Iterator[XgrammarBackend]:
    config = EngineCoreConfig(model=ModelConfig(path=str(MODEL)))
    made = make_grammar_backend(config, vocab_size=2048, eos_token_ids=frozenset({EOS}))
    assert isinstance(made, XgrammarBackend)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


CASES: list[tuple[type[ToolParser], dict[str, Any], str, bool]] = [
    (HermesToolParser, {}, HERMES, True),
    (HermesToolParser, {}, f"{HERMES}\n{HERMES_NOW}", True),
    (HermesToolParser, {}, "It rains.", False),
    (HermesToolParser, {}, "", False),
    (HermesToolParser, {}, HERMES.replace("Köln", "Rom"), False),
    (HermesToolParser, {}, HERMES.replace("weather", "wetter"), False),
    (HermesToolParser, {"named": "now"}, HERMES_NOW, True),
    (HermesToolParser, {"named": "now"}, HERMES, False),
    (HermesToolParser, {"named": "now"}, f"{HERMES_NOW}\n{HERMES_NOW}", False),
    (Llama3JsonToolParser, {}, LLAMA, True),
    (Llama3JsonToolParser, {}, '{"city": "Bonn"}', False),
    (HermesToolParser, {"reasoning": Qwen3ReasoningParser}, HERMES, True),
    (HermesToolParser, {"reasoning": Qwen3ReasoningParser}, f"<think>\nHm < 3.\n</think>\n\n{HERMES}", True),
    (HermesToolParser, {"reasoning": Qwen3ReasoningParser}, "<think>\nHm.\n</think>\n\nIt rains.", False),
    (HermesToolParser, {"reasoning": Qwen3ReasoningParser, "prompt": "<think>\n"}, f"Hm.</think>\n\n{HERMES}", True),
    (HermesToolParser, {"reasoning": Qwen3ReasoningParser, "prompt": "<think>\n"}, "Hm.</think>\n\nNo.", False),
]


@pytest.mark.parametrize(("parser", "options", "text", "allowed"), CASES)
def test_the_engine_lets_calls_of_the_tools_through_and_nothing_else(
    backend: XgrammarBackend, tokenizer: Tokenizer, parser: type[ToolParser], options: Any, text: str, allowed: bool
) -> None:
    constraint = tool_constraint(TOOLS, "required", parser, **options)
    assert constraint is not None
    grammar = follow_here(backend, **dict([constraint.constraint]))
    tokens = [*tokenizer.encode(text, add_special_tokens=False).ids, EOS]
    assert grammar.accept(tokens) is allowed
    if allowed:
        assert grammar.terminated
        reasoning = options["reasoning"](options.get("prompt", "")) if "reasoning" in options else None
        answer = AnswerParser(reasoning, parser()).push(text, ended=True)
        assert answer.content == ""
        assert {call.name for call in answer.tool_calls} <= {"weather", "now"}
        assert all(json.loads(call.arguments) is not None for call in answer.tool_calls)
        assert answer.tool_calls


@pytest.mark.parametrize("name", registry.tool_parser_names())
def test_calls_that_must_be_made_are_read_in_every_format(
    backend: XgrammarBackend, tokenizer: Tokenizer, name: str
) -> None:
    parser = registry.pick(tool=name, reasoning="none", template="").tool
    assert parser is not None
    constraint = tool_constraint(TOOLS, "required", parser)
    assert constraint is not None
    form = parser.form
    weather = f'{form.begin}{{"city": "Köln"}}{form.end}'.replace("{name}", '"weather"').replace("{bare}", "weather")
    now = f"{form.begin}{{}}{form.end}".replace("{name}", '"now"').replace("{bare}", "now")
    several = form.separator is not None
    text = form.opening + (f"{weather}{form.separator}{now}" if several else weather) + form.closing
    grammar = follow_here(backend, **dict([constraint.constraint]))
    assert grammar.accept([*tokenizer.encode(text, add_special_tokens=False).ids, EOS])
    tool = parser()
    first, last = tool.push(text), tool.finish()
    calls: dict[int, list[str]] = {}
    for call in [*first.calls, *last.calls]:
        calls.setdefault(call.index, [call.name, ""])[1] += call.arguments
    assert first.content + last.content == ""
    assert list(calls.values()) == [["weather", '{"city": "Köln"}'], *([["now", "{}"]] if several else [])]
    assert tool.broken == 0
