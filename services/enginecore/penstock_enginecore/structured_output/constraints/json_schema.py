"""JSON schemas as grammars.

The grammar's sentences are JSON texts that the schema accepts; what it cannot enforce is refused by keyword and place, never
ignored. Narrower than the schema it may be: properties come in the schema's order, an object that declares properties has
no others unless ``additionalProperties`` says so, numbers and blanks are bounded in length.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock_common.types.sampling import JsonWhitespace
from penstock_enginecore.structured_output.constraints import number
from penstock_enginecore.structured_output.constraints.formats import FORMATS
from penstock_enginecore.structured_output.constraints.json_grammar import Rules, json_literal, other_strings
from penstock_enginecore.structured_output.constraints.json_keywords import (
    bound,
    count,
    in_order,
    mapping,
    required_names,
)
from penstock_enginecore.structured_output.constraints.json_types import (
    KEYWORDS,
    TYPES,
    Schema,
    SchemaError,
    SchemaTypes,
    shown,
)
from penstock_enginecore.structured_output.constraints.layout import Layout, Level, deeper
from penstock_enginecore.structured_output.constraints.regex import RegexError, in_json_string

MAX_DEPTH = 64
"""How deeply schemas may nest."""

MAX_REFS = 1000
"""How many different places ``$ref`` may point to."""

MAX_KEY = 256
"""Characters of a property's name."""


def schema_grammar(schema: Any, whitespace: JsonWhitespace = JsonWhitespace.DUMPS) -> str:
    """The grammar of the JSON texts that ``schema`` (parsed by ``parse``) accepts, with such blanks. Raises SchemaError."""
    converter = _Converter(schema, whitespace)
    root = converter.convert(schema, "#", 0)
    converter.finish()
    return converter.rules.text(root)


