"""Settings as declared by a service's structs: sections, types, ranges, byte sizes and descriptions."""

import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec

from penstock_common.errors import ConfigError, nearest

# Sizes in bytes, in human-readable notation.

ByteSize = Annotated[int, msgspec.Meta(extra={"kind": "bytes"})]
"""Type of settings that are a number of bytes. Files, flags and environment accept ``512MiB``, ``2GB`` or a plain
integer.
"""

PATTERN = r"^\s*[0-9]+(\.[0-9]+)?\s*([KMGTkmgt]([Ii]?[Bb])?|[Bb])?\s*$"
"""Regular expression for the input of ``parse_bytes``, for a JSON schema."""

_UNITS = {"": 1, "B": 1}

for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}IB": 1024**_power, f"{_letter}B": 1000**_power}


def parse_bytes(text: str | int, *, key: str = "size") -> int:
    """Return the number of bytes that ``text`` states. Raises ConfigError naming ``key``.

    The units K, M, G, T and KiB, MiB, ... are powers of 1024. The units KB, MB, ... are powers of 1000.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(
            f"{key}: {text!r} is not a size; write a number of bytes, or a number with a unit, such as 512MiB or 4GiB"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def format_bytes(size: int) -> str:
    """Return ``size`` in the notation of ``parse_bytes``, in the largest unit that divides ``size`` without a remainder."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _UNITS[unit.upper()] == 0:
            return f"{size // _UNITS[unit.upper()]}{unit}"
    return str(size)


# Content of a setting's annotation: type, range and description. Only annotations define ranges.

REREAD = msgspec.Meta(extra={"reread": True})
"""Annotation of a top-level section that is read again while the service runs (``config.reread``)."""

_OF_META = ("ge", "gt", "le", "lt", "min_length", "description")


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """Allowed values of a setting, and its description.

    Type, range and choices apply to the value itself, to each entry of a list, or to each value of a mapping.
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
        """Text of the range, such as ``from 1 to 10``, ``at least 1`` or ``above 0 and at most 1``. Empty without a
        range.
        """
        if self.ge is not None and self.le is not None:
            return f"from {self._text(self.ge)} to {self._text(self.le)}"
        limits = (("at least", self.ge), ("above", self.gt), ("at most", self.le), ("below", self.lt))
        return " and ".join(f"{words} {self._text(limit)}" for words, limit in limits if limit is not None)

    def refusal(self, key: str, value: Any) -> str:
        """Return the error if ``value`` is outside the range or the choices, else ''. The error contains ``key``, the
        value and the limit. This method does not check the type. None means unset.
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
        return (  # NaN is outside every range
            (self.ge is None or number >= self.ge)
            and (self.gt is None or number > self.gt)
            and (self.le is None or number <= self.le)
            and (self.lt is None or number < self.lt)
        )

    def _text(self, limit: float) -> str:
        return format_bytes(int(limit)) if self.is_size else f"{limit}"


def kind_of(annotation: Any) -> Kind:
    """Return the kind of ``annotation``: a type, a ``Literal``, or a tuple or mapping of these, with or without
    ``msgspec.Meta``.
    """
    found: dict[str, Any] = {}
    _read(annotation, found)
    return Kind(**found)


def struct_in(annotation: Any) -> type[msgspec.Struct] | None:
    """Return the struct in ``annotation``, or None if ``annotation`` describes a single value."""
    if typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    return annotation if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct) else None


def struct_in_list(annotation: Any) -> type[msgspec.Struct] | None:
    """Return the struct of which ``annotation`` describes a list, or None if there is no such struct."""
    if typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    return struct_in(typing.get_args(annotation)[0]) if typing.get_origin(annotation) is tuple else None


def description_of(annotation: Any) -> str:
    """Return the description that ``annotation`` itself contains, or ''."""
    metas = typing.get_args(annotation)[1:] if typing.get_origin(annotation) is Annotated else ()
    return next((m.description for m in reversed(metas) if isinstance(m, msgspec.Meta) and m.description), "")


def is_reread(annotation: Any) -> bool:
    """Return whether ``annotation`` contains ``REREAD``."""
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

