"""What of two answers is told: kinds and words, not values."""

from typing import Any

import pytest

from tests.peers.cases import MODEL
from tests.peers.shapes import Event, differences, events_of, kinds, kinds_of_events, sequence


def different(there: Any, here: Any) -> list[Any]:
    return differences(kinds(there), kinds(here))


def test_values_are_no_difference() -> None:
    there = {"id": "cmpl-1", "created": 1, "choices": [{"text": "a", "logprobs": {"top_logprobs": [{"a": -1.5}]}}]}
    here = {"id": "cmpl-2", "created": 2, "choices": [{"text": "b", "logprobs": {"top_logprobs": [{"b": -2.5}]}}] * 2}
    assert different(there, here) == []


@pytest.mark.parametrize(
    ("there", "here", "row"),
    [
        ({"a": 1}, {"a": 1.0}, ("a", "int", "float")),
        ({"a": None}, {}, ("a", "null", "-")),
        ({"object": "list"}, {"object": "lists"}, ("object", '"list"', '"lists"')),
        ({"id": "cmpl-1"}, {"id": "embd-1"}, ("id", "cmpl-...", "embd-...")),
        ({"a": [{"b": 1}, {"b": None}]}, {"a": [{"b": 1}]}, ("a[].b", "int or null", "int")),
        ({"a": {"b": {"c": 1}}}, {"a": None}, ("a", "object", "null")),
        ({"a": [1]}, {}, ("a", "list", "-")),
        ({}, {"a": [{"b": 1}]}, ("a", "-", "list")),
    ],
)
def test_a_difference_is_told_once_and_at_its_root(there: Any, here: Any, row: tuple[str, str, str]) -> None:
    given = [{MODEL: 1, **each} for each in (there, here)]
    assert different(*given) == [row]


def test_streams_are_told_by_the_order_of_their_events() -> None:
    text = (
        'event: start\ndata: {"a": 1}\n\n: comment\n\nevent: more\ndata: {"b": 2}\n\nevent: more\ndata: {"b": null}\n\n'
    )
    events = events_of(text.splitlines())
    assert [(event.name, event.data) for event in events] == [
        ("start", '{"a": 1}'),
        ("more", '{"b": 2}'),
        ("more", '{"b": null}'),
    ]
    read = [Event("start", {"a": 1}), Event("more", {"b": 2}), Event("more", {"b": None})]
    assert sequence(read) == ["start", "more"]
    assert kinds_of_events(read)["more.b"] == {"int", "null"}


def test_chunks_are_labelled_by_what_they_bring() -> None:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}]
    chunks: list[Any] = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks += [
        {"choices": [{"delta": {}, "text": "", "finish_reason": "stop"}]},
        {"choices": []},
        {"error": {}},
        "[DONE]",
    ]
    expected = ["role+content", "content", "text+finish", "usage", "error", "[DONE]"]
    assert sequence(Event("", chunk) for chunk in chunks) == expected
