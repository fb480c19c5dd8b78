"""Reader of JSON schemas: parses the text, checks types and keywords, resolves references, and limits the work for a
schema.
"""

import json
import re
from collections.abc import Callable, Hashable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from penstock_common.errors import nearest
from penstock_common.nesting_depth import nests_deeper
from penstock_enginecore.structured_output.constraints.regex import MAX_REPEAT

Schema = Mapping[str, Any]

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_MAX_SHOWN = 100


class SchemaError(ValueError):
    """Raised when a schema, or its part at ``path``, is invalid or not supported.

    ``path`` is a JSON pointer that starts with ``#``. It is empty if the error concerns the text of the schema.
    """

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path} {what}" if path else what)
        self.path = path
        self.what = what


class UnfulfillableError(SchemaError):
    """Raised when no value can fulfil the schema. If the schema is one of several alternatives, the translation leaves
    out this alternative.
    """


class TooMuchWorkError(SchemaError):
    """Raised when translating the schema takes more work than allowed."""


class Work:
    """Counts the steps of a translation, to limit the time that the translation of a schema takes."""

    def __init__(self, limit: int) -> None:
        """Create a counter that allows ``limit`` steps. A step is one transition of an automaton, which takes a few
        microseconds.
        """
        self._limit = limit
        self._left = limit

    def spend(self, path: str, steps: int) -> None:
        """Count ``steps`` steps for the schema at ``path``. Raises TooMuchWorkError if the total exceeds the limit."""
        self._left -= steps
        if self._left < 0:
            raise TooMuchWorkError(
                path,
                f"makes the schema too complex: its translation to a grammar needs more than {self._limit} steps; "
                "simplify the schema",
            )


def shown(value: Any) -> str:
    """Return the beginning of a value as JSON text, for error messages."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def present(schema: Any) -> Any:
    """Return a schema without keywords that are null, because serializers write null for absent keywords. A ``const``
    may be null.
    """
    if not isinstance(schema, dict):
        return schema
    return {name: value for name, value in schema.items() if value is not None or name == "const"}


def never(schema: Any) -> bool:
    """Return whether a schema allows no value: the schema is false, or ``{"not": {}}``, which means the same."""
    return schema is False or (isinstance(schema, dict) and schema.get("not", 0) in (True, {}) and len(schema) == 1)


def fits(value: Any, kind: str) -> bool:
    """Return whether a JSON value is of the given type."""
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if isinstance(value, int | Decimal):
        return kind == "number" or (kind == "integer" and value == int(value))
    return kind == ("object" if isinstance(value, dict) else "array" if isinstance(value, list) else "string")


def identity(value: Any) -> Hashable:
    """Return a key that is the same for equal JSON values, at any depth. The numbers 1 and 1.0 have the same key, but 1
    and true have different keys.
    """
    if isinstance(value, list):
        return list, tuple(map(identity, value))
    if isinstance(value, dict):
        return dict, frozenset((name, identity(part)) for name, part in value.items())
    return isinstance(value, bool), value


def escaped(name: str) -> str:
    """Return a name with the escapes that a JSON pointer needs."""
    return name.replace("~", "~0").replace("/", "~1")


# Parsing the text of a schema. Numbers are parsed exactly, and nesting is limited.

MAX_NESTING = 256
"""Maximum depth of nesting in a schema's JSON text, including values of ``const`` and ``enum``."""

MAX_EXPONENT = 300
"""Maximum absolute value of the decimal exponent of a number in a schema."""


def parse(text: str) -> Any:
    """Return the JSON value that ``text`` contains. Numbers with a fraction or an exponent become Decimal. Raises
    SchemaError.
    """

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    try:
        value = json.loads(text, parse_float=_fraction, parse_constant=refuse)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as e:
        raise SchemaError("", f"is not valid JSON: {e}") from None
    if nests_deeper(value, MAX_NESTING):
        raise _too_deep()
    return value


def _too_deep() -> SchemaError:
    return SchemaError("", f"is nested more than {MAX_NESTING} levels deep")


def _fraction(text: str) -> Decimal:
    try:
        value = Decimal(text)
    except InvalidOperation:  # The exponent is out of range.
        raise ValueError(f"the number {text[:40]} is out of range") from None
    if abs(value.adjusted()) > MAX_EXPONENT:
        raise ValueError(f"the number {text[:40]} is out of range")
    return value


