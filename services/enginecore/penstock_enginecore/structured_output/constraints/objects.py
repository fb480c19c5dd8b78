"""Translation of object keywords in a JSON schema into grammar rules. Declared properties come first, in the schema's
order. Undeclared properties follow, and their names may have to match regular expressions.
"""

from collections.abc import Sequence
from itertools import product

from penstock_enginecore.structured_output.constraints.arrays import sequence
from penstock_enginecore.structured_output.constraints.composition import Fact, Part, SchemaWriter
from penstock_enginecore.structured_output.constraints.json_grammar import Layout, json_literal, other_strings
from penstock_enginecore.structured_output.constraints.regex import Group
from penstock_enginecore.structured_output.constraints.schema_document import (
    SchemaError,
    UnfulfillableError,
    count,
    escaped,
    mapping,
    names,
    never,
    shown,
)
from penstock_enginecore.structured_output.constraints.strings import Texts, matches, pattern_at

MAX_KEY = 256
"""Maximum length of a declared property's name, in characters."""
_MAX_PATTERNS = 4
"""Maximum number of different patterns for property names. The limit exists because each combination of matching
patterns is examined.
"""

Property = list[Part]
"""Parts (schemas with their paths) that the value of a property must fulfil. An empty list allows any value."""


class _Objects:
    """Conversion of the facts about one object into a grammar expression."""

    def __init__(self, writer: SchemaWriter, facts: Sequence[Fact], path: str, depth: int) -> None:
        self._writer = writer
        self._facts = facts
        self._path = path
        self._depth = depth
        self._patterns: dict[str, tuple[Group, list[tuple[Fact, Part]]]] = {}
        for fact in facts:
            for pattern, schema in mapping(fact.keywords, "patternProperties", fact.path).items():
                place = f"{fact.path}/patternProperties/{escaped(pattern)}"
                parsed = self._patterns.setdefault(pattern, (pattern_at(pattern, place), []))
                parsed[1].append((fact, Part(schema, place)))
        if len(self._patterns) > _MAX_PATTERNS:
            raise SchemaError(path, f"has {len(self._patterns)} patternProperties; the limit is {_MAX_PATTERNS}")
        self._key_facts = [
            Part(fact.keywords["propertyNames"], f"{fact.path}/propertyNames")
            for fact in facts
            if "propertyNames" in fact.keywords
        ]
        self._required = {name: fact for fact in facts for name in names(fact.keywords, "required", fact.path)}
        self._closed_by = self._closing()

    def _closing(self) -> str | None:
        """Return the path of the keyword that forbids undeclared properties. The result is None if no keyword, or only
        ``additionalProperties``, forbids them.
        """
        for fact in self._facts:
            value = fact.keywords.get("unevaluatedProperties", True)
            place = f"{fact.path}/unevaluatedProperties"
            if value is not True and (value is not False or not (fact.main or len(self._facts) == 1)):
                raise SchemaError(
                    place, "is only supported with the value false, and only in the outermost of the combined schemas"
                )
            if value is False and not any("additionalProperties" in each.keywords for each in self._facts):
                return place
        declares = any(
            schema is not False
            for fact in self._facts
            for schema in (*mapping(fact.keywords, "properties", fact.path).values(),)
        )
        says = any("additionalProperties" in fact.keywords for fact in self._facts)
        return None if says or not (declares or self._patterns) else self._path

    def declared(self) -> dict[str, Property]:
        """Return the declared properties by name, with the parts that each property must fulfil."""
        found: dict[str, Property] = {}
        named = [name for fact in self._facts for name in mapping(fact.keywords, "properties", fact.path)]
        named += self._required
        if (listed := self._listed_names()) is not None:
            named += listed
        for name in dict.fromkeys(named):
            found[name] = self._property(name)
        return found

    def _listed_names(self) -> list[str] | None:
        """Return the allowed names of properties if the schema lists the names, otherwise None."""
        values = self._writer.values_of(self._key_facts) if self._key_facts else None
        return None if values is None else [value for value in values if isinstance(value, str)]

    def _property(self, name: str) -> Property:
        parts: Property = []
        known_anywhere = False
        spend = self._writer.spender(self._path)
        matching = {p for p, (group, _) in self._patterns.items() if matches(name, [group], spend)}
        for fact in self._facts:
            properties = mapping(fact.keywords, "properties", fact.path)
            known = name in properties
            if known:
                value = False if never(properties[name]) else properties[name]
                parts.append(Part(value, f"{fact.path}/properties/{escaped(name)}", fact.ours))
            for pattern in matching:
                for owner, part in self._patterns[pattern][1]:
                    if owner is fact:
                        known = True
                        parts.append(part)
            # A property with the schema false must be absent, so it does not count as evaluated.
            known_anywhere |= known and not fact.ours
            if not known and "additionalProperties" in fact.keywords:
                parts.append(Part(fact.keywords["additionalProperties"], f"{fact.path}/additionalProperties"))
        if self._closed_by is not None and self._closed_by != self._path and not known_anywhere:
            parts.append(Part(False, self._closed_by))
        if self._key_facts and not self._writer.fulfils(name, self._key_facts):
            parts.append(Part(False, self._key_facts[0].path))
        return [part for part in parts if part.schema is not True]

    def written(self) -> str:
        """Return the grammar expression for the object. Raises SchemaError if the schema cannot be enforced."""
        properties = self.declared()
        low, high = self._counts()
        with self._writer.inside() as blanks:
            members = self._members(properties, blanks)
            others = self._others([*properties], blanks)
            return self._object(members, others, low, high, blanks)

    def _counts(self) -> tuple[int, int | None]:
        lows = [count(fact.keywords, "minProperties", fact.path) or 0 for fact in self._facts]
        highs = [h for fact in self._facts if (h := count(fact.keywords, "maxProperties", fact.path)) is not None]
        low, high = max(lows, default=0), min(highs, default=None)
        if high is not None and low > high:
            raise UnfulfillableError(self._path, f"has minProperties {low}, which is above maxProperties {high}")
        return low, high

    def _members(self, properties: dict[str, Property], blanks: Layout) -> list[tuple[str, bool]]:
        """Return the grammar expression of each declared member of the object, and whether the member is required.
        Members for which no value is possible are left out.
        """
        members = []
        for name, parts in properties.items():
            required = name in self._required
            false = next((part for part in parts if part.schema is False), None)
            if false is not None:
                if required:
                    self._refuse_required(name, false)
                continue
            if len(name) > MAX_KEY:
                raise SchemaError(self._path, f"has a property of {len(name)} characters; the limit is {MAX_KEY}")
            key = self._key(name)
            try:
                value = self._writer.convert(parts, self._depth + 1) if parts else "any"
            except UnfulfillableError:
                if required or len(parts) < 2:
                    raise
                continue
            members.append((f"{key} {blanks.colon} {value}", required))
        return members

    def _refuse_required(self, name: str, false: Part) -> None:
        if false.path.endswith(("/additionalProperties", "/unevaluatedProperties", "/propertyNames")):
            place = f"{self._required[name].path}/required"
            keyword = false.path.rpartition("/")[2]
            owner = false.path.removesuffix(f"/{keyword}")
            where = keyword if owner == self._required[name].path else f"the {keyword} of {owner}"
            raise UnfulfillableError(place, f"names {shown(name)}, which {where} forbids")
        raise UnfulfillableError(false.path, "is false: no value is allowed there")

    def _key(self, name: str) -> str:
        try:
            return json_literal(name)
        except ValueError:
            raise SchemaError(self._path, f"has the property {shown(name)}, which cannot be written") from None

    def _others(self, taken: list[str], blanks: Layout) -> list[str]:
        """Return the grammar expressions of undeclared members: one expression for each combination of patterns that a
        name can match.
        """
        if self._listed_names() is not None:
            return []
        found = []
        for signs in product((True, False), repeat=len(self._patterns)):
            if self._closed_by is not None and not any(signs):
                continue
            texts = self._key_texts()
            parts: Property = []
            for (group, owners), matching in zip(self._patterns.values(), signs, strict=True):
                (texts.patterns if matching else texts.unwanted).append((group, owners[0][1].path))
            for fact in self._facts:
                mine = [
                    part
                    for (_, owners), matching in zip(self._patterns.values(), signs, strict=True)
                    for owner, part in owners
                    if matching and owner is fact
                ]
                parts += mine
                if not mine and "additionalProperties" in fact.keywords:
                    parts.append(Part(fact.keywords["additionalProperties"], f"{fact.path}/additionalProperties"))
            parts = [part for part in parts if part.schema is not True]
            if any(part.schema is False for part in parts):
                continue
            try:
                key = self._other_keys(texts, taken)
                value = self._writer.convert(parts, self._depth + 1) if parts else "any"
            except UnfulfillableError:
                if len(parts) < 2 and len(self._patterns) < 2:
                    raise
                continue
            found.append(f"{key} {blanks.colon} {value}")
        return found

    def _other_keys(self, texts: Texts, taken: list[str]) -> str:
        rules, path = self._writer.rules, self._path
        if texts.free:
            return other_strings(rules, taken) if taken else "string"
        texts.excluded += taken
        return texts.written(rules, path, self._writer.spender(path))

    def _key_texts(self) -> Texts:
        texts = Texts()
        for part in self._key_facts:
            self._writer.add_texts(part, texts)
        return texts

    def _object(
        self, members: Sequence[tuple[str, bool]], others: Sequence[str], low: int, high: int | None, blanks: Layout
    ) -> str:
        rules = self._writer.rules
        extra = rules.add(" | ".join(others)) if len(others) > 1 else others[0] if others else ""
        required = sum(required for _, required in members)
        if not members:
            if low > 1 or (low == 1 and not extra):
                raise SchemaError(self._least(), self._too_many(low))
            if not extra or high == 0:
                return rules.add(f'"{{" {blanks.opened} "}}"')
            if extra == f"string {blanks.colon} any" and low == 0 and high is None:
                return "object"
            member = rules.add(extra)
            return rules.add(f'"{{" {blanks.opened} {sequence([], member, low, high, blanks)}"}}"')
        if low > max(len(members), 1 if extra else 0):
            raise SchemaError(self._least(), self._too_many(low))
        if high is not None and high < required:
            raise UnfulfillableError(self._place("maxProperties"), f"is {high}; {required} properties are required")
        counted = low > required or (high is not None and (bool(extra) or high < len(members)))
        if extra:
            extra = rules.add(extra)
        body = self._counted(members, extra, low, high, blanks) if counted else self._chain(members, extra, blanks)
        return rules.add(f'"{{" {blanks.opened} {body} "}}"')

    def _too_many(self, low: int) -> str:
        return f"is {low}; a number above 1 is only supported if the schema declares at least as many properties"

    def _place(self, keyword: str) -> str:
        return next((f"{f.path}/{keyword}" for f in self._facts if keyword in f.keywords), self._path)

    def _least(self) -> str:
        return self._place("minProperties")

    def _chain(self, members: Sequence[tuple[str, bool]], extra: str, blanks: Layout) -> str:
        """Return a grammar expression for the declared members in order, followed by any number of ``extra`` members,
        with whitespace. A member may be absent if it is not required.

        Each member has two rules. The first rule is for the remaining members if an earlier member is present. The
        second rule is for an object that starts with this member.
        """
        rules = self._writer.rules
        after = rules.add(f"({blanks.comma} {extra})* {blanks.last}" if extra else blanks.last or '""')
        first = rules.add(f"{extra} {after}") if extra else ""
        for member, required in reversed(members):
            begun = f"{member} {after}"
            first = rules.add(begun if required or not first else f"{begun} | {first}")
            after = rules.add(f"({blanks.comma} {member}){'' if required else '?'} {after}")
        if not first:
            return ""
        some = f"{blanks.first} {first}"
        return some if any(required for _, required in members) else f"({some})?"

    def _counted(
        self, members: Sequence[tuple[str, bool]], extra: str, low: int, high: int | None, blanks: Layout
    ) -> str:
        """Return a grammar expression for the same members as ``_chain``, but for objects with ``low`` to ``high``
        members.

        If ``low`` is more than 1, only declared members count, because the grammar cannot prevent that an undeclared
        name is repeated.
        """
        rules = self._writer.rules
        top = max(low, high or 0)
        known: dict[tuple[int, int], str] = {}

        def behind(index: int, size: int) -> str:
            """Return a rule for the members that follow ``size`` members, starting with declared member ``index``. A
            result of ``""`` means that no members follow.
            """
            size = size if high is not None else min(size, top)
            if (index, size) in known:
                return known[index, size]
            self._writer.work.spend(self._path, 3)
            options = []
            if index == len(members):
                room = None if high is None else high - size
                if extra and room != 0 and (size >= low or (low == 1 and size == 0)):
                    comma = f"{blanks.comma} " if size else blanks.first
                    more = "" if room is None else room - 1
                    options.append(f"{comma} {extra} ({blanks.comma} {extra}){{0,{more}}} {blanks.last}")
                if size >= low:
                    options.append(blanks.last if size and blanks.last else '""')
            else:
                member, required = members[index]
                if high is None or size < high:
                    following = behind(index + 1, size + 1)
                    comma = f"{blanks.comma} " if size else blanks.first
                    options += [f"{comma} {member} {following}"] if following else []
                if not required:
                    following = behind(index + 1, size)
                    options += [following] if following else []
            known[index, size] = rules.add(" | ".join(options)) if options else ""
            return known[index, size]

        # Create the rules from the last member to the first, to avoid deep recursion.
        for index in reversed(range(len(members))):
            for size in range(min(index, top) + 1):
                behind(index, size)
        body = behind(0, 0)
        if not body:
            raise UnfulfillableError(self._path, "allows no object with the required number of properties")
        return body


def object_(writer: SchemaWriter, facts: Sequence[Fact], path: str, depth: int) -> str:
    """Return the grammar expression for objects that fulfil all of ``facts``. Raises SchemaError if the schema cannot
    be enforced.
    """
    return _Objects(writer, facts, path, depth).written()
