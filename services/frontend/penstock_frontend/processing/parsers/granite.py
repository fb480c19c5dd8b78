"""Calls and reasoning as Granite 3 writes them. Granite 4 writes calls as Hermes does."""

from typing import ClassVar

from penstock_frontend.processing.parsers.base import ToolForm
from penstock_frontend.processing.parsers.call_reader import CallListReader, State
from penstock_frontend.processing.parsers.reasoning_tags import TagReasoningParser

_CALLS = "<|tool_call|>"
_THOUGHTS = "Here is my thought process:"


class GraniteToolParser(CallListReader):
    """``<|tool_call|>``, which 3.1 writes without bars, and a JSON list of calls."""

    form: ClassVar = ToolForm('{"name": {name}, "arguments": ', "}", ", ", _CALLS + "[", "]")
    tags: ClassVar = (_CALLS,)
    marks: ClassVar = (_CALLS, "<tool_call>")
    ends: ClassVar = ("</tool_call>",)

    @classmethod
    def fits(cls, template: str) -> bool:
        """Whether the template tells the model of Granite's mark, in Granite's turns."""
        return _CALLS in template and "<|start_of_role|>" in template

    def _begin(self) -> State | None:
        return self._list


class GraniteReasoningParser(TagReasoningParser):
    """Reasoning behind a sentence (3.2) or between tags (3.3), which stand around the response as well."""

    tags: ClassVar = (_THOUGHTS, "Here is my response:")
    begins: ClassVar = (_THOUGHTS, "Here's my thought process:", "<think>")
    ends: ClassVar = ("Here is my response:", "Here's my response:", "</think>")
    response: ClassVar = ("<response>", "</response>")

    @classmethod
    def fits(cls, template: str) -> bool:
        """Whether the template tells the model of the sentence, or of tags around responses."""
        return _THOUGHTS in template or "<response>" in template
