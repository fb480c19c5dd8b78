"""Tool calls of GLM 4.5 and later models, which use ``<arg_key>`` and ``<arg_value>`` tags for each argument.

A call is the name of the tool, followed by ``<arg_key>key</arg_key><arg_value>value</arg_value>`` for each argument.
"""

import re
from typing import ClassVar

from penstock_frontend.processing.parsers.base import ToolForm
from penstock_frontend.processing.parsers.call_reader import State
from penstock_frontend.processing.parsers.hermes import HermesToolParser
from penstock_frontend.processing.parsers.markup import MarkupReader, Tags

_CALL, _CALL_END, _KEY = "<tool_call>", "</tool_call>", "<arg_key>"
_NAME = re.compile(r"[^\s<>{}]+\s*")


class Glm45ToolParser(MarkupReader):
    """Parser for tool calls between the tags of GLM models.

    A JSON object between the outer tags is also a call, as in Hermes, because forced calls are JSON.
    """

    form: ClassVar[ToolForm] = HermesToolParser.form
    tags: ClassVar = (_CALL, _CALL_END, _KEY, "</arg_key>", "<arg_value>", "</arg_value>")
    marks: ClassVar = (_CALL,)
    ends: ClassVar = (_CALL_END,)
    markup: ClassVar = Tags(_KEY, "<arg_value>", "</arg_value>", _CALL_END)

    @classmethod
    def fits(cls, template: str) -> bool:
        """Return whether the template writes the arguments of tool calls between GLM's tags."""
        return _KEY in template

    def _begin(self) -> State | None:
        self._drop_blanks()
        if self._text.startswith("{"):
            return self._call_object()
        return self._function if self._text else self._wait()

    def _function(self) -> State | None:
        """Read the name of the tool, up to the next tag."""
        head = self._head("<", keep_end=True)
        if head is None:
            return self._wait()
        return self._call(head.strip()) if _NAME.fullmatch(head) else self._broken()

    def _argument_name(self) -> State | None:
        state = super()._argument_name()
        self._key = self._key.removesuffix("</arg_key>").strip()
        return state
