"""Recorded requests of agent programs, one JSON file for each program.

A file holds the last request of a run of five tool calls, with every field that the program sent. Its history has the
earlier turns, so the earlier requests are prefixes of it. Instructions, descriptions and identifiers are replaced by
short ones. ``{work}`` stands for the agent's working directory.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock_frontend.api.anthropic.protocol import opened

FOLDER = Path(__file__).parent
PROGRAMS = sorted(file.stem for file in FOLDER.glob("*.json"))
ANSWER = "It prints 42."
"""The model's last answer in every recorded run."""
MADE = frozenset({"reasoning", "function_call", "custom_tool_call"})
"""Types of the items that the model produces. A message of the model is recognized by its role instead."""


class Turn(NamedTuple):
    """One output of the model. ``calls``: pairs of a tool's name and its arguments."""

    thought: str
    text: str
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    @property
    def tokens(self) -> str:
        """Text of the turn in the format of a Hermes model."""
        calls = (
            f'\n<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'
            for name, arguments in self.calls
        )
        return f"<think>\n{self.thought}\n</think>\n\n{self.text}{''.join(calls)}"


class Answer(NamedTuple):
    """A turn as a client read it. ``ids``: identifiers of items and calls, in the order in which the history repeats
    them.
    """

    turn: Turn
    ids: tuple[str, ...]
    finish: str


class Recorded:
    """The recorded run of one program. ``work``: the working directory to put in place of ``{work}``."""

    def __init__(self, program: str, work: str = "/work") -> None:
        text = (FOLDER / f"{program}.json").read_text(encoding="utf-8").replace("{work}", work)
        told = json.loads(text)
        self.program: str = told["program"]
        self.version: str = told["version"]
        self.package: str = told["package"]
        self.path: str = told["path"]
        self.headers: dict[str, str] = told["headers"]
        self._body: dict[str, Any] = told["body"]
        self._list = "input" if "input" in self._body else "messages"
        self._starts = list(_starts(self._body[self._list]))

    @property
    def tools(self) -> list[str]:
        """Names of the tools that the request offers, without tools in namespaces."""
        found = (tool.get("function", tool) for tool in self._body["tools"])
        return [tool["name"] for tool in found if "name" in tool and tool.get("type") != "namespace"]

    @property
    def turns(self) -> list[Turn]:
        """The model's answer to each request, each with reasoning. The last turn answers the complete history."""
        made = [_turn(self._made(start)) for start in self._starts]
        steps = (turn._replace(thought=turn.thought or f"This is step {step}.") for step, turn in enumerate(made))
        return [*steps, Turn("This is the end.", ANSWER)]

    @property
    def keeps_thoughts(self) -> bool:
        """Whether the program sends the model's reasoning back."""
        return all(_turn(self._made(start)).thought for start in self._starts)

    def body(self, number: int, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return request ``number``, with the identifiers of ``answers`` in place of the recorded ones."""
        items = self._body[self._list]
        end = self._starts[number] if number < len(self._starts) else len(items)
        text = json.dumps({**self._body, self._list: items[:end]})
        for start, answer in zip(self._starts, answers, strict=False):
            for recorded, real in zip(_ids(self._made(start)), answer.ids, strict=True):
                text = text.replace(json.dumps(recorded), json.dumps(real))
        body: dict[str, Any] = json.loads(text)
        return body

    def _made(self, start: int) -> list[Any]:
        """Return the items of the turn that begins at ``start``."""
        return list(itertools.takewhile(_is_made, self._body[self._list][start:]))


def _starts(items: Sequence[Any]) -> Iterator[int]:
    """Yield the indexes in a history at which the model's turns begin."""
    for place, item in enumerate(items):
        if _is_made(item) and (place == 0 or not _is_made(items[place - 1])):
            yield place


def _is_made(item: Any) -> bool:
    return item.get("type") in MADE or item.get("role") == "assistant"


def _turn(items: Sequence[Any]) -> Turn:
    thought = text = ""
    calls: list[tuple[str, Any]] = []
    for item in items:
        match item:
            case {"type": "reasoning", "content": parts}:
                thought += "".join(part["text"] for part in parts)
            case {"type": "function_call", "name": name, "arguments": arguments}:
                calls.append((name, json.loads(arguments)))
            case {"type": "custom_tool_call", "name": name, "input": given}:
                calls.append((name, {"input": given}))
            case {"role": "assistant", "content": list(parts)}:
                thought += "".join(part.get("thinking") or opened(part.get("signature", "")) for part in parts)
                text += "".join(part.get("text", "") for part in parts)
                calls += [(part["name"], part["input"]) for part in parts if part["type"] == "tool_use"]
            case {"role": "assistant", "content": content}:
                thought += item.get("reasoning_content", "")
                text += content or ""
                made = [call["function"] for call in item["tool_calls"]]
                calls += [(call["name"], json.loads(call["arguments"])) for call in made]
            case _:
                raise AssertionError(f"no turn has {item}")
    return Turn(thought, text, tuple(calls))


def _ids(items: Sequence[Any]) -> list[str]:
    found: list[str] = []
    for item in items:
        found += [item[key] for key in ("id", "call_id") if key in item]
        found += [call["id"] for call in item.get("tool_calls", ())]
        content = item.get("content")
        found += [part["id"] for part in content if "id" in part] if isinstance(content, list) else []
    return found
