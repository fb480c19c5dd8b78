"""Reads streamed answers as agent programs do: the model's turn, and the identifiers that the history repeats."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from penstock_frontend.api.anthropic.protocol import opened
from tests.fakes.clients.agents.recorded import Answer, Turn


def read(path: str, text: str) -> Answer:
    """Return the answer in a stream. Fails if the stream has no end or its events are out of order."""
    if path.startswith("/v1/responses"):
        return _response([json.loads(data) for _, data in _events(text)])
    if path.startswith("/v1/messages"):
        return _message([(name, json.loads(data)) for name, data in _events(text)])
    events = [data for _, data in _events(text)]
    assert events[-1] == "[DONE]"
    return _chat([json.loads(data) for data in events[:-1]])


def _events(text: str) -> Iterator[tuple[str, str]]:
    for event in text.strip().split("\n\n"):
        fields = dict(line.partition(": ")[::2] for line in event.splitlines())
        yield fields.get("event", ""), fields["data"]


def _response(events: list[dict[str, Any]]) -> Answer:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    last = events[-1]
    assert last["response"]["output"] == items
    assert last["response"]["usage"]["output_tokens"] > 0
    thought = "".join(part["text"] for item in items if item["type"] == "reasoning" for part in item["content"])
    text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    calls = [
        item if item["type"] == "function_call" else {**item, "arguments": json.dumps({"input": item["input"]})}
        for item in items
        if item["type"] in ("function_call", "custom_tool_call")
    ]
    ids = [item[key] for item in items for key in ("id", "call_id") if key in item]
    return Answer(_turn(thought, text, {each["call_id"]: each for each in calls}), tuple(ids), last["type"])


def _message(events: list[tuple[str, dict[str, Any]]]) -> Answer:
    assert all(name == event["type"] for name, event in events)
    assert (events[0][0], events[-1][0]) == ("message_start", "message_stop")
    blocks: list[dict[str, Any]] = []
    for name, event in events:
        if name == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "arguments": ""})
        elif name == "content_block_delta":
            delta = event["delta"]
            block = blocks[event["index"]]
            match delta["type"]:
                case "text_delta":
                    block["text"] += delta["text"]
                case "thinking_delta":
                    block["thinking"] += delta["thinking"]
                case "signature_delta":
                    block["thinking"] += opened(delta["signature"])
                case "input_json_delta":
                    block["arguments"] += delta["partial_json"]
    [finish] = [event["delta"]["stop_reason"] for name, event in events if name == "message_delta"]
    calls = {block["id"]: block for block in blocks if block["type"] == "tool_use"}
    thought = "".join(block.get("thinking", "") for block in blocks)
    return Answer(_turn(thought, "".join(block.get("text", "") for block in blocks), calls), tuple(calls), finish)


def _chat(chunks: list[dict[str, Any]]) -> Answer:
    *_, usage = chunks
    assert (usage["choices"], usage["usage"]["completion_tokens"] > 0) == ([], True)
    [choices] = zip(*(chunk["choices"] for chunk in chunks if chunk["choices"]), strict=True)
    thought = text = ""
    calls: list[dict[str, Any]] = []
    for choice in choices:
        delta = choice["delta"]
        thought += delta.get("reasoning_content") or ""
        text += delta.get("content") or ""
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(calls):
                calls.append({"id": piece["id"], **piece["function"]})
            else:
                calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    [finish] = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return Answer(
        _turn(thought, text, {each["id"]: each for each in calls}), tuple(each["id"] for each in calls), finish
    )


def _turn(thought: str, text: str, calls: Mapping[str, Mapping[str, Any]]) -> Turn:
    made = tuple((call["name"], json.loads(call["arguments"])) for call in calls.values())
    return Turn(thought.strip(), text.strip(), made)
