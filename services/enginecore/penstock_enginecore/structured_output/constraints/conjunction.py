"""Schemas that a value must fulfil all at once: ``allOf``, ``$ref`` and what stands beside it, and what alternatives leave.

A ``Part`` is one schema with its place in the client's document, so that whatever is refused is refused at that place.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from penstock_enginecore.structured_output.constraints.formats import FORMATS
from penstock_enginecore.structured_output.constraints.json_grammar import Rules
from penstock_enginecore.structured_output.constraints.json_keywords import (
    COMBINED,
    KEYWORDS,
    constraining,
    kinds_of,
    mapping,
    names,
    schemas,
)
from penstock_enginecore.structured_output.constraints.json_types import (
    TYPES,
    Schema,
    SchemaError,
    UnfulfillableError,
    Work,
    fits,
    identity,
    present,
    shown,
)
from penstock_enginecore.structured_output.constraints.layout import Layout
from penstock_enginecore.structured_output.constraints.references import Document
from penstock_enginecore.structured_output.constraints.texts import Texts

_CONSTANTS = frozenset({"const", "enum"})


class Part(NamedTuple):
    """``ours``: it was written here for the keyword at ``path``, and may hold keywords that clients do not have. ``main``: it is
    what is left of the schema that holds the others.
    """

    schema: Any
    path: str
    ours: bool = False
    main: bool = False


class Fact(NamedTuple):
    """The keywords of a part that constrain, without ``$ref`` and ``allOf``. ``main``: of the schema that holds the others."""

    keywords: dict[str, Any]
    path: str
    ours: bool
    main: bool

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from other facts of the document."""
        return self.path, repr(self.keywords) if self.ours else " ".join(sorted(self.keywords))

    @property
    def part(self) -> Part:
        """It as a part."""
        return Part(self.keywords, self.path, self.ours, self.main)


class SchemaWriter(Protocol):
    """What writes the parts of arrays and objects."""

    rules: Rules
    document: Document
    work: Work

    def convert(self, parts: Sequence[Part], depth: int, path: str = "") -> str:
        """An expression for the values that fulfil all of ``parts``. ``path``: the place that is refused where none of them alone
        is to blame, that of the first unless it is given. Raises SchemaError.
        """

    def inside(self) -> AbstractContextManager[Layout]:
        """What is converted meanwhile stands in an array or object of this layout."""

    def values_of(self, parts: Sequence[Part]) -> list[Any] | None:
        """The values that fulfil all of ``parts``, if these list them; None where they do not."""

    def fulfils(self, value: Any, parts: Iterable[Part]) -> bool:
        """Whether a value fulfils all of ``parts``."""

    def add_texts(self, part: Part, texts: Texts) -> None:
        """Add to ``texts`` what strings must fulfil that fulfil ``part``. Raises SchemaError where it says more."""

    def spender(self, path: str) -> Callable[[int], None]:
        """Counts work for the schema at ``path``."""


def reference_of(parts: Sequence[Part], document: Document) -> str | None:
    """The place that ``parts`` name, if they say no more than that."""
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
    """What ``parts`` say, and whether a reference was followed for it. Raises UnfulfillableError where one is false."""
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
        inherits = next(iter(keywords), "") in ("$ref", "allOf")  # properties come in the order of the document
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
    """The types that keywords speak of."""
    kinds = {kind for kind in TYPES if kind != "integer" and set(keywords) & KEYWORDS[kind]}
    texts = "!pattern" in keywords or keywords.get("format") in FORMATS
    return kinds | ({"string"} if texts else set())


def types_of(facts: Sequence[Fact], path: str) -> tuple[str, ...]:
    """The types that values may have, in the order of ``TYPES``; none means every one without constraints.

    Without ``type`` it is what the keywords speak of. Raises UnfulfillableError when the facts leave none.
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
            raise UnfulfillableError(f"{fact.path}/type", f"allows no type that {other} allows, too")
        kinds, by = both, fact.path
    if kinds is None:
        kinds = set().union(*(spoken_of(fact.keywords) for fact in facts)) or _without_excluded(facts)
    excluded = {kind for fact in facts for kind in fact.keywords.get("!type", ())}
    if excluded:
        kinds = set(TYPES) - {"integer"} if kinds is None else kinds
        if "integer" in excluded and "number" in kinds and "number" not in excluded:
            raise SchemaError(path, "must be a number but no integer, which cannot be enforced")
        excluded |= {"integer"} if "number" in excluded else set()
        if not kinds - excluded:
            raise UnfulfillableError(path, "allows no type")
        kinds -= excluded
    return tuple(kind for kind in TYPES if kind in (kinds or ()))


def _without_excluded(facts: Sequence[Fact]) -> set[str] | None:
    """The types of values in which those that must not be can be left out; None where there are none of these."""
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
    """The facts with the keywords that speak of a type, those without any left out."""
    mine = KEYWORDS[kind] | {"!enum"} | ({"format"} if kind in ("string", "integer", "number") else set())
    mine = mine | ({"!pattern"} if kind == "string" else set())
    found = [fact._replace(keywords={k: v for k, v in fact.keywords.items() if k in mine}) for fact in facts]
    return [fact for fact in found if fact.keywords]


def combines(fact: Fact) -> bool:
    """Whether the fact has a keyword that speaks of values of any type."""
    return bool(fact.keywords.keys() & COMBINED)


def written_of(parts: Iterable[Part]) -> list[Fact]:
    """What ``parts`` say themselves, without what they refer to."""
    return [
        Fact(present(part.schema), part.path, part.ours, part.main) for part in parts if isinstance(part.schema, dict)
    ]


def check_properties(facts: Sequence[Fact], path: str) -> None:
    """Raise UnfulfillableError where a required property can have no value, as far as that is seen at once: before conditions on
    the same property are combined, of which there may be many.
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
            raise UnfulfillableError(path, f"leaves no value for {shown(name)}")


def _constants(schema: Schema) -> set[Hashable] | None:
    if "const" in schema:
        return {identity(schema["const"])}
    values = schema.get("enum")
    return set(map(identity, values)) if isinstance(values, list) else None
