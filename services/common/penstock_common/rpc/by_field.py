"""Conversion between messages and structs with fields of the same names.

If a message does not set a field, the struct gets the field's default, or an empty value if the field has no default.
Enums have the same numbers in messages and structs, except the enums in ``NUMBERS``. Fields that only the message or
only the struct has are skipped. If a field needs another conversion, the caller passes its value. For each pair of
types, a conversion function is generated once. The generated function is as fast as a hand-written function.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from penstock_common.errors import InvalidArgument
from penstock_common.types.cluster import EngineState
from penstock_common.types.data_parallel import PauseMode
from penstock_common.types.kv_transfer import EngineRole
from penstock_common.types.outputs import FinishReason

S = TypeVar("S", bound=msgspec.Struct)
M = TypeVar("M", bound=Message)
FieldInfo = msgspec.structs.FieldInfo

UNKNOWN: Mapping[type[enum.IntEnum], enum.IntEnum] = {
    EngineState: EngineState.LOADING,
    EngineRole: EngineRole.BOTH,
    FinishReason: FinishReason.ERROR,
    PauseMode: PauseMode.ABORT,
}
"""Enum member that replaces unknown numbers in messages, by enum. Unknown numbers of other enums are refused."""
NUMBERS: Mapping[type[enum.IntEnum], Mapping[enum.IntEnum, int]] = {
    PauseMode: {PauseMode.NONE: 0, PauseMode.ABORT: 1, PauseMode.WAIT: 2, PauseMode.KEEP: 3}
}
"""Message numbers of enums whose domain type has other numbers. The domain type orders pause modes by strength."""


def from_message(message: Message, kind: type[S], path: str = "", /, **special: Any) -> S:
    """Return the struct of a message.

    Args:
        message: The message, which is not changed.
        kind: The type of the struct.
        path: Path of the message in its request, for errors.
        special: Values for fields of the struct. These values replace the message's values.

    Raises:
        InvalidArgument: An enum number is unknown and not covered by ``UNKNOWN``.
    """
    struct: S = _reader(kind, message.DESCRIPTOR, tuple(special))(message, path and f"{path}.", special)
    return struct


def to_message(struct: msgspec.Struct, kind: type[M], /, **special: Any) -> M:
    """Return the message of a struct.

    ``special`` contains values for fields of the message. These values replace the struct's values; None leaves a field
    unset.
    """
    message = kind(**special)
    _writer(type(struct), kind.DESCRIPTOR, tuple(special))(struct, message)
    return message


def fill(message: Message, struct: msgspec.Struct, /, *special: str) -> None:
    """Write a struct into an empty message, except for the fields in ``special``."""
    _writer(type(struct), message.DESCRIPTOR, special)(struct, message)


def member(kind: type[enum.IntEnum], number: int, path: str) -> Any:
    """Return the enum member with a number. Raises InvalidArgument for an unknown number if the enum is not in
    ``UNKNOWN``.
    """
    try:
        return kind(number)
    except ValueError:
        if (found := UNKNOWN.get(kind)) is not None:
            return found
        known = ", ".join(each.name for each in kind)
        raise InvalidArgument(f"{path} is {number}; known: {known}", field=path) from None


@cache
def _reader(kind: type[msgspec.Struct], message: Descriptor, special: tuple[str, ...]) -> Callable[..., Any]:
    """Return a function that builds a struct from a message, the path prefix of its fields, and special values."""
    names: dict[str, Any] = {"kind": kind}
    arguments = [f"{name}=special[{name!r}]" for name in special]
    for field, descriptor in _shared(kind, message, special):
        value, default = _read(field, descriptor, names), _default(field, descriptor, names)
        said = f"message.HasField({field.name!r})" if descriptor.has_presence else f"message.{field.name}"
        arguments.append(f"{field.name}={value} if {said} else {default}" if default else f"{field.name}={value}")
    return _compiled("message, path, special", [f"return kind({', '.join(arguments)})"], names)


@cache
def _writer(kind: type[msgspec.Struct], message: Descriptor, special: tuple[str, ...]) -> Callable[..., None]:
    """Return a function that writes a struct into a message, except for the special fields."""
    names: dict[str, Any] = {}
    lines = ["pass"]
    for field, descriptor in _shared(kind, message, special):
        name, to, said = field.name, f"message.{field.name}", ""
        nested = _nested(field, descriptor)
        if descriptor.has_presence and (nested or field.default in (None, msgspec.NODEFAULT)):
            said = " is not None"
        elif descriptor.has_presence:
            names[f"default_{name}"], said = field.default, f" not in (None, default_{name})"
        if nested:
            names[f"write_{name}"] = _writer(*nested, ())
        value = "value"
        if numbers := NUMBERS.get(field.type):
            names[f"numbers_{name}"], value = numbers, f"numbers_{name}[value]"
        write = {
            (False, False): f"{to} = {value}",
            (False, True): f"write_{name}(value, {to}); {to}.SetInParent()",
            (True, False): f"{to}.{'update' if _is_map(descriptor) else 'extend'}(value)",
            (True, True): f"[write_{name}(each, {to}.add()) for each in value]",
        }[descriptor.is_repeated, nested is not None]
        lines.append(f"if (value := struct.{name}){said}: {write}")
    return _compiled("struct, message", lines, names)


def _compiled(parameters: str, lines: Sequence[str], names: dict[str, Any]) -> Callable[..., Any]:
    exec("\n    ".join([f"def convert({parameters}):", *lines]), names)  # noqa: S102 - the code contains only names of fields
    convert: Callable[..., Any] = names["convert"]
    return convert


def _shared(
    kind: type[msgspec.Struct], message: Descriptor, special: tuple[str, ...]
) -> list[tuple[FieldInfo, FieldDescriptor]]:
    known: Mapping[str, Any] = message.fields_by_name
    fields = (field for field in msgspec.structs.fields(kind) if field.name in known and field.name not in special)
    return [(field, known[field.name]) for field in fields]


def _is_map(descriptor: FieldDescriptor) -> bool:
    return descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry


def _without_none(kind: Any) -> Any:
    return next(each for each in get_args(kind) if each is not NoneType) if NoneType in get_args(kind) else kind


def _nested(field: FieldInfo, descriptor: FieldDescriptor) -> tuple[type[msgspec.Struct], Descriptor] | None:
    """Return the struct and message types of a nested field, or None."""
    if descriptor.message_type is None or _is_map(descriptor):
        return None
    kind = _without_none(field.type)
    return get_args(kind)[0] if descriptor.is_repeated else kind, descriptor.message_type


def _default(field: FieldInfo, descriptor: FieldDescriptor, names: dict[str, Any]) -> str:
    """Return an expression for the struct's default, or '' if the message's value for an unset field equals the
    default.
    """
    if field.required or field.type in UNKNOWN:
        return ""
    made = field.default_factory is not msgspec.NODEFAULT
    default = field.default_factory() if made else field.default
    if not descriptor.has_presence and default is not None and not default:
        return ""
    names[f"default_{field.name}"] = field.default_factory if made else default
    return f"default_{field.name}{'()' if made else ''}"


def _read(field: FieldInfo, descriptor: FieldDescriptor, names: dict[str, Any]) -> str:
    """Return an expression for the struct's value of a field that the message sets."""
    name, kind, value = field.name, _without_none(field.type), f"message.{field.name}"
    if nested := _nested(field, descriptor):
        names[f"read_{name}"] = _reader(*nested, ())
    if descriptor.is_repeated:
        make = "dict" if _is_map(descriptor) else "list" if get_origin(kind) is list else "tuple"
        each = f"read_{name}(each, f'{{path}}{name}[{{i}}].', None) for i, each in enumerate({value})"
        return f"{make}({each if nested else value})"
    if nested:
        return f"read_{name}({value}, path + '{name}.', None)"
    if descriptor.enum_type is not None:
        numbers = NUMBERS.get(kind, {})
        names[f"members_{name}"] = {numbers.get(each, each.value): each for each in kind}
        names[f"other_{name}"] = partial(member, kind)
        return f"(members_{name}.get({value}) or other_{name}({value}, path + '{name}'))"
    return value
