"""Tool calls in which each argument is between tags, and values are texts without a type."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from penstock_frontend.processing.parsers.call_reader import CallReader, State
from penstock_frontend.processing.parsers.call_scanner import whole

_WORDS = {"true": True, "false": False, "null": None, "none": None}
"""Words that templates write for values that are not text. Some templates write the words of JSON, and others the words
of Python.
"""


class Tags(NamedTuple):
    """Tags around the name and the value of an argument, and the tag that ends the call."""

    key: str
    between: str
    value_end: str
    end: str


class MarkupReader(CallReader):
    """Parser for tool calls that have the tag ``key``, a name, ``between``, a value and ``value_end`` for each
    argument, then ``end``.

    A value may contain any of the tags. A value ends at an end tag after which another argument or the end of the call
    follows. The parser returns a call only when it is complete, because a later argument may show that the text is not
    a tool call. Values of string parameters stay unchanged. Other values are parsed as JSON if possible. ``margin`` is
    the line break that the format has around values.
    """

    markup: ClassVar[Tags]
    margin: ClassVar[str] = ""

    def __init__(self) -> None:
        super().__init__()
        self._name = ""
        self._key = ""
        self._values: dict[str, Any] = {}
        self._looked = 0  # position in the text up to which the code has searched for the end of the value

    def _call(self, name: str) -> State:
        self._name, self._values = name, {}
        return self._argument

    def _argument(self) -> State | None:
        """Read the next argument, or the end of the call."""
        self._drop_blanks()
        tags = self.markup
        if self._text.startswith(tags.end):
            self._drop(len(tags.end))
            self._start(self._name, arguments=whole(json.dumps(self._values, ensure_ascii=False)))
            return self._behind
        if self._text.startswith(tags.key):
            self._drop(len(tags.key))
            return self._argument_name
        if tags.end.startswith(self._text) or tags.key.startswith(self._text):
            return self._wait()
        return self._broken()

    def _argument_name(self) -> State | None:
        head = self._head(self.markup.between)
        if head is None:
            return self._wait()
        self._key = head.strip()
        self._looked = 0
        return self._value if self._key else self._broken()

    def _value(self) -> State | None:
        """Read a value up to an end tag after which another argument or the end of the call follows."""
        tags = self.markup
        while (index := self._text.find(tags.value_end, self._looked)) >= 0:
            behind = self._text[index + len(tags.value_end) :].lstrip()
            if behind.startswith((tags.key, tags.end)):
                self._values[self._key] = self._read(self._text[:index])
                self._drop(index + len(tags.value_end))
                return self._argument
            if tags.key.startswith(behind) or tags.end.startswith(behind):
                return self._wait()
            self._looked = index + 1
        self._looked = max(self._looked, len(self._text) - len(tags.value_end) + 1)
        return self._wait()

    def _read(self, text: str) -> Any:
        """Return the value of an argument, parsed as JSON.

        If the schema requires a string, or the value is not JSON, return the value as text.
        """
        text = text.removeprefix(self.margin).removesuffix(self.margin)
        kinds = self._kinds()
        if kinds == {"string"}:
            return text
        try:
            value = json.loads(text)
            json.dumps(value, allow_nan=False)
            return value
        except (ValueError, RecursionError):
            pass
        word = text.strip().lower()
        return _WORDS[word] if word in _WORDS and "string" not in kinds else text

    def _kinds(self) -> set[str]:
        """Return the JSON types that the schema allows for an argument. Return an empty set if the schema has no type."""
        properties = self.schemas.get(self._name, {}).get("properties")
        schema = properties.get(self._key) if isinstance(properties, Mapping) else None
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if isinstance(schema, Mapping) and kind is None and isinstance(values := schema.get("enum"), list):
            return {"string"} if values and all(isinstance(value, str) for value in values) else set()
        return {kind} if isinstance(kind, str) else {each for each in kind or () if isinstance(each, str)}
