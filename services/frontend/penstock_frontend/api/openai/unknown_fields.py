"""Detection of unknown fields in JSON bodies, also in nested objects. Unknown fields are logged, counted and refused."""

import asyncio
import re
import typing
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, Counter
from starlette.types import Scope

from penstock_common.errors import InvalidArgument, nearest
from penstock_common.observability.logging import get_logger
from penstock_frontend.api.ignored_fields import ignored_in
from penstock_frontend.api.openai.errors import undecodable
from penstock_frontend.api.openai.response_format import ResponseFormat
from penstock_frontend.api.unsupported_fields import UnsupportedField, unsupported_in
from penstock_frontend.call_types import caller_named
from penstock_frontend.call_warnings import LoggedOnce

_MOST = 32
"""Maximum number of unknown fields that are reported for one body."""
_MOST_NESTED = 2
"""Maximum number of objects of the same struct that may be nested in each other in one pass. Such objects are, for
example, blocks in a tool result in a block.
"""
_OPEN = frozenset({"DocumentBody"})
"""Structs of objects that contain a client's own data. ``ignored_fields.py`` lists all other fields of these objects."""
_RAW = {"response_format": ResponseFormat}
"""Structs of the fields that the struct of the body keeps as JSON text."""
_TYPES = {
    "ToolBody": frozenset({b"", b"function", b"custom"}),
    "FunctionTool": frozenset({b"function", b"custom", b"namespace"}),
    "ClientToolBody": frozenset({b"", b"custom"}),
    "AllowedToolBody": frozenset({b"", b"function", b"custom"}),
    "BlockBody": frozenset(
        (
            b"text",
            b"image",
            b"document",
            b"search_result",
            b"tool_use",
            b"tool_result",
            b"thinking",
            b"redacted_thinking",
        )
    ),
}
"""Types of objects whose fields are checked, by struct. Tools of other types are left out of the prompt, so they may
have any field.
"""
_NESTED = {"BlockBody": "content"}
"""Fields that may contain a list of objects of the same struct, although their declared type is any value. The key is
the struct.
"""
_NULL = b"null"


class UnknownField(NamedTuple):
    """A field that the server does not know.

    Attributes:
        path: Path of the unknown field in the body, such as ``messages[2].nmae``.
        shape: The path without indices, such as ``messages[].nmae``.
        name: Last part of the path, such as ``nmae``.
        known: Names of all fields that the object may have.
    """

    path: str
    shape: str
    name: str
    known: Collection[str]


class _Plan(NamedTuple):
    struct: str
    closed: bool
    known: frozenset[str]
    silent: frozenset[str]
    unsupported: Mapping[str, UnsupportedField]
    objects: Mapping[str, type]
    lists: Mapping[str, type]


def find_unknown(body: bytes, kind: type) -> list[UnknownField]:
    """Return the unknown fields of a body that was decoded as ``kind``. For each shape, the result has only the first
    field.

    Null fields and fields listed as ignored are left out.

    Raises:
        Unimplemented: a field is known but not supported.
        InvalidArgument: a name or value that the decoder skipped is not valid text.
    """
    try:
        _checker(kind).decode(body)
    except (msgspec.ValidationError, UnicodeDecodeError):
        pass  # the body has a name that is unknown or not valid; the code below finds it
    else:
        return []
    found: dict[str, UnknownField] = {}
    try:
        for field in _walk(msgspec.json.decode(body, type=dict[str, msgspec.Raw]), kind, "", ""):
            if len(found) < _MOST:
                # continue even if the maximum is reached, because a later field may have to be refused
                found.setdefault(field.shape, field)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise undecodable(e) from None
    return list(found.values())


def _walk(given: Mapping[str, msgspec.Raw], kind: type, path: str, shape: str) -> Iterator[UnknownField]:
    plan = _plan(kind)
    if not given.keys() <= plan.silent:
        yield from _unknown_in(given, plan, path, shape)
    for name, of in plan.objects.items():
        if (value := given.get(name)) is not None and _begins(value, b"{"):
            inner = msgspec.json.decode(value, type=dict[str, msgspec.Raw])
            if not (of is ResponseFormat and _is_structural_tag(inner)):
                yield from _walk(inner, of, f"{path}{name}.", f"{shape}{name}.")
    for name, of in plan.lists.items():
        if (value := given.get(name)) is not None and _begins(value, b"["):
            for index, each in _objects_of(value):
                if _has_known_type(each, of):
                    yield from _walk(each, of, f"{path}{name}[{index}].", f"{shape}{name}[].")


