"""Translation of array keywords in a JSON schema into grammar rules: items by position, number of items, ``contains``
and ``uniqueItems``.
"""

import math
from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import Any

from penstock_enginecore.structured_output.constraints.composition import Fact, Part, SchemaWriter
from penstock_enginecore.structured_output.constraints.json_grammar import Layout
from penstock_enginecore.structured_output.constraints.schema_document import (
    SchemaError,
    UnfulfillableError,
    count,
    flag,
    identity,
)
from penstock_enginecore.structured_output.constraints.values import tuple_of

_MAX_SUBSETS = 256
"""Maximum number of subsets of the allowed values in arrays with unique items. Each subset needs a grammar rule. If
there are more subsets, the grammar allows items only in the order of the enum.
"""
_MAX_IN_ORDER = 10_000
"""Maximum product of the number of allowed values and the number of items, in arrays whose items must be in the order
of the enum. Each combination of a value and a number of items needs a grammar rule.
"""
_MAX_PLACES = 64
"""Maximum number of positions for which the grammar of an array with ``contains`` has a separate alternative."""


def array(writer: SchemaWriter, facts: Sequence[Fact], path: str, depth: int) -> str:
    """Return the grammar expression for arrays that fulfil all of ``facts``. Raises SchemaError if the schema cannot be
    enforced or no array fulfils it.
    """
    low, high = _sizes(facts, path)
    tuples = [(tuple_of(fact.keywords, fact.path), fact) for fact in facts]
    length = max((len(prefix) for (prefix, _), _ in tuples), default=0)
    places = [[_item(each, i) for each, _ in tuples] for i in range(length)]
    rest = [Part(*last) for (_, last), _ in tuples]
    for (_prefix, _), fact in tuples:
        unevaluated = fact.keywords.get("unevaluatedItems", True)
        if unevaluated is not True and (unevaluated is not False or len(facts) > 1):
            raise SchemaError(
                f"{fact.path}/unevaluatedItems",
                "is only supported with the value false, and only if no other schema describes the same array",
            )
        closing = "additionalItems" if isinstance(fact.keywords.get("items"), list) else "items"
        if unevaluated is False and closing not in fact.keywords:
            rest.append(Part(False, f"{fact.path}/unevaluatedItems"))
    rest = [part for part in rest if part.schema is not True]
    if any(part.schema is False for part in rest):
        if low > length:
            least = next((f"{f.path}/minItems" for f in facts if "minItems" in f.keywords), path)
            raise UnfulfillableError(least, f"is {low}; only {length} items are allowed")
        high = length if high is None else min(high, length)
    places = places[:high]
    unique = next((f for f in facts if flag(f.keywords, "uniqueItems", f.path)), None)
    wanted = _wanted(facts)
    with writer.inside() as blanks:
        if unique is not None and (high is None or high > 1):
            if wanted:
                raise SchemaError(f"{unique.path}/uniqueItems", "is not supported together with contains")
            return _unique(writer, unique, places, rest, low, high, blanks, depth)
        if wanted:
            return _containing(writer, places, rest, wanted, low, high, blanks, depth)
        return _items(writer, places, rest, low, high, blanks, depth)


def _sizes(facts: Sequence[Fact], path: str) -> tuple[int, int | None]:
    lows = [count(fact.keywords, "minItems", fact.path) or 0 for fact in facts]
    highs = [high for fact in facts if (high := count(fact.keywords, "maxItems", fact.path)) is not None]
    low, high = max(lows, default=0), min(highs, default=None)
    if high is not None and low > high:
        raise UnfulfillableError(path, f"has minItems {low}, which is above maxItems {high}")
    return low, high


def _item(each: tuple[list[tuple[Any, str]], tuple[Any, str]], index: int) -> Part:
    prefix, last = each
    return Part(*(prefix[index] if index < len(prefix) else last))


