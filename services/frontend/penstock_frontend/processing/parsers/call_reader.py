"""Base of the parsers of calls behind a mark: content up to the mark, then one call or a list."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from penstock_frontend.processing.parsers.base import ToolCallDelta, ToolDelta, ToolParser, call_id, partial
from penstock_frontend.processing.parsers.call_scanner import CallScanner, ObjectScanner

State = Callable[[], Any]
"""Reads from the front of ``_text``. Returns the next state; None where it needs more text, or there is none."""

_MAX_HEAD = 256
"""Characters of a name and what stands around it."""


class CallReader(ToolParser):
    """A machine whose states take text from the front of a buffer, or leave it there until more has come.

    ``marks`` begin calls; what of ``ends`` stands behind one is dropped, and so are the blanks around all of them. What
    a mark begins and is no call is content, mark included, and counts as broken.
    """

    marks: ClassVar[Sequence[str]]
    ends: ClassVar[Sequence[str]] = ()

    def __init__(self) -> None:
        self._text = ""  # to be read
        self._ended = False  # no more will come
        self._mark = ""  # the last one that was read
        self._raw = ""  # what was read of a call that is not known to be one: blanks, its mark and what follows
        self._scanner: CallScanner | ObjectScanner = ObjectScanner()
        self._state: State = self._outside
        self._calls: list[ToolCallDelta] = []
        self._content: list[str] = []
        self._ids: list[str] = []

    def push(self, text: str) -> ToolDelta:
        self._text += text
        return self._advance()

    def finish(self) -> ToolDelta:
        """What was held back: content, if it became no call."""
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
        """Behind a mark, ``_mark``: the first state of a call."""

    def _outside(self) -> State | None:
        """Content up to the next mark; the blanks before it belong to it."""
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
        """Behind a call: blanks and end marks are dropped."""
        self._raw = ""
        self._text = self._text.lstrip()
        if any(end.startswith(self._text) for end in self.ends if len(end) > len(self._text)) or not self._text:
            return None  # at the answer's end, a part of an end mark is dropped
        for end in self.ends:
            if self._text.startswith(end):
                self._text = self._text[len(end) :]
                return self._behind
        return self._outside

    def _broken(self) -> State:
        """It is no call: what was read of it is content."""
        self.broken += 1
        self._content.append(self._raw)
        self._raw = ""
        return self._outside

    def _wait(self) -> State | None:
        """A call goes on with what has not come yet; one that the answer's end cuts off here is none."""
        return self._broken() if self._ended else None

    def _drop(self, count: int) -> None:
        """Read characters that nobody is to see, unless the call turns out to be none."""
        self._raw += self._text[:count]
        self._text = self._text[count:]

    def _drop_blanks(self) -> None:
        self._drop(len(self._text) - len(self._text.lstrip()))

    def _head(self, end: str, *, keep_end: bool = False) -> str | None:
        """The text up to ``end``, read with it unless it is kept. None when it has not come; ``""`` when there is no text
        before it, or too much for a name.
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
        """It is a call. ``given_id``: what the model calls it."""
        taken = not given_id or given_id in self._ids
        self._ids.append(self._new_id() if taken else given_id)
        self._raw = ""
        self._hand_on(name, arguments)

    def _new_id(self) -> str:
        return call_id()

    def _hand_on(self, name: str, arguments: str) -> None:
        self._calls.append(ToolCallDelta(index=len(self._ids) - 1, id=self._ids[-1], name=name, arguments=arguments))

    def _call_object(self) -> State | None:
        """``{"name": ..., "arguments": ...}``"""
        self._scanner = CallScanner(need_arguments=False)
        return self._scan

    def _arguments(self) -> State | None:
        """The arguments of a call that has started, as an object."""
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
        """Behind a call's JSON."""
        return self._behind()


# Calls as a JSON list: ``[{"name": ..., "arguments": ...}, ...]``.


class CallListReader(CallReader):
    """Reads the list behind a mark. A list that ends early, or that nothing closes, has the calls that it has."""

    def _list(self) -> State | None:
        """Before the bracket that opens the list."""
        self._drop_blanks()
        if not self._text:
            return self._wait()
        if self._text[0] != "[":
            return self._broken()
        self._drop(1)
        return self._item

    def _item(self) -> State | None:
        """Before a call."""
        self._drop_blanks()
        if not self._text:
            return self._wait()
        return self._call_object() if self._text[0] == "{" else self._broken()

    def _after_scan(self) -> State | None:
        """Behind a call of the list: a comma and the next one, or the list's end."""
        self._drop_blanks()
        if not self._text:
            return self._behind if self._ended else None
        if self._text[0] == ",":
            self._drop(1)
            return self._item
        if self._text[0] == "]":
            self._drop(1)
        return self._behind
