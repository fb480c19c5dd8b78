"""What the annotation of a setting says: its type, its range, and what it means. Ranges stand there and nowhere else."""

import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from penstock_common.config.sizes import format_bytes
from penstock_common.errors import nearest

REREAD = msgspec.Meta(extra={"reread": True})
"""Annotates a section at the top of a service's configuration that is read anew while the service runs (``config.reread``)."""

_OF_META = ("ge", "gt", "le", "lt", "min_length", "description")


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """The values that a setting may have, and what it means.

    Type, range and choices are those of the value itself, of each entry of a list, or of each value of a mapping.
    """

    type: type
    shape: Literal["one", "list", "mapping"] = "one"
    optional: bool = False
    is_size: bool = False
    choices: tuple[str, ...] = ()
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    min_length: int = 0
    description: str = ""

    @property
    def range(self) -> str:
        """``from 1 to 10``, ``at least 1``, ``above 0 and at most 1``; empty where every number will do."""
        if self.ge is not None and self.le is not None:
            return f"from {self._text(self.ge)} to {self._text(self.le)}"
        limits = (("at least", self.ge), ("above", self.gt), ("at most", self.le), ("below", self.lt))
        return " and ".join(f"{words} {self._text(limit)}" for words, limit in limits if limit is not None)

    def refusal(self, key: str, value: Any) -> str:
        """Why ``value`` is outside the range or the choices, naming ``key``, value and limit; empty where it is not.

        A value of another type is not refused here. None means unset.
        """
        return next(filter(None, (self._refusal(where, entry) for where, entry in self._entries(key, value))), "")

    def _entries(self, key: str, value: Any) -> Iterator[tuple[str, Any]]:
        if self.shape == "mapping" and isinstance(value, dict):
            yield from ((f"{key}.{name}", entry) for name, entry in value.items())
        elif self.shape == "list" and isinstance(value, (list, tuple)):
            yield from ((key, entry) for entry in value)
        elif value is not None:
            yield key, value

    def _refusal(self, key: str, value: Any) -> str:
        if self.choices:
            hint = nearest(str(value), self.choices)
            return "" if value in self.choices else f"{key} is {value!r}; known: {', '.join(self.choices)}{hint}"
        if self.min_length and isinstance(value, str) and len(value) < self.min_length:
            return f"{key} is required"
        if self.type in (int, float) and not self._in_range(value):
            return f"{key} is {value}; it must be {self.range}"
        return ""

    def _in_range(self, value: Any) -> bool:
        try:
            number: float = msgspec.convert(value, self.type, strict=False)
        except msgspec.ValidationError:
            return True
        return (  # nan is in no range
            (self.ge is None or number >= self.ge)
            and (self.gt is None or number > self.gt)
            and (self.le is None or number <= self.le)
            and (self.lt is None or number < self.lt)
        )

    def _text(self, limit: float) -> str:
        return format_bytes(int(limit)) if self.is_size else f"{limit}"


def kind_of(annotation: Any) -> Kind:
    """What ``annotation`` says: a type, a ``Literal``, a tuple or mapping of those, each with ``msgspec.Meta`` or without."""
    found: dict[str, Any] = {}
    _read(annotation, found)
    return Kind(**found)


def struct_in(annotation: Any) -> type[msgspec.Struct] | None:
    """The struct that ``annotation`` stands for, None where it stands for a value."""
    if typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    return annotation if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct) else None


def description_of(annotation: Any) -> str:
    """The description that ``annotation`` has itself; empty: none."""
    metas = typing.get_args(annotation)[1:] if typing.get_origin(annotation) is Annotated else ()
    return next((m.description for m in reversed(metas) if isinstance(m, msgspec.Meta) and m.description), "")


def is_reread(annotation: Any) -> bool:
    """Whether ``REREAD`` is among what annotates it."""
    return typing.get_origin(annotation) is Annotated and REREAD in typing.get_args(annotation)[1:]


def _read(annotation: Any, found: dict[str, Any]) -> None:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        _read(arguments[0], found)
        for meta in arguments[1:]:
            found |= {name: value for name in _OF_META if (value := getattr(meta, name, None)) is not None}
            found["is_size"] = found.get("is_size", False) or (meta.extra or {}).get("kind") == "bytes"
    elif origin in (types.UnionType, typing.Union):
        for option in arguments:
            if option is types.NoneType:
                found["optional"] = True
            else:
                _read(option, found)
    elif origin is tuple:
        _read(arguments[0], found)
        found["shape"] = "list"
    elif origin is dict:
        _read(arguments[1], found)
        found["shape"] = "mapping"
    elif origin is Literal:
        found |= {"type": str, "choices": arguments}
    else:
        found["type"] = annotation