# Keywords that constrain values, keywords that are only annotations, and the required types of keyword values.

_NUMBER = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_DEPENDENT = frozenset({"dependentRequired", "dependentSchemas", "dependencies"})
KEYWORDS: Mapping[str, frozenset[str]] = {
    "object": frozenset(
        {"properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"}
        | {"propertyNames", "unevaluatedProperties"}
        | _DEPENDENT
    ),
    "array": frozenset(
        {"items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems"}
        | {"contains", "minContains", "maxContains"}
    ),
    "string": frozenset({"minLength", "maxLength", "pattern"}),
    "number": _NUMBER,
    "integer": _NUMBER,
    "boolean": frozenset(),
    "null": frozenset(),
}
"""Supported keywords, by the JSON type of the values to which the keywords apply. ``format`` applies to strings and
numbers.
"""
COMBINED = frozenset({"$ref", "const", "enum", "anyOf", "oneOf", "allOf", "not", "if", "then", "else"})
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"}
    | {"$schema", "$id", "id", "$anchor", "$comment", "$vocabulary", "$defs", "definitions", "components"}
    | {"contentEncoding", "contentMediaType", "contentSchema", "discriminator", "externalDocs", "xml", "summary"}
    | {"propertyOrdering", "propertyOrder", "order", "enumNames", "enumDescriptions", "enumVarnames", "tsEnumNames"}
    | {"markdownDescription", "markdownEnumDescriptions", "deprecationMessage", "doNotSuggest", "defaultSnippets"}
    | {"errorMessage", "javaType", "existingJavaType", "javaEnumNames", "typeName", "_meta", "env", "env_names"}
)
"""Keywords of JSON Schema drafts and of common generators that do not constrain values."""
OURS = frozenset({"!type", "!enum", "!pattern"})
"""Internal keywords that this package generates for negations: excluded types, excluded values, and a regular
expression that values must not match.
"""
_KNOWN = frozenset({"type", "format", "nullable"} | COMBINED | set().union(*KEYWORDS.values()))
INTEGER_FORMATS: Mapping[str, tuple[int, int]] = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32)},
    "uint64": (0, 2**64 - 1),
    "uint": (0, 2**64 - 1),
}
"""Minimum and maximum integer of each integer format that has fewer than 64 bits or is unsigned."""


def constraining(schema: Any, path: str, *, ours: bool = False) -> dict[str, Any]:
    """Return the keywords of ``schema`` that constrain values. Raises SchemaError for an unknown keyword.

    ``ours`` is true if this package generated the schema, so that the schema may contain internal keywords.
    """
    if not isinstance(schema, dict):
        raise SchemaError(path, f"is {shown(schema)}; a schema is an object, true or false")
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if ours and name in OURS:
            found[name] = value
        elif (value is None and name != "const") or name in _ANNOTATIONS or name.startswith(("x-", "X-", "x_")):
            continue
        elif name not in _KNOWN:
            raise SchemaError(f"{path}/{name}", f"is not supported{nearest(name, _KNOWN)}")
        else:
            found[name] = value
    for name, check in _FORMS.items():
        if name in found:
            check(found, name, path)
    return found


def kinds_of(given: Any, path: str) -> set[str]:
    """Return the types in the value of the keyword ``type``. If the value contains ``number``, ``integer`` is
    dropped.
    """
    kinds = given if isinstance(given, list) else [given]
    if not kinds or any(kind not in TYPES for kind in kinds):
        lower = given.lower() if isinstance(given, str) else ""
        hint = f"; write {lower!r}" if lower in TYPES else f"; known types are {', '.join(TYPES)}"
        raise SchemaError(f"{path}/type", f"is {shown(given)}{hint}")
    return set(kinds) - ({"integer"} if "number" in kinds else set())


def number(keywords: Schema, name: str, path: str) -> Decimal | None:
    """Return the value of a keyword that must be a number, or None if the keyword is not set."""
    if name not in keywords:
        return None
    value = keywords[name]
    if isinstance(value, bool) or not isinstance(value, int | Decimal) or len(str(int(value))) > 30:
        raise SchemaError(f"{path}/{name}", "must be a number of at most 30 digits")
    return Decimal(value)