def _unknown_in(given: Mapping[str, msgspec.Raw], plan: _Plan, path: str, shape: str) -> Iterator[UnknownField]:
    """Yield the unknown fields of one object. Raises Unimplemented for a field that is known but not supported."""
    for name, raw in given.items():
        if name in plan.silent or memoryview(raw) == _NULL:
            continue
        if (field := plan.unsupported.get(name)) is not None:
            if field.asks(msgspec.json.decode(raw), plan.struct):
                raise field.refusal(f"{path}{name}")
        elif not plan.closed:  # for a struct that allows no other fields, the decoder has already refused the field
            yield UnknownField(f"{path}{name}", f"{shape}{name}", name, plan.known)


def _begins(raw: msgspec.Raw, with_: bytes) -> bool:
    return bytes(memoryview(raw)[:1]) == with_


def _objects_of(raw: msgspec.Raw) -> Iterator[tuple[int, Mapping[str, msgspec.Raw]]]:
    """Yield the objects of a list, each with its index. Other values in the list are skipped."""
    try:
        yield from enumerate(msgspec.json.decode(raw, type=list[dict[str, msgspec.Raw]]))
    except msgspec.ValidationError:  # the list may also contain texts or numbers
        for index, value in enumerate(msgspec.json.decode(raw, type=list[msgspec.Raw])):
            if _begins(value, b"{"):
                yield index, msgspec.json.decode(value, type=dict[str, msgspec.Raw])


def _is_structural_tag(value: Mapping[str, msgspec.Raw]) -> bool:
    """Return True if the object is a structural tag, which has the fields that xgrammar defines."""
    return bytes(value.get("type", msgspec.Raw())) == b'"structural_tag"'


def _has_known_type(value: Mapping[str, msgspec.Raw], kind: type) -> bool:
    types = _TYPES.get(kind.__name__)
    given = bytes(value.get("type", msgspec.Raw()))
    return types is None or given == _NULL or given.strip(b'"') in types


@cache
def _plan(kind: type[msgspec.Struct]) -> _Plan:
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    known = frozenset(fields)
    objects: dict[str, type] = {name: of for name, of in _RAW.items() if name in fields}
    lists: dict[str, type] = {_NESTED[kind.__name__]: kind} if kind.__name__ in _NESTED else {}
    for name, of in fields.items():
        for member in _members(of):
            if typing.get_origin(member) is list:
                structs = [each for each in _members(typing.get_args(member)[0]) if _is_struct(each)]
                if structs:
                    lists[name] = structs[0]
            elif _is_struct(member):
                objects[name] = member
    struct = kind.__name__
    closed = kind.__struct_config__.forbid_unknown_fields
    return _Plan(struct, closed, known, known | ignored_in(struct), unsupported_in(struct), objects, lists)


@cache
def _checker(kind: type) -> msgspec.json.Decoder[Any]:
    """Return a decoder that refuses every body with unknown fields, and accepts most of the other bodies.

    The decoder skips values, so it is several times as fast as a check of every object.
    """
    return msgspec.json.Decoder(_strict(kind, ()))


def _strict(kind: type, around: tuple[type, ...]) -> type[msgspec.Struct]:
    """Return a struct with exactly the field names that an object of ``kind`` may have.

    ``around`` has the structs that contain the object.
    """
    plan, within = _plan(kind), (*around, kind)
    types: dict[str, Any] = dict.fromkeys(sorted(plan.silent), msgspec.Raw)
    for name in plan.objects.keys() | plan.lists.keys():
        inner = _one_of(plan.lists.get(name), within)
        types[name] = _one_of(plan.objects.get(name), within) | list[inner]  # type: ignore[valid-type]
    # Names in JSON need not be valid Python names.
    places = {f"f{place}": name for place, name in enumerate(types)}
    fields = [(place, types[name], None) for place, name in places.items()]
    return msgspec.defstruct(f"Strict{kind.__name__}", fields, rename=places, forbid_unknown_fields=True, frozen=True)


