"""Parsing of bodies with the type ``multipart/form-data``, which contain files and other fields."""

import logging
import re
import typing
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from penstock_common.errors import InvalidArgument, excerpt, quoted
from penstock_frontend.api.openai.errors import HttpError, undecodable

# The parser would log a warning about each malformed body, which the client is told anyway.
logging.getLogger("python_multipart").setLevel(logging.ERROR)

MEDIA_TYPE = "multipart/form-data"
MAX_PARTS = 100
"""Maximum number of parts of a form."""
MAX_TEXT_BYTES = 1024 * 1024
"""Maximum number of bytes of all parts of a form that are not files."""
_MAX_HEADERS = 8
_MAX_HEADER_BYTES = 4096
"""Maximum number of bytes of one header of a part."""
_ENCODINGS = ("", "7bit", "8bit", "binary")
_NAME = re.compile(r"(?P<name>[^\[\]]+)(?:\[(?P<key>[^\[\]]*)\])?")
"""Pattern of the names of fields. ``name[]`` and ``name[0]`` are items of a list, and ``name[key]`` is a member of an
object.
"""
_NUMBER = re.compile(r"-?\d{1,15}(\.\d{1,15})?")
_WORDS = {"true": True, "false": False}

T = TypeVar("T")


class Part(NamedTuple):
    """A part of a form. ``content`` has the bytes of a file, or the text of a field in UTF-8."""

    name: str
    content: bytes


class FormReader:
    """Parser of one form, which is fed with the parts of the HTTP body as they arrived."""

    def __init__(self, content_type: str, files: Collection[str]) -> None:
        """``content_type`` is the header of the request. ``files`` are the names of the fields that are files.

        Raises HttpError 415 if the body has another type, and InvalidArgument if the header is not valid.
        """
        kind, options = parse_options_header(content_type)
        if kind.decode("latin-1") != MEDIA_TYPE:
            given = f"is {quoted(content_type)}" if content_type else "is not set"
            raise HttpError(415, f"Content-Type {given}; it must be {MEDIA_TYPE}", "unsupported_content_type")
        if not (boundary := options.get(b"boundary")):
            raise _invalid("the header Content-Type has no boundary")
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": self._add_to_header_name,
                    "on_header_value": self._add_to_header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._add_data,
                    "on_part_end": self._end,
                    "on_end": self._finish,
                },
                max_header_count=_MAX_HEADERS,
                max_header_size=_MAX_HEADER_BYTES,
            )
        except FormParserError as e:
            raise _invalid(str(e)) from None
        self._files = files
        self._parts: list[Part] = []
        self._text_bytes = 0
        self._complete = False
        self._name, self._data = "", [b""]
        self._header_name, self._header_value = b"", b""
        self._headers: dict[bytes, bytes] = {}

    def feed(self, data: bytes) -> None:
        """Parse the next bytes of the body. Raises InvalidArgument if the form is malformed or exceeds a limit."""
        try:
            self._parser.write(data)
        except FormParserError as e:
            raise _invalid(excerpt(str(e))) from None

    def finish(self) -> list[Part]:
        """Return all parts in order. Raises InvalidArgument if the end of the form is missing."""
        if not self._complete:
            raise _invalid("its last boundary is missing")
        return self._parts

    # The parser calls the methods below.

    def _begin(self) -> None:
        if len(self._parts) == MAX_PARTS:
            raise _invalid(f"it has more than {MAX_PARTS} parts")
        self._headers, self._data = {}, []

    def _add_to_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_to_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name = self._header_value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        if not (name := options.get(b"name")):
            raise _invalid("a part has no name in its header Content-Disposition")
        self._name = name.decode("utf-8", errors="replace")
        encoding = self._headers.get(b"content-transfer-encoding", b"").decode("latin-1").strip().lower()
        if encoding not in _ENCODINGS:
            raise _invalid(f"a part has the Content-Transfer-Encoding {quoted(encoding)}; send its bytes unencoded")

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        self._data.append(data[start:end])
        if self._name not in self._files:
            self._text_bytes += end - start
            if self._text_bytes > MAX_TEXT_BYTES:
                raise _invalid(f"its fields other than files have more than {MAX_TEXT_BYTES} bytes")

    def _end(self) -> None:
        self._parts.append(Part(self._name, b"".join(self._data)))
        self._data = []

    def _finish(self) -> None:
        self._complete = True


