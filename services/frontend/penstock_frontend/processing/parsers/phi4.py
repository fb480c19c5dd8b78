"""Tool calls of Phi-4-mini, which consist of the word ``functools`` and a JSON list of calls."""

from typing import ClassVar

from penstock_frontend.processing.parsers.base import ToolForm
from penstock_frontend.processing.parsers.call_reader import CallListReader, State

_WORD, _TAG, _TAG_END = "functools[", "<|tool_call|>", "<|/tool_call|>"


class Phi4ToolParser(CallListReader):
    """Parser for a list of tool calls that follows after the word ``functools``, or is between tags."""

    form: ClassVar = ToolForm('{"name": {name}, "arguments": ', "}", ", ", _WORD, "]")
    tags: ClassVar = (_TAG, _TAG_END)
    marks: ClassVar = (_WORD, _TAG)
    ends: ClassVar = (_TAG_END,)

    @classmethod
    def fits(cls, template: str) -> bool:
        """Return whether the template contains the word ``functools``, or writes tools between Phi-4's tags."""
        return _WORD in template or "<|tool|>" in template

    def _begin(self) -> State | None:
        return self._item if self._mark == _WORD else self._list
