"""Tool calls of Qwen3-Coder: ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``."""

import re
from typing import ClassVar

from penstock_frontend.processing.parsers.base import ToolForm
from penstock_frontend.processing.parsers.call_reader import State
from penstock_frontend.processing.parsers.hermes import HermesToolParser
from penstock_frontend.processing.parsers.markup import MarkupReader, Tags

_CALL, _CALL_END, _FUNCTION = "<tool_call>", "</tool_call>", "<function="
_NAME = re.compile(r"\s*[^\s<>]+\s*")


class Qwen3CoderToolParser(MarkupReader):
    """Parser for tool calls that may be without their outer tags.

    A JSON object between the outer tags is also a call, as in Hermes, because forced calls are JSON.
    """

    form: ClassVar[ToolForm] = HermesToolParser.form
    tags: ClassVar = (_CALL, _CALL_END)
    marks: ClassVar = (_CALL, _FUNCTION)
    ends: ClassVar = (_CALL_END,)
    markup: ClassVar = Tags("<parameter=", ">", "</parameter>", "</function>")
    margin: ClassVar = "\n"

    @classmethod
    def fits(cls, template: str) -> bool:
        """Return whether the template writes the name of the function inside a tag."""
        return _FUNCTION in template and "<parameter=" in template

    def _begin(self) -> State | None:
        if self._mark == _FUNCTION:
            return self._function
        self._drop_blanks()
        if self._text.startswith("{"):
            return self._call_object()
        if self._text.startswith(_FUNCTION):
            self._drop(len(_FUNCTION))
            return self._function
        return self._wait() if _FUNCTION.startswith(self._text) else self._broken()

    def _function(self) -> State | None:
        head = self._head(">")
        if head is None:
            return self._wait()
        return self._call(head.strip()) if _NAME.fullmatch(head) else self._broken()