def bounds(keywords: Schema, name: str, exclusive: str, path: str) -> list[tuple[Decimal, bool, str]]:
    """Return the bounds that a keyword and its exclusive form set. A bound is a number, whether the number itself is
    excluded, and the path of the keyword.

    In draft 4 of JSON Schema, the exclusive form is a boolean, which says whether the number of the other keyword is
    excluded.
    """
    plain, marked = number(keywords, name, path), keywords.get(exclusive)
    if isinstance(marked, bool):
        return [] if plain is None else [(plain, marked, f"{path}/{name}")]
    excluded = number(keywords, exclusive, path)
    found = [] if plain is None else [(plain, False, f"{path}/{name}")]
    return found if excluded is None else [*found, (excluded, True, f"{path}/{exclusive}")]


def count(keywords: Schema, name: str, path: str) -> int | None:
    """Return the value of a keyword that must be a count, or None if the keyword is not set."""
    value = keywords.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | Decimal) or value != int(value) or value < 0:
        raise SchemaError(f"{path}/{name}", f"is {shown(value)}; it must be an integer of at least 0")
    if value > MAX_REPEAT:
        raise SchemaError(f"{path}/{name}", f"is {shown(value)}; the limit is {MAX_REPEAT}")
    return int(value)


def flag(keywords: Schema, name: str, path: str) -> bool:
    """Return the value of a keyword that must be a boolean, or False if the keyword is not set."""
    value = keywords.get(name, False)
    if not isinstance(value, bool):
        raise SchemaError(f"{path}/{name}", f"is {shown(value)}; it must be true or false")
    return value


def mapping(keywords: Schema, name: str, path: str) -> Mapping[str, Any]:
    """Return the value of a keyword that must be an object, or an empty object if the keyword is not set."""
    value = keywords.get(name, {})
    if not isinstance(value, dict):
        raise SchemaError(f"{path}/{name}", "must be an object")
    return value


def schemas(keywords: Schema, name: str, path: str) -> list[Any]:
    """Return the value of a keyword that must be a list of schemas, or an empty list if the keyword is not set."""
    value = keywords.get(name, [])
    if not isinstance(value, list):
        raise SchemaError(f"{path}/{name}", "must be a list of schemas")
    return value


def names(keywords: Schema, name: str, path: str) -> list[str]:
    """Return the value of a keyword that must be a list of names, without duplicates."""
    given = keywords.get(name, [])
    if not isinstance(given, list) or not all(isinstance(item, str) for item in given):
        raise SchemaError(f"{path}/{name}", "must be a list of strings")
    return list(dict.fromkeys(given))


def text(keywords: Schema, name: str, path: str) -> str:
    """Return the value of a keyword that must be a string."""
    value = keywords[name]
    if not isinstance(value, str):
        raise SchemaError(f"{path}/{name}", f"is {shown(value)}; it must be a string")
    return value


def _bound(keywords: Schema, name: str, path: str) -> None:
    if not isinstance(keywords[name], bool):
        number(keywords, name, path)


_FORMS: Mapping[str, Callable[[Schema, str, str], object]] = {
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), count),
    **dict.fromkeys(("minContains", "maxContains"), count),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), number),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _bound),
    **dict.fromkeys(
        ("properties", "patternProperties", "dependentRequired", "dependentSchemas", "dependencies"), mapping
    ),
    **dict.fromkeys(("uniqueItems", "nullable"), flag),
    **dict.fromkeys(("pattern", "format"), text),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), schemas),
    "required": names,
}
"""Functions that check the values of keywords, by keyword. The checks also run if the schema does not allow the type to
which the keyword applies.
"""


# References: the schemas of one document to which ``$ref`` can refer.

_INDEX = re.compile("[0-9]{1,9}")
_VALUES = frozenset({"const", "enum", "default", "examples", "example"})
"""Keywords whose values contain no schemas."""


