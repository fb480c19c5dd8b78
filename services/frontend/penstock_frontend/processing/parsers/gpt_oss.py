"""Answers of gpt-oss in OpenAI's harmony format.

An answer consists of messages on channels. Some messages are tool calls.
"""

import enum
import re
from typing import ClassVar

from penstock_frontend.processing.parsers.base import ReasoningDelta, ReasoningParser, ToolForm, partial
from penstock_frontend.processing.parsers.call_reader import CallReader, State

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_MARKS = (_START, _CHANNEL, _END, _CALL, _RETURN)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")
_MAX_HEADER = 256
"""Maximum length of the header of a message in an answer, in characters."""


class GptOssToolParser(CallReader):
    """Parser for messages with a recipient, which are tool calls: ``<|channel|>commentary to=functions.name
    <|constrain|>json<|message|>{...}``.

    Other messages become content without changes. ``GptOssReasoningParser`` has already removed the headers of these
    other messages.
    """

    form: ClassVar = ToolForm(f"{_CHANNEL}commentary to=functions.{{bare}} <|constrain|>json{_MESSAGE}", _CALL, None)
    tags: ClassVar = (*_MARKS, _MESSAGE, "<|constrain|>")
    marks: ClassVar = (_START, _CHANNEL)
    ends: ClassVar = (_CALL, _END)

    def __init__(self) -> None:
        super().__init__()
        self._recipient = ""

    @classmethod
    def fits(cls, template: str) -> bool:
        """Return whether the template writes messages on channels, as in the harmony format."""
        return _CHANNEL in template and _MESSAGE in template

    def _begin(self) -> State | None:
        head = self._head(_MESSAGE)
        if head is None:
            return self._wait()
        recipient = _RECIPIENT.search(head)
        if recipient is None:
            self._content.append(self._raw)  # this message is not a tool call
            return self._outside
        self._recipient = recipient[1]
        return self._bracket

    def _bracket(self) -> State | None:
        self._drop_blanks()
        if not self._text:
            return self._wait()
        if self._text[0] != "{":
            return self._broken()
        self._start(self._recipient)
        return self._arguments()


class _At(enum.Enum):
    BETWEEN = enum.auto()
    """State in which the parser is before the header of a message."""
    ANALYSIS = enum.auto()
    SHOWN = enum.auto()
    """State in which the parser is in a message for the user."""
    CALL = enum.auto()
    """State in which the parser is in a message for a tool. The parser returns such a message with all its marks."""


class GptOssReasoningParser(ReasoningParser):
    """Parser that treats messages on the channel ``analysis`` as reasoning, and all other messages as content.

    Messages for tools keep their headers. A line break separates messages of the same kind. Text without a header is
    content.
    """

    tags: ClassVar = (f"{_CHANNEL}analysis{_MESSAGE}", _END)
    before_calls: ClassVar = None

    def __init__(self, prompt: str) -> None:
        del prompt
        self._at = _At.BETWEEN
        self._text = ""
        self._ended = False
        self._reasoning: list[str] = []
        self._content: list[str] = []
        # one key for each kind of message with text so far; True if its text belongs to an earlier message
        self._said: dict[_At, bool] = {}

    @classmethod
    def fits(cls, template: str) -> bool:
        """Return whether the template writes messages on channels, as in the harmony format."""
        return GptOssToolParser.fits(template)

    def push(self, text: str) -> ReasoningDelta:
        """Parse the next piece of the answer. Text that could be the beginning of a header waits for the next piece."""
        self._text += text
        while self._step():
            pass
        delta = ReasoningDelta("".join(self._reasoning), "".join(self._content))
        self._reasoning, self._content = [], []
        return delta

    def finish(self) -> ReasoningDelta:
        """Return the text that is left at the end of the answer."""
        self._ended = True
        return self.push("")

    def _step(self) -> bool:
        return self._header() if self._at is _At.BETWEEN else self._body()

    def _header(self) -> bool:
        """Read the header of a message, if the text begins with one. Return whether parsing can continue."""
        start = self._text.lstrip()
        if not start.startswith((_START, _CHANNEL)):
            if not self._ended and any(mark.startswith(start) for mark in (_START, _CHANNEL)):
                return False
            self._at = _At.SHOWN
            return bool(self._text)
        index = self._text.find(_MESSAGE)
        if index < 0 and len(self._text) < _MAX_HEADER + len(_MESSAGE) and not self._ended:
            return False
        if not 0 <= index <= _MAX_HEADER:
            self._say(self._text[:1])  # this is not a header, only a mark in other text
            self._text = self._text[1:]
            self._at = _At.SHOWN
            return bool(self._text)
        header = self._text[: index + len(_MESSAGE)]
        self._text = self._text[len(header) :]
        if _RECIPIENT.search(header):
            self._at = _At.CALL
            self._content.append(header)
        else:
            self._at = _At.ANALYSIS if _ANALYSIS.search(header) else _At.SHOWN
            if self._at in self._said:
                self._said[self._at] = True
        return True

    def _body(self) -> bool:
        """Read the text of a message up to its end. Return whether parsing can continue."""
        # strings in a tool call may contain the other marks of the format
        marks = _MARKS[:2] if self._at is _At.CALL else _MARKS
        places = [(index, mark) for mark in marks if (index := self._text.find(mark)) >= 0]
        if not places:
            held = 0 if self._ended else max(partial(self._text, mark) for mark in marks)
            size = len(self._text) - held
            self._say(self._text[:size])
            self._text = self._text[size:]
            return False
        index, mark = min(places)
        self._say(self._text[:index])
        self._text = self._text[index if mark in _MARKS[:2] else index + len(mark) :]
        self._at = _At.BETWEEN
        return True

    def _say(self, text: str) -> None:
        if not text:
            return
        to = self._reasoning if self._at is _At.ANALYSIS else self._content
        if self._said.get(self._at) and self._at is not _At.CALL:
            to.append("\n")
        self._said[self._at] = False
        to.append(text)
