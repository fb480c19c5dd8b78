"""What can be said about JSON schemas without writing a grammar: keywords, types, references, values."""

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from itertools import combinations
from typing import Any
from urllib.parse import unquote

Schema = Mapping[str, Any]

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_NUMBER = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
KEYWORDS: Mapping[str, frozenset[str]] = {
    "object": frozenset(
        {"properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"}
    ),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": _NUMBER,
    "integer": _NUMBER,
    "boolean": frozenset(),
    "null": frozenset(),
}
"""The keywords that are honoured, by the type they speak of."""
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"}
    | {"$schema", "$id", "$comment", "$defs", "definitions"}
)
_COMBINED = frozenset({"$ref", "const", "enum", "anyOf", "oneOf", "allOf"})
_WITHOUT_EFFECT = {"uniqueItems": False, "nullable": False}
_KNOWN = frozenset(_ANNOTATIONS | _COMBINED | {"type"} | set().union(*KEYWORDS.values()))
_MAX_SHOWN = 100
_INDEX = re.compile("[0-9]{1,9}")
MAX_ONE_OF = 128
"""Branches of a ``oneOf``: each pair is compared."""


class SchemaError(ValueError):
    """A schema, or a part of it at ``path`` (a JSON pointer behind ``#``; empty for the text), cannot be honoured."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path} {what}" if path else what)
        self.path = path


def shown(value: Any) -> str:
    """A value as an error quotes it: its beginning."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def present(schema: Any) -> Any:
    """A schema without the keywords that are null, which serializers write for absent ones. A ``const`` may be null."""
    if not isinstance(schema, dict):
        return schema
    return {name: value for name, value in schema.items() if value is not None or name == "const"}


def fits(value: Any, kind: str) -> bool:
    """Whether a JSON value is of a type."""
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if isinstance(value, int | Decimal):
        return kind == "number" or (kind == "integer" and value == int(value))
    return kind == ("object" if isinstance(value, dict) else "array" if isinstance(value, list) else "string")


