"""Inputs of an ``LLM``, and errors for invalid ones."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from penstock_common.errors import InvalidArgument, RequestFailed
from penstock_local.llm.inputs import (
    Predicted,
    conversations_of,
    paired,
    predicted_of,
    prompts_of,
    sampling_of,
    tools_of,
)

HELLO = {"role": "user", "content": "Hello"}


def generated(*each: Any) -> Iterator[Any]:
    yield from each


def listed(each: Iterator[Any]) -> list[Any]:
    """Return all values, or raise the first failure."""
    values = []
    for value in each:
        if isinstance(value, RequestFailed):
            raise value
        values.append(value)
    return values


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("text", ["text"]),
        ([5, 6], [[5, 6]]),
        ((5, 6), [[5, 6]]),
        ({"prompt": "text"}, ["text"]),
        ({"prompt_token_ids": [5, 6]}, [[5, 6]]),
        ([], []),
        (generated(), []),
        (generated("a", "b"), ["a", "b"]),
        (generated(5, 6), [[5, 6]]),
        (generated("a", generated(5, 6), {"prompt": "c"}), ["a", [5, 6], "c"]),
        ({"a": 1, "b": 2}.keys(), ["a", "b"]),
        (map(str.upper, ["a"]), ["A"]),
    ],
)
def test_whatever_can_be_gone_through_is_several_prompts(given: Any, prompts: list[Any]) -> None:
    assert listed(prompts_of(given, name="prompts").each) == prompts


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "prompts is None; a prompt is text or a list of token ids"),
        (b"text", "prompts is of type bytes; a prompt is text or a list of token ids"),
        (5, "prompts is of type int; a prompt is text or a list of token ids"),
        (["a", None], "prompts[1] is None; a prompt is text or a list of token ids"),
        (["a", b"b"], "prompts[1] is of type bytes; a prompt is text or a list of token ids"),
        (["a", ["b"]], "prompts[1][0] is 'b'; token ids are integers from 0 on"),
        ([[5, -6]], "prompts[0][1] is -6; token ids are integers from 0 on"),
        ([[5, True]], "prompts[0][1] is True; token ids are integers from 0 on"),
        ([5, "a"], "prompts[1] is 'a'; token ids are integers from 0 on"),
        ({"text": "a"}, "prompts is a mapping with 'text'; it must have only prompt or prompt_token_ids"),
        ([{}], "prompts[0] is a mapping with nothing; it must have only prompt or prompt_token_ids"),
        (
            {"prompt": "a", "cache_salt": 1},
            "prompts is a mapping with 'prompt', 'cache_salt'; it must have only prompt or prompt_token_ids",
        ),
    ],
)
def test_invalid_prompts_are_refused_by_their_place(given: Any, said: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        listed(prompts_of(given, name="prompts").each)
    assert refused.value.message == said


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: [HELLO], 1),
        (lambda: generated(HELLO, HELLO), 1),
        (lambda: [[HELLO], [HELLO]], 2),
        (lambda: generated([HELLO], generated(HELLO)), 2),
    ],
)
def test_conversations_may_be_generated(make: Callable[[], Any], count: int) -> None:
    conversations = listed(conversations_of(make()).each)
    assert len(conversations) == count
    assert all(message.content == "Hello" for conversation in conversations for message in conversation)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "messages is None; a conversation is a list of messages"),
        ("Hello", "messages is of type str; a conversation is a list of messages"),
        (HELLO, "messages is of type dict; a conversation is a list of messages"),
        (["Hello"], "conversations[0] is of type str; a conversation is a list of messages"),
        ([[HELLO], None], "conversations[1] is None; a conversation is a list of messages"),
    ],
)
def test_invalid_conversations_are_refused_by_their_place(given: Any, said: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        listed(conversations_of(given).each)
    assert refused.value.message.startswith(said)


def test_sampling_params_may_be_generated() -> None:
    assert [each["seed"] for each in listed(sampling_of(({"seed": seed} for seed in (1, 2)), None))] == [1, 2]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("greedy", "sampling_params is of type str; it must be SamplingParams"),
        (0.7, "sampling_params is of type float; it must be SamplingParams"),
        (["greedy"], "sampling_params[0] is of type str; it must be SamplingParams"),
        ([{"seed": 1}, {"seed": 2}], "sampling_params has 2 entries for 1 inputs"),
    ],
)
def test_invalid_sampling_params_are_refused_by_their_place(given: Any, said: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        listed(itertools.islice(sampling_of(given, 1), 1))
    assert refused.value.message.startswith(said)


def test_what_is_wrong_with_one_input_stands_in_its_place() -> None:
    first, second, third = prompts_of(["a", 2.5, "c"], name="prompts").each
    assert (first, third) == ("a", "c")
    assert isinstance(second, InvalidArgument)
    assert second.message.startswith("prompts[1] is of type float")


def test_prompts_are_read_one_by_one() -> None:
    read = []

    def prompts() -> Iterator[str]:
        for index in itertools.count():
            read.append(index)
            yield f"prompt {index}"

    inputs = prompts_of(prompts(), name="prompts")
    assert list(itertools.islice(inputs.each, 3)) == ["prompt 0", "prompt 1", "prompt 2"]
    assert (read, inputs.total) == ([0, 1, 2], None)


def test_fewer_sampling_params_than_inputs_are_refused_when_they_end() -> None:
    pairs = paired(prompts_of(generated("a", "b"), name="prompts"), generated({"seed": 1}))
    assert next(pairs) == ("a", next(sampling_of({"seed": 1}, 1)))
    with pytest.raises(InvalidArgument, match="sampling_params has 1 entries, but there are more inputs"):
        next(pairs)


def test_tools_and_calls_of_them_may_be_as_in_openais_protocol() -> None:
    function = {"name": "weather", "parameters": {"type": "object"}}
    assert tools_of([{"type": "function", "function": function}]) == tools_of([function])
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    ((message,),) = listed(conversations_of([{"role": "assistant", "tool_calls": [call]}]).each)
    assert (message.tool_calls[0].name, message.tool_calls[0].arguments) == ("weather", '{"city":"Rome"}')
    with pytest.raises(InvalidArgument, match=r"^tools\[0\]: Object missing required field `name`"):
        tools_of([{"type": "function"}])


def test_tools_that_are_no_functions_are_left_out_with_a_line_in_the_log() -> None:
    with structlog.testing.capture_logs() as logs:
        found = tools_of([{"type": "web_search"}, {"type": "function", "function": {"name": "f"}}])
    assert [tool.name for tool in found] == ["f"]
    assert [(log["kind"], log["field"]) for log in logs] == [("tool_left_out", "tools[0]")]


def test_an_answer_may_be_sent_back_as_it_came() -> None:
    call = {"id": "1", "type": None, "index": 0, "function": {"name": "now", "arguments": None}}
    answer = {"role": "assistant", "content": None, "refusal": None, "tool_call_id": None, "reasoning_content": "Hm."}
    ((message,),) = listed(conversations_of([{**answer, "annotations": [], "tool_calls": [call]}]).each)
    assert (message.reasoning, message.tool_calls[0].name, message.tool_calls[0].arguments) == ("Hm.", "now", "")


def test_a_prompt_may_have_a_prediction_as_text_or_token_ids() -> None:
    given = ["a", {"prompt": "b", "prediction": "c"}, {"prompt_token_ids": [1], "prediction": [2, 3]}]
    assert listed(predicted_of(given, name="prompts").each) == [
        Predicted("a", None),
        Predicted("b", "c"),
        Predicted([1], [2, 3]),
    ]
    assert list(predicted_of({"prompt": "b", "prediction": None}, name="prompts").each) == [Predicted("b", None)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompt": "a", "prediction": 3}, "prompts[0].prediction is of type int"),
        ({"prompt": "a", "prediction": {"prompt": "b"}}, "prompts[0].prediction is a mapping; it must be text"),
        ({"prompt": "a", "prediction": [-1]}, "prompts[0].prediction[0] is -1"),
        ({"prediction": "a"}, "prompts[0] is a mapping with nothing; it must have only prompt"),
    ],
)
def test_invalid_predictions_are_refused_by_their_place(given: Any, said: str) -> None:
    (wrong,) = predicted_of([given], name="prompts").each
    assert isinstance(wrong, InvalidArgument)
    assert said in wrong.message


def test_what_is_not_continued_has_no_prediction() -> None:
    (wrong,) = prompts_of([{"prompt": "a", "prediction": "b"}], name="texts").each
    assert isinstance(wrong, InvalidArgument)
    assert "'prediction'" in wrong.message
