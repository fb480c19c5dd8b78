"""Tool calls and reasoning of DeepSeek V3, R1 and V3.1. These models use tags that other models do not have."""

import re
from typing import ClassVar

from penstock_frontend.processing.parsers.base import ToolForm
from penstock_frontend.processing.parsers.call_reader import CallReader, State
from penstock_frontend.processing.parsers.reasoning_tags import TagReasoningParser

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _BEFORE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCE = "```"
_NAME = re.compile(r"\s*(\S+)\s*")
_FENCED_NAME = re.compile(r"\s*(\S+)\s*```(?:json)?\s*")


class DeepSeekV3ToolParser(CallReader):
    """Parser for tool calls ``function<｜tool▁sep｜>name``, whose arguments are in a fenced block (V3, R1). The parser
    also finds tool calls ``name<｜tool▁sep｜>``, which the arguments follow directly (V3.1).
    """

    form: ClassVar = ToolForm(
        f"{_CALL}function{_BEFORE}{{bare}}\n{_FENCE}json\n", f"\n{_FENCE}{_CALL_END}", "\n", _CALLS, _CALLS_END
    )
    tags: ClassVar = (_CALLS, _CALL, _BEFORE, _CALL_END, _CALLS_END)
    marks: ClassVar = (_CALLS, _CALL)
    ends: ClassVar = (_FENCE, _CALL_END, _CALLS_END)

    def __init__(self) -> None:
        super().__init__()
        self._kind = ""  # text of the call before the separator

    @classmethod
    def fits(cls, template: str) -> bool:
        """Return whether the template writes tool calls between DeepSeek's tags, with arguments in fenced blocks."""
        return _CALLS in template and f"{_FENCE}json" in template

    def _begin(self) -> State | None:
        if self._mark == _CALL:
            return self._before_separator
        self._drop_blanks()
        if self._text.startswith(_CALL):
            self._drop(len(_CALL))
            return self._before_separator
        return self._wait() if _CALL.startswith(self._text) else self._broken()

    def _before_separator(self) -> State | None:
        head = self._head(_BEFORE)
        if head is None:
            return self._wait()
        named = _NAME.fullmatch(head)
        if named is None:
            return self._broken()
        self._kind = named[1]
        return self._before_arguments

    def _before_arguments(self) -> State | None:
        self._drop_blanks()
        if self._text.startswith("{"):
            self._start(self._kind)
            return self._arguments()
        head = self._head("{", keep_end=True)
        if head is None:
            return self._wait()
        named = _FENCED_NAME.fullmatch(head)
        if named is None:
            return self._broken()
        self._start(named[1])
        return self._arguments()


class DeepSeekV31ToolParser(DeepSeekV3ToolParser):
    """DeepSeek parser for models whose forced tool calls use the format of V3.1."""

    form: ClassVar = ToolForm(f"{_CALL}{{bare}}{_BEFORE}", _CALL_END, "", _CALLS, _CALLS_END)

    @classmethod
    def fits(cls, template: str) -> bool:
        """Return whether the template writes tool calls between DeepSeek's tags, with arguments outside of fenced
        blocks.
        """
        return _CALLS in template and f"{_FENCE}json" not in template


class DeepSeekR1ReasoningParser(TagReasoningParser):
    """Parser for answers that begin with reasoning even if they do not have the opening tag.

    If the prompt has already ended the reasoning, the answer has no reasoning.
    """

    tags: ClassVar = ("<think>", "</think>")
    always: ClassVar = True

    @classmethod
    def fits(cls, template: str) -> bool:
        """Return whether the template belongs to a DeepSeek model that always reasons."""
        return "<｜Assistant｜>" in template and cls.tags[1] in template and "thinking" not in template