def _one_of(of: type | None, within: tuple[type, ...]) -> Any:
    """Return the type for a value that is not a list. The type refuses objects with unknown field names, and objects
    that are nested too deeply.
    """
    plain = str | int | float | bool | None
    return plain if of is None or within.count(of) == _MOST_NESTED else plain | _strict(of, within)


def _members(of: Any) -> Collection[Any]:
    """Return the types of which a union consists. For another type, return the type itself."""
    args = typing.get_args(of)
    return args if args and typing.get_origin(of) is not list and typing.get_origin(of) is not dict else (of,)


def _is_struct(of: Any) -> bool:
    # The decoder already checks a struct that forbids unknown fields, so it needs no check here.
    return (
        isinstance(of, type)
        and issubclass(of, msgspec.Struct)
        and not of.__struct_config__.forbid_unknown_fields
        and of.__name__ not in _OPEN
    )


_LARGE = 64 * 1024
"""Size of a body in bytes above which the body is checked in a thread."""
_MAX_LABELS = 50
"""Maximum number of unknown fields that have their own label in the metric. All other unknown fields share one label."""
_LABEL = re.compile(r"[a-z][a-z0-9_]{0,39}(?:(?:\[\])?\.[a-z][a-z0-9_]{0,39}){0,3}")
"""Pattern of the field names that may become labels, because they look like names of API fields."""
_OTHER = "other"
_MAX_NAME = 64


class FieldPolicy:
    """Checker of the fields of every HTTP body. All methods must be called on the event loop's thread.

    Args:
        refuse: Whether a body with an unknown field is refused. False means that unknown fields are ignored.
        registry: Metrics registry for the number of unknown fields. None means that unknown fields are not counted.
    """

    def __init__(self, *, refuse: bool, registry: CollectorRegistry | None = None) -> None:
        self._refuse = refuse
        self._logged = LoggedOnce()
        self._labels: set[str] = set()
        self._count = (
            None
            if registry is None
            else Counter("penstock:unknown_fields", "Unknown fields in HTTP bodies", ["field"], registry=registry)
        )

    async def check(self, body: bytes, kind: type, client: str) -> None:
        """Check the fields of a body that was decoded as ``kind``. ``client`` is the name of the caller, from
        ``client_of``. Raises InvalidArgument if unknown fields are refused and the body has such a field.
        """
        # Check a large body in a thread, so that the event loop can serve other requests.
        large = len(body) > _LARGE
        found = await asyncio.to_thread(find_unknown, body, kind) if large else find_unknown(body, kind)
        if not found:
            return
        for field in found:
            if self._count is not None:
                self._count.labels(self._label(field.shape)).inc()
        self._tell(found, client)
        if self._refuse:
            raise _refusal(found[0])

    def _label(self, shape: str) -> str:
        if shape in self._labels:
            return shape
        if len(self._labels) >= _MAX_LABELS or not _LABEL.fullmatch(shape):
            return _OTHER
        self._labels.add(shape)
        return shape

    def _tell(self, found: list[UnknownField], client: str) -> None:
        new = self._logged.new(client, [_shortened(field.shape) for field in found])
        if new:
            get_logger().warning("request has unknown fields", fields=new, client=client, refused=self._refuse)


def client_of(scope: Scope) -> str:
    """Return the name of the caller for logs. The name is the caller's tenant, the name of its credentials, or its
    address.
    """
    address = scope.get("client")
    return caller_named(str(address[0]) if address else "local")


def _refusal(field: UnknownField) -> InvalidArgument:
    path, hint = _shortened(field.path), nearest(field.name, field.known)
    return InvalidArgument(
        f"{path} is not a known field{hint or '.'} {'Correct' if hint else 'Remove'} it; this server refuses unknown fields "
        "(http.unknown_fields)",
        field=path,
        reason="UNKNOWN_FIELD",
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_NAME else f"{text[:_MAX_NAME]}..."