def file_fields(kind: type) -> frozenset[str]:
    """Return the names of the fields that are files in a struct. These are the fields of the type bytes."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind) if field.type is bytes)


def values_of(parts: list[Part], kind: type) -> dict[str, Any]:
    """Return the fields of a form by name. A value is a text, a list or an object of texts, or the bytes of a file.

    ``kind`` is the struct that the form will be converted to. Fields without text are left out. Raises InvalidArgument
    for a field that is set twice, or whose text is not valid UTF-8.
    """
    files, lists = file_fields(kind), _list_fields(kind)
    found: dict[str, Any] = {}
    for part in parts:
        match = _NAME.fullmatch(part.name)
        name, key = (match["name"], match["key"]) if match else (part.name, None)
        if name in files:
            _set(found, name, part.content)
        elif (text := _text(name, part.content)) != "":
            if key == "" or (key or "").isdecimal() or (key is None and name in lists):
                _append(found, name, text)
            elif key is None:
                _set(found, name, text)
            else:
                _set(_object(found, name), key, text, f"{name}.{key}")
    return found


def converted(values: Mapping[str, Any], kind: type[T]) -> T:
    """Return the struct for the fields of a form. Raises InvalidArgument, which names the faulty field."""
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as e:
        error = undecodable(e, kind=kind)
    given, (_, must, wanted) = values.get(error.field), error.message.partition(" must be ")
    if not must or not isinstance(given, str):
        raise error
    # The decoder says that the value is a text, but all values of a form are texts.
    message = f"{error.field} is {quoted(given)}; it must be {wanted.removesuffix(' or null')}"
    raise InvalidArgument(message, field=error.field, reason=error.reason)


def as_json(values: Mapping[str, Any], kind: type) -> bytes:
    """Return the fields of a form other than files as a JSON object. Texts that look like numbers or truth values become
    such values.
    """
    files = file_fields(kind)
    return msgspec.json.encode({name: _typed(value) for name, value in values.items() if name not in files})


def _typed(value: Any) -> Any:
    if isinstance(value, list):
        return [_typed(each) for each in value]
    if isinstance(value, dict):
        return {key: _typed(each) for key, each in value.items()}
    if value.lower() in _WORDS:
        return _WORDS[value.lower()]
    return float(value) if _NUMBER.fullmatch(value) else value


def _list_fields(kind: type) -> frozenset[str]:
    fields = msgspec.structs.fields(kind)
    types = {field.encode_name: (field.type, *typing.get_args(field.type)) for field in fields}
    return frozenset(name for name, of in types.items() if any(typing.get_origin(each) is list for each in of))


def _text(name: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise InvalidArgument(f"{_shown(name)} is not valid UTF-8", field=_shown(name)) from None


def _set(found: dict[str, Any], name: str, value: object, path: str = "") -> None:
    if name in found:
        field = _shown(path or name)
        raise InvalidArgument(f"{field} is set more than once; send it once", field=field)
    found[name] = value


def _append(found: dict[str, Any], name: str, text: str) -> None:
    items = found.setdefault(name, [])
    if not isinstance(items, list):
        raise _mixed(name)
    items.append(text)


def _object(found: dict[str, Any], name: str) -> dict[str, Any]:
    members = found.setdefault(name, {})
    if not isinstance(members, dict):
        raise _mixed(name)
    return members


def _mixed(name: str) -> InvalidArgument:
    field = _shown(name)
    return InvalidArgument(f"{field} is sent in two forms; send either {field}, {field}[] or {field}[key]", field=field)


def _shown(name: str) -> str:
    return excerpt(name)


def _invalid(why: str) -> InvalidArgument:
    return InvalidArgument(f"the body is not a valid form: {why}", reason="INVALID_FORM")
