"""Tool calls of Llama 4. An answer with tool calls is a list ``[name(key="value"), ...]``."""

from collections.abc import Sequence
from typing import ClassVar

from penstock_frontend.processing.parsers.base import ToolForm
from penstock_frontend.processing.parsers.call_reader import CallListReader, State
from penstock_frontend.processing.parsers.call_scanner import CallScanner
from penstock_frontend.processing.parsers.pythonic import BracketScanner, may_begin_calls, read_calls

_START, _END = "<|python_start|>", "<|python_end|>"


class Llama4PythonicToolParser(CallListReader):
    """Parser for an answer that begins with a list of tool calls. The parser returns the calls when the list is
    complete.

    Any other answer is content. The list may also contain JSON objects, because forced tool calls are JSON.
    """

    form: ClassVar = ToolForm('{"name": {name}, "arguments": ', "}", ", ", "[", "]")
    tags: ClassVar[Sequence[str]] = (_START, _END)
    marks: ClassVar[Sequence[str]] = (_START, "[")
    ends: ClassVar[Sequence[str]] = (_END,)

    def __init__(self) -> None:
        super().__init__()
        self._brackets = BracketScanner()
        self._list_text: list[str] = []
        self._state = self._first

    @classmethod
    def fits(cls, template: str) -> bool:
        """Return whether the chat template asks for tool calls in this format, and contains Llama 4's special token for
        the start of a header.
        """
        return "[func_name" in template and "<|header_start|>" in template

    def _first(self) -> State | None:
        """Check whether the answer begins with tool calls. Calls at other positions of the answer are content."""
        start = self._text.lstrip()
        if start.startswith(tuple(self.marks)):
            return self._outside
        if not self._ended and any(mark.startswith(start) for mark in self.marks):
            return None
        return self._rest

    def _rest(self) -> State | None:
        """Read content up to the end of the answer."""
        self._content.append(self._text)
        self._text = ""
        return None

    def _begin(self) -> State | None:
        if self._mark == "[":
            return self._opened
        self._drop_blanks()
        if self._text.startswith("["):
            self._drop(1)
            return self._opened
        return self._broken() if self._text else self._wait()

    def _opened(self) -> State | None:
        """Continue to read after the opening bracket of the list."""
        self._drop_blanks()
        if self._text.startswith("{"):
            return self._item
        begins = may_begin_calls(self._text)
        if begins is None and not self._ended:
            return None
        if not begins:
            return self._no_list()
        self._brackets = BracketScanner()
        self._brackets.push("[")
        self._list_text = ["["]
        return self._calls_in_list

    def _calls_in_list(self) -> State | None:
        taken, complete = self._brackets.push(self._text)
        self._list_text.append(self._text[:taken])
        self._drop(taken)
        if complete is False:
            return self._wait()
        try:
            calls = read_calls("".join(self._list_text)) if complete else ()
        except ValueError:
            calls = ()
        if not calls:
            return self._broken()
        for name, arguments in calls:
            self._start(name, arguments=arguments)
        return self._behind

    def _no_list(self) -> State:
        """Handle brackets whose content is not a list of tool calls."""
        self._content.append(self._raw)
        self._raw = ""
        return self._rest

    def _broken(self) -> State:
        if isinstance(self._scanner, CallScanner):
            return self._no_list()  # the list contains objects that are not tool calls
        super()._broken()
        return self._rest

    def _behind(self) -> State | None:
        state = super()._behind()
        return self._rest if state == self._outside else state
