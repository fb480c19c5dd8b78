"""What can be given to an ``LLM``, and what is said of the rest."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock_common.errors import InvalidArgument
from penstock_local.inprocess.inputs import as_conversations, as_prompts, as_sampling

HELLO = {"role": "user", "content": "Hello"}


def generated(*each: Any) -> Iterator[Any]:
    yield from each


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
    assert as_prompts(given, name="prompts") == prompts


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
        ({"text": "a"}, "prompts is a mapping with 'text'; it must have prompt or prompt_token_ids alone"),
        ([{}], "prompts[0] is a mapping with nothing; it must have prompt or prompt_token_ids alone"),
        (
            {"prompt": "a", "multi_modal_data": 1},
            "prompts is a mapping with 'prompt', 'multi_modal_data'; it must have prompt or prompt_token_ids alone",
        ),
    ],
)
def test_what_is_no_prompt_is_refused_by_its_place(given: Any, said: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        as_prompts(given, name="prompts")
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
    conversations = as_conversations(make())
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
def test_what_is_no_conversation_is_refused_by_its_place(given: Any, said: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        as_conversations(given)
    assert refused.value.message.startswith(said)


def test_sampling_params_may_be_generated() -> None:
    assert [each["seed"] for each in as_sampling(({"seed": seed} for seed in (1, 2)), 2)] == [1, 2]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("greedy", "sampling_params is of type str; it must be SamplingParams"),
        (0.7, "sampling_params is of type float; it must be SamplingParams"),
        (["greedy"], "sampling_params[0] is of type str; it must be SamplingParams"),
        ([{"seed": 1}, {"seed": 2}], "sampling_params has 2 entries for 1 inputs"),
    ],
)
def test_what_are_no_sampling_params_is_refused_by_its_place(given: Any, said: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        as_sampling(given, 1)
    assert refused.value.message.startswith(said)
