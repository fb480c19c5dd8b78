"""Reader of JSON schemas: text, types, keywords and references, and limits on the work for a schema."""

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

    ``path`` is a JSON pointer that starts with ``#``, or empty for the text itself.
    """

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path} {what}" if path else what)
        self.path = path
        self.what = what


class UnfulfillableError(SchemaError):
    """Raised when no value can fulfil the schema. The translation leaves out an alternative that raises this error."""


class TooMuchWorkError(SchemaError):
    """Raised when translating the schema takes more work than allowed."""


class Work:
    """Counts the steps of a translation, to limit the time that a schema takes."""

    def __init__(self, limit: int) -> None:
        """Allow ``limit`` steps. A step is one transition of an automaton, which takes a few microseconds."""
        self._limit = limit
        self._left = limit

    def spend(self, path: str, steps: int) -> None:
        """Count ``steps`` for the schema at ``path``. Raises TooMuchWorkError if no steps are left."""
        self._left -= steps
        if self._left < 0:
            raise TooMuchWorkError(
                path, f"makes the translation of the schema take more than {self._limit} steps; simplify the schema"
            )


def shown(value: Any) -> str:
    """Return the beginning of a value, for error messages."""
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
    """Return whether a schema is false, or ``{"not": {}}``, which means the same."""
    return schema is False or (isinstance(schema, dict) and schema.get("not", 0) in (True, {}) and len(schema) == 1)


def fits(value: Any, kind: str) -> bool:
    """Return whether a JSON value has a type."""
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if isinstance(value, int | Decimal):
        return kind == "number" or (kind == "integer" and value == int(value))
    return kind == ("object" if isinstance(value, dict) else "array" if isinstance(value, list) else "string")


def identity(value: Any) -> Hashable:
    """Return a key that is the same for equal JSON values, at any depth. 1 equals 1.0, but does not equal true."""
    if isinstance(value, list):
        return list, tuple(map(identity, value))
    if isinstance(value, dict):
        return dict, frozenset((name, identity(part)) for name, part in value.items())
    return isinstance(value, bool), value


def escaped(name: str) -> str:
    """Return a name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


# The text: numbers are parsed exactly, and nesting is limited.

MAX_NESTING = 256
"""Maximum nesting of a schema's JSON text, including values of ``const`` and ``enum``."""

MAX_EXPONENT = 300
"""Largest exponent of a number, as a power of ten."""


def parse(text: str) -> Any:
    """Parse the JSON value in ``text``, with fractions as Decimal. Raises SchemaError."""

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


# Keywords: constraints, annotations, and the forms of their values.

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
"""Supported keywords, by the type to which they apply. ``format`` applies to strings and numbers."""
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
"""Internal keywords for negations: types, values, and an expression that values must not match."""
_KNOWN = frozenset({"type", "format", "nullable"} | COMBINED | set().union(*KEYWORDS.values()))
INTEGER_FORMATS: Mapping[str, tuple[int, int]] = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32)},
    "uint64": (0, 2**64 - 1),
    "uint": (0, 2**64 - 1),
}
"""Minimum and maximum of integer formats that have fewer than 64 bits or are unsigned."""