class _Converter:
    """Writes rules for a schema and, once each, for the places its ``$ref`` point to."""

    def __init__(self, root: Any, whitespace: JsonWhitespace) -> None:
        self.rules = Rules(whitespace)
        self.types = SchemaTypes(root)
        self.level: Level = 0
        self.refs: dict[str, str] = {}
        self.pending: list[str] = []
        self.apart: list[tuple[list[tuple[int, Any]], str]] = []

    def finish(self) -> None:
        """Convert what was referred to, and what that refers to."""
        self.level = None
        while self.pending:
            pointer = self.pending.pop()
            self.rules.add(self.convert(self.types.resolve(pointer), pointer, 0), self.refs[pointer])
        for branches, path in self.apart:
            self.types.check_apart(branches, path)
        self.types.check_finite(self.refs)

    @contextmanager
    def inside(self) -> Iterator[Layout]:
        """What is converted meanwhile stands in an array or object of this layout."""
        outer = self.level
        self.level = deeper(outer)
        try:
            yield self.rules.layout(self.level)
        finally:
            self.level = outer

    def convert(self, schema: Any, path: str, depth: int) -> str:
        """An expression for the values that ``schema`` accepts."""
        if depth > MAX_DEPTH:
            raise SchemaError(path, f"nests more than {MAX_DEPTH} deep")
        if schema is True:
            return "any"
        if schema is False:
            raise SchemaError(path, "is false: no value is allowed there")
        keywords = self.types.keywords(schema, path)
        for name, convert in _COMBINED.items():
            if name in keywords:
                return convert(self, keywords, path, depth)
        options = []
        for kind in self.types.declared(keywords, path):
            mine = {k: v for k, v in keywords.items() if k in KEYWORDS[kind]}
            options.append(_TYPED[kind](self, mine, path, depth))
        return self.rules.add(" | ".join(options)) if len(options) > 1 else options[0] if options else "any"

    def ref(self, keywords: Schema, path: str, _depth: int) -> str:
        pointer = self.types.pointer(keywords["$ref"], path)
        self.types.alone(keywords, "$ref", path)
        self.types.resolve(pointer, path)
        if pointer not in self.refs:
            if len(self.refs) >= MAX_REFS:
                raise SchemaError(path, f"there are more than {MAX_REFS} different $ref")
            self.refs[pointer] = self.rules.name()
            self.pending.append(pointer)
        return self.refs[pointer]

    def values(self, keywords: Schema, path: str, _depth: int) -> str:
        try:
            return self.rules.add(
                " | ".join(self.rules.value(value, self.level) for value in self.types.values(keywords, path))
            )
        except ValueError as e:
            raise (
                e if isinstance(e, SchemaError) else SchemaError(path, f"holds a value that cannot be written: {e}")
            ) from None

    def any_of(self, keywords: Schema, path: str, depth: int) -> str:
        name = next(name for name in ("anyOf", "oneOf", "allOf") if name in keywords)
        self.types.alone(keywords, name, path)
        branches = self.types.branches(keywords, name, path)
        if name == "oneOf":
            self.apart.append((branches, path))
        options = [self.convert(branch, f"{path}/{name}/{i}", depth + 1) for i, branch in branches]
        return options[0] if len(options) == 1 else self.rules.add(" | ".join(options))

    def number(self, keywords: Schema, path: str, _depth: int) -> str:
        return self.bounded(keywords, path, "number", number.number_range)

    def integer(self, keywords: Schema, path: str, _depth: int) -> str:
        if (step := keywords.get("multipleOf", 1)) != 1 or isinstance(step, bool):
            raise SchemaError(f"{path}/multipleOf", "is not supported")
        return self.bounded(keywords, path, "integer", number.integer_range)

    def bounded(self, keywords: Schema, path: str, name: str, write: Callable[..., str]) -> str:
        if "multipleOf" in keywords and name == "number":
            raise SchemaError(f"{path}/multipleOf", "is not supported")
        low, above = bound(keywords, "minimum", "exclusiveMinimum", path, max)
        high, below = bound(keywords, "maximum", "exclusiveMaximum", path, min)
        if low is None and high is None:
            return name
        try:
            return self.rules.add(write(low, high, above=above, below=below))
        except ValueError as e:
            raise SchemaError(path, f"cannot be fulfilled: {e}") from None

    def string(self, keywords: Schema, path: str, _depth: int) -> str:
        given = [name for name in ("pattern", "format") if name in keywords]
        low, high = count(keywords, "minLength", path), count(keywords, "maxLength", path)
        sized = low > 0 or high is not None
        if len(given) + sized > 1:
            names = " and ".join([*given, *(k for k in ("minLength", "maxLength") if k in keywords)])
            raise SchemaError(path, f"has {names}; only one of pattern, format and lengths can be honoured")
        if given:
            return self.matching(keywords[given[0]], f"{path}/{given[0]}")
        if not sized:
            return "string"
        in_order(low, high, "Length", path)
        return self.rules.add(f'"\\"" char{{{low},{"" if high is None else high}}} "\\""')

    def matching(self, pattern: Any, path: str) -> str:
        """A string that the regular expression or the format at ``path`` matches."""
        if not isinstance(pattern, str):
            raise SchemaError(path, "must be a string")
        if path.endswith("/format"):
            if pattern not in FORMATS:
                raise SchemaError(path, f"is {shown(pattern)}; supported: {', '.join(FORMATS)}")
            pattern = FORMATS[pattern]
        try:
            return self.rules.add(f'"\\"" {in_json_string(pattern)} "\\""')
        except RegexError as e:
            raise SchemaError(path, f"cannot be honoured: {e}") from None

    def boolean(self, _keywords: Schema, _path: str, _depth: int) -> str:
        return "boolean"

    def null(self, _keywords: Schema, _path: str, _depth: int) -> str:
        return "null"

    def array(self, keywords: Schema, path: str, depth: int) -> str:
        items = keywords.get("items", True)
        low, high = count(keywords, "minItems", path), count(keywords, "maxItems", path)
        in_order(low, high, "Items", path)
        prefix = keywords.get("prefixItems", [])
        if isinstance(items, list):
            raise SchemaError(
                f"{path}/items", "must be one schema; write the schemas of a tuple as a list in prefixItems"
            )
        if not isinstance(prefix, list):
            raise SchemaError(f"{path}/prefixItems", "must be a list of schemas")
        with self.inside() as blanks:
            return self.items(prefix[:high], items, low, high, blanks, path, depth)

    def items(
        self, prefix: list[Any], items: Any, low: int, high: int | None, blanks: Layout, path: str, depth: int
    ) -> str:
        """An array of ``prefix`` and then of ``items``, ``low`` to ``high`` in all."""
        places = [self.convert(s, f"{path}/prefixItems/{i}", depth + 1) for i, s in enumerate(prefix)]
        if items is False:
            high = len(places) if high is None else min(high, len(places))
            if low > high:
                raise SchemaError(f"{path}/minItems", f"is {low}; only {high} items are allowed")
        rest = "" if items is False else self.convert(items, f"{path}/items", depth + 1)
        if not places and low == 0 and high is None and rest == "any":
            return "array"
        return self.rules.add(f'"[" {blanks.opened} {_sequence(places, rest, low, high, blanks)}"]"')

    def object(self, keywords: Schema, path: str, depth: int) -> str:
        properties = dict(mapping(keywords, "properties", path))
        more = keywords.get("additionalProperties", "properties" not in keywords)
        for name in required_names(keywords, path):
            if name not in properties:
                if keywords.get("additionalProperties") is False:
                    raise SchemaError(f"{path}/required", f"names {shown(name)}, which additionalProperties forbids")
                properties[name] = keywords.get("additionalProperties", True)
        if "patternProperties" in keywords:
            return self.pattern_object(keywords, properties, path, depth)
        if not properties:
            return self.map("string", more, keywords, path, depth)
        self.check_counts(keywords, len(properties), more, path)
        with self.inside() as blanks:
            return self.declared_object(keywords, properties, more, blanks, path, depth)

    def declared_object(
        self, keywords: Schema, properties: dict[str, Any], more: Any, blanks: Layout, path: str, depth: int
    ) -> str:
        """An object of ``properties``, and of others that fulfil the schema ``more``."""
        required = set(keywords.get("required", ()))
        members = []
        for name, schema in properties.items():
            if schema is False and name not in required:
                continue
            if len(name) > MAX_KEY:
                raise SchemaError(path, f"has a property of {len(name)} characters; the limit is {MAX_KEY}")
            value = self.convert(schema, f"{path}/properties/{_escaped(name)}", depth + 1)
            members.append((f"{self.key(name, path)} {blanks.colon} {value}", name in required))
        extra = ""
        if more is not False:
            value = self.convert(more, f"{path}/additionalProperties", depth + 1)
            extra = self.rules.add(f"{other_strings(self.rules, [*properties])} {blanks.colon} {value}")
        return self.rules.add(f'"{{" {blanks.opened} {self.members(members, extra, blanks)} "}}"')

    def key(self, name: str, path: str) -> str:
        try:
            return json_literal(name)
        except ValueError:
            raise SchemaError(path, f"has the property {shown(name)}, which cannot be written") from None

    def check_counts(self, keywords: Schema, declared: int, more: Any, path: str) -> None:
        """Refuse counts that the members of an object do not keep by themselves."""
        low, high = count(keywords, "minProperties", path), count(keywords, "maxProperties", path)
        if low > len(required_names(keywords, path)):
            raise SchemaError(
                f"{path}/minProperties", f"is {low}; it is only honoured up to the number of required properties"
            )
        if high is not None and (more is not False or high < declared):
            raise SchemaError(f"{path}/maxProperties", "is not supported beside properties")

    def members(self, members: list[tuple[str, bool]], extra: str, blanks: Layout) -> str:
        """Members in order, each optional unless required, then any number of ``extra`` ones, with the blanks around them.

        Two rules per member: what may follow once something was written, and what may come first.
        """
        after = self.rules.add(f"({blanks.comma} {extra})* {blanks.last}" if extra else blanks.last or '""')
        first = self.rules.add(f"{extra} {after}") if extra else ""
        for member, required in reversed(members):
            begun = f"{member} {after}"
            first = self.rules.add(begun if required or not first else f"{begun} | {first}")
            after = self.rules.add(f"({blanks.comma} {member}){'' if required else '?'} {after}")
        if not first:
            return ""
        some = f"{blanks.first} {first}"
        return some if any(required for _, required in members) else f"({some})?"

    def pattern_object(self, keywords: Schema, properties: dict[str, Any], path: str, depth: int) -> str:
        """One pattern alone: keys that match it, and no others."""
        patterns = mapping(keywords, "patternProperties", path)
        if len(patterns) != 1 or properties or keywords.get("additionalProperties", False) is not False:
            raise SchemaError(
                f"{path}/patternProperties", "is only supported with one pattern, no properties and no additional ones"
            )
        (pattern, schema), *_ = patterns.items()
        place = f"{path}/patternProperties/{_escaped(pattern)}"
        return self.map(self.matching(pattern, place), schema, keywords, path, depth)

    def map(self, key: str, value: Any, keywords: Schema, path: str, depth: int) -> str:
        """Any number of members with such keys and values. The same key may come twice, so no least number is kept."""
        if count(keywords, "minProperties", path):
            raise SchemaError(f"{path}/minProperties", "is not supported without required properties")
        high = count(keywords, "maxProperties", path)
        with self.inside() as blanks:
            if value is False or high == 0:
                return self.rules.add(f'"{{" {blanks.opened} "}}"')
            written = self.convert(value, f"{path}/additionalProperties", depth + 1)
            if (key, written, high) == ("string", "any", None):
                return "object"
            member = self.rules.add(f"{key} {blanks.colon} {written}")
            return self.rules.add(f'"{{" {blanks.opened} {_sequence([], member, 0, high, blanks)}"}}"')


