"""Incremental scanners for tool calls and other JSON objects, which process text as it arrives."""

import abc
import enum
import json
from typing import NamedTuple

from penstock_frontend.processing.parsers.base import ToolCallDelta, ToolDelta, ToolParser, call_id

# The class below matches the brackets of JSON that is not complete yet.


class Brackets:
    """Tracks the brackets of one JSON value, from the first bracket to the last. Brackets inside strings are ignored."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def close(self, char: str) -> bool:
        """Process the next character of the value.

        Return True if the character ends the value, or closes a bracket that is not open.
        """
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
    """Result of scanning one piece of text.

    Attributes:
        taken: Number of characters of the piece that were consumed.
        name: Name of the tool. The name is set once, in the first result after which it is certain that the text is a
            tool call.
        arguments: Next part of the call's arguments, as JSON text.
        ended: Whether the object is complete or not valid. The next character does not belong to the object.
    """

    taken: int
    name: str = ""
    arguments: str = ""
    ended: bool = False


def whole(text: str) -> str:
    """Replace lone surrogates in a text by U+FFFD. JSON can contain lone surrogates, but no API protocol accepts them."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class CallScanner:
    """Scanner for the JSON object of a tool call.

    The scanner reads the outermost level of the object, and returns the arguments of the call unchanged.

    The object counts as a tool call once its name and the beginning of its arguments were read. If the arguments are
    not an object, they are returned when they are complete. If the arguments are a string, the string contains the
    arguments as JSON. null and an empty string mean no arguments.
    """

    def __init__(self, *, need_arguments: bool) -> None:
        """Create the scanner. If ``need_arguments`` is True, an object without arguments is not a tool call."""
        self._need_arguments = need_arguments
        self._has_arguments = False
        self._at = _At.OPEN
        self._key = ""
        self._name = ""
        self._value: list[str] = []  # characters of the key or value that is being read
        self._ready: list[str] = []  # parts of the arguments that were not returned yet
        self._brackets = Brackets()
        self._escaped = False
        self.raw: list[str] = []
        """Characters that were consumed before it was certain that the text is a tool call."""
        self.started = False
        """Whether it is certain that the text is a tool call."""
        self.complete = False
        """Whether the object is complete, and is valid JSON."""

    def push(self, text: str) -> Scanned:
        """Consume characters of the text, up to the end of the object."""
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
        """Process the next character of the object. Return False if the character is not valid at this position."""
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
        """Process a character on the outermost level that is not part of a key or value."""
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
                self._key = ""  # ignore these arguments, because the object already had arguments before
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
        """End a number or a word. Numbers and words cannot be the name of a tool."""
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


# The class below scans a JSON object up to its end.


class ObjectScanner:
    """Scanner that returns an object unchanged, and finds its end even if strings contain brackets.

    Text that does not begin with a bracket is not an object.
    """

    started = True

    def __init__(self) -> None:
        self._brackets = Brackets()

    def push(self, text: str) -> Scanned:
        """Consume characters of the text, up to the end of the object."""
        for index, char in enumerate(text):
            if self._brackets.close(char):
                return Scanned(index + 1, arguments=text[: index + 1], ended=True)
        return Scanned(len(text), arguments=text)


class JsonToolParser(ToolParser):
    """Base class of parsers for tool calls that are JSON objects.

    The class creates a new scanner for each call. Subclasses find the beginning of each call.
    """

    def __init__(self) -> None:
        self._scanner: CallScanner | None = None  # scanner of the current call
        self._held = ""
        self._num_calls = 0
        self._id = ""
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []

    @abc.abstractmethod
    def _give_back(self, scanner: CallScanner) -> None:
        """Turn the text of a possible call into content, because the text is not a tool call."""

    def _ended(self) -> None:
        """Handle the end of a tool call. Subclasses may override this method."""

    def _scan(self, scanner: CallScanner, text: str) -> str:
        """Scan the text of the current tool call. Return the text that follows after the call."""
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