def constraining(schema: Any, path: str, *, ours: bool = False) -> dict[str, Any]:
    """Return the constraining keywords of ``schema``. Raises SchemaError for an unknown keyword.

    ``ours`` means that the schema was generated here and may contain internal keywords.
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
    """Return the types in the value of ``type``. If it contains ``number``, ``integer`` is dropped."""
    kinds = given if isinstance(given, list) else [given]
    if not kinds or any(kind not in TYPES for kind in kinds):
        lower = given.lower() if isinstance(given, str) else ""
        hint = f"; write {lower!r}" if lower in TYPES else f"; known types are {', '.join(TYPES)}"
        raise SchemaError(f"{path}/type", f"is {shown(given)}{hint}")
    return set(kinds) - ({"integer"} if "number" in kinds else set())


def number(keywords: Schema, name: str, path: str) -> Decimal | None:
    """Return the number of a keyword, or None if it is not set."""
    if name not in keywords:
        return None
    value = keywords[name]
    if isinstance(value, bool) or not isinstance(value, int | Decimal) or len(str(int(value))) > 30:
        raise SchemaError(f"{path}/{name}", "must be a number of at most 30 digits")
    return Decimal(value)


def bounds(keywords: Schema, name: str, exclusive: str, path: str) -> list[tuple[Decimal, bool, str]]:
    """Return the bounds of a keyword and of its exclusive form: the number, whether the number is excluded, and its
    path.

    In draft 4, the exclusive form is a boolean that applies to the other keyword.
    """
    plain, marked = number(keywords, name, path), keywords.get(exclusive)
    if isinstance(marked, bool):
        return [] if plain is None else [(plain, marked, f"{path}/{name}")]
    excluded = number(keywords, exclusive, path)
    found = [] if plain is None else [(plain, False, f"{path}/{name}")]
    return found if excluded is None else [*found, (excluded, True, f"{path}/{exclusive}")]


def count(keywords: Schema, name: str, path: str) -> int | None:
    """Return the count of a keyword, or None if it is not set."""
    value = keywords.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | Decimal) or value != int(value) or value < 0:
        raise SchemaError(f"{path}/{name}", f"is {shown(value)}; it must be an integer of at least 0")
    if value > MAX_REPEAT:
        raise SchemaError(f"{path}/{name}", f"is {shown(value)}; the limit is {MAX_REPEAT}")
    return int(value)


def flag(keywords: Schema, name: str, path: str) -> bool:
    """Return whether a keyword is true. False if it is not set."""
    value = keywords.get(name, False)
    if not isinstance(value, bool):
        raise SchemaError(f"{path}/{name}", f"is {shown(value)}; it must be true or false")
    return value


def mapping(keywords: Schema, name: str, path: str) -> Mapping[str, Any]:
    """Return a keyword's object, empty if it is not set."""
    value = keywords.get(name, {})
    if not isinstance(value, dict):
        raise SchemaError(f"{path}/{name}", "must be an object")
    return value


def schemas(keywords: Schema, name: str, path: str) -> list[Any]:
    """Return a keyword's list of schemas, empty if it is not set."""
    value = keywords.get(name, [])
    if not isinstance(value, list):
        raise SchemaError(f"{path}/{name}", "must be a list of schemas")
    return value


def names(keywords: Schema, name: str, path: str) -> list[str]:
    """Return a keyword's list of names, without duplicates."""
    given = keywords.get(name, [])
    if not isinstance(given, list) or not all(isinstance(item, str) for item in given):
        raise SchemaError(f"{path}/{name}", "must be a list of strings")
    return list(dict.fromkeys(given))


def text(keywords: Schema, name: str, path: str) -> str:
    """Return a keyword's text."""
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
"""Checks of keyword values. The checks also run if the schema does not allow the type to which the keyword applies."""


# References: the schemas of one document to which ``$ref`` can refer.

_INDEX = re.compile("[0-9]{1,9}")
_VALUES = frozenset({"const", "enum", "default", "examples", "example"})
"""Keywords whose values are not schemas."""


class Document:
    """A schema, and the targets to which its ``$ref`` can refer: JSON pointers, ``$anchor`` and ``$id``."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._names: dict[str, str] | None = None

    def pointer(self, reference: Any, path: str) -> str:
        """Return the JSON pointer, starting with ``#``, of the target of the ``$ref`` at ``path``.

        Raises SchemaError if the target is not in this document.
        """
        field = f"{path}/$ref"
        if not isinstance(reference, str):
            raise SchemaError(field, f"is {shown(reference)}; it must be a string")
        base, base_pointer = self._base(path)
        if reference == "#" or reference.startswith("#/"):
            pointer = base_pointer + reference[1:]
            if base_pointer != "#" and not self._has(pointer) and self._has(reference):
                pointer = (
                    reference  # Some generators put a $id below the root, but their pointers still start at the root.
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
        """Return the schema at a JSON pointer that the method ``pointer`` returned."""
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
        """Return the pointer to the target of ``reference``, which starts with a ``$id`` or ``$anchor`` and may
        continue with a pointer.

        Returns a pointer that does not exist if there is no such ``$id`` or ``$anchor``.
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
        """Add the names of the schema at ``pointer``, and of all schemas inside it, to ``names``."""
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
    """Return the name of a schema: ``$id``, or in draft 4 ``id``, if ``id`` is not the name of a property."""
    name = schema.get("$id", schema.get("id"))
    return name if isinstance(name, str) else None


def _joined(base: str, reference: str) -> str:
    """Return ``reference`` relative to ``base``, or unchanged if it is not an address."""
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference
