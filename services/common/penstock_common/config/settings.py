"""Settings as a service's structs declare them: sections, types, ranges, sizes in bytes and meaning."""

import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec

from penstock_common.errors import ConfigError, nearest

# Sizes in bytes, as people write them.

ByteSize = Annotated[int, msgspec.Meta(extra={"kind": "bytes"})]
"""A number of bytes. Files, flags and environment may say ``512MiB``, ``2GB`` or a plain integer."""

PATTERN = r"^\s*[0-9]+(\.[0-9]+)?\s*([KMGTkmgt]([Ii]?[Bb])?|[Bb])?\s*$"
"""What ``parse_bytes`` reads, as a regular expression for a JSON schema."""

_UNITS = {"": 1, "B": 1}

for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}IB": 1024**_power, f"{_letter}B": 1000**_power}


def parse_bytes(text: str | int, *, key: str = "size") -> int:
    """Bytes in ``text``. K, M, G, T and KiB.. count in 1024s, KB.. in 1000s. Raises ConfigError that names ``key``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(f"{key}: {text!r} is not a size; write a number of bytes or e.g. 512MiB, 4GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def format_bytes(size: int) -> str:
    """What ``parse_bytes`` reads as ``size``, in the largest unit of which it is a whole number."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _UNITS[unit.upper()] == 0:
            return f"{size // _UNITS[unit.upper()]}{unit}"
    return str(size)


# What the annotation of a setting says: its type, its range, and what it means. Ranges stand there and nowhere else.

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


ENV_PREFIX = "PENSTOCK_"

_READ_ANEW = " Read anew while the service runs, when the file changes."


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One value of a configuration. ``key`` is dotted: the names of its sections and its own. ``default`` None: unset."""

    key: str
    kind: Kind
    required: bool = False
    default: Any = None

    @property
    def flag(self) -> str:
        """``--scheduler.max-num-seqs``."""
        return f"--{self.key.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The environment variable: ``PENSTOCK_SCHEDULER__MAX_NUM_SEQS``."""
        return ENV_PREFIX + self.key.replace(".", "__").upper()

    @property
    def value(self) -> str:
        """What stands for the value in a command's help: its type, or the choices."""
        if self.kind.choices and self.kind.shape == "one":
            return "{" + ",".join(self.kind.choices) + "}"
        name = "SIZE" if self.kind.is_size else self.kind.type.__name__.upper()
        return {"one": name, "list": f"[{name}, ...]", "mapping": f"{{NAME: {name}, ...}}"}[self.kind.shape]

    @property
    def default_text(self) -> str:
        """The default as a file has it; ``required`` where there is none."""
        if self.required:
            return "required"
        if self.default is None:
            return "unset"
        if self.kind.is_size:
            return format_bytes(self.default)
        text = msgspec.json.encode(self.default).decode()
        return text if self.kind.shape != "one" or self.default == "" else text.strip('"')


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that belong together. ``key`` is empty for those at the top."""

    key: str
    description: str
    settings: tuple[Setting, ...]


def settings_of(config_type: type[msgspec.Struct]) -> Iterator[Setting]:
    """Every setting of a service, section by section."""
    for section in sections_of(config_type):
        yield from section.settings


def sections_of(config_type: type[msgspec.Struct]) -> Iterator[Section]:
    """The sections of a service that have settings: what is at the top, then each with those within it behind it."""
    found = _sections(config_type, key="", description=_summary(config_type), defaults=None)
    return (section for section in found if section.settings)


def with_defaults(
    config_type: type[msgspec.Struct], values: Mapping[str, Any], defaults: msgspec.Struct | None = None
) -> dict[str, Any]:
    """``values``, in which each section that is given in part has the rest as the struct around it has it by default.

    A frontend's ``admin`` is a ``ServerConfig`` on the loopback interface: it stays there when only its port is given.
    """
    filled = dict(values)
    for field in msgspec.structs.fields(config_type):
        default = _default(field) if defaults is None else getattr(defaults, field.name)
        nested, given = struct_in(field.type), values.get(field.name)
        if nested is not None and isinstance(given, dict):
            filled[field.name] = with_defaults(nested, given, default)
        elif defaults is not None and field.name not in values:
            filled[field.name] = msgspec.to_builtins(default)
    return filled


def removed(config_type: type[msgspec.Struct], prefix: str = "") -> dict[str, str]:
    """Dotted keys that there once were, each with what is there instead: those in the class variables ``REMOVED`` of structs."""
    found = {prefix + key: instead for key, instead in removed_here(config_type).items()}
    for field in msgspec.structs.fields(config_type):
        if (nested := struct_in(field.type)) is not None:
            found |= removed(nested, f"{prefix}{field.name}.")
    return found


def removed_here(config_type: type[msgspec.Struct]) -> Mapping[str, str]:
    """The same of one struct, without the sections in it."""
    found: Mapping[str, str] = getattr(config_type, "REMOVED", {})
    return found


def _sections(
    config_type: type[msgspec.Struct], *, key: str, description: str, defaults: msgspec.Struct | None
) -> Iterator[Section]:
    own: list[Setting] = []
    within: list[Section] = []
    for field in msgspec.structs.fields(config_type):
        name = f"{key}.{field.name}" if key else field.name
        default = _default(field) if defaults is None else getattr(defaults, field.name)
        if (nested := struct_in(field.type)) is not None:
            about = description_of(field.type) or _summary(nested)
            about += _READ_ANEW if is_reread(field.type) else ""
            within += _sections(nested, key=name, description=about, defaults=default)
        else:
            required = defaults is None and field.required
            own.append(Setting(key=name, kind=kind_of(field.type), required=required, default=default))
    yield Section(key=key, description=description, settings=tuple(own))
    yield from within


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.required:
        return None
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


def _summary(config_type: type[msgspec.Struct]) -> str:
    """The first paragraph of the struct's docstring, on one line."""
    return " ".join((config_type.__doc__ or "").split("\n\n")[0].split())


# Settings that are read anew while a service runs: which they are, who holds them, and what differs between two configurations.
#
# They are whole sections: those at the top of a service's configuration that are annotated with ``REREAD`` (``kinds``).

T = TypeVar("T")
C = TypeVar("C", bound=msgspec.Struct)


class Reread(Generic[T]):
    """A section that may be replaced while the service runs. Who needs it keeps this, and asks for ``now`` at each use."""

    __slots__ = ("now",)

    def __init__(self, now: T) -> None:
        self.now = now


def reread_sections(config_type: type[msgspec.Struct]) -> tuple[str, ...]:
    """The keys of the sections that a service reads anew, in the order of its configuration."""
    return tuple(field.name for field in msgspec.structs.fields(config_type) if is_reread(field.type))


def with_reread(running: C, given: C) -> C:
    """What runs once ``running`` has taken from ``given`` what is read anew."""
    return msgspec.structs.replace(running, **{name: getattr(given, name) for name in reread_sections(type(running))})


def differences(one: msgspec.Struct, other: msgspec.Struct) -> dict[str, Any]:
    """The settings in which two configurations of a service differ, by their dotted keys, with the values of ``other``."""
    values, others = msgspec.to_builtins(one), msgspec.to_builtins(other)
    keys = [setting.key for setting in settings_of(type(one))]
    return {key: value for key in keys if _at(values, key) != (value := _at(others, key))}


def _at(values: Mapping[str, Any], key: str) -> Any:
    value: Any = values
    for part in key.split("."):
        value = value[part]
    return value
