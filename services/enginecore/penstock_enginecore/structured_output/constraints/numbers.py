"""Translation of number keywords in a JSON schema into grammar rules: bounds, ``multipleOf`` and excluded numbers."""

import contextlib
import math
from collections.abc import Callable, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction

from penstock_enginecore.structured_output.constraints.composition import Fact
from penstock_enginecore.structured_output.constraints.json_grammar import (
    MAX_INTEGER_DIGITS,
    MAX_SIGNIFICANT,
    Rules,
    integer_range,
    number_range,
)
from penstock_enginecore.structured_output.constraints.schema_document import (
    INTEGER_FORMATS,
    SchemaError,
    UnfulfillableError,
    bounds,
    fits,
    number,
    shown,
)

_MAX_FRACTION = 9
"""Maximum number of decimal places in the value of ``multipleOf``."""
_MAX_RULES = 3000
"""Maximum number of grammar rules for the multiples of a number. Each combination of a remainder and a number of
remaining digits needs one rule.
"""
_MAX_EXCLUDED = 256
"""Maximum number of numbers that one schema may exclude."""

Spend = Callable[[int], None]


class _Range:
    """Constraints on the numbers of one schema."""

    def __init__(self, facts: Sequence[Fact], kind: str) -> None:
        self.low: Decimal | None = None
        self.high: Decimal | None = None
        self.above = self.below = False
        self.step: Fraction | None = None
        self.place = ""
        self.excluded: list[Decimal] = []
        for fact in facts:
            self._take_bounds(fact, kind)
            self._take_step(fact)
            numbers = [Decimal(v) for v in fact.keywords.get("!enum", ()) if fits(v, "number")]
            self.excluded += [v for v in numbers if kind == "number" or v % 1 == 0]

    def _take_bounds(self, fact: Fact, kind: str) -> None:
        lows = bounds(fact.keywords, "minimum", "exclusiveMinimum", fact.path)
        highs = bounds(fact.keywords, "maximum", "exclusiveMaximum", fact.path)
        form = fact.keywords.get("format")
        if kind == "integer" and isinstance(form, str) and form in INTEGER_FORMATS:
            least, most = INTEGER_FORMATS[form]
            lows, highs = [*lows, (Decimal(least), False, "")], [*highs, (Decimal(most), False, "")]
        for bound, excluded, _ in lows:
            if self.low is None or (bound, excluded) > (self.low, self.above):
                self.low, self.above = bound, excluded
        for bound, excluded, _ in highs:
            if self.high is None or (-bound, excluded) > (-self.high, self.below):
                self.high, self.below = bound, excluded

    def _take_step(self, fact: Fact) -> None:
        step = number(fact.keywords, "multipleOf", fact.path)
        if step is None:
            return
        place = f"{fact.path}/multipleOf"
        if step <= 0:
            raise SchemaError(place, f"is {shown(fact.keywords['multipleOf'])}; it must be above 0")
        both = Fraction(step)
        if self.step is not None:
            both = Fraction(
                math.lcm(self.step.numerator, both.numerator), math.gcd(self.step.denominator, both.denominator)
            )
        self.step, self.place = both, place


def numbers(rules: Rules, facts: Sequence[Fact], path: str, kind: str, spend: Spend) -> str:
    """Return the grammar expression for the numbers, or integers, that fulfil all of ``facts``. Raises SchemaError if
    the schema cannot be enforced or no number fulfils it.
    """
    given = _Range(facts, kind)
    step = given.step
    if kind == "integer" and step is not None:
        step = Fraction(step.numerator)  # Integers must be multiples of the least common multiple of multipleOf and 1.
    if len(given.excluded) > _MAX_EXCLUDED:
        raise SchemaError(path, f"excludes {len(given.excluded)} numbers; the limit is {_MAX_EXCLUDED}")
    try:
        if (step is not None and step != 1) or (kind == "number" and step is not None):
            return _multiples(rules, given, step, kind, spend)
        if kind == "integer":
            return _integers(rules, given)
        if any(_within(given, each) for each in given.excluded):
            raise SchemaError(
                path, "excludes numbers, which is only supported for integers and together with multipleOf"
            )
        if given.low is None and given.high is None:
            return "number"
        return rules.add(number_range(given.low, given.high, above=given.above, below=given.below))
    except SchemaError:
        raise
    except ValueError as e:
        raise UnfulfillableError(path, f"cannot be fulfilled: {e}") from None


def _integers(rules: Rules, given: _Range) -> str:
    if given.low is None and given.high is None and not given.excluded:
        return "integer"
    if not given.excluded:
        return rules.add(integer_range(given.low, given.high, above=given.above, below=given.below))
    options, low, above = list[str](), given.low, given.above
    for hole in (*sorted(set(given.excluded)), None):
        high, below = (given.high, given.below) if hole is None else (hole, True)
        if hole is not None and given.high is not None and hole > given.high:
            continue
        with contextlib.suppress(ValueError):  # Skip this range: there may be no integer between two excluded integers.
            options.append(integer_range(low, high, above=above, below=below))
        if hole is not None and (low is None or hole >= low):
            low, above = hole, True
    if not options:
        raise ValueError("every integer between the bounds is excluded")
    return rules.add(" | ".join(options))


