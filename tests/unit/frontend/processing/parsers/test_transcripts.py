"""Answers in the models' own formats: read whole, and in every way that a stream may cut them.

``tests/fakes/models/transcripts`` has a file for each parser, which follows the conventions of the models' chat
templates.
"""

import functools
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_frontend.processing.parsers import registry
from penstock_frontend.processing.parsers.base import AnswerParser, ToolCallDelta

FOLDER = Path(__file__).resolve().parents[4] / "fakes/models/transcripts"
CORPORA = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.glob("*.json"))}
CASES = [
    pytest.param(corpus, case, id=f"{name}: {case['name']}")
    for name, corpus in CORPORA.items()
    for case in corpus["cases"]
]
TOKENS = re.compile(r"<[|｜]?|\w{1,4}|\s+|.", re.DOTALL)
"""Pieces about as long as tokens, which do not end where marks do."""


@functools.cache
def classes(tool: str, reasoning: str) -> registry.Parsers:
    return registry.pick(tool=tool, reasoning=reasoning, template="")


def test_every_parser_of_other_formats_has_transcripts() -> None:
    assert {*CORPORA} == {*registry.tool_parser_names()} - {"hermes", "llama3_json"}


def make_parser(corpus: dict[str, Any], prompt: str = "", tools: dict[str, Any] | None = None) -> AnswerParser:
    parsers = classes(corpus["tool"], corpus["reasoning"])
    assert parsers.tool is not None
    tool = parsers.tool()
    tool.expect(tools or {})
    return AnswerParser(parsers.reasoning(prompt) if parsers.reasoning is not None else None, tool)


class Read:
    """A client's result of an answer that came in pieces."""

    def __init__(self, answer: AnswerParser, pieces: Sequence[str]) -> None:
        self.content = self.reasoning = ""
        calls: list[ToolCallDelta] = []
        for index, piece in enumerate([*pieces, ""]):
            delta = answer.push(piece, ended=index == len(pieces))
            self.content += delta.content
            self.reasoning += delta.reasoning
            for call in delta.tool_calls:
                assert bool(call.name) == (call.index == len(calls)), "the first piece of a call has its name"
                if call.name:
                    calls.append(call)
                    continue
                before = calls[-1]
                assert (call.index, call.id) == (before.index, before.id)
                arguments = before.arguments + call.arguments
                calls[-1] = ToolCallDelta(index=call.index, id=call.id, name=before.name, arguments=arguments)
        self.ids = [call.id for call in calls]
        self.calls = [[call.name, call.arguments] for call in calls]
        self.broken = answer.broken
        assert len(set(self.ids)) == len(calls)
        (self.content + self.reasoning + "".join(itertools.chain(*self.calls))).encode()  # no halves of characters

    @property
    def all(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("content", "reasoning", "calls", "broken")}


def cuttings(text: str) -> Iterator[list[str]]:
    """Yield the text in characters, in pieces of every small size, in two at every place, and in likely tokens."""
    for size in range(1, 9):
        yield [text[start : start + size] for start in range(0, len(text), size)]
    for place in range(1, len(text)):
        yield [text[:place], text[place:]]
    yield TOKENS.findall(text)


@pytest.mark.parametrize(("corpus", "case"), CASES)
def test_a_transcript_is_read_the_same_however_it_is_cut(corpus: dict[str, Any], case: dict[str, Any]) -> None:
    def read(pieces: Sequence[str]) -> Read:
        return Read(make_parser(corpus, case.get("prompt", ""), case.get("tools")), pieces)

    whole = read([case["text"]])
    assert whole.all == {name: case[name] for name in ("content", "reasoning", "calls", "broken")}
    if "ids" in case:
        assert whole.ids == case["ids"]
    if not case["broken"]:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole.calls)
    for pieces in cuttings(case["text"]):
        assert read(pieces).all == whole.all, pieces


@st.composite
def mutated(draw: st.DrawFn, corpus: dict[str, Any]) -> str:
    """Return a transcript that is cut off, lacks a part, or has a part of another transcript."""
    texts = st.sampled_from([case["text"] for case in corpus["cases"]])
    text: str = draw(texts)
    for _ in range(draw(st.integers(1, 3))):
        at, to = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
        kind = draw(st.sampled_from(["cut", "lose", "double", "insert", "join"]))
        match kind:
            case "cut":
                text = text[:at]
            case "lose":
                text = text[:at] + text[to:]
            case "double":
                text = text[:to] + text[at:]
            case "insert":
                text = (
                    text[:at] + draw(st.sampled_from([*"{}[]()<>\"\\'", "\n", "é", "🙂", "null", "\x00"])) + text[at:]
                )
            case _:
                text = text[:at] + draw(texts)
    return text


@pytest.mark.parametrize("name", CORPORA)
@settings(max_examples=25)
@given(data=st.data())
def test_a_damaged_transcript_is_read_the_same_however_it_is_cut(name: str, data: st.DataObject) -> None:
    corpus = CORPORA[name]
    text = data.draw(mutated(corpus))
    whole = Read(make_parser(corpus), [text])
    assert Read(make_parser(corpus), list(text)).all == whole.all
    points = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)) | {0, len(text)})
    pieces = [text[start:end] for start, end in itertools.pairwise(points)]
    assert Read(make_parser(corpus), pieces).all == whole.all


@pytest.mark.parametrize("name", CORPORA)
def test_text_without_a_mark_is_content_as_it_stands(name: str) -> None:
    text = "  Ünïcode, {braces} and [brackets] < > \n\n and blanks at the end \n"
    corpus = {**CORPORA[name], "reasoning": "none"}
    assert Read(make_parser(corpus), list(text)).content == text


def test_mistrals_ids_are_those_that_its_templates_take() -> None:
    read = Read(make_parser(CORPORA["mistral"]), ['[TOOL_CALLS][{"name": "f", "arguments": {}}]'])
    assert re.fullmatch(r"[a-zA-Z0-9]{9}", read.ids[0])


def test_an_id_that_the_model_gives_twice_is_given_once() -> None:
    call = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    read = Read(make_parser(CORPORA["kimi_k2"]), [call, call])
    assert read.ids[0] == "functions.f:0"
    assert read.ids[1].startswith("call_")


def test_arguments_of_json_formats_are_handed_on_while_they_are_written() -> None:
    for name, text in {
        "mistral": '[TOOL_CALLS]f[ARGS]{"a": "x',
        "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "x',
        "granite": '<|tool_call|>[{"name": "f", "arguments": {"a": "x',
    }.items():
        answer = make_parser({**CORPORA[name], "reasoning": "none"})
        first, *more = answer.push(text).tool_calls
        assert (first.name, "".join(call.arguments for call in (first, *more))) == ("f", '{"a": "x')
        (second,) = answer.push("y").tool_calls
        assert (second.id, second.name, second.arguments) == (first.id, "", "y")
