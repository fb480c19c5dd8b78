"""Inputs of custom tools: the text in a call's arguments, however these are cut into pieces."""

import json
import random

import pytest

from penstock_common.types.outputs import FinishReason
from penstock_frontend.api.tools import CustomInputs, InputReader, ServedTools, input_arguments
from penstock_frontend.call_types import Finish, Usage
from penstock_frontend.processing.chat.answers import ChatOutput
from penstock_frontend.processing.parsers.base import ToolCallDelta

TEXTS = ["", "a", 'a "b" \\ \n\t', "ü 🙂 \ud83d", "*** Begin Patch\n+x = {}\n", "\\u0041", "]}\"'"]
ENDED = Finish(FinishReason.STOP, None, Usage())


def read(pieces: list[str]) -> str:
    reader = InputReader()
    return "".join([*(reader.push(piece) for piece in pieces), reader.finish()])


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("escaped", [False, True])
def test_a_text_is_read_whatever_the_pieces_are(text: str, escaped: bool) -> None:
    shown = text.replace("\ud83d", "\ufffd")
    written = json.dumps({"input": text}, ensure_ascii=escaped)
    written = written if escaped else written.replace("\ud83d", "\\ud83d")
    assert read([written]) == shown
    assert read(list(written)) == shown
    for seed in range(20):
        cuts = sorted(random.Random(seed).sample(range(len(written)), 3))
        assert read([written[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]) == shown


def test_a_text_that_was_cut_off_is_what_there_is_of_it() -> None:
    assert read(['{"input": "ab', "c\\"]) == "abc"
    assert read(['{"input": "ab\\ud83d"}']) == "ab\ufffd"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("{}", ""),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"why": "y", "input": "x"}', "x"),
        ('{"input": 7}', '{"input": 7}'),
        ("no JSON", "no JSON"),
        ("[1]", "[1]"),
    ],
)
def test_other_arguments_are_handed_on_whole(arguments: str, shown: str) -> None:
    assert read([arguments]) == shown
    assert read(list(arguments)) == shown


def test_only_calls_of_custom_tools_are_changed() -> None:
    tools = ServedTools()
    tools.custom("patch", None, "tools[0]")
    tools.function("get", None, None, "tools[1]")
    inputs = CustomInputs(tools)
    calls = [
        ToolCallDelta(index=0, id="a", name="patch", arguments='{"why": 1, "in'),
        ToolCallDelta(index=0, id="a", arguments='put": "x"}'),
        ToolCallDelta(index=1, id="b", name="get", arguments='{"input": "y"}'),
        ToolCallDelta(index=2, id="c", name="patch", arguments=input_arguments("z")),
    ]
    found = inputs.read(ChatOutput(tool_calls=calls, finish=ENDED)).tool_calls
    assert [(call.index, call.name, call.arguments) for call in found] == [
        (0, "patch", "x"),
        (1, "get", '{"input": "y"}'),
        (2, "patch", "z"),
    ]
    pieces = CustomInputs(tools)
    outputs = [pieces.read(ChatOutput(tool_calls=[call])) for call in calls]
    outputs.append(pieces.read(ChatOutput(finish=ENDED)))
    told = [(call.index, call.name, call.arguments) for output in outputs for call in output.tool_calls]
    assert told == [(0, "patch", ""), (0, "", "x"), (1, "get", '{"input": "y"}'), (2, "patch", "z")]
