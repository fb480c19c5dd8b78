"""The keywords of JSON schemas: which constrain, which only annotate, and what their values must be."""

from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from penstock_enginecore.structured_output.constraints.json_types import TYPES, Schema, SchemaError, shown
from penstock_enginecore.structured_output.constraints.regex import MAX_REPEAT

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
"""The keywords that are honoured, by the type they speak of. ``format`` speaks of strings and of numbers."""
COMBINED = frozenset({"$ref", "const", "enum", "anyOf", "oneOf", "allOf", "not", "if", "then", "else"})
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"}
    | {"$schema", "$id", "id", "$anchor", "$comment", "$vocabulary", "$defs", "definitions", "components"}
    | {"contentEncoding", "contentMediaType", "contentSchema", "discriminator", "externalDocs", "xml", "summary"}
    | {"propertyOrdering", "propertyOrder", "order", "enumNames", "enumDescriptions", "enumVarnames", "tsEnumNames"}
    | {"markdownDescription", "markdownEnumDescriptions", "deprecationMessage", "doNotSuggest", "defaultSnippets"}
    | {"errorMessage", "javaType", "existingJavaType", "javaEnumNames", "typeName", "_meta", "env", "env_names"}
)
"""Keywords of the drafts and of common generators that describe values and allow all of them."""
OURS = frozenset({"!type", "!enum", "!pattern"})
"""What is left of a negation: types, values and an expression that must not fit."""
_KNOWN = frozenset({"type", "format", "nullable"} | COMBINED | set().union(*KEYWORDS.values()))
INTEGER_FORMATS: Mapping[str, tuple[int, int]] = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32)},
    "uint64": (0, 2**64 - 1),
    "uint": (0, 2**64 - 1),
}
"""Least and greatest value of the formats of integers that are narrower than 64 bits, or have no sign."""


def constraining(schema: Any, path: str, *, ours: bool = False) -> dict[str, Any]:
    """The keywords of ``schema`` that constrain. Raises SchemaError for one that is not known. ``ours``: it was written here, and
    may say what a client cannot.
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
            raise SchemaError(f"{path}/{name}", "is not supported")
        else:
            found[name] = value
    for name, check in _FORMS.items():
        if name in found:
            check(found, name, path)
    return found


def kinds_of(given: Any, path: str) -> set[str]:
    """The types that the value of ``type`` names, without ``integer`` beside ``number``."""
    kinds = given if isinstance(given, list) else [given]
    if not kinds or any(kind not in TYPES for kind in kinds):
        lower = given.lower() if isinstance(given, str) else ""
        hint = f"; write {lower!r}" if lower in TYPES else f"; known types are {', '.join(TYPES)}"
        raise SchemaError(f"{path}/type", f"is {shown(given)}{hint}")
    return set(kinds) - ({"integer"} if "number" in kinds else set())


def number(keywords: Schema, name: str, path: str) -> Decimal | None:
    """The number of a keyword, None where it is not set."""
    if name not in keywords:
        return None
    value = keywords[name]
    if isinstance(value, bool) or not isinstance(value, int | Decimal) or len(str(int(value))) > 30:
        raise SchemaError(f"{path}/{name}", "must be a number of at most 30 digits")
    return Decimal(value)


def bounds(keywords: Schema, name: str, exclusive: str, path: str) -> list[tuple[Decimal, bool, str]]:
    """The bounds that a keyword and its exclusive form give: the number, whether it is itself excluded, and its place.

    In draft 4 the exclusive form is true or false, and says it of the other.
    """
    plain, marked = number(keywords, name, path), keywords.get(exclusive)
    if isinstance(marked, bool):
        return [] if plain is None else [(plain, marked, f"{path}/{name}")]
    excluded = number(keywords, exclusive, path)
    found = [] if plain is None else [(plain, False, f"{path}/{name}")]
    return found if excluded is None else [*found, (excluded, True, f"{path}/{exclusive}")]


def count(keywords: Schema, name: str, path: str) -> int | None:
    """The count of a keyword, None where it is not set."""
    value = keywords.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | Decimal) or value != int(value) or value < 0:
        raise SchemaError(f"{path}/{name}", f"is {shown(value)}; it must be a whole number of at least 0")
    if value > MAX_REPEAT:
        raise SchemaError(f"{path}/{name}", f"is {shown(value)}; the limit is {MAX_REPEAT}")
    return int(value)


def flag(keywords: Schema, name: str, path: str) -> bool:
    """Whether a keyword is true; false where it is not set."""
    value = keywords.get(name, False)
    if not isinstance(value, bool):
        raise SchemaError(f"{path}/{name}", f"is {shown(value)}; it must be true or false")
    return value


def mapping(keywords: Schema, name: str, path: str) -> Mapping[str, Any]:
    """A keyword's object, empty where it is not set."""
    value = keywords.get(name, {})
    if not isinstance(value, dict):
        raise SchemaError(f"{path}/{name}", "must be an object")
    return value


def schemas(keywords: Schema, name: str, path: str) -> list[Any]:
    """A keyword's list of schemas, empty where it is not set."""
    value = keywords.get(name, [])
    if not isinstance(value, list):
        raise SchemaError(f"{path}/{name}", "must be a list of schemas")
    return value


def names(keywords: Schema, name: str, path: str) -> list[str]:
    """A keyword's list of names, each once."""
    given = keywords.get(name, [])
    if not isinstance(given, list) or not all(isinstance(item, str) for item in given):
        raise SchemaError(f"{path}/{name}", "must be a list of strings")
    return list(dict.fromkeys(given))


def text(keywords: Schema, name: str, path: str) -> str:
    """A keyword's text."""
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
"""Looks at the value of a keyword, also where it speaks of other types than the schema allows."""
