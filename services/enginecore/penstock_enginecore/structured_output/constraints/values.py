"""Evaluation of known values against a schema. The translation uses it to drop values of ``enum`` and ``const`` that
violate other keywords.
"""

from collections.abc import Callable, Hashable
from decimal import Decimal
from typing import Any

from penstock_enginecore.structured_output.constraints.regex import RegexError
from penstock_enginecore.structured_output.constraints.schema_document import (
    Document,
    SchemaError,
    Work,
    bounds,
    constraining,
    count,
    escaped,
    fits,
    flag,
    identity,
    kinds_of,
    mapping,
    names,
    number,
    schemas,
)
from penstock_enginecore.structured_output.constraints.strings import matches, pattern_at

_MAX_DEPTH = 64


class Values:
    """Evaluates values against one schema document. The keyword ``format`` is ignored."""

    def __init__(self, document: Document, work: Work) -> None:
        self._document = document
        self._work = work
        self._depth = 0
        self._known: dict[int, tuple[Any, frozenset[Hashable]]] = {}

    def fulfils(self, value: Any, schema: Any, path: str, *, ours: bool = False) -> bool:
        """Return whether ``value`` fulfils the schema at ``path``. Raises SchemaError if the schema is malformed."""
        self._work.spend(path, 3)
        if isinstance(schema, bool):
            return schema
        if self._depth > _MAX_DEPTH:
            raise SchemaError(path, f"is nested more than {_MAX_DEPTH} levels deep")
        self._depth += 1
        try:
            keywords = constraining(schema, path, ours=ours)
            return all(check(self, value, keywords, path) for check in (*_CHECKS, *_OF_TYPE[_kind(value)]))
        finally:
            self._depth -= 1

    def _spender(self, path: str) -> Callable[[int], None]:
        return lambda steps: self._work.spend(path, steps)

    def _typed(self, value: Any, keywords: dict[str, Any], path: str) -> bool:
        excluded = keywords.get("!type", ())
        if any(fits(value, kind) for kind in excluded):
            return False
        if "type" not in keywords:
            return True
        if value is None and keywords.get("nullable") is True:
            return True
        return any(fits(value, kind) for kind in kinds_of(keywords["type"], path))

    def _listed(self, value: Any, keywords: dict[str, Any], path: str) -> bool:
        mine = identity(value)
        if "!enum" in keywords and mine in self._identities(keywords["!enum"], path):
            return False
        if "const" in keywords and mine != identity(keywords["const"]):
            return False
        return "enum" not in keywords or mine in self._identities(keywords["enum"], path)

    def _identities(self, values: Any, path: str) -> frozenset[Hashable]:
        """Return the keys (see ``identity``) of the values in a list of the schema, such as ``enum``, for fast
        lookups.
        """
        if not isinstance(values, list):
            raise SchemaError(f"{path}/enum", "must be a list")
        if id(values) not in self._known:
            self._work.spend(path, len(values) // 4)
            self._known[id(values)] = values, frozenset(map(identity, values))
        return self._known[id(values)][1]

    def _combined(self, value: Any, keywords: dict[str, Any], path: str) -> bool:
        if "$ref" in keywords:
            pointer = self._document.pointer(keywords["$ref"], path)
            if not self.fulfils(value, self._document.at(pointer), pointer):
                return False
        found = {
            name: [self.fulfils(value, s, f"{path}/{name}/{i}") for i, s in enumerate(schemas(keywords, name, path))]
            for name in ("allOf", "anyOf", "oneOf")
            if name in keywords
        }
        if not all(found.get("allOf", ())) or not any(found.get("anyOf", [True])):
            return False
        if "oneOf" in found and sum(found["oneOf"]) != 1:
            return False
        if "not" in keywords and self.fulfils(value, keywords["not"], f"{path}/not"):
            return False
        if "if" not in keywords:
            return True
        branch = "then" if self.fulfils(value, keywords["if"], f"{path}/if") else "else"
        return self.fulfils(value, keywords.get(branch, True), f"{path}/{branch}")

    def _number(self, value: Any, keywords: dict[str, Any], path: str) -> bool:
        for bound, excluded, _ in bounds(keywords, "minimum", "exclusiveMinimum", path):
            if value < bound or (excluded and value == bound):
                return False
        for bound, excluded, _ in bounds(keywords, "maximum", "exclusiveMaximum", path):
            if value > bound or (excluded and value == bound):
                return False
        step = number(keywords, "multipleOf", path)
        return step is None or step <= 0 or (Decimal(value) / step) % 1 == 0

    def _string(self, value: Any, keywords: dict[str, Any], path: str) -> bool:
        if not _between(len(value), keywords, "Length", path):
            return False
        patterns = [pattern_at(keywords["pattern"], f"{path}/pattern")] if "pattern" in keywords else []
        unwanted = [pattern_at(keywords["!pattern"], path)] if "!pattern" in keywords else []
        try:
            return matches(value, patterns, self._spender(path), unwanted=unwanted)
        except RegexError as e:
            raise SchemaError(f"{path}/pattern", f"cannot be enforced: {e}") from None

    def _array(self, value: Any, keywords: dict[str, Any], path: str) -> bool:
        if not _between(len(value), keywords, "Items", path):
            return False
        if flag(keywords, "uniqueItems", path) and len(set(map(identity, value))) < len(value):
            return False
        prefix, rest = tuple_of(keywords, path)
        for index, item in enumerate(value):
            schema, place = prefix[index] if index < len(prefix) else rest
            if not self.fulfils(item, schema, place):
                return False
        if "contains" not in keywords:
            return True
        fitting = sum(self.fulfils(item, keywords["contains"], f"{path}/contains") for item in value)
        least, most = count(keywords, "minContains", path), count(keywords, "maxContains", path)
        return fitting >= (1 if least is None else least) and (most is None or fitting <= most)

    def _object(self, value: Any, keywords: dict[str, Any], path: str) -> bool:
        if not _between(len(value), keywords, "Properties", path):
            return False
        if any(name not in value for name in names(keywords, "required", path)):
            return False
        properties = mapping(keywords, "properties", path)
        patterns = mapping(keywords, "patternProperties", path)
        for name, part in value.items():
            if not self.fulfils(name, keywords.get("propertyNames", True), f"{path}/propertyNames"):
                return False
            known = name in properties
            if known and not self.fulfils(part, properties[name], f"{path}/properties/{escaped(name)}"):
                return False
            for pattern, schema in patterns.items():
                place = f"{path}/patternProperties/{escaped(pattern)}"
                if matches(name, [pattern_at(pattern, place)], self._spender(path)):
                    known = True
                    if not self.fulfils(part, schema, place):
                        return False
            more = keywords.get("additionalProperties", True)
            if not known and not self.fulfils(part, more, f"{path}/additionalProperties"):
                return False
        for needed, schema, place in dependents(keywords, path):
            if needed in value and not self.fulfils(value, schema, place):
                return False
        return True


_CHECKS = (Values._typed, Values._listed, Values._combined)
_OF_TYPE: dict[str, tuple[Callable[[Values, Any, dict[str, Any], str], bool], ...]] = {
    "string": (Values._string,),
    "number": (Values._number,),
    "array": (Values._array,),
    "object": (Values._object,),
    "boolean": (),
    "null": (),
}


def listed(keywords: dict[str, Any], path: str) -> list[Any] | None:
    """Return the values of ``const`` or ``enum``, or None if the schema has neither keyword. A ``const`` must also be
    in the ``enum``.
    """
    values = keywords.get("enum")
    if values is not None and not isinstance(values, list):
        raise SchemaError(f"{path}/enum", "must be a list")
    if "const" not in keywords:
        return values
    const = keywords["const"]
    return [const] if values is None or identity(const) in set(map(identity, values)) else []


def tuple_of(keywords: dict[str, Any], path: str) -> tuple[list[tuple[Any, str]], tuple[Any, str]]:
    """Return the schemas of an array's first items, and the schema of all later items, with their paths. The keywords
    may be from any draft of JSON Schema.
    """
    items = keywords.get("items", True)
    if isinstance(items, list) and "prefixItems" not in keywords:
        prefix = [(schema, f"{path}/items/{i}") for i, schema in enumerate(items)]
        return prefix, (keywords.get("additionalItems", True), f"{path}/additionalItems")
    if isinstance(items, list):
        raise SchemaError(f"{path}/items", "must be a single schema, because prefixItems is set")
    first = schemas(keywords, "prefixItems", path)
    return [(s, f"{path}/prefixItems/{i}") for i, s in enumerate(first)], (items, f"{path}/items")


def dependents(keywords: dict[str, Any], path: str) -> list[tuple[str, Any, str]]:
    """Return the dependencies on properties: the name of the property, the schema that applies if the property is
    present, and the schema's path. The keywords may be from any draft of JSON Schema.
    """
    found: list[tuple[str, Any, str]] = []
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, needed in mapping(keywords, keyword, path).items():
            place = f"{path}/{keyword}/{escaped(name)}"
            if keyword == "dependentRequired" or (keyword == "dependencies" and isinstance(needed, list)):
                found.append((name, {"required": names({"required": needed}, "required", place)}, place))
            else:
                found.append((name, needed, place))
    return found


def _between(size: int, keywords: dict[str, Any], what: str, path: str) -> bool:
    least, most = count(keywords, f"min{what}", path), count(keywords, f"max{what}", path)
    return size >= (least or 0) and (most is None or size <= most)


def _kind(value: Any) -> str:
    return next(kind for kind in ("string", "number", "array", "object", "boolean", "null") if fits(value, kind))
