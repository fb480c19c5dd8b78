"""Which schemas no value can fulfil at once."""

from typing import Any

from penstock_enginecore.structured_output.constraints.conjunction import Part
from penstock_enginecore.structured_output.constraints.json_types import TYPES, Schema, Work, fits, identity, present
from penstock_enginecore.structured_output.constraints.references import Document

_OPENING = frozenset({"anyOf", "oneOf", "if", "not", "patternProperties", "dependentSchemas", "dependencies"})
"""Keywords that may allow properties which are declared elsewhere."""
_MAX_DEPTH = 8
"""How deeply ``allOf`` and references are followed."""


class Apart:
    """Compares the schemas of one document. What it cannot tell counts as possible."""

    def __init__(self, document: Document, work: Work) -> None:
        self._document = document
        self._work = work

    def never_both(self, written: Part, other: Part, *, alone: bool) -> bool:
        """Whether it is certain that no value which is written for one schema fulfils the other. ``alone``: whether nothing else
        is said of the value.
        """
        mine, yours = self._views(written), self._views(other)
        if mine is None or yours is None:
            return False
        kinds, others = self._kinds(mine), self._kinds(yours)
        if not kinds & others:
            return True
        if (a := _constants(mine)) is not None and (b := _constants(yours)) is not None:
            return not _some_equal(a, b)
        if kinds & others != {"object"}:
            return False
        needed = _required(yours)
        if self._leaves_out(mine, needed, alone=alone):
            return True
        return any(self._told_apart(mine, yours, name) for name in _required(mine) & needed)

    def _views(self, part: Part, depth: int = 0) -> list[Schema] | None:
        """The schemas that a value must fulfil all, as far as they are followed."""
        self._work.spend(part.path, 1)
        schema = present(part.schema)
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return None if depth == 0 else [{"anyOf": []}]
        found: list[Schema] = [schema]
        if "$ref" in schema:
            pointer = self._document.pointer(schema["$ref"], part.path)
            found += self._views(Part(self._document.at(pointer), pointer), depth + 1) or []
        branches = schema.get("allOf")
        for index, branch in enumerate(branches if isinstance(branches, list) else ()):
            found += self._views(Part(branch, f"{part.path}/allOf/{index}"), depth + 1) or []
        return found

    def _leaves_out(self, views: list[Schema], needed: set[str], *, alone: bool) -> bool:
        """Whether objects written for ``views`` lack one of the properties ``needed``. Nothing undeclared is written unless
        something allows it; what could is known where the views stand ``alone``, or say that there is nothing else.
        """
        declared = [view["properties"] for view in views if isinstance(view.get("properties"), dict)]
        if any(not view.keys().isdisjoint(_OPENING) for view in views) or not declared:
            return False
        more = [view["additionalProperties"] for view in views if "additionalProperties" in view]
        if any(each is not False for each in more) or not (more or alone):
            return False
        return bool(needed - {name for each in declared for name in each} - _required(views))

    def _told_apart(self, mine: list[Schema], yours: list[Schema], name: str) -> bool:
        a, b = self._property(mine, name), self._property(yours, name)
        if a is None or b is None:
            return False
        if not self._kinds(a) & self._kinds(b):
            return True
        x, y = _constants(a), _constants(b)
        return x is not None and y is not None and not _some_equal(x, y)

    def _property(self, views: list[Schema], name: str) -> list[Schema] | None:
        found: list[Schema] = []
        for view in views:
            properties = view.get("properties")
            if isinstance(properties, dict) and name in properties:
                found += self._views(Part(properties[name], "#")) or []
        return found or None

    def _kinds(self, views: list[Schema]) -> set[str]:
        """The types that a value may have; an integer is a number. Without ``type`` it has any, whatever the keywords say."""
        found = set(TYPES) - {"integer"}
        for view in views:
            given = view.get("type")
            if given is not None:
                named = {kind for kind in (given if isinstance(given, list) else [given]) if isinstance(kind, str)}
                mine = {"number" if kind == "integer" else kind for kind in named}
                found &= mine | ({"null"} if view.get("nullable") is True else set())
        values = _constants(views)
        return found if values is None else {kind for kind in found if any(fits(value, kind) for value in values)}


def _constants(views: list[Schema]) -> list[Any] | None:
    for view in views:
        if "const" in view:
            return [view["const"]]
        if isinstance(view.get("enum"), list):
            return list(view["enum"])
    return None


def _some_equal(a: list[Any], b: list[Any]) -> bool:
    return not set(map(identity, a)).isdisjoint(map(identity, b))


def _required(views: list[Schema]) -> set[str]:
    given = [view.get("required") for view in views]
    return {name for each in given if isinstance(each, list) for name in each if isinstance(name, str)}