class Document:
    """A complete schema, and the schemas inside it to which a ``$ref`` can refer by JSON pointer, ``$anchor`` or
    ``$id``.
    """

    def __init__(self, root: Any) -> None:
        self.root = root
        self._names: dict[str, str] | None = None

    def pointer(self, reference: Any, path: str) -> str:
        """Return the JSON pointer of the schema to which the ``$ref`` at ``path`` refers.

        The pointer starts with ``#``. Raises SchemaError if the schema is not in this document.
        """
        field = f"{path}/$ref"
        if not isinstance(reference, str):
            raise SchemaError(field, f"is {shown(reference)}; it must be a string")
        base, base_pointer = self._base(path)
        if reference == "#" or reference.startswith("#/"):
            pointer = base_pointer + reference[1:]
            if base_pointer != "#" and not self._has(pointer) and self._has(reference):
                pointer = (
                    # Some generators put a $id below the root schema, but the pointers in their references still start
                    # at the root.
                    reference
                )
        else:
            pointer = self._named(_joined(base, reference), reference)
        if not self._has(pointer) and not reference.startswith("#"):
            raise SchemaError(
                field,
                f"is {shown(reference)}; it must refer to a part of this schema: #/..., a $id or a $anchor",
            )
        if not self._has(pointer):
            raise SchemaError(field, f"is {shown(reference)}, but this schema has no such part")
        return pointer

    def at(self, pointer: str) -> Any:
        """Return the schema at a JSON pointer, as returned by the method ``pointer``."""
        return self._look(pointer)[1]

    def _has(self, pointer: str) -> bool:
        return self._look(pointer)[0]

    def _look(self, pointer: str) -> tuple[bool, Any]:
        here = self.root
        for part in pointer.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(here, dict) and key in here:
                here = here[key]
            elif isinstance(here, list) and _INDEX.fullmatch(key) and int(key) < len(here):
                here = here[int(key)]
            else:
                return False, None
        return True, here

    def _named(self, absolute: str, reference: str) -> str:
        """Return the JSON pointer of the schema to which ``reference`` refers.

        ``reference`` starts with a ``$id`` or ``$anchor`` and may continue with a pointer. If the document has no such
        ``$id`` or ``$anchor``, the returned pointer refers to no schema.
        """
        if self._names is None:
            self._names = {}
            self._index(self.root, "#", "", self._names)
        if absolute in self._names:
            return self._names[absolute]
        resource, fragment = urldefrag(absolute)
        if resource in self._names and (not fragment or fragment.startswith("/")):
            return self._names[resource] + fragment
        return f"#/{reference}"

    def _index(self, schema: Any, pointer: str, base: str, names: dict[str, str]) -> None:
        """Add the ``$id`` and ``$anchor`` of the schema at ``pointer``, and of all schemas inside this schema, to
        ``names``.
        """
        if isinstance(schema, list):
            for index, part in enumerate(schema):
                self._index(part, f"{pointer}/{index}", base, names)
        if not isinstance(schema, dict):
            return
        if (name := _id(schema)) is not None:
            base = _joined(base, name)
            names.setdefault(base.removesuffix("#"), pointer)
        if isinstance(anchor := schema.get("$anchor"), str):
            names.setdefault(f"{base}#{anchor}", pointer)
        for key, part in schema.items():
            if key not in _VALUES:
                self._index(part, f"{pointer}/{escaped(key)}", base, names)

    def _base(self, path: str) -> tuple[str, str]:
        """Return the address to which references at ``path`` are relative, and the path of the schema with this
        address.
        """
        base, place, here, walked = "", "#", self.root, "#"
        parts = path.split("/")[1:]
        for part in [None, *parts]:
            if part is not None:
                key = part.replace("~1", "/").replace("~0", "~")
                if isinstance(here, dict):
                    here = here.get(key)
                elif isinstance(here, list) and _INDEX.fullmatch(key) and int(key) < len(here):
                    here = here[int(key)]
                else:
                    break
                walked = f"{walked}/{part}"
            if isinstance(here, dict) and (name := _id(here)) is not None:
                base = _joined(base, name)
                if not name.startswith("#"):
                    place = walked
        return base, place


def _id(schema: dict[str, Any]) -> str | None:
    """Return the identifier of a schema: the value of ``$id``, or in draft 4 of ``id``, if ``id`` is not the name of a
    property.
    """
    name = schema.get("$id", schema.get("id"))
    return name if isinstance(name, str) else None


def _joined(base: str, reference: str) -> str:
    """Return the address of ``reference``, which may be relative to the address ``base``. If ``reference`` is not an
    address, return it unchanged.
    """
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference
