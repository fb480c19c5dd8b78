"""Answers from an engine's tokens: they do not depend on steps, stop strings or the client's speed."""

import itertools
from collections.abc import Sequence

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_common.types.outputs import FinishReason
from penstock_common.types.sampling import OutputKind
from penstock_frontend.call_types import Finish, Usage
from penstock_frontend.processing.chat.answers import ChatOutput, ChatOutputs
from penstock_frontend.processing.outputs.collector import OutputCollector
from penstock_frontend.processing.outputs.detokenizer import IncrementalDetokenizer, OutputText
from penstock_frontend.processing.parsers.base import AnswerParser
from penstock_frontend.processing.parsers.hermes import HermesToolParser
from penstock_frontend.processing.parsers.reasoning_tags import Qwen3ReasoningParser
from penstock_frontend.processing.prompts.tokenizer import Tokenizer
from tests.fakes.models.small_tokenizers import byte_level

TOKENIZER = Tokenizer(byte_level())
BACKEND = byte_level()
PIECES = [
    "<think>",
    "</think>",
    "hm 🙂",
    "\n\n",
    " größer",
    '<tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call>',
    "<tool_call>",
    "STOP",
    "S",
    "你",
    "<",
]

Answer = tuple[str, str, list[tuple[str, str]]]


def parser() -> AnswerParser:
    return AnswerParser(Qwen3ReasoningParser(""), HermesToolParser())


def joined(outputs: Sequence[ChatOutput]) -> Answer:
    calls: dict[int, list[str]] = {}
    for call in (call for output in outputs for call in output.tool_calls):
        calls.setdefault(call.index, [call.name, ""])[1] += call.arguments
    content, reasoning = ("".join(getattr(output, name) for output in outputs) for name in ("content", "reasoning"))
    return content, reasoning, [(name, arguments) for name, arguments in calls.values()]


async def read(tokens: list[int], steps: Sequence[int], reads: Sequence[bool], kind: OutputKind) -> list[ChatOutput]:
    """Return the answer of a client that reads only after some steps. Each step is a number of tokens."""
    text = OutputText(IncrementalDetokenizer(TOKENIZER, [], skip_special_tokens=True), stops=["STOP"])
    collector = OutputCollector(kind, 1)
    outputs = ChatOutputs(kind, parser)
    got: list[ChatOutput] = []
    begin = 0
    for index in range(len(tokens) + 1):
        end = begin + steps[index % len(steps)]
        delta = text.add(tokens[begin:end], ended=end >= len(tokens))
        over = bool(delta.stop) or end >= len(tokens)
        collector.put(delta, Finish(FinishReason.STOP, delta.stop or None, Usage()) if over else None)
        if over or (reads[index % len(reads)] and collector._due):
            got.append(outputs.read(await collector.get()))
        if over:
            break
        begin = end
    return got


@pytest.mark.parametrize("kind", OutputKind)
@settings(max_examples=60)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=8),
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    reads=st.lists(st.booleans(), min_size=1, max_size=6),
)
async def test_the_answer_does_not_depend_on_how_it_came(
    kind: OutputKind, pieces: list[str], steps: list[int], reads: list[bool]
) -> None:
    text = "".join(pieces)
    got = await read(BACKEND.encode(text, add_special_tokens=False).ids, steps, reads, kind)
    whole = parser().push(text.split("STOP")[0], ended=True)
    expected = joined([ChatOutput(content=whole.content, reasoning=whole.reasoning, tool_calls=whole.tool_calls)])
    assert joined(got if kind is OutputKind.DELTA else got[-1:]) == expected
    assert got[-1].finish is not None


async def test_cumulative_answers_only_grow() -> None:
    text = '<think>hm</think>So.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    got = await read(BACKEND.encode(text, add_special_tokens=False).ids, [1], [True], OutputKind.CUMULATIVE)
    for before, after in itertools.pairwise(got):
        assert after.content.startswith(before.content)
        assert after.reasoning.startswith(before.reasoning)
        assert all(
            (old.id, old.name) == (new.id, new.name) and new.arguments.startswith(old.arguments)
            for old, new in zip(before.tool_calls, after.tool_calls, strict=False)
        )


@pytest.mark.parametrize(
    ("text", "warnings"), [('<tool_call>{"na', 1), ('<tool_call>{"name": "f"}</tool_call>', 0), ("<", 0)]
)
async def test_calls_that_cannot_be_read_are_text_and_one_warning(text: str, warnings: int) -> None:
    with structlog.testing.capture_logs() as logs:
        got = await read(BACKEND.encode(text, add_special_tokens=False).ids, [1], [True], OutputKind.DELTA)
    assert [log["calls"] for log in logs if "could not be parsed" in log["event"]] == [1] * warnings
    assert (joined(got)[0] == text) is not text.endswith("</tool_call>")
