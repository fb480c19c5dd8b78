"""Base class of parsers for calls after a mark: content up to the mark, then one call or a list of calls."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from penstock_frontend.processing.parsers.base import ToolCallDelta, ToolDelta, ToolParser, call_id, partial
from penstock_frontend.processing.parsers.call_scanner import CallScanner, ObjectScanner

State = Callable[[], Any]
"""Function that reads from the front of ``_text``.

Returns the next state, or None if it needs more text or is finished.
"""

_MAX_HEAD = 256
"""Maximum length of a tool name with its surrounding text, in characters."""


class CallReader(ToolParser):
    """State machine that consumes text from the front of a buffer, or waits for more text.

    ``marks`` begin calls. ``ends`` after a call are dropped, and so is the whitespace around marks and ends. If the
    text after a mark is not a call, the text with the mark becomes content, and the call counts as broken.
    """

    marks: ClassVar[Sequence[str]]
    ends: ClassVar[Sequence[str]] = ()

    def __init__(self) -> None:
        self._text = ""  # text not read yet
        self._ended = False  # whether the answer has ended
        self._mark = ""  # last mark that was read
        self._raw = ""  # text of a possible call that is not confirmed yet: whitespace, mark, and following text
        self._scanner: CallScanner | ObjectScanner = ObjectScanner()
        self._state: State = self._outside
        self._calls: list[ToolCallDelta] = []
        self._content: list[str] = []
        self._ids: list[str] = []

    def push(self, text: str) -> ToolDelta:
        self._text += text
        return self._advance()

    def finish(self) -> ToolDelta:
        """Return the held-back text, which is content if it did not become a call."""
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
        """Return the first state of a call, after the mark ``_mark``."""

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
            return None  # At the end of the answer, a partial end mark is dropped.
        for end in self.ends:
            if self._text.startswith(end):
                self._text = self._text[len(end) :]
                return self._behind
        return self._outside

    def _broken(self) -> State:
        """Turn the text read so far into content, because it is not a call."""
        self.broken += 1
        self._content.append(self._raw)
        self._raw = ""
        return self._outside

    def _wait(self) -> State | None:
        """Wait for more text of a call. If the answer has ended, the call is broken."""
        return self._broken() if self._ended else None

    def _drop(self, count: int) -> None:
        """Consume characters that are shown only if the call turns out to be broken."""
        self._raw += self._text[:count]
        self._text = self._text[count:]

    def _drop_blanks(self) -> None:
        self._drop(len(self._text) - len(self._text.lstrip()))

    def _head(self, end: str, *, keep_end: bool = False) -> str | None:
        """Return the text up to ``end`` and consume it. ``end`` is consumed too, unless ``keep_end`` is set.

        Returns None if ``end`` has not arrived, and ``""`` if the text before it is empty or too long for a name.
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
        """Start a confirmed call. ``given_id`` is the id that the model wrote."""
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
        """Read the arguments object of a call that has started."""
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
        """Continue after a call's JSON."""
        return self._behind()


# Calls as a JSON list: ``[{"name": ..., "arguments": ...}, ...]``.


class CallListReader(CallReader):
    """Reads a list of calls after a mark. A list that ends early or has no closing bracket yields its complete calls."""

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
