"""Inputs of custom tools in answers: texts, read from the arguments of the functions that the tools are for the model."""

import json
import re

import msgspec

from penstock_frontend.api.served_tools import INPUT, ServedTools
from penstock_frontend.processing.chat.answers import ChatOutput
from penstock_frontend.processing.parsers.base import ToolCallDelta
from penstock_frontend.processing.parsers.call_scanner import whole

_BEGIN = re.compile(rf'\s*{{\s*"{INPUT}"\s*:\s*"')
_CHARACTER = re.compile(r"\\(?:u[0-9a-fA-F]{4}|[^u])|[^\\]", re.DOTALL)
_HIGH = re.compile(r"\\u[dD][89abAB]")
"""The first half of a character, whose second half may come with the next piece."""


class InputReader:
    """Reads the text ``input`` from a call's arguments while they are being written. Other arguments are handed on as text."""

    def __init__(self) -> None:
        self._raw = ""
        self._begun = False
        self._ended = False

    def push(self, arguments: str) -> str:
        """Return more of the text."""
        if self._ended:
            return ""
        self._raw += arguments
        if not self._begun:
            begin = _BEGIN.match(self._raw)
            if begin is None:
                return ""
            self._begun, self._raw = True, self._raw[begin.end() :]
        return self._text()

    def finish(self) -> str:
        """Return what is left when the call has ended: all of the arguments, if they do not begin with the text."""
        if self._begun:
            return "" if self._ended else self._text(ended=True)
        try:
            found = json.loads(self._raw, strict=False)
        except (ValueError, RecursionError):
            return self._raw
        if isinstance(found, dict) and isinstance(found.get(INPUT), str):
            return whole(found[INPUT])
        return "" if found == {} else self._raw

    def _text(self, *, ended: bool = False) -> str:
        upto = 0
        while (match := _CHARACTER.match(self._raw, upto)) is not None:
            if match[0] == '"':
                self._ended = True
                break
            if not ended and _HIGH.match(match[0]) and len(self._raw) < match.end() + 6:
                break
            upto = match.end()
        written, self._raw = self._raw[:upto], self._raw[upto:]
        try:
            return whole(json.loads(f'"{written}"', strict=False))
        except ValueError:  # an escape that JSON does not have
            return whole(written)


class CustomInputs:
    """Makes the calls of one sequence those of the client's tools: of custom tools the arguments become the input."""

    def __init__(self, tools: ServedTools) -> None:
        self._tools = tools
        self._has_custom = tools.has_custom
        self._readers: dict[int, InputReader] = {}
        self._last: ToolCallDelta | None = None

    def read(self, output: ChatOutput) -> ChatOutput:
        """Return the output with the inputs of custom tools in the place of their arguments."""
        if not self._has_custom:
            return output
        calls: list[ToolCallDelta] = []
        for call in output.tool_calls:
            if self._last is not None and self._last.index != call.index:
                self._finish(calls)
            if call.name and (tool := self._tools.called(call.name)) is not None and tool.custom:
                self._readers[call.index] = InputReader()
            reader = self._readers.get(call.index)
            arguments = call.arguments if reader is None else reader.push(call.arguments)
            if call.name or arguments:
                calls.append(msgspec.structs.replace(call, arguments=arguments))
            self._last = call
        if output.finish is not None:
            self._finish(calls)
        return msgspec.structs.replace(output, tool_calls=calls)

    def _finish(self, calls: list[ToolCallDelta]) -> None:
        """Add what is left of the last call to its piece, or as a piece of its own."""
        last, self._last = self._last, None
        if last is None or (reader := self._readers.pop(last.index, None)) is None:
            return
        if not (rest := reader.finish()):
            return
        if calls and calls[-1].index == last.index:
            calls[-1] = msgspec.structs.replace(calls[-1], arguments=calls[-1].arguments + rest)
        else:
            calls.append(ToolCallDelta(index=last.index, id=last.id, arguments=rest))


def input_arguments(text: str) -> str:
    """Return the arguments of a custom tool's call with that input, as the model writes them."""
    return json.dumps({INPUT: text}, ensure_ascii=False)
