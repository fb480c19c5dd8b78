"""Tool calls of Kimi K2, which have ``functions.name:0`` and arguments between tags, in a separate section of the
answer.
"""

import re
from typing import ClassVar

from penstock_frontend.processing.parsers.base import ToolForm
from penstock_frontend.processing.parsers.call_reader import CallReader, State

_CALLS, _CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _CALL_END, _BEFORE = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
_ID = re.compile(r"(?:functions\.)?(\S+?)(?::\d+)?")


class KimiK2ToolParser(CallReader):
    """Parser for tool calls in which the text before the arguments contains the name of the tool and is the id of the
    call.

    In later prompts, the template writes this id next to the tool's result.
    """

    form: ClassVar = ToolForm(f"{_CALL}functions.{{bare}}:0{_BEFORE}", _CALL_END, "", _CALLS, _CALLS_END)
    tags: ClassVar = (_CALLS, _CALL, _BEFORE, _CALL_END, _CALLS_END)
    marks: ClassVar = (_CALLS, _CALL)
    ends: ClassVar = (_CALL_END, _CALLS_END)

    def __init__(self) -> None:
        super().__init__()
        self._call = ""  # id of the call that is being read

    @classmethod
    def fits(cls, template: str) -> bool:
        """Return whether the template has the section of tool calls, or the declaration of tools, that Kimi models use."""
        return _CALLS in template or "<|im_system|>tool_declare" in template

    def _begin(self) -> State | None:
        if self._mark == _CALL:
            return self._before_arguments
        self._drop_blanks()
        if self._text.startswith(_CALL):
            self._drop(len(_CALL))
            return self._before_arguments
        return self._wait() if _CALL.startswith(self._text) else self._broken()

    def _before_arguments(self) -> State | None:
        head = self._head(_BEFORE)
        if head is None:
            return self._wait()
        self._call = head.strip()
        return self._bracket if _ID.fullmatch(self._call) else self._broken()

    def _bracket(self) -> State | None:
        self._drop_blanks()
        named = _ID.fullmatch(self._call)
        if not self._text:
            return self._wait()
        if self._text[0] != "{" or named is None:
            return self._broken()
        self._start(named[1], given_id=self._call)
        return self._arguments()