def _within(given: _Range, value: Decimal) -> bool:
    if given.low is not None and (value < given.low or (value == given.low and given.above)):
        return False
    return not (given.high is not None and (value > given.high or (value == given.high and given.below)))


def _multiples(rules: Rules, given: _Range, step: Fraction, kind: str, spend: Spend) -> str:
    """Return the grammar expression for the multiples of ``step``. The rules go digit by digit. The multiples have at
    most as many decimal places as ``step``.
    """
    digits = 0
    while digits <= _MAX_FRACTION and 10**digits % step.denominator:
        digits += 1
    if digits > _MAX_FRACTION:
        raise SchemaError(given.place, f"has more than {_MAX_FRACTION} decimal places")
    options = []
    for places in range(digits + 1):
        unit = step * 10**places
        multiple = unit.numerator  # A number without decimal places must also be a multiple of 1.
        limit = 10 ** (MAX_INTEGER_DIGITS if kind == "integer" else MAX_SIGNIFICANT) - 1
        scale = Decimal(10) ** places
        first = -limit if given.low is None else _inwards(given.low * scale, given.above, up=True)
        last = limit if given.high is None else _inwards(given.high * scale, given.below, up=False)
        holes = {int(v * scale) for v in given.excluded if (v * scale) % 1 == 0}
        digitwise = _Digits(rules, multiple, places, holes, given.place, spend)
        options += digitwise.between(max(first, -limit), min(last, limit))
    if not options:
        raise ValueError("there is no multiple between the bounds")
    return rules.add(" | ".join(options))


def _inwards(bound: Decimal, excluded: bool, *, up: bool) -> int:
    whole = int(bound.to_integral_value(ROUND_CEILING if up else ROUND_FLOOR))
    return whole + (1 if up else -1) if excluded and whole == bound else whole


class _Digits:
    """Writes grammar rules for the multiples of ``multiple``. The last ``places`` digits of a multiple are decimal
    places. Numbers in ``holes`` are left out.
    """

    def __init__(self, rules: Rules, multiple: int, places: int, holes: set[int], place: str, spend: Spend) -> None:
        self._rules = rules
        self._multiple = multiple
        self._places = places
        self._holes = holes
        self._place = place
        self._spend = spend
        self._known: dict[tuple[int, int, int, int], str] = {}

    def between(self, first: int, last: int) -> list[str]:
        """Return grammar alternatives for the multiples in a range. The range includes both ends."""
        options = []
        for low, high in self._gaps(first, last):
            if high >= 0:
                options += self._naturals(max(low, 0), high)
            if low < 0 and (written := self._naturals(max(-high, 1), -low)):
                options.append(f'"-" ({" | ".join(written)})')
        return options

    def _gaps(self, first: int, last: int) -> list[tuple[int, int]]:
        found, low = [], first
        for hole in sorted(each for each in self._holes if first <= each <= last):
            if low < hole:
                found.append((low, hole - 1))
            low = hole + 1
        return [*found, (low, last)] if low <= last else found

    def _naturals(self, first: int, last: int) -> list[str]:
        options = []
        for length in range(self._places + 1, max(len(str(last)), self._places + 1) + 1):
            smallest = 0 if length == self._places + 1 else 10 ** (length - 1)
            low, high = max(first, smallest), min(last, 10**length - 1)
            if low <= high and (written := self._suffix(length, low, high, 0)):
                options.append(written)
        return options

    def _suffix(self, digits: int, low: int, high: int, residue: int) -> str:
        """Return a rule for ``digits`` digits with a value from ``low`` to ``high`` and the given ``residue``, or
        ``""`` if there is no such value.
        """
        if not digits:
            return '""' if residue == 0 else ""
        key = (digits, low, high, residue)
        if key in self._known:
            return self._known[key]
        self._spend(10)
        if len(self._known) >= _MAX_RULES:
            raise SchemaError(self._place, f"needs more than {_MAX_RULES} rules; use a number with fewer digits")
        unit = 10 ** (digits - 1)
        by_rest: dict[str, list[int]] = {}
        for digit in range(low // unit, high // unit + 1):
            least, most = max(low - digit * unit, 0), min(high - digit * unit, unit - 1)
            rest = self._suffix(digits - 1, least, most, (residue - digit * unit) % self._multiple)
            if rest:
                by_rest.setdefault(rest, []).append(digit)
        point = '"." ' if digits == self._places else ""
        options = [f"{point}[{''.join(map(str, each))}] {rest}" for rest, each in by_rest.items()]
        self._known[key] = self._rules.add(" | ".join(options)) if options else ""
        return self._known[key]