def _wanted(facts: Sequence[Fact]) -> Part | None:
    """Return the schema of ``contains``, or None."""
    found = None
    for fact in facts:
        if "contains" not in fact.keywords:
            continue
        least, most = (count(fact.keywords, name, fact.path) for name in ("minContains", "maxContains"))
        if most is not None:
            raise SchemaError(f"{fact.path}/maxContains", "is not supported")
        if least == 0:
            continue
        if least is not None and least > 1:
            raise SchemaError(f"{fact.path}/minContains", f"is {least}; only 1 is supported")
        if found is not None:
            raise SchemaError(f"{fact.path}/contains", f"is not supported together with {found.path}")
        found = Part(fact.keywords["contains"], f"{fact.path}/contains")
    return found


def _items(
    writer: SchemaWriter,
    places: Sequence[Sequence[Part]],
    rest: Sequence[Part],
    low: int,
    high: int | None,
    blanks: Layout,
    depth: int,
) -> str:
    """Return the grammar expression for an array of ``low`` to ``high`` items. Item i fulfils ``places[i]``, and items
    after ``places`` fulfil ``rest``.
    """
    written, last, high = _written(writer, places, rest, low, high, depth)
    if not written and low == 0 and high is None and last == "any":
        return "array"
    return writer.rules.add(f'"[" {blanks.opened} {sequence(written, last, low, high, blanks)}"]"')


def _written(
    writer: SchemaWriter, places: Sequence[Sequence[Part]], rest: Sequence[Part], low: int, high: int | None, depth: int
) -> tuple[list[str], str, int | None]:
    """Return the grammar expressions for the items ``places``, the grammar expression for the items ``rest``, and the
    maximum number of items. An empty expression for ``rest`` means that no items may follow ``places``.
    """
    written: list[str] = []
    for index, parts in enumerate(places):
        try:
            written.append(writer.convert(parts, depth + 1))
        except UnfulfillableError:
            if index < low or sum(part.schema is not True for part in parts) < 2:
                raise
            return written, "", index
    if high is not None and high <= len(places):
        return written, "", high
    try:
        return written, writer.convert(rest, depth + 1), high
    except UnfulfillableError:
        if low > len(places) or len(rest) < 2:
            raise
        return written, "", len(places)


def _containing(
    writer: SchemaWriter,
    places: Sequence[Sequence[Part]],
    rest: Sequence[Part],
    wanted: Part,
    low: int,
    high: int | None,
    blanks: Layout,
    depth: int,
) -> str:
    """Return the grammar expression for an array in which at least one item fulfils ``wanted``. The expression has one
    alternative for each of the first positions of that item. If the array has no maximum length, one more alternative
    covers all later positions.
    """
    if places:
        raise SchemaError(wanted.path, "is not supported together with items that have schemas by position")
    if high == 0:
        raise UnfulfillableError(wanted.path, "must be fulfilled, but no items are allowed")
    most = low if high is None else high
    if most > _MAX_PLACES:
        raise SchemaError(
            wanted.path, f"is only supported in arrays whose maximum length (maxItems) is at most {_MAX_PLACES}"
        )
    one = writer.convert([*rest, wanted], depth + 1)
    other = writer.convert(rest, depth + 1) if high != 1 else one
    options = []
    for before in range(most if high is not None else max(low, 1)):
        least = max(low - 1 - before, 0)
        greatest = "" if high is None else high - 1 - before
        first = f"{one}" if not before else f"{other} ({blanks.comma} {other}){{{before - 1}}} {blanks.comma} {one}"
        options.append(f"{first} ({blanks.comma} {other}){{{least},{greatest}}}")
    if high is None:  # The item that fulfils ``wanted`` may also be after the first positions.
        more = max(low, 1)
        options.append(
            f"{other} ({blanks.comma} {other}){{{more - 1},}} {blanks.comma} {one} ({blanks.comma} {other})*"
        )
    body = writer.rules.add(" | ".join(options))
    return writer.rules.add(f'"[" {blanks.opened} {blanks.first} {body} {blanks.last} "]"')