class SchemaTypes:
    """Answers questions about the parts of one schema document."""

    def __init__(self, root: Any) -> None:
        self.root = root

    def keywords(self, schema: Any, path: str) -> Schema:
        """The keywords of ``schema`` that constrain. Raises SchemaError for one that is not honoured."""
        if not isinstance(schema, dict):
            raise SchemaError(path, f"is {shown(schema)}; a schema is an object, true or false")
        schema = present(schema)
        for name, value in schema.items():
            if name in _WITHOUT_EFFECT and value is _WITHOUT_EFFECT[name]:
                continue
            if name not in _KNOWN:
                raise SchemaError(f"{path}/{name}", "is not supported")
            if name == "$id" and path != "#":
                raise SchemaError(f"{path}/$id", "is not supported below the root")
        return {k: v for k, v in schema.items() if k not in _ANNOTATIONS and k not in _WITHOUT_EFFECT}

    def alone(self, keywords: Schema, name: str, path: str) -> None:
        """Raise SchemaError when other constraints stand beside the keyword ``name``."""
        if others := sorted(set(keywords) - {name}):
            raise SchemaError(f"{path}/{name}", f"is not supported beside {', '.join(others)}")

    def declared(self, keywords: Schema, path: str) -> tuple[str, ...]:
        """The types that a schema without combining keywords accepts; none means every one without constraints."""
        given = keywords.get("type")
        if given is None:
            speaks = [kind for kind in TYPES if kind != "integer" and set(keywords) & KEYWORDS[kind]]
            if len(speaks) > 1:
                raise SchemaError(path, f"has keywords of {' and '.join(speaks)}, but no type")
            return tuple(speaks)
        kinds = given if isinstance(given, list) else [given]
        if not kinds or any(kind not in TYPES for kind in kinds):
            raise SchemaError(f"{path}/type", f"is {shown(given)}; known types are {', '.join(TYPES)}")
        for name in keywords:
            if name != "type" and not any(name in KEYWORDS[kind] for kind in kinds):
                raise SchemaError(f"{path}/{name}", f"does not go with type {shown(given)}")
        return tuple(kind for kind in TYPES if kind in kinds and not (kind == "integer" and "number" in kinds))

    def values(self, keywords: Schema, path: str) -> list[Any]:
        """The values of ``enum`` or ``const`` that the type beside it allows."""
        name = "const" if "const" in keywords else "enum"
        self.alone({k: v for k, v in keywords.items() if k != "type"}, name, path)
        values = [keywords["const"]] if name == "const" else keywords["enum"]
        if not isinstance(values, list):
            raise SchemaError(f"{path}/enum", "must be a list")
        if "type" in keywords:
            kinds = self.declared({"type": keywords["type"]}, path)
            values = [value for value in values if any(fits(value, kind) for kind in kinds)]
        if not values:
            raise SchemaError(f"{path}/{name}", "allows no value")
        return values

    def branches(self, keywords: Schema, name: str, path: str) -> list[tuple[int, Any]]:
        """The branches of ``anyOf``, ``oneOf`` or ``allOf`` as alternatives, with their places."""
        branches = keywords[name]
        if not isinstance(branches, list) or not branches:
            raise SchemaError(f"{path}/{name}", "must be a list of at least one schema")
        if name == "allOf" and len(branches) > 1:
            raise SchemaError(f"{path}/allOf", "is only supported with one schema")
        left = [(i, branch) for i, branch in enumerate(branches) if branch is not False]
        if not left:
            raise SchemaError(f"{path}/{name}", "allows no value")
        if name == "oneOf" and len(left) > MAX_ONE_OF:
            raise SchemaError(f"{path}/oneOf", f"has {len(left)} branches; the limit is {MAX_ONE_OF}")
        return left

    def check_apart(self, branches: list[tuple[int, Any]], path: str) -> None:
        """Raise SchemaError unless no value fits two of the branches of the ``oneOf`` at ``path``."""
        for (i, a), (j, b) in combinations(branches, 2):
            if not self.disjoint(a, b):
                raise SchemaError(
                    f"{path}/oneOf",
                    f"is only supported where no value can fit two branches; {i} and {j} may both fit. "
                    "Use anyOf, or tell them apart by type or by a required property with different constants",
                )

    def pointer(self, reference: Any, path: str) -> str:
        """The place that ``$ref`` names. Raises SchemaError unless it is a JSON pointer into this document."""
        if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
            raise SchemaError(
                f"{path}/$ref", f"is {shown(reference)}; only places of this schema can be referred to: #/..."
            )
        return reference

    def resolve(self, pointer: str, path: str = "") -> Any:
        """The schema at ``pointer``."""
        here = self.root
        for part in pointer.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(here, dict) and key in here:
                here = here[key]
            elif isinstance(here, list) and _INDEX.fullmatch(key) and int(key) < len(here):
                here = here[int(key)]
            else:
                raise SchemaError(f"{path}/$ref", f"is {shown(pointer)}, which this schema does not have")
        return here

    def disjoint(self, a: Any, b: Any) -> bool:
        """Whether it is certain that no value fits both schemas."""
        a, b = self._followed(a), self._followed(b)
        if not isinstance(a, dict) or not isinstance(b, dict):
            return False
        if not self._types(a) & self._types(b):
            return True
        mine, yours = self._constants(a), self._constants(b)
        if mine is not None and yours is not None:
            return not any(_equal(x, y) for x in mine for y in yours)
        if self._types(a) != {"object"} or self._types(b) != {"object"}:
            return False
        shared = set(a.get("required", ())) & set(b.get("required", ()))
        return any(self._told_apart(a, b, name) for name in shared)

    def _told_apart(self, a: Schema, b: Schema, name: str) -> bool:
        mine, yours = (self._constants(self._followed((s.get("properties") or {}).get(name))) for s in (a, b))
        return mine is not None and yours is not None and not any(_equal(x, y) for x in mine for y in yours)

    def _followed(self, schema: Any) -> Any:
        """``schema``, or what it refers to; a circle of references is left as it is."""
        schema = present(schema)
        for _ in range(10):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = present(self.resolve(self.pointer(schema["$ref"], "#"), "#"))
        return schema

    def _constants(self, schema: Any) -> list[Any] | None:
        if not isinstance(schema, dict):
            return None
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        return values if isinstance(values, list) else None

    def _types(self, schema: Schema) -> set[str]:
        """The types that a value of ``schema`` may have; an integer is a number. Without ``type`` a value of any, whatever the
        keywords speak of.
        """
        if (values := self._constants(schema)) is not None:
            return {kind for kind in TYPES if kind != "integer" and any(fits(value, kind) for value in values)}
        given = schema.get("type")
        kinds = TYPES if given is None else given if isinstance(given, list) else [given]
        return {"number" if kind == "integer" else kind for kind in kinds}

    def check_finite(self, pointers: Iterable[str]) -> None:
        """Raise SchemaError when a referred schema accepts only values without end, each holding another of its kind."""
        left, known = list(pointers), set[str]()
        while left:
            before = len(known)
            for pointer in reversed(left):
                if self._finite(self.resolve(pointer), known):
                    known.add(pointer)
            if len(known) == before:
                raise SchemaError(left[0], "refers to itself without end: no value can fulfil it")
            left = [pointer for pointer in left if pointer not in known]

    def _finite(self, schema: Any, known: set[str]) -> bool:
        """Whether some value fulfils ``schema``, given that some fulfil the ``known`` places."""
        schema = present(schema)
        if not isinstance(schema, dict):
            return schema is not False
        if "$ref" in schema:
            return schema["$ref"] in known
        for name in ("anyOf", "oneOf", "allOf"):
            if name in schema:
                return any(self._finite(branch, known) for branch in schema[name])
        kinds = schema.get("type")
        if isinstance(kinds, list) and set(kinds) - {"object", "array"}:
            return True
        needed = [schema.get("properties", {}).get(name, True) for name in schema.get("required", ())]
        least = int(schema.get("minItems", 0))
        needed += schema.get("prefixItems", [])[:least]
        needed += [schema.get("items", True)] if least > len(schema.get("prefixItems", [])) else []
        return all(self._finite(part, known) for part in needed)


def _equal(a: Any, b: Any) -> bool:
    """Equality of JSON values: 1 equals 1.0, but not true."""
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)
