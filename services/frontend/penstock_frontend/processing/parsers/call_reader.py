"""Base class of parsers for formats in which a mark precedes a tool call or a list of tool calls."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from penstock_frontend.processing.parsers.base import ToolCallDelta, ToolDelta, ToolParser, call_id, partial
from penstock_frontend.processing.parsers.call_scanner import CallScanner, ObjectScanner

State = Callable[[], Any]
"""Function that reads from the start of ``_text``.

Returns the next state. Returns None if the function needs more text, or if the parser has finished.
"""

_MAX_HEAD = 256
"""Maximum length of a tool name, including the text around the name, in characters."""


class CallReader(ToolParser):
    """State machine that consumes text from the start of a buffer, or waits for more text.

    ``marks`` are texts that begin a call. ``ends`` are texts that end a call. The parser drops marks, ends, and the
    whitespace around them. If the text after a mark is not a call, the mark and this text become content, and the call
    counts as broken.
    """

    marks: ClassVar[Sequence[str]]
    ends: ClassVar[Sequence[str]] = ()

    def __init__(self) -> None:
        self._text = ""  # text that was not read yet
        self._ended = False  # whether the answer has ended
        self._mark = ""  # last mark that was read
        self._raw = ""  # whitespace, mark and further text of a possible call, until it is known to be a call
        self._scanner: CallScanner | ObjectScanner = ObjectScanner()
        self._state: State = self._outside
        self._calls: list[ToolCallDelta] = []
        self._content: list[str] = []
        self._ids: list[str] = []

    def push(self, text: str) -> ToolDelta:
        self._text += text
        return self._advance()

    def finish(self) -> ToolDelta:
        """Return the remaining text. If the text has not become a call, it is content."""
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
        """Return the state that reads a call after the mark ``_mark``."""

    def _outside(self) -> State | None:
        """Read content up to the next mark. The whitespace before a mark belongs to the mark."""
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
        """Drop whitespace and end marks after a call."""
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
        """Turn the text that was read so far into content, because the text is not a call."""
        self.broken += 1
        self._content.append(self._raw)
        self._raw = ""
        return self._outside

    def _wait(self) -> State | None:
        """Wait for more text of a call. If the answer has already ended, the call counts as broken."""
        return self._broken() if self._ended else None

    def _drop(self, count: int) -> None:
        """Consume characters. They become content only if the call is broken."""
        self._raw += self._text[:count]
        self._text = self._text[count:]

    def _drop_blanks(self) -> None:
        self._drop(len(self._text) - len(self._text.lstrip()))

    def _head(self, end: str, *, keep_end: bool = False) -> str | None:
        """Consume and return the text before ``end``. Also consume ``end`` if ``keep_end`` is False.

        Returns None if ``end`` has not arrived yet. Returns ``""`` if the text before ``end`` is empty, or too long for
        a name.
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
        """Start a call, after the text is known to be a call. ``given_id`` is the id that the model wrote, if any."""
        taken = not given_id or given_id in self._ids
        self._ids.append(self._new_id() if taken else given_id)
        self._raw = ""
        self._hand_on(name, arguments)

    def _new_id(self) -> str:
        return call_id()

    def _hand_on(self, name: str, arguments: str) -> None:
        self._calls.append(ToolCallDelta(index=len(self._ids) - 1, id=self._ids[-1], name=name, arguments=arguments))

    def _call_object(self) -> State | None:
        """Read a call of the form ``{"name": ..., "arguments": ...}``."""
        self._scanner = CallScanner(need_arguments=False)
        return self._scan

    def _arguments(self) -> State | None:
        """Read the JSON object with the arguments of a call that has started."""
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
        """Return the state after the JSON of a call."""
        return self._behind()


# The class below reads calls in a JSON list: ``[{"name": ..., "arguments": ...}, ...]``.


class CallListReader(CallReader):
    """Parser for formats with a list of calls after a mark.

    If the list ends early or has no closing bracket, its complete calls are returned.
    """

    def _list(self) -> State | None:
        """Read the opening bracket of the list."""
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