def _unique(
    writer: SchemaWriter,
    unique: Fact,
    places: Sequence[Sequence[Part]],
    rest: Sequence[Part],
    low: int,
    high: int | None,
    blanks: Layout,
    depth: int,
) -> str:
    """Return the grammar expression for an array without duplicates. The schema must list the allowed values."""
    place = f"{unique.path}/uniqueItems"
    if places:
        return _apart_by_place(writer, place, places, rest, low, high, blanks, depth)
    given = writer.values_of(rest) if rest else None
    if given is None:
        raise SchemaError(place, "is only supported where the items are values of an enum, booleans or null")
    different: dict[Hashable, Any] = {}
    for value in given:
        different.setdefault(identity(value), value)
    values = [*different.values()]
    high = len(values) if high is None else min(high, len(values))
    if low > high:
        raise UnfulfillableError(place, f"allows at most {len(values)} different items, but minItems is {low}")
    written = [writer.convert([Part({"enum": [value]}, place)], depth + 1) for value in values]
    rules = writer.rules
    if len(values) * high > _MAX_IN_ORDER:
        raise SchemaError(
            place, f"is only supported for up to {math.isqrt(_MAX_IN_ORDER)} different values, not {len(values)}"
        )
    if _subsets(len(values), high) > _MAX_SUBSETS:
        return _in_order(writer, written, low, high, blanks)
    names = {
        frozenset(used): rules.name() for size in range(1, high + 1) for used in combinations(range(len(values)), size)
    }
    for used, name in names.items():
        options = [blanks.last or '""'] if len(used) >= low else []
        if len(used) < high:
            options += [f"{blanks.comma} {written[i]} {names[used | {i}]}" for i in range(len(values)) if i not in used]
        rules.add(" | ".join(options), name)
    first = rules.add(" | ".join(f"{blanks.first} {written[i]} {names[frozenset({i})]}" for i in range(len(values))))
    return rules.add(f'"[" {blanks.opened} {first if low else f"({first})?"} "]"')


def _subsets(values: int, size: int) -> int:
    total, ways = 0, 1
    for chosen in range(1, size + 1):
        ways = ways * (values - chosen + 1) // chosen
        total += ways
        if total > _MAX_SUBSETS:
            break
    return total


def _in_order(writer: SchemaWriter, written: Sequence[str], low: int, high: int, blanks: Layout) -> str:
    """Return the grammar expression for an array of ``low`` to ``high`` of the values, in the order of ``written``."""
    rules = writer.rules
    # after[n] is the rule for the remaining items after n items. The remaining items come after the current value in
    # the order of the enum.
    after: list[str | None] = [
        rules.add(blanks.last or '""') if low <= size <= high else None for size in range(high + 1)
    ]
    first: str | None = None
    for value in reversed(written):
        if (begun := after[1] if high >= 1 else None) is not None:
            options = [f"{blanks.first} {value} {begun}", *([first] if first else [])]
            first = rules.add(" | ".join(options))
        before = list(after)
        for size in range(1, high):
            following = before[size + 1]
            options = [*([f"{blanks.comma} {value} {following}"] if following else [])]
            options += [each] if (each := before[size]) else []
            after[size] = rules.add(" | ".join(options)) if options else None
    body = f"({first})?" if low == 0 else first
    return rules.add(f'"[" {blanks.opened} {body} "]"')


def _apart_by_place(
    writer: SchemaWriter,
    place: str,
    places: Sequence[Sequence[Part]],
    rest: Sequence[Part],
    low: int,
    high: int | None,
    blanks: Layout,
    depth: int,
) -> str:
    """Return the grammar expression for an array whose items have schemas by position. The items cannot be equal,
    because their lists of allowed values are disjoint.
    """
    values = [writer.values_of(parts) for parts in places]
    listed = [each for each in values if each is not None]
    if high is None or high > len(places) or len(listed) < len(places):
        raise SchemaError(place, "is only supported where the items are values of an enum, booleans or null")
    for a, b in combinations(listed, 2):
        if not set(map(identity, a)).isdisjoint(map(identity, b)):
            raise SchemaError(
                place, "is not supported together with items that have schemas by position and may be equal"
            )
    return _items(writer, places, rest, low, high, blanks, depth)


def sequence(places: Sequence[str], rest: str, low: int, high: int | None, blanks: Layout) -> str:
    """Return the grammar expression for ``low`` to ``high`` items with separators and whitespace: first the items
    ``places``, then items ``rest``. An empty ``rest`` means that no items follow ``places``.
    """
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
