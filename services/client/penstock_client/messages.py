"""Message classes of the API contract, with constructors that check their arguments and convert plain Python values."""

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from penstock.common.v1 import media_pb2, sampling_pb2, structured_output_pb2
from penstock.inference.v1 import messages_pb2

M = TypeVar("M", bound=Message)

_JSON_FIELDS = frozenset({"json_schema", "structural_tag", "parameters", "chat_template_kwargs"})
"""Text fields that contain JSON. A value that is not a string is converted to JSON text."""
_LONGEST_VALUE = 100
"""Maximum number of characters of a value in an error message."""
_INTEGERS: Mapping[int, tuple[int, int]] = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
}
"""Ranges of the integer types that the contract uses."""
_WORDS: Mapping[int, str] = {
    FieldDescriptor.TYPE_FLOAT: "a number",
    FieldDescriptor.TYPE_DOUBLE: "a number",
    FieldDescriptor.TYPE_BOOL: "True or False",
    FieldDescriptor.TYPE_STRING: "a string",
    FieldDescriptor.TYPE_BYTES: "bytes",
}


def build(kind: type[M], fields: Mapping[str, Any], path: str = "") -> M:
    """Return a message of the class ``kind`` with these fields. A field with the value None stays unset.

    The function converts schemas to JSON text, lists to messages with one list (such as Choice), dicts to nested
    messages, and enum names without prefix, such as ``compact``.

    Args:
        kind: Class of the message.
        fields: Values by field name.
        path: Path of the message for errors; empty if the fields are arguments of a method.

    Raises:
        ValueError: A field is unknown, or a value is out of range.
        TypeError: A value has the wrong type.
    """
    known = kind.DESCRIPTOR.fields_by_name
    values = {}
    for name, value in fields.items():
        if name not in known:
            raise ValueError(f"{path} has no field {name!r}{nearest(name, known)}")
        if value is not None:
            values[name] = _converted(known[name], value, f"{path}.{name}".removeprefix("."))
    try:
        return kind(**values)
    except (TypeError, ValueError):
        for name, value in values.items():
            _check(kind, known[name], value, f"{path}.{name}".removeprefix("."))
        raise


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the most similar known word, or ``""``."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def shown(value: object) -> str:
    """Return a value for an error message: plain values as Python writes them, other values by their class."""
    if not isinstance(value, str | int | float | bytes | list | tuple | dict):
        return f"of the class {type(value).__module__}.{type(value).__qualname__}"
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _converted(field: Any, value: Any, path: str) -> Any:
    """Return the value in the form that protobuf's constructor accepts."""
    if field.name in _JSON_FIELDS and not isinstance(value, str | bytes):
        try:
            return json.dumps(value)
        except (TypeError, ValueError) as e:
            raise TypeError(f"{path} is {shown(value)}, which cannot be written as JSON: {e}") from None
    if field.is_repeated and (isinstance(value, str) or not isinstance(value, Iterable)):
        raise TypeError(f"{path} is {shown(value)}; it must be {_wanted(field)}")
    if field.message_type is not None and not _is_map(field):
        if field.is_repeated:
            return [_message(field, each, f"{path}[{index}]") for index, each in enumerate(value)]
        return _message(field, value, path)
    if field.enum_type is not None and isinstance(value, str) and value not in field.enum_type.values_by_name:
        prefix = field.enum_type.values[0].name.removesuffix("UNSPECIFIED")
        return prefix + value.upper()
    return value


def _message(field: Any, value: Any, path: str) -> Any:
    kind = field.message_type._concrete_class
    [first, *others] = field.message_type.fields
    if isinstance(value, list | tuple) and first.is_repeated and not others:
        value = {first.name: value}
    if isinstance(value, dict):
        return build(kind, value, path)
    if not isinstance(value, kind):
        raise TypeError(f"{path} is {shown(value)}; it must be {kind.__name__}")
    return value


def _check(kind: type[Message], field: Any, value: Any, path: str) -> None:
    """Raise TypeError or ValueError with the path and the limit if protobuf refuses the value."""
    try:
        kind(**{field.name: value})
    except (TypeError, ValueError) as e:
        error = TypeError if isinstance(e, TypeError) else ValueError
        raise error(f"{path} is {shown(value)}; it must be {_wanted(field)}") from None


def _wanted(field: Any) -> str:
    """Return the type of a field in words."""
    if _is_map(field):
        key, item = field.message_type.fields
        return f"a dict; each key must be {_wanted(key)}, and each value {_wanted(item)}"
    if field.enum_type is not None:
        word = "one of " + ", ".join(value.name for value in field.enum_type.values[1:])
    elif field.message_type is not None:
        word = field.message_type.name
    elif field.type in _INTEGERS:
        low, high = _INTEGERS[field.type]
        word = f"an integer from {low} to {high}"
    else:
        word = _WORDS[field.type]
    return f"a list; each entry must be {word}" if field.is_repeated else word


def _is_map(field: Any) -> bool:
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)


class _CheckedClass(type):
    """Type of the message classes below. Their constructors return messages of the contract's generated classes."""

    generated: type[Message]

    def __call__(cls, *values: Any, **fields: Any) -> Message:
        if values:
            raise TypeError(f"{cls.__name__} takes only named fields, but the first argument is {shown(values[0])}")
        return build(cls.generated, fields, cls.__name__)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.generated)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.generated, name)


def _checked(generated: type[Message]) -> Any:
    # protobuf does not allow subclasses of messages
    members = {"generated": generated, "__module__": generated.__module__, "__slots__": ()}
    return _CheckedClass(generated.__name__, (), members)


if TYPE_CHECKING:
    from penstock.common.v1.media_pb2 import Media as Media
    from penstock.common.v1.sampling_pb2 import SamplingParams as SamplingParams
    from penstock.common.v1.structured_output_pb2 import StructuredOutput as StructuredOutput
    from penstock.inference.v1.messages_pb2 import ChatMessage as ChatMessage
    from penstock.inference.v1.messages_pb2 import RoutingHints as RoutingHints
    from penstock.inference.v1.messages_pb2 import Tool as Tool
    from penstock.inference.v1.messages_pb2 import ToolCall as ToolCall
    from penstock.inference.v1.messages_pb2 import ToolChoice as ToolChoice
else:
    ChatMessage = _checked(messages_pb2.ChatMessage)
    Media = _checked(media_pb2.Media)
    RoutingHints = _checked(messages_pb2.RoutingHints)
    SamplingParams = _checked(sampling_pb2.SamplingParams)
    StructuredOutput = _checked(structured_output_pb2.StructuredOutput)
    Tool = _checked(messages_pb2.Tool)
    ToolCall = _checked(messages_pb2.ToolCall)
    ToolChoice = _checked(messages_pb2.ToolChoice)
