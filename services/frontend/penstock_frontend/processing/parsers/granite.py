"""Tool calls and reasoning of Granite 3. The successor, Granite 4, uses the Hermes format for tool calls."""

from typing import ClassVar

from penstock_frontend.processing.parsers.base import ToolForm
from penstock_frontend.processing.parsers.call_reader import CallListReader, State
from penstock_frontend.processing.parsers.reasoning_tags import TagReasoningParser

_CALLS = "<|tool_call|>"
_THOUGHTS = "Here is my thought process:"


class GraniteToolParser(CallListReader):
    """Parser for the mark ``<|tool_call|>``, after which a JSON list of tool calls follows. Granite 3.1 writes the mark
    without bars.
    """

    form: ClassVar = ToolForm('{"name": {name}, "arguments": ', "}", ", ", _CALLS + "[", "]")
    tags: ClassVar = (_CALLS,)
    marks: ClassVar = (_CALLS, "<tool_call>")
    ends: ClassVar = ("</tool_call>",)

    @classmethod
    def fits(cls, template: str) -> bool:
        """Return whether the chat template contains Granite's mark of tool calls, and Granite's special token for the
        start of a role name.
        """
        return _CALLS in template and "<|start_of_role|>" in template

    def _begin(self) -> State | None:
        return self._list


class GraniteReasoningParser(TagReasoningParser):
    """Parser for reasoning between two fixed sentences (Granite 3.2) or between tags (Granite 3.3).

    The text after the reasoning may be between ``<response>`` tags.
    """

    tags: ClassVar = (_THOUGHTS, "Here is my response:")
    begins: ClassVar = (_THOUGHTS, "Here's my thought process:", "<think>")
    ends: ClassVar = ("Here is my response:", "Here's my response:", "</think>")
    response: ClassVar = ("<response>", "</response>")

    @classmethod
    def fits(cls, template: str) -> bool:
        """Return whether the template contains the opening sentence of the reasoning, or tags around responses."""
        return _THOUGHTS in template or "<response>" in template