_Convert = Callable[[_Converter, Schema, str, int], str]

_COMBINED: dict[str, _Convert] = {
    "$ref": _Converter.ref,
    "const": _Converter.values,
    "enum": _Converter.values,
    "anyOf": _Converter.any_of,
    "oneOf": _Converter.any_of,
    "allOf": _Converter.any_of,
}

_TYPED: dict[str, _Convert] = {kind: getattr(_Converter, kind) for kind in TYPES}


def _sequence(places: list[str], rest: str, low: int, high: int | None, blanks: Layout) -> str:
    """Items with separators and blanks, ``places`` first, then ``rest`` (``""``: nothing); ``low`` to ``high`` in all."""
    expression = ""
    if rest and (high is None or high > len(places)):
        least = max(low - len(places), 0)
        most = "" if high is None else high - len(places)
        if places:
            expression = f"({blanks.comma} {rest}){{{least},{most}}} "
        else:
            others = f"({blanks.comma} {rest}){{{max(least - 1, 0)},{'' if high is None else high - 1}}}"
            follow = f"{blanks.first} {rest} {others} {blanks.last}"
            return f"{follow} " if least else f"({follow})? "
    for i, place in reversed(list(enumerate(places))):
        expression = (
            f"{blanks.comma} {place} {expression}" if i else f"{blanks.first} {place} {expression}{blanks.last} "
        )
        expression = expression if i < low else f"({expression})? "
    return expression


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
