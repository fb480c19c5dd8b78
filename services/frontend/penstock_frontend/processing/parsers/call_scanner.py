"""Scans tool calls and other JSON objects while the model writes them."""

import abc
import enum
import json
from typing import NamedTuple

from penstock_frontend.processing.parsers.base import ToolCallDelta, ToolDelta, ToolParser, call_id

# The brackets of JSON that is being written.


class Brackets:
    """Follows one value from its first bracket to the one that ends it. Brackets in strings do not count."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def close(self, char: str) -> bool:
        """Take the next character. True for the one that ends the value, or for a closing bracket where none is open."""
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._quoted = char != '"'
            self._escaped = char == "\\"
        elif char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False


_BLANKS = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


class _At(enum.Enum):
    OPEN = enum.auto()
    KEY = enum.auto()
    IN_KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    IN_STRING = enum.auto()
    IN_CONTAINER = enum.auto()
    IN_SCALAR = enum.auto()
    AFTER_VALUE = enum.auto()


class Scanned(NamedTuple):
    """``taken``: how many characters. ``name`` when the call has just become one. ``arguments``: more of them as text.

    ``ended``: the object is complete, or is none: the next character does not belong to it.
    """

    taken: int
    name: str = ""
    arguments: str = ""
    ended: bool = False


def whole(text: str) -> str:
    """The text with U+FFFD for halves of characters, which JSON can spell and no protocol takes."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class CallScanner:
    """Follows the object's outermost level and hands its arguments on as they stand.

    It is known to be a call once its name and the begin of its arguments have been read. Arguments that are no object are
    handed on whole: a string holds them as JSON once more, null and an empty string are none.
    """

    def __init__(self, *, need_arguments: bool) -> None:
        """``need_arguments``: an object without any is no call; else it is one with none."""
        self._need_arguments = need_arguments
        self._has_arguments = False
        self._at = _At.OPEN
        self._key = ""
        self._name = ""
        self._value: list[str] = []  # of the key or value that is being read
        self._ready: list[str] = []  # of the arguments, not handed on yet
        self._brackets = Brackets()
        self._escaped = False
        self.raw: list[str] = []
        """All characters taken until it was known to be a call."""
        self.started = False
        """Whether it is known to be a call."""
        self.complete = False
        """Whether it ended as JSON does."""

    def push(self, text: str) -> Scanned:
        """Take characters up to the object's end."""
        before = self.started
        count = 0
        ended = False
        for char in text:
            if not self._take(char):
                ended = True
                break
            count += 1
            if self.complete:
                ended = True
                break
        if not self.started:
            self.raw.append(text[:count])
            return Scanned(count, ended=ended)
        arguments, self._ready = "".join(self._ready), []
        return Scanned(count, "" if before else self._name, arguments, ended)

    def _take(self, char: str) -> bool:
        """Move by one character. Returns False when it does not belong here."""
        match self._at:
            case _At.IN_CONTAINER:
                self._in_container(char)
                return True
            case _At.IN_STRING | _At.IN_KEY:
                return self._in_string(char)
            case _At.IN_SCALAR:
                if char not in ",}" and char not in _BLANKS:
                    self._value.append(char)
                    return True
                return self._end_value() and self._between(char)
            case _:
                return self._between(char)

    def _between(self, char: str) -> bool:
        """A character of the outermost level, outside of keys and values."""
        if char in _BLANKS:
            return True
        match self._at, char:
            case _At.OPEN, "{":
                self._at = _At.KEY
            case _At.KEY, '"':
                self._at, self._value = _At.IN_KEY, []
            case _At.COLON, ":":
                self._at = _At.VALUE
            case _At.AFTER_VALUE, ",":
                self._at = _At.KEY
            case ((_At.AFTER_VALUE | _At.KEY), "}"):
                return self._close()
            case _At.VALUE, _:
                return self._begin_value(char)
            case _:
                return False
        return True

    def _begin_value(self, char: str) -> bool:
        self._value = []
        if self._key in _ARGUMENTS:
            if self._has_arguments:
                self._key = ""  # the first ones count
            self._has_arguments = True
        if char in "{[":
            self._at, self._brackets = _At.IN_CONTAINER, Brackets()
            self._in_container(char)
        elif char == '"':
            self._at = _At.IN_STRING
        elif char in "}],:":
            return False
        else:
            self._at = _At.IN_SCALAR
            self._value.append(char)
        return True

    def _in_container(self, char: str) -> None:
        streamed = self._key in _ARGUMENTS
        if streamed:
            self._ready.append(char)
        if self._brackets.close(char):
            self._at = _At.AFTER_VALUE
        if streamed:
            self._start()

    def _in_string(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            return self._end_string()
        self._value.append(char)
        return True

    def _end_string(self) -> bool:
        try:
            text = whole(json.loads(f'"{"".join(self._value)}"', strict=False))
        except ValueError:
            return False
        if self._at is _At.IN_KEY:
            self._key, self._at = text, _At.COLON
            return True
        if self._key == "name":
            self._name = text
            self._start()
        elif self._key in _ARGUMENTS:
            self._ready.append(text if text.strip() else "{}")
            self._start()
        self._at = _At.AFTER_VALUE
        return bool(text) or self._key != "name"

    def _end_value(self) -> bool:
        """Behind a number, or a word: a name is none of these."""
        text = "".join(self._value)
        if self._key in _ARGUMENTS:
            self._ready.append("{}" if text == "null" else text)
            self._start()
        self._at = _At.AFTER_VALUE
        return self._key != "name"

    def _start(self) -> None:
        if self._name and self._ready:
            self.started = True

    def _close(self) -> bool:
        if not self.started:
            if not self._name or self._need_arguments:
                return False
            self._ready.append("{}")
            self.started = True
        self.complete = True
        return True


# A JSON object followed to its end while it is being written.


class ObjectScanner:
    """Hands an object on as it stands, strings with brackets in them included. What begins with no bracket is none."""

    started = True

    def __init__(self) -> None:
        self._brackets = Brackets()

    def push(self, text: str) -> Scanned:
        """Take characters up to the object's end."""
        for index, char in enumerate(text):
            if self._brackets.close(char):
                return Scanned(index + 1, arguments=text[: index + 1], ended=True)
        return Scanned(len(text), arguments=text)


class JsonToolParser(ToolParser):
    """Reads calls that are JSON objects, one scanner each; its subclasses find where they begin."""

    def __init__(self) -> None:
        self._scanner: CallScanner | None = None  # of the call that is being read
        self._held = ""
        self._num_calls = 0
        self._id = ""
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []

    @abc.abstractmethod
    def _give_back(self, scanner: CallScanner) -> None:
        """It is no call: what was read of it is content."""

    def _ended(self) -> None:
        """A call has ended."""

    def _scan(self, scanner: CallScanner, text: str) -> str:
        """Read on in the call that has begun. Returns what is left to read."""
        new = scanner.push(text)
        if new.name:
            self._id = call_id()
            self._num_calls += 1
        if new.name or new.arguments:
            self._calls.append(
                ToolCallDelta(index=self._num_calls - 1, id=self._id, name=new.name, arguments=new.arguments)
            )
        if new.ended:
            if scanner.started:
                self._scanner = None
                self._ended()
            else:
                self._give_back(scanner)
        return text[new.taken :]

    def _take(self) -> ToolDelta:
        delta = ToolDelta("".join(self._content), self._calls)
        self._content, self._calls = [], []
        return delta
