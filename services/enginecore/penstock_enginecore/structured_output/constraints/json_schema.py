"""Translation of JSON schemas into grammars.

The grammar generates JSON texts that the schema accepts. A keyword that cannot be enforced is refused with its path,
never ignored. The grammar may generate fewer texts than the schema accepts. Properties are generated in the schema's
order. If a schema declares properties, undeclared properties are generated only if ``additionalProperties`` allows
them. The lengths of numbers and whitespace are limited.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock_common.types.sampling import JsonWhitespace
from penstock_enginecore.structured_output.constraints.arrays import array
from penstock_enginecore.structured_output.constraints.composition import (
    Alternatives,
    Fact,
    Part,
    Ways,
    check_properties,
    combines,
    facts_of,
    of_kind,
    reference_of,
    types_of,
    written_of,
)
from penstock_enginecore.structured_output.constraints.json_grammar import Layout, Level, Rules, deeper, unproductive
from penstock_enginecore.structured_output.constraints.numbers import numbers
from penstock_enginecore.structured_output.constraints.objects import object_
from penstock_enginecore.structured_output.constraints.schema_document import (
    KEYWORDS,
    Document,
    SchemaError,
    UnfulfillableError,
    Work,
    count,
)
from penstock_enginecore.structured_output.constraints.strings import FORMATS, Texts, pattern_at, writable
from penstock_enginecore.structured_output.constraints.values import Values, listed

MAX_DEPTH = 64
"""Maximum depth to which schemas may be nested."""

MAX_REFS = 1000
"""Maximum number of different schemas to which ``$ref`` may refer in one document."""

MAX_WORK = 500_000
"""Maximum number of steps of a translation in the compiling process. The compiling process also has a time limit."""


def schema_grammar(schema: Any, whitespace: JsonWhitespace = JsonWhitespace.DUMPS, work: Work | None = None) -> str:
    """Return the grammar of the JSON texts that ``schema`` accepts. The other arguments choose the whitespace.
    ``schema`` is a result of ``parse``. Raises SchemaError if the schema cannot be enforced or no value fulfils it.
    """
    converter = _Converter(schema, whitespace, work or Work(MAX_WORK))
    root = converter.convert([Part(schema, "#")], 0)
    converter.finish(root)
    return converter.rules.text(root)


class _Converter:
    """Writes the grammar rules of a schema. The rules of a schema to which several ``$ref`` refer are written only
    once.
    """

    def __init__(self, root: Any, whitespace: JsonWhitespace, work: Work) -> None:
        self.rules = Rules(whitespace)
        self.document = Document(root)
        self.work = work
        self._values = Values(self.document, work)
        self._alternatives = Alternatives(self.document, work)
        self._level: Level = 0
        self._shared: dict[tuple[tuple[str, str], ...], str] = {}
        self._places: dict[str, str] = {}
        self._pending: list[tuple[str, list[Part], list[Fact] | None]] = []

    def finish(self, root: str) -> None:
        """Convert the schemas to which references refer, including references inside those schemas."""
        self._level = None
        while self._pending:
            name, parts, facts = self._pending.pop()
            if facts is None:
                facts, _ = facts_of(parts, self.document, self.work)
            self.rules.add(self._convert(facts, self._places[name], 0), name)
        for name in unproductive(self.rules, [root, *self._places]) if self._places else ():
            raise SchemaError(self._places.get(name, "#"), "refers to itself without end: no value can fulfil it")

    @contextmanager
    def inside(self) -> Iterator[Layout]:
        outer = self._level
        self._level = deeper(outer)
        try:
            yield self.rules.layout(self._level)
        finally:
            self._level = outer

    def spender(self, path: str) -> Callable[[int], None]:
        return lambda steps: self.work.spend(path, steps)

    def convert(self, parts: Sequence[Part], depth: int, path: str = "") -> str:
        if not parts:
            return "any"
        path = path or parts[0].path
        if depth > MAX_DEPTH:
            raise SchemaError(path, f"is nested more than {MAX_DEPTH} levels deep")
        self.work.spend(path, 10)
        if (pointer := reference_of(parts, self.document)) is not None:
            return self._share(((pointer, ""),), pointer, [Part(self.document.at(pointer), pointer)], None, path)
        facts, followed = facts_of(parts, self.document, self.work)
        if followed:
            return self._share(tuple(sorted({fact.key for fact in facts})), path, [], facts, path)
        return self._convert(facts, path, depth)

    def _share(
        self, key: tuple[tuple[str, str], ...], place: str, parts: list[Part], facts: list[Fact] | None, path: str
    ) -> str:
        """Return the name of a rule for a schema to which several places refer. The rule is written once, in
        ``finish``.
        """
        if key not in self._shared:
            if len(self._shared) >= MAX_REFS:
                raise SchemaError(path, f"is beyond the limit of {MAX_REFS} different $ref targets")
            name = self.rules.name()
            self._shared[key] = name
            self._places[name] = place
            self._pending.append((name, parts, facts))
        return self._shared[key]

    def _convert(self, facts: Sequence[Fact], path: str, depth: int) -> str:
        """Return a grammar expression for the values that fulfil all ``facts``."""
        self.work.spend(path, 3 * len(facts))
        if (values := self._listed(facts, path)) is not None:
            return self._written_values(values, path)
        if len(facts) > 1:
            check_properties(facts, path)
        for index, fact in enumerate(facts):
            others = [each for each in facts if each is not fact]
            ways = self._alternatives.of(fact, alone=not any(map(_speaks_of_objects, [fact, *others])))
            if ways is not None:
                left = {name: value for name, value in fact.keywords.items() if name != ways.keyword}
                if ways.keyword == "if":
                    left = {name: value for name, value in left.items() if name not in ("then", "else")}
                rest = [fact._replace(keywords=left)] if left else []
                return self._either(ways, [*facts[:index], *rest, *facts[index + 1 :]], path, depth)
        options, failed = list[str](), None
        kinds = types_of(facts, path)
        for kind in kinds:
            try:
                options.append(_TYPED[kind](self, of_kind(facts, kind), path, depth))
            except UnfulfillableError as e:
                if len(kinds) == 1 or len(facts) == 1:
                    raise
                failed = failed or e
        if failed is not None and not options:
            raise failed
        return self._any_of(options) if options else "any"

    def _any_of(self, options: Sequence[str]) -> str:
        options = [*dict.fromkeys(options)]
        return options[0] if len(options) == 1 else self.rules.add(" | ".join(options))

    def _either(self, ways: Ways, rest: Sequence[Fact], path: str, depth: int) -> str:
        """Return a grammar expression for values that fulfil ``rest`` and one of ``ways``. Ways that contradict
        ``rest`` are left out.
        """
        options, failed = list[str](), None
        around = [fact.part for fact in rest]
        for way in ways.ways:
            shared, pending = dict(self._shared), len(self._pending)
            try:
                place = way[0].path if way else path
                if ways.ours:
                    check_properties([*rest, *written_of(way)], path)
                options.append(self.convert([*around, *way], depth + (not ways.ours), place))
            except UnfulfillableError as e:
                if not rest and not ways.ours:
                    raise
                failed = failed or e
                self._shared = shared
                del self._pending[pending:]
        if not options:
            raise failed or UnfulfillableError(f"{path}/{ways.keyword}", "allows no value")
        return self._any_of(options)

    def values_of(self, parts: Sequence[Part]) -> list[Any] | None:
        facts, _ = facts_of(parts, self.document, self.work)
        path = parts[0].path
        if (values := self._listed(facts, path)) is not None:
            return values
        if any(combines(fact) for fact in facts):
            return None
        kinds = types_of(facts, path)
        if not kinds or not set(kinds) <= {"boolean", "null"}:
            return None
        known = [value for kind in kinds for value in ([False, True] if kind == "boolean" else [None])]
        return [value for value in known if self.fulfils(value, [fact.part for fact in facts])]

    def fulfils(self, value: Any, parts: Iterable[Part]) -> bool:
        return all(self._values.fulfils(value, part.schema, part.path, ours=part.ours) for part in parts)

    def _listed(self, facts: Sequence[Fact], path: str) -> list[Any] | None:
        """Return the values of ``enum`` or ``const`` that fulfil all of ``facts``, or None if no fact lists values."""
        for fact in facts:
            if (values := listed(fact.keywords, fact.path)) is None:
                continue
            # Refuse unknown type names. Otherwise they would only compare as unequal to the types of the values.
            types_of(facts, path)
            left = {name: value for name, value in fact.keywords.items() if name not in ("const", "enum")}
            parts = [each.part for each in facts if each is not fact] + [fact._replace(keywords=left).part]
            found = [value for value in values if self.fulfils(value, parts)]
            if not found:
                keyword = "const" if "const" in fact.keywords else "enum"
                raise UnfulfillableError(f"{fact.path}/{keyword}", "allows no value")
            return found
        return None

    def _written_values(self, values: Sequence[Any], path: str) -> str:
        try:
            return self.rules.add(" | ".join(self.rules.value(value, self._level) for value in values))
        except ValueError as e:
            raise SchemaError(path, f"contains a value that cannot be written: {e}") from None

    def number(self, facts: Sequence[Fact], path: str, _depth: int) -> str:
        return numbers(self.rules, facts, path, "number", self.spender(path))

    def integer(self, facts: Sequence[Fact], path: str, _depth: int) -> str:
        return numbers(self.rules, facts, path, "integer", self.spender(path))

    def string(self, facts: Sequence[Fact], path: str, _depth: int) -> str:
        texts = Texts()
        for fact in facts:
            _add_texts(fact, texts)
        return texts.written(self.rules, path, self.spender(path))

    def add_texts(self, part: Part, texts: Texts) -> None:
        facts, _ = facts_of([part], self.document, self.work)
        for fact in facts:
            if combines(fact):
                raise SchemaError(fact.path, "is only supported with type, pattern, format, lengths, enum or const")
            kinds = types_of([fact], fact.path)
            if kinds and "string" not in kinds:
                raise UnfulfillableError(fact.path, "allows no string")
            for mine in of_kind([fact], "string"):
                _add_texts(mine, texts)

    def boolean(self, facts: Sequence[Fact], path: str, _depth: int) -> str:
        excluded = [value for fact in facts for value in fact.keywords.get("!enum", ())]
        left = [value for value in (True, False) if not any(each is value for each in excluded)]
        if not left:
            raise UnfulfillableError(path, "allows neither true nor false")
        return "boolean" if len(left) == 2 else self._written_values(left, path)

    def null(self, facts: Sequence[Fact], path: str, _depth: int) -> str:
        if any(value is None for fact in facts for value in fact.keywords.get("!enum", ())):
            raise UnfulfillableError(path, "excludes null, the only value of its type")
        return "null"

    def array(self, facts: Sequence[Fact], path: str, depth: int) -> str:
        _refuse_excluded(facts, list)
        return array(self, facts, path, depth)

    def object(self, facts: Sequence[Fact], path: str, depth: int) -> str:
        _refuse_excluded(facts, dict)
        return object_(self, facts, path, depth)


def _refuse_excluded(facts: Sequence[Fact], kind: type) -> None:
    for fact in facts:
        if any(isinstance(value, kind) for value in fact.keywords.get("!enum", ())):
            raise SchemaError(fact.path, "excludes an array or object; only other values can be excluded")


def _add_texts(fact: Fact, texts: Texts) -> None:
    keywords, path = fact.keywords, fact.path
    texts.at_least(count(keywords, "minLength", path))
    texts.at_most(count(keywords, "maxLength", path))
    if "pattern" in keywords:
        texts.patterns.append((pattern_at(keywords["pattern"], f"{path}/pattern"), f"{path}/pattern"))
    if "!pattern" in keywords:
        texts.unwanted.append((pattern_at(keywords["!pattern"], path), path))
    form = keywords.get("format")
    if form in FORMATS:
        texts.formats.append((form, f"{path}/format"))
    excluded = (value for value in keywords.get("!enum", ()) if isinstance(value, str))
    texts.excluded += [value for value in excluded if writable(value)]


def _speaks_of_objects(fact: Fact) -> bool:
    others = fact.keywords.keys() - {"oneOf"}
    return bool(others & KEYWORDS["object"]) or any(name in others for name in ("anyOf", "not", "if"))


_Convert = Callable[[_Converter, Sequence[Fact], str, int], str]

_TYPED: dict[str, _Convert] = {
    "object": _Converter.object,
    "array": _Converter.array,
    "string": _Converter.string,
    "number": _Converter.number,
    "integer": _Converter.integer,
    "boolean": _Converter.boolean,
    "null": _Converter.null,
}