_READ_ANEW = " A running service reloads these settings when the file changes."


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Setting of a configuration.

    ``key`` consists of the names of the setting's sections and its own name, joined by dots. A ``default`` of None
    means unset.
    """

    key: str
    kind: Kind
    required: bool = False
    default: Any = None

    @property
    def flag(self) -> str:
        """Command-line flag, such as ``--scheduler.max-num-seqs``."""
        return f"--{self.key.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """Environment variable, such as ``PENSTOCK_SCHEDULER__MAX_NUM_SEQS``."""
        return ENV_PREFIX + self.key.replace(".", "__").upper()

    @property
    def value(self) -> str:
        """Placeholder for the value in a command's help: its type or its choices."""
        if self.kind.choices and self.kind.shape == "one":
            return "{" + ",".join(self.kind.choices) + "}"
        name = "SIZE" if self.kind.is_size else self.kind.type.__name__.upper()
        if issubclass(self.kind.type, msgspec.Struct):
            name = "{KEY: VALUE, ...}"
        return {"one": name, "list": f"[{name}, ...]", "mapping": f"{{NAME: {name}, ...}}"}[self.kind.shape]

    @property
    def default_text(self) -> str:
        """The default as written in a config file, or ``required``."""
        if self.required:
            return "required"
        if self.default is None:
            return "unset"
        if self.kind.is_size:
            return format_bytes(self.default)
        text = msgspec.json.encode(self.default).decode()
        return text if self.kind.shape != "one" or self.default == "" else text.strip('"')


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A group of settings. ``key`` is empty for top-level settings."""

    key: str
    description: str
    settings: tuple[Setting, ...]


def settings_of(config_type: type[msgspec.Struct]) -> Iterator[Setting]:
    """Yield every setting of a service, section by section."""
    for section in sections_of(config_type):
        yield from section.settings


def sections_of(config_type: type[msgspec.Struct]) -> Iterator[Section]:
    """Yield the sections of a service that have settings: the top level first, then each section with its subsections."""
    found = _sections(config_type, key="", description=_summary(config_type), defaults=None)
    return (section for section in found if section.settings)


def with_defaults(
    config_type: type[msgspec.Struct], values: Mapping[str, Any], defaults: msgspec.Struct | None = None
) -> dict[str, Any]:
    """Add the enclosing struct's defaults to sections that ``values`` has only in part.

    For example, a frontend's ``admin`` is a ``ServerConfig`` whose default host is the loopback interface. If
    ``values`` has only the port of ``admin``, the host is still the loopback interface.
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
    """Return the removed settings and their replacements, by dotted key.

    The class variables ``REMOVED`` of all structs list the removed settings.
    """
    found = {prefix + key: instead for key, instead in removed_here(config_type).items()}
    for field in msgspec.structs.fields(config_type):
        if (nested := struct_in(field.type)) is not None:
            found |= removed(nested, f"{prefix}{field.name}.")
    return found


def removed_here(config_type: type[msgspec.Struct]) -> Mapping[str, str]:
    """Return the removed settings of one struct, without the removed settings of the struct's sections."""
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
    """Return the first paragraph of the struct's docstring, on one line."""
    return " ".join((config_type.__doc__ or "").split("\n\n")[0].split())


# Settings that are read again while a service runs, and the differences between two configurations.
#
# Only top-level sections that are annotated with ``REREAD`` can be read again, always with all their settings.

T = TypeVar("T")
C = TypeVar("C", bound=msgspec.Struct)


class Reread(Generic[T]):
    """Holder of a section that may be replaced while the service runs. Users read ``now`` at each use."""

    __slots__ = ("now",)

    def __init__(self, now: T) -> None:
        self.now = now


def reread_sections(config_type: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the keys of the sections that a service reads again, in the order of its configuration."""
    return tuple(field.name for field in msgspec.structs.fields(config_type) if is_reread(field.type))


def with_reread(running: C, given: C) -> C:
    """Return ``running``, but with the sections that can be read again from ``given``."""
    return msgspec.structs.replace(running, **{name: getattr(given, name) for name in reread_sections(type(running))})


def differences(one: msgspec.Struct, other: msgspec.Struct) -> dict[str, Any]:
    """Return the settings in which two configurations differ, by dotted key, with the values of ``other``."""
    values, others = msgspec.to_builtins(one), msgspec.to_builtins(other)
    keys = [setting.key for setting in settings_of(type(one))]
    return {key: value for key in keys if _at(values, key) != (value := _at(others, key))}


def _at(values: Mapping[str, Any], key: str) -> Any:
    value: Any = values
    for part in key.split("."):
        value = value[part]
    return value
