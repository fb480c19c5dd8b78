"""Schema composition with ``allOf``, ``$ref``, ``anyOf``, ``oneOf``, ``not`` and ``if``. A value must fulfil all
schemas in ``allOf`` and the schema to which ``$ref`` refers.

A ``Part`` is one of the schemas that a value must fulfil, with its path in the client's document, so that errors can
name the path.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from penstock_enginecore.structured_output.constraints.json_grammar import Layout, Rules
from penstock_enginecore.structured_output.constraints.schema_document import (
    COMBINED,
    KEYWORDS,
    TYPES,
    Document,
    Schema,
    SchemaError,
    TooMuchWorkError,
    UnfulfillableError,
    Work,
    bounds,
    constraining,
    count,
    fits,
    identity,
    kinds_of,
    mapping,
    names,
    never,
    present,
    schemas,
    shown,
)
from penstock_enginecore.structured_output.constraints.strings import FORMATS, Texts
from penstock_enginecore.structured_output.constraints.values import dependents, listed

_CONSTANTS = frozenset({"const", "enum"})


class Part(NamedTuple):
    """One of the schemas that a value must fulfil, and the schema's path in the client's document.

    Attributes:
        ours: Whether this package generated the schema for the keyword at ``path``. A generated schema may contain
            internal keywords.
        main: Whether the part is the schema that contains the other parts. Such a part has the keywords that remain
            after the other parts were split off.
    """

    schema: Any
    path: str
    ours: bool = False
    main: bool = False


class Fact(NamedTuple):
    """The keywords of a part that constrain values, without ``$ref`` and ``allOf``. ``main`` and ``ours`` are copied
    from the part.
    """

    keywords: dict[str, Any]
    path: str
    ours: bool
    main: bool

    @property
    def key(self) -> tuple[str, str]:
        """Key that identifies the fact among all facts of the document."""
        return self.path, repr(self.keywords) if self.ours else " ".join(sorted(self.keywords))

    @property
    def part(self) -> Part:
        """The fact converted back to a part."""
        return Part(self.keywords, self.path, self.ours, self.main)


class SchemaWriter(Protocol):
    """Interface through which the translations of arrays and objects convert the schemas inside them."""

    rules: Rules
    document: Document
    work: Work

    def convert(self, parts: Sequence[Part], depth: int, path: str = "") -> str:
        """Return a grammar expression for the values that fulfil all of ``parts``. Raises SchemaError if the schemas
        cannot be enforced or no value fulfils them.

        ``path`` is the path that errors name if no single part causes them. The default is the path of the first part.
        """

    def inside(self) -> AbstractContextManager[Layout]:
        """Return a context manager that increases the nesting level by one array or object. Entering it gives the
        layout (whitespace and separators) at that level.
        """

    def values_of(self, parts: Sequence[Part]) -> list[Any] | None:
        """Return the values that fulfil all of ``parts`` if the parts list values in ``enum`` or ``const``, otherwise
        None.
        """

    def fulfils(self, value: Any, parts: Iterable[Part]) -> bool:
        """Return whether a value fulfils all of ``parts``."""

    def add_texts(self, part: Part, texts: Texts) -> None:
        """Add the string constraints of ``part`` to ``texts``. Raises SchemaError if the part has other constraints."""

    def spender(self, path: str) -> Callable[[int], None]:
        """Return a function that counts steps of work for the schema at ``path``."""


def reference_of(parts: Sequence[Part], document: Document) -> str | None:
    """Return the JSON pointer to which ``parts`` refer, or None if ``parts`` is not a single reference."""
    if len(parts) != 1 or isinstance(parts[0].schema, bool):
        return None
    schema, path, ours, _ = parts[0]
    keywords = constraining(schema, path, ours=ours)
    if len(branches := keywords.get("allOf", ())) == 1 and len(keywords) == 1 and isinstance(branches, list):
        return reference_of([Part(branches[0], f"{path}/allOf/0")], document)
    if "$ref" not in keywords or len(keywords) > 1:
        return None
    return document.pointer(keywords["$ref"], path)


def facts_of(parts: Sequence[Part], document: Document, work: Work) -> tuple[list[Fact], bool]:
    """Return the facts of ``parts``, and whether a reference was followed. Raises UnfulfillableError if a schema is
    false.
    """
    found: list[Fact] = []
    followed, seen = False, set[str]()
    left: list[Fact | tuple[Part, set[str]]] = [
        (part._replace(main=part.main or len(parts) == 1), {part.path}) for part in reversed(parts)
    ]
    while left:
        taken = left.pop()
        if isinstance(taken, Fact):
            found.append(taken)
            continue
        part, above = taken
        work.spend(part.path, 1)
        if part.schema is True:
            continue
        if part.schema is False:
            raise UnfulfillableError(part.path, "is false: no value is allowed there")
        keywords = constraining(part.schema, part.path, ours=part.ours)
        behind: list[Part] = []
        # The facts keep the order of the document, because properties are written in this order.
        inherits = next(iter(keywords), "") in ("$ref", "allOf")
        if "$ref" in keywords:
            pointer = document.pointer(keywords.pop("$ref"), part.path)
            followed = True
            if pointer in above:
                raise SchemaError(pointer, "refers to itself without end: no value can fulfil it")
            if pointer not in seen:
                seen.add(pointer)
                behind.append(Part(document.at(pointer), pointer))
        if "allOf" in keywords:
            branches = schemas(keywords, "allOf", part.path)
            if not branches:
                raise SchemaError(f"{part.path}/allOf", "must be a list of at least one schema")
            del keywords["allOf"]
            behind += [Part(branch, f"{part.path}/allOf/{i}") for i, branch in enumerate(branches)]
        if "if" not in keywords:
            keywords = {name: value for name, value in keywords.items() if name not in ("then", "else")}
        mine = [Fact(keywords, part.path, part.ours, part.main)] if keywords else []
        others = [(each, above | {each.path}) for each in reversed(behind)]
        left += [*mine, *others] if inherits else [*others, *mine]
    return found, followed


def spoken_of(keywords: Schema) -> set[str]:
    """Return the JSON types to which the keywords of a fact apply."""
    kinds = {kind for kind in TYPES if kind != "integer" and set(keywords) & KEYWORDS[kind]}
    texts = "!pattern" in keywords or keywords.get("format") in FORMATS
    return kinds | ({"string"} if texts else set())


def types_of(facts: Sequence[Fact], path: str) -> tuple[str, ...]:
    """Return the JSON types that values may have, in the order of ``TYPES``. An empty result means that every type is
    allowed without constraints.

    Without ``type``, the keywords determine the types. Raises UnfulfillableError if no type is left.
    """
    kinds: set[str] | None = None
    by = path
    for fact in facts:
        if "type" not in fact.keywords:
            continue
        mine = kinds_of(fact.keywords["type"], fact.path)
        mine |= {"null"} if fact.keywords.get("nullable") else set()
        both = mine if kinds is None else _both(kinds, mine)
        if not both:
            other = by if by != fact.path else path
            raise UnfulfillableError(f"{fact.path}/type", f"has no type in common with {other}")
        kinds, by = both, fact.path
    if kinds is None:
        kinds = set().union(*(spoken_of(fact.keywords) for fact in facts)) or _without_excluded(facts)
    excluded = {kind for fact in facts for kind in fact.keywords.get("!type", ())}
    if excluded:
        kinds = set(TYPES) - {"integer"} if kinds is None else kinds
        if "integer" in excluded and "number" in kinds and "number" not in excluded:
            raise SchemaError(path, "requires a number that is not an integer, which cannot be enforced")
        excluded |= {"integer"} if "number" in excluded else set()
        if not kinds - excluded:
            raise UnfulfillableError(path, "allows no type")
        kinds -= excluded
    return tuple(kind for kind in TYPES if kind in (kinds or ()))


def _without_excluded(facts: Sequence[Fact]) -> set[str] | None:
    """Return the types for which a grammar can leave out the excluded values, or None if no values are excluded."""
    excluded = [value for fact in facts for value in fact.keywords.get("!enum", ())]
    if not excluded:
        return None
    kinds = {"string", "boolean", "null", "number", "array", "object"}
    kinds -= {kind for kind in ("null", "number", "array", "object") if any(fits(value, kind) for value in excluded)}
    kinds -= {"boolean"} if any(v is True for v in excluded) and any(v is False for v in excluded) else set()
    return kinds if "number" in kinds else kinds | {"integer"}


def _both(a: set[str], b: set[str]) -> set[str]:
    shared = a & b
    if ("integer" in a and "number" in b) or ("integer" in b and "number" in a):
        shared |= {"integer"}
    return shared


def of_kind(facts: Sequence[Fact], kind: str) -> list[Fact]:
    """Return the facts with only the keywords that apply to one type. Facts without such keywords are left out."""
    mine = KEYWORDS[kind] | {"!enum"} | ({"format"} if kind in ("string", "integer", "number") else set())
    mine = mine | ({"!pattern"} if kind == "string" else set())
    found = [fact._replace(keywords={k: v for k, v in fact.keywords.items() if k in mine}) for fact in facts]
    return [fact for fact in found if fact.keywords]


def combines(fact: Fact) -> bool:
    """Return whether the fact has a keyword that combines schemas, and therefore applies to values of any type."""
    return bool(fact.keywords.keys() & COMBINED)


def written_of(parts: Iterable[Part]) -> list[Fact]:
    """Return the facts of ``parts``, without the schemas to which their references point."""
    return [
        Fact(present(part.schema), part.path, part.ours, part.main) for part in parts if isinstance(part.schema, dict)
    ]


def check_properties(facts: Sequence[Fact], path: str) -> None:
    """Raise UnfulfillableError if a required property obviously has no possible value.

    This check is cheap. The check runs before the alternatives of conditions on the same property are combined, because
    there may be many combinations.
    """
    required = {name for fact in facts for name in names(fact.keywords, "required", fact.path)}
    left: dict[str, set[Hashable]] = {}
    excluded: dict[str, set[Hashable]] = {}
    for fact in facts:
        properties = mapping(fact.keywords, "properties", fact.path)
        for name in required.intersection(properties):
            schema = properties[name]
            if schema is False:
                raise UnfulfillableError(fact.path, f"forbids {shown(name)}, which is required")
            if not isinstance(schema, dict):
                continue
            if (values := _constants(schema)) is not None:
                left[name] = left[name] & values if name in left else values
            elif len(schema) == 1 and isinstance(negated := schema.get("not"), dict) and set(negated) <= _CONSTANTS:
                excluded.setdefault(name, set()).update(_constants(negated) or ())
    for name, values in left.items():
        if not values - excluded.get(name, set()):
            raise UnfulfillableError(path, f"allows no value for the property {shown(name)}")


def _constants(schema: Schema) -> set[Hashable] | None:
    if "const" in schema:
        return {identity(schema["const"])}
    values = schema.get("enum")
    return set(map(identity, values)) if isinstance(values, list) else None


# Detection of schemas that no value can fulfil at the same time.

_OPENING = frozenset({"anyOf", "oneOf", "if", "not", "patternProperties", "dependentSchemas", "dependencies"})
"""Keywords that may allow properties that other schemas declare."""
_MAX_DEPTH = 8
"""Maximum depth to which ``allOf`` and references are followed."""


class Apart:
    """Decides whether two schemas of one document exclude each other, which means that no value fulfils both. If this
    is unknown, the schemas count as not excluding each other.
    """

    def __init__(self, document: Document, work: Work) -> None:
        self._document = document
        self._work = work

    def never_both(self, written: Part, other: Part, *, alone: bool) -> bool:
        """Return whether it is certain that no value written for schema ``written`` fulfils schema ``other``.

        ``alone`` is True if no other schema constrains the value.
        """
        mine, yours = self._views(written), self._views(other)
        if mine is None or yours is None:
            return False
        kinds, others = self._kinds(mine), self._kinds(yours)
        if not kinds & others:
            return True
        if (a := _constants_of_views(mine)) is not None and (b := _constants_of_views(yours)) is not None:
            return not _some_equal(a, b)
        if kinds & others != {"object"}:
            return False
        needed = _required(yours)
        if self._leaves_out(mine, needed, alone=alone):
            return True
        return any(self._told_apart(mine, yours, name) for name in _required(mine) & needed)

    def _views(self, part: Part, depth: int = 0) -> list[Schema] | None:
        """Return all schemas that a value of ``part`` must fulfil. The method follows references and ``allOf`` up to a
        maximum depth.
        """
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
        """Return whether objects that the grammar writes for ``views`` lack at least one of the properties ``needed``.

        Undeclared properties are written only if a schema allows them. Undeclared properties are certainly not written
        if ``views`` forbid them, or if no other schema constrains the object (``alone``).
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
        x, y = _constants_of_views(a), _constants_of_views(b)
        return x is not None and y is not None and not _some_equal(x, y)

    def _property(self, views: list[Schema], name: str) -> list[Schema] | None:
        found: list[Schema] = []
        for view in views:
            properties = view.get("properties")
            if isinstance(properties, dict) and name in properties:
                found += self._views(Part(properties[name], "#")) or []
        return found or None

    def _kinds(self, views: list[Schema]) -> set[str]:
        """Return the types that a value that fulfils ``views`` may have. An integer counts as a number. Without
        ``type``, any type is possible.
        """
        found = set(TYPES) - {"integer"}
        for view in views:
            given = view.get("type")
            if given is not None:
                named = {kind for kind in (given if isinstance(given, list) else [given]) if isinstance(kind, str)}
                mine = {"number" if kind == "integer" else kind for kind in named}
                found &= mine | ({"null"} if view.get("nullable") is True else set())
        values = _constants_of_views(views)
        return found if values is None else {kind for kind in found if any(fits(value, kind) for value in values)}


