"""Base class of parsers for formats in which a mark (a fixed text) precedes a tool call or a list of tool calls."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from penstock_frontend.processing.parsers.base import ToolCallDelta, ToolDelta, ToolParser, call_id, partial
from penstock_frontend.processing.parsers.call_scanner import CallScanner, ObjectScanner

State = Callable[[], Any]
"""Function that reads from the beginning of the buffer ``_text``.

The function returns the next state. The function returns None if it needs more text, or if the parser has finished.
"""

_MAX_HEAD = 256
"""Maximum length of a tool name, including the text around the name, in characters."""


class CallReader(ToolParser):
    """State machine that reads text from the beginning of a buffer, or waits for more text.

    ``marks`` are the texts that begin a tool call. ``ends`` are the texts that end a tool call. The parser drops both,
    and the whitespace around them. If the text after a mark is not a tool call, the mark and this text become content,
    and the call counts as broken.
    """

    marks: ClassVar[Sequence[str]]
    ends: ClassVar[Sequence[str]] = ()

    def __init__(self) -> None:
        self._text = ""  # text that the parser has not read yet
        self._ended = False  # whether the answer has ended
        self._mark = ""  # the last mark that the parser has read
        # whitespace, mark and later text of a possible call, until the parser knows whether it is a call
        self._raw = ""
        self._scanner: CallScanner | ObjectScanner = ObjectScanner()
        self._state: State = self._outside
        self._calls: list[ToolCallDelta] = []
        self._content: list[str] = []
        self._ids: list[str] = []

    def push(self, text: str) -> ToolDelta:
        self._text += text
        return self._advance()

    def finish(self) -> ToolDelta:
        """Return the text that is left at the end. If this text has not become a tool call, it is content."""
        self._ended = True
        return self._advance()

    def _advance(self) -> ToolDelta:
        while (state := self._state()) is not None:
            self._state = state
        delta = ToolDelta("".join(self._content), self._calls)
        self._content, self._calls = [], []
        return delta

    @abc.abstractmethod
    def _begin(self) -> State | None:
        """Return the state that reads a tool call after the mark ``_mark``."""

    def _outside(self) -> State | None:
        """Read content up to the next mark. Whitespace before a mark counts as part of the mark."""
        places = [(index, mark) for mark in self.marks if (index := self._text.find(mark)) >= 0]
        if places:
            index, self._mark = min(places, key=lambda place: place[0])
            content = self._text[:index].rstrip()
            self._raw = self._text[len(content) : index] + self._mark
            self._text = self._text[index + len(self._mark) :]
            self._content.append(content)
            return self._begin
        held = max(partial(self._text, mark) for mark in self.marks)
        content = self._text if self._ended else self._text[: len(self._text) - held].rstrip()
        self._content.append(content)
        self._text = self._text[len(content) :]
        return None

    def _behind(self) -> State | None:
        """Drop the whitespace and the end marks after a tool call."""
        self._raw = ""
        self._text = self._text.lstrip()
        if any(end.startswith(self._text) for end in self.ends if len(end) > len(self._text)) or not self._text:
            return None  # drop an incomplete end mark at the end of the answer
        for end in self.ends:
            if self._text.startswith(end):
                self._text = self._text[len(end) :]
                return self._behind
        return self._outside

    def _broken(self) -> State:
        """Turn the text of a possible call into content, because the text is not a tool call."""
        self.broken += 1
        self._content.append(self._raw)
        self._raw = ""
        return self._outside

    def _wait(self) -> State | None:
        """Wait for more text of a tool call. If the answer has already ended, the call counts as broken."""
        return self._broken() if self._ended else None

    def _drop(self, count: int) -> None:
        """Remove characters from the buffer. The removed characters become content only if the call turns out to be
        broken.
        """
        self._raw += self._text[:count]
        self._text = self._text[count:]

    def _drop_blanks(self) -> None:
        self._drop(len(self._text) - len(self._text.lstrip()))

    def _head(self, end: str, *, keep_end: bool = False) -> str | None:
        """Remove the text before ``end`` from the buffer and return it. Also remove ``end`` if ``keep_end`` is False.

        Return None if ``end`` has not arrived yet. Return ``""`` if the text before ``end`` is empty, or too long for a
        tool name.
        """
        index = self._text.find(end)
        if index > _MAX_HEAD or (index < 0 and len(self._text) >= _MAX_HEAD + len(end)):
            return ""
        if index < 0:
            return None
        head = self._text[:index]
        self._drop(index if keep_end else index + len(end))
        return head

    def _start(self, name: str, *, given_id: str = "", arguments: str = "") -> None:
        """Start a tool call, once it is certain that the text is a call. ``given_id`` is the id that the model wrote,
        if it wrote one.
        """
        taken = not given_id or given_id in self._ids
        self._ids.append(self._new_id() if taken else given_id)
        self._raw = ""
        self._hand_on(name, arguments)

    def _new_id(self) -> str:
        return call_id()

    def _hand_on(self, name: str, arguments: str) -> None:
        self._calls.append(ToolCallDelta(index=len(self._ids) - 1, id=self._ids[-1], name=name, arguments=arguments))

    def _call_object(self) -> State | None:
        """Read a tool call of the form ``{"name": ..., "arguments": ...}``."""
        self._scanner = CallScanner(need_arguments=False)
        return self._scan

    def _arguments(self) -> State | None:
        """Read the JSON object with the arguments of a tool call that has started."""
        self._scanner = ObjectScanner()
        return self._scan

    def _scan(self) -> State | None:
        scanner = self._scanner
        started = scanner.started
        new = scanner.push(self._text)
        self._raw += "" if started else self._text[: new.taken]
        self._text = self._text[new.taken :]
        if new.name:
            self._start(new.name, arguments=new.arguments)
        elif new.arguments:
            self._hand_on("", new.arguments)
        if new.ended:
            return self._after_scan if scanner.started else self._broken()
        if not self._ended:
            return None
        if scanner.started:
            self.broken += 1
            return self._behind
        return self._broken()

    def _after_scan(self) -> State | None:
        """Return the state that follows after the JSON of a tool call."""
        return self._behind()


# The class below reads tool calls in a JSON list: ``[{"name": ..., "arguments": ...}, ...]``.


class CallListReader(CallReader):
    """Parser for formats in which a JSON list of tool calls follows after a mark.

    If the list ends early or has no closing bracket, the parser returns only the complete calls.
    """

    def _list(self) -> State | None:
        """Read the opening bracket of the list of calls."""
        self._drop_blanks()
        if not self._text:
            return self._wait()
        if self._text[0] != "[":
            return self._broken()
        self._drop(1)
        return self._item

    def _item(self) -> State | None:
        """Read the next call of the list."""
        self._drop_blanks()
        if not self._text:
            return self._wait()
        return self._call_object() if self._text[0] == "{" else self._broken()

    def _after_scan(self) -> State | None:
        """Read a comma and the next call, or the end of the list."""
        self._drop_blanks()
        if not self._text:
            return self._behind if self._ended else None
        if self._text[0] == ",":
            self._drop(1)
            return self._item
        if self._text[0] == "]":
            self._drop(1)
        return self._behind
