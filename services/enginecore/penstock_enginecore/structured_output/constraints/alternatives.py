"""Keywords that leave several ways to fulfil them: ``anyOf``, ``oneOf``, ``not``, ``if`` and what depends on a property."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock_enginecore.structured_output.constraints.apart import Apart
from penstock_enginecore.structured_output.constraints.conjunction import Fact, Part
from penstock_enginecore.structured_output.constraints.json_keywords import (
    bounds,
    constraining,
    count,
    kinds_of,
    mapping,
    names,
    schemas,
)
from penstock_enginecore.structured_output.constraints.json_types import (
    Schema,
    SchemaError,
    TooMuchWorkError,
    Work,
    never,
)
from penstock_enginecore.structured_output.constraints.references import Document
from penstock_enginecore.structured_output.constraints.values import dependents, listed

MAX_ONE_OF = 128
"""Branches of a ``oneOf``: each pair is compared."""
_MAX_NEGATION = 16
"""How deeply negations may nest."""

Way = list[Part]
"""What a value must fulfil besides the rest."""


class Ways(NamedTuple):
    """``ways`` to fulfil ``keyword`` of one fact. ``ours``: some were written here, and may turn out impossible."""

    keyword: str
    ways: list[Way]
    ours: bool


class Alternatives:
    """Splits the keywords of one document into ways."""

    def __init__(self, document: Document, work: Work) -> None:
        self._document = document
        self._work = work
        self._apart = Apart(document, work)

    def of(self, fact: Fact, *, alone: bool) -> Ways | None:
        """The ways to fulfil the first keyword of ``fact`` that leaves several; None where none does. ``alone``: whether nothing
        else is said of objects. Raises SchemaError.
        """
        keywords, path = fact.keywords, fact.path
        if "anyOf" in keywords:
            return Ways("anyOf", [[part] for part in self._branches(fact, "anyOf")], False)
        if "oneOf" in keywords:
            ways = self._one_of(self._branches(fact, "oneOf"), f"{path}/oneOf", alone=alone)
            return Ways("oneOf", ways, any(len(way) > 1 for way in ways))
        if "not" in keywords:
            return Ways("not", self._negated(Part(keywords["not"], path if fact.ours else f"{path}/not")), True)
        if "if" in keywords:
            condition = Part(keywords["if"], f"{path}/if")
            then, other = (Part(keywords.get(name, True), f"{path}/{name}") for name in ("then", "else"))
            if then.schema is True and other.schema is True:
                return Ways("if", [[]], True)
            negated = self._negated(condition)
            return Ways("if", [[condition, then], *([*way, other] for way in negated)], True)
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            if keyword in keywords:
                return Ways(keyword, _dependent(fact, keyword), True)
        return None

    def _branches(self, fact: Fact, name: str) -> list[Part]:
        branches = schemas(fact.keywords, name, fact.path)
        place = f"{fact.path}/{name}"
        if not branches:
            raise SchemaError(place, "must be a list of at least one schema")
        left = [Part(each, f"{place}/{i}") for i, each in enumerate(branches) if not never(each)]
        if not left:
            raise SchemaError(place, "allows no value")
        return left

    def _one_of(self, branches: Sequence[Part], path: str, *, alone: bool) -> list[Way]:
        """Each branch, without what fits another one, too."""
        if len(branches) > MAX_ONE_OF:
            raise SchemaError(path, f"has {len(branches)} branches; the limit is {MAX_ONE_OF}")
        ways = []
        for branch in branches:
            others = [each for each in branches if each is not branch]
            overlapping = [each for each in others if not self._apart.never_both(branch, each, alone=alone)]
            for other in overlapping:
                try:
                    ways_out = self._negated(other)
                except TooMuchWorkError:
                    raise
                except SchemaError:
                    ways_out = []
                if not ways_out:
                    i, j = (each.path.removeprefix(f"{path}/") for each in (branch, other))
                    raise SchemaError(
                        path,
                        f"is only supported where no value can fit two branches; {min(i, j)} and {max(i, j)} may both fit. "
                        "Use anyOf, or tell them apart by type or by a required property with different constants",
                    )
            ways.append([branch, *(Part({"not": each.schema}, each.path, True) for each in overlapping)])
        return ways

    def _negated(self, part: Part, depth: int = 0) -> list[Way]:
        """The ways not to fulfil ``part``; none where every value fulfils it. Raises SchemaError for what has no such ways."""
        schema, path = part.schema, part.path
        self._work.spend(path, 3)
        if depth > _MAX_NEGATION:
            raise SchemaError(path, f"nests more than {_MAX_NEGATION} negations")
        if schema is False:
            return [[]]
        if schema is True:
            return []
        keywords = constraining(schema, path, ours=part.ours)
        return [way for name in sorted(keywords) for way in self._without(name, keywords, path, depth)]

    def _without(self, name: str, keywords: dict[str, Any], path: str, depth: int) -> list[Way]:
        """The ways not to fulfil one keyword."""

        def ours(schema: Any) -> Part:
            return Part(schema, path, True)

        match name:
            case "$ref":
                pointer = self._document.pointer(keywords["$ref"], path)
                return self._negated(Part(self._document.at(pointer), pointer), depth + 1)
            case "not":
                return [[Part(keywords["not"], f"{path}/not")]]
            case "allOf":
                branches = enumerate(schemas(keywords, "allOf", path))
                return [way for i, s in branches for way in self._negated(Part(s, f"{path}/allOf/{i}"), depth + 1)]
            case "anyOf":
                branches = enumerate(schemas(keywords, "anyOf", path))
                return [[Part({"not": s}, f"{path}/anyOf/{i}", True) for i, s in branches]]
            case "type":
                return [[ours({"!type": sorted(kinds_of(keywords["type"], path))})]]
            case "const" | "enum":
                return (
                    [[ours({"!enum": listed(keywords, path) or []})]]
                    if name == "const" or "const" not in keywords
                    else []
                )
            case "properties":
                return [
                    [
                        ours({"type": "object", "required": [key], "properties": {key: True}}),
                        Part({"properties": {key: {"not": value}}}, path, True),
                    ]
                    for key, value in mapping(keywords, "properties", path).items()
                    if value is not True
                ]
            case "required":
                absent = names(keywords, "required", path)
                return [[ours({"type": "object", "properties": {key: False}})] for key in absent]
            case "pattern":
                return [[ours({"type": "string", "!pattern": keywords["pattern"]})]]
            case "format" | "nullable":
                return []
        return [[ours(each)] for each in _beyond(name, keywords, path)]


def _beyond(name: str, keywords: Schema, path: str) -> list[Schema]:
    """Schemas of what a bound keeps out. Raises SchemaError for another keyword."""
    for kind, what in (("string", "Length"), ("array", "Items"), ("object", "Properties")):
        if name == f"min{what}":
            least = count(keywords, name, path) or 0
            return [{"type": kind, f"max{what}": least - 1}] if least else []
        if name == f"max{what}":
            return [{"type": kind, f"min{what}": (count(keywords, name, path) or 0) + 1}]
    for plain, exclusive, low in (
        ("minimum", "exclusiveMinimum", True),
        ("maximum", "exclusiveMaximum", False),
    ):
        if name in (plain, exclusive):
            found = [b for b in bounds(keywords, plain, exclusive, path) if b[2] == f"{path}/{name}"]
            inner, outer = ("maximum", "exclusiveMaximum") if low else ("minimum", "exclusiveMinimum")
            return [{"type": "number", inner if excluded else outer: bound} for bound, excluded, _ in found]
    raise SchemaError(f"{path}/{name}", "is not supported in what must not fit")


def _dependent(fact: Fact, keyword: str) -> list[Way]:
    """The ways to fulfil what depends on the first property of ``keyword``; the others are left for the next time."""
    (name, schema, place), *rest = dependents({keyword: fact.keywords[keyword]}, fact.path) or [("", True, fact.path)]
    later = {each: fact.keywords[keyword][each] for each, _, _ in rest}
    after = [Part({keyword: later}, fact.path, True)] if later else []
    if schema is True:
        return [after]
    without = Part({"properties": {name: False}}, place, True)
    within = [Part({"required": [name]}, place, True), Part(schema, place)]
    return [[without, *after], [*within, *after]]