def _constants_of_views(views: list[Schema]) -> list[Any] | None:
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


# The code below handles two kinds of JSON schema keywords. A value can fulfil keywords of the first kind in several
# ways, for example ``anyOf``. Keywords of the second kind apply only if an object has a certain property, for example
# ``dependentRequired``.

MAX_ONE_OF = 128
"""Maximum number of branches of a ``oneOf``. The limit exists because all pairs of branches are compared."""
_MAX_NEGATION = 16
"""Maximum depth to which negations may be nested."""

Way = list[Part]
"""One way to fulfil a keyword: parts that a value must fulfil in addition to the other keywords of the schema."""


class Ways(NamedTuple):
    """Ways to fulfil ``keyword`` of one fact. ``ours`` is true if this package, and not the client's schema, defines
    some of the ways. It is possible that no value fulfils such a way.
    """

    keyword: str
    ways: list[Way]
    ours: bool


class Alternatives:
    """Splits the keywords of one document into the ways in which a value can fulfil them."""

    def __init__(self, document: Document, work: Work) -> None:
        self._document = document
        self._work = work
        self._apart = Apart(document, work)

    def of(self, fact: Fact, *, alone: bool) -> Ways | None:
        """Return the ways to fulfil the first keyword of ``fact`` that can be fulfilled in several ways, or None if
        there is no such keyword.

        ``alone`` is True if no other schema constrains the objects that the fact describes. Raises SchemaError if the
        keyword cannot be enforced.
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
        """Return one way for each branch of a ``oneOf``. Each way excludes the values that fulfil another branch."""
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
                        f"is only supported if no value can fit two branches; branches {min(i, j)} and {max(i, j)} may both fit. "
                        "Use anyOf, or give the branches different types or a required property with different constants",
                    )
            ways.append([branch, *(Part({"not": each.schema}, each.path, True) for each in overlapping)])
        return ways

    def _negated(self, part: Part, depth: int = 0) -> list[Way]:
        """Return the ways to violate ``part``. The result is empty if every value fulfils ``part``. Raises SchemaError
        if ``part`` cannot be negated.
        """
        schema, path = part.schema, part.path
        self._work.spend(path, 3)
        if depth > _MAX_NEGATION:
            raise SchemaError(path, f"has more than {_MAX_NEGATION} nested negations")
        if schema is False:
            return [[]]
        if schema is True:
            return []
        keywords = constraining(schema, path, ours=part.ours)
        return [way for name in sorted(keywords) for way in self._without(name, keywords, path, depth)]

    def _without(self, name: str, keywords: dict[str, Any], path: str, depth: int) -> list[Way]:
        """Return the ways in which a value can violate one keyword."""

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
    """Return schemas for the values that a bound, such as ``maximum`` or ``minLength``, excludes. Raises SchemaError if
    the keyword is not a bound.
    """
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
    raise SchemaError(f"{path}/{name}", "is not supported in a negated schema")


def _dependent(fact: Fact, keyword: str) -> list[Way]:
    """Return the ways to fulfil the dependency on the first property of ``keyword``. The dependencies on other
    properties stay in the fact for a later call.
    """
    (name, schema, place), *rest = dependents({keyword: fact.keywords[keyword]}, fact.path) or [("", True, fact.path)]
    later = {each: fact.keywords[keyword][each] for each, _, _ in rest}
    after = [Part({keyword: later}, fact.path, True)] if later else []
    if schema is True:
        return [after]
    without = Part({"properties": {name: False}}, place, True)
    within = [Part({"required": [name]}, place, True), Part(schema, place)]
    return [[without, *after], [*within, *after]]
