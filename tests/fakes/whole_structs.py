"""Structs in which all fields differ from their defaults and from each other, so that a lost field is detected."""

import enum
import types
import typing
from array import array
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

import msgspec
import numpy as np

Given = Mapping[tuple[type, str], Any]
"""Values of fields that do not accept arbitrary values, by struct and field."""


class Whole:
    """Factory of values from types. All values differ."""

    def __init__(self, given: Given | None = None, turn: int = 0) -> None:
        """Create the factory. ``turn``: index, modulo the number of types, of the type that is used for a union."""
        self._given = given or {}
        self._turn = turn
        self._last = 0

    def struct(self, kind: type, **fields: Any) -> Any:
        """Return a struct or named tuple with a value in every field. ``fields``: values of given fields."""
        if not issubclass(kind, msgspec.Struct):
            hints = typing.get_type_hints(kind)
            return kind(*(fields.get(name, self.of(hints[name])) for name in kind._fields))  # type: ignore[attr-defined]
        made = {}
        for field in msgspec.structs.fields(kind):
            if field.name in fields:
                made[field.name] = fields[field.name]
            elif (kind, field.name) in self._given:
                made[field.name] = self._given[kind, field.name]
            else:
                made[field.name] = self._other(field.type, default_of(field))
        return kind(**made)

    def of(self, kind: Any) -> Any:
        """Return a value of the type."""
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is typing.Annotated:
            return self.of(arguments[0])
        if origin is Literal:
            self._last += 1
            return arguments[self._last % len(arguments)]
        if origin in (typing.Union, types.UnionType):
            kinds = [each for each in arguments if each is not type(None)]
            return self.of(kinds[self._turn % len(kinds)])
        if origin is np.ndarray:
            return np.array([[self.number(), self.number()], [self.number(), -self.number()]], dtype=np.int32)
        if origin is array:
            return array("I", [self.number()])
        if origin is tuple and arguments[-1] is not Ellipsis:
            return tuple(self.of(each) for each in arguments)
        if origin is not None and issubclass(origin, Mapping):
            return {self.of(arguments[0]): self.of(arguments[1])}
        if origin is not None:
            return (origin if origin in (tuple, frozenset) else list)([self.of(arguments[0])])
        return self._plain(kind)

    def number(self) -> int:
        """Return a new integer."""
        self._last += 1
        return self._last

    def _plain(self, kind: Any) -> Any:
        if kind is Any:
            return f"any {self.number()}"
        if kind is bool:
            return bool(self.number() % 2)
        if issubclass(kind, enum.Enum):
            members = list(kind)
            return members[self.number() % len(members)]
        if issubclass(kind, msgspec.Struct) or hasattr(kind, "_fields"):
            return self.struct(kind)
        makers = {int: self.number, float: lambda: self.number() + 0.5, str: lambda: f"text {self.number()}"}
        makers |= {bytes: lambda: f"bytes {self.number()}".encode()}
        return makers[kind]()

    def _other(self, kind: Any, default: Any) -> Any:
        """Return a value of the type that differs from the default."""
        for _ in range(100):
            value = self.of(kind)
            if type(value) is not type(default) or not same(value, default):
                return value
        raise AssertionError(f"{kind} has no value but its default {default!r}")


def default_of(field: Any) -> Any:
    """Return the default of a field, or a value that equals no other value."""
    if field.default is not msgspec.NODEFAULT:
        return field.default
    return object() if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, arrays included."""
    return not lost(one, other)


def lost(sent: Any, arrived: Any, path: str = "") -> list[str]:
    """Return the paths at which two values differ."""
    if isinstance(sent, np.ndarray):
        alike = isinstance(arrived, np.ndarray) and sent.dtype == arrived.dtype and np.array_equal(sent, arrived)
        return [] if alike else [path]
    if isinstance(sent, msgspec.Struct) and type(sent) is type(arrived):
        names = type(sent).__struct_fields__
        return [at for name in names for at in lost(getattr(sent, name), getattr(arrived, name), f"{path}.{name}")]
    if isinstance(sent, Mapping) and isinstance(arrived, Mapping) and list(sent) == list(arrived):
        return [at for key in sent for at in lost(sent[key], arrived[key], f"{path}[{key!r}]")]
    if isinstance(sent, list | tuple) and isinstance(arrived, list | tuple) and len(sent) == len(arrived):
        pairs = enumerate(zip(sent, arrived, strict=True))
        return [at for i, pair in pairs for at in lost(*pair, f"{path}[{i}]")]
    return [] if sent == arrived else [path]
