"""What can be said about JSON schemas without writing a grammar: types, errors, values, and how much work a schema may be."""

from collections.abc import Hashable, Mapping
from decimal import Decimal
from typing import Any

Schema = Mapping[str, Any]

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_MAX_SHOWN = 100


class SchemaError(ValueError):
    """A schema, or a part of it at ``path`` (a JSON pointer behind ``#``; empty for the text), cannot be honoured."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path} {what}" if path else what)
        self.path = path
        self.what = what


class UnfulfillableError(SchemaError):
    """No value can fulfil the schema. An alternative of several that cannot be fulfilled may be left out."""


class TooMuchWorkError(SchemaError):
    """Translating the schema takes more than the work that was allowed for it."""


class Work:
    """Counts the steps of a translation, so that no schema takes longer than whoever waits for it can afford."""

    def __init__(self, limit: int) -> None:
        """``limit``: in transitions of an automaton, which take a few microseconds each."""
        self._limit = limit
        self._left = limit

    def spend(self, path: str, steps: int) -> None:
        """Count ``steps`` for the schema at ``path``. Raises TooMuchWorkError when none are left."""
        self._left -= steps
        if self._left < 0:
            raise TooMuchWorkError(
                path, f"makes the schema take more than {self._limit} steps to translate; say it more simply"
            )


def shown(value: Any) -> str:
    """A value as an error quotes it: its beginning."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def present(schema: Any) -> Any:
    """A schema without the keywords that are null, which serializers write for absent ones. A ``const`` may be null."""
    if not isinstance(schema, dict):
        return schema
    return {name: value for name, value in schema.items() if value is not None or name == "const"}


def never(schema: Any) -> bool:
    """Whether a schema is false, or spells it out: ``{"not": {}}``."""
    return schema is False or (isinstance(schema, dict) and schema.get("not", 0) in (True, {}) and len(schema) == 1)


def fits(value: Any, kind: str) -> bool:
    """Whether a JSON value is of a type."""
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if isinstance(value, int | Decimal):
        return kind == "number" or (kind == "integer" and value == int(value))
    return kind == ("object" if isinstance(value, dict) else "array" if isinstance(value, list) else "string")


def identity(value: Any) -> Hashable:
    """What JSON values have in common that are equal, at any depth: 1 equals 1.0, but not true."""
    if isinstance(value, list):
        return list, tuple(map(identity, value))
    if isinstance(value, dict):
        return dict, frozenset((name, identity(part)) for name, part in value.items())
    return isinstance(value, bool), value


def escaped(name: str) -> str:
    """A name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
