r"""Rules that all grammars of JSON texts share: whitespace, ranges of numbers, and strings.

The grammar allows exactly one spelling of each string: characters are escaped only if necessary, and never with ``\u``.
The same property name therefore cannot have two spellings. The amount of whitespace between tokens is limited.
Otherwise a model that repeats whitespace could use up ``max_tokens``. The lengths of numbers are limited for the same
reason.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, NamedTuple

from penstock_common.types.sampling import JsonWhitespace
from penstock_enginecore.structured_output.constraints.regex import (
    ANY,
    ESCAPED,
    PLAIN_IN_JSON,
    CharSet,
    as_json,
    literal,
)

# Whitespace between the tokens of JSON.

INDENT = 4
"""Maximum number of indentation characters per level after a line break, if the depth of the value is known."""
MAX_INDENT = 32
"""Maximum number of indentation characters after a line break if the depth of the value is unknown. The depth is
unknown inside references, and for values of any type.
"""

Level = int | None
"""Number of arrays and objects that surround a JSON token, or None if the rule with the token is used at several
depths.
"""


class Layout(NamedTuple):
    """Expressions for whitespace and separators in one array or object. An empty string means that the grammar writes
    nothing at that place.

    Attributes:
        opened: Whitespace after the opening bracket.
        first: Whitespace before the first member or item.
        last: Whitespace after the last member or item.
        comma: Comma between members or items, with whitespace.
        colon: Colon after a member's name, with whitespace.
    """

    opened: str
    first: str
    last: str
    comma: str
    colon: str


COMPACT = Layout("", "", "", '","', '":"')
ANY_LAYOUT = Layout("ws", "", "ws", 'ws "," ws', 'ws ":" ws')
_WS = f'(" " | "\\n" [ \\t]{{0,{MAX_INDENT}}})?'
_BEHIND_STRING = {
    JsonWhitespace.DUMPS: '("\\n" [ \\t]*)? [,}\\]:]',
    JsonWhitespace.COMPACT: "[,}\\]:]",
    JsonWhitespace.ANY: "ws [,}\\]:]",
}


def deeper(level: Level) -> Level:
    """Return the level of the members of an array or object that is at ``level``."""
    return None if level is None else level + 1


def layout(whitespace: JsonWhitespace, level: Level, add: Callable[[str, str], str]) -> Layout:
    """Return the layout inside an array or object whose members are at ``level``. ``add`` creates a rule from a body
    and a name.
    """
    if whitespace is JsonWhitespace.COMPACT:
        return COMPACT
    if whitespace is JsonWhitespace.ANY:
        add(_WS, "ws")
        return ANY_LAYOUT
    inner, outer = ("", "") if level is None else (str(level), str(level - 1))
    first = add(f"({_line_break(level)})?", f"line{inner}")
    last = add(f"({_line_break(None if level is None else level - 1)})?", f"line{outer}")
    comma = add(f'"," (" " | {_line_break(level)})?', f"comma{inner}")
    return Layout("", first, last, comma, '":" " "?')


def behind_string(whitespace: JsonWhitespace) -> str:
    """Return a grammar expression for all texts that can come directly after a JSON string."""
    return _BEHIND_STRING[whitespace]


def _line_break(level: Level) -> str:
    blanks = MAX_INDENT if level is None else INDENT * level
    return f'"\\n" [ \\t]{{0,{blanks}}}' if blanks else '"\\n"'


# Ranges of numbers: JSON numbers without an exponent, whose rules go digit by digit. Every number that is written
# within bounds has at most 15 significant digits. Different texts are therefore different floats, and an exclusive
# bound stays exclusive after parsing. If a bound cannot be written as such a number, the next number inside the range
# is the bound.

MAX_INTEGER_DIGITS = 18
"""Maximum number of digits of an integer without an upper bound. All such integers fit into 64 bits."""
MAX_SIGNIFICANT = 15
"""Maximum number of digits of a number with a decimal fraction. Different texts with at most 15 digits are different
floats.
"""
_FRACTION = 6
_SMALL = 10 ** (MAX_SIGNIFICANT - _FRACTION)
_Writer = Callable[[int, int], list[str]]

INTEGER = f'"-"? ("0" | [1-9] [0-9]{{0,{MAX_INTEGER_DIGITS - 1}}})'
NUMBER = f'"-"? ("0" | [1-9] [0-9]{{0,14}}) ("." [0-9]{{1,{MAX_SIGNIFICANT}}})? ([eE] [+\\-]? [0-9]{{1,2}})?'


def integer_range(low: Decimal | None, high: Decimal | None, *, above: bool = False, below: bool = False) -> str:
    """Return the grammar expression for the integers from ``low`` to ``high``. A bound of None means no bound.

    ``above`` excludes ``low`` itself, and ``below`` excludes ``high``. Raises ValueError if there is no such integer of
    at most 18 digits.
    """
    limit = 10**MAX_INTEGER_DIGITS - 1
    first, last = -limit if low is None else _lowest(low, above), limit if high is None else _highest(high, below)
    return _signed(max(first, -limit), min(last, limit), _naturals, "18 digits")


def number_range(low: Decimal | None, high: Decimal | None, *, above: bool = False, below: bool = False) -> str:
    """Return the grammar expression for numbers in a range. The arguments are as in ``integer_range``. The numbers have
    up to 6 decimal places, or no decimal places if a bound is 10**9 or more.
    """
    small = all(bound is None or abs(bound) < _SMALL for bound in (low, high))
    scale = 10**_FRACTION if small else 1
    limit = 10**MAX_SIGNIFICANT - 1
    first = -limit if low is None else _lowest(low * scale, above)
    last = limit if high is None else _highest(high * scale, below)
    write = _decimals if small else _naturals
    return _signed(max(first, -limit), min(last, limit), write, f"{_FRACTION} decimal places")


def _lowest(bound: Decimal, exclusive: bool) -> int:
    whole = int(bound.to_integral_value(ROUND_CEILING))
    return whole + 1 if exclusive and whole == bound else whole


def _highest(bound: Decimal, exclusive: bool) -> int:
    whole = int(bound.to_integral_value(ROUND_FLOOR))
    return whole - 1 if exclusive and whole == bound else whole


def _signed(first: int, last: int, write: _Writer, written: str) -> str:
    if first > last:
        raise ValueError(f"no number with at most {written} is between the bounds")
    options = []
    if last >= 0:
        options += write(max(first, 0), last)
    if first < 0:
        options.append(f'"-" ({" | ".join(write(max(-last, 1), -first))})')
    return f"({' | '.join(options)})"


def _naturals(first: int, last: int) -> list[str]:
    """Return grammar alternatives for the integers from ``first`` to ``last``, without leading zeros."""
    options = []
    for length in range(len(str(first)), len(str(last)) + 1):
        smallest = 0 if length == 1 else 10 ** (length - 1)
        low, high = max(first, smallest), min(last, 10**length - 1)
        options.append(_digits(str(low), str(high)))
    return options


def _decimals(first: int, last: int) -> list[str]:
    """Return grammar alternatives for the numbers from ``first`` to ``last``, which are given in millionths."""
    (low, low_part), (high, high_part) = divmod(first, 10**_FRACTION), divmod(last, 10**_FRACTION)
    nines = 10**_FRACTION - 1
    if low == high:
        return [f"{_digits(str(low), str(low))} {_fraction(low_part, high_part)}"]
    options = []
    if low_part > 0:
        options.append(f"{_digits(str(low), str(low))} {_fraction(low_part, nines)}")
        low += 1
    if high_part < nines:
        options.append(f"{_digits(str(high), str(high))} {_fraction(0, high_part)}")
        high -= 1
    if low <= high:
        options.append(f"({' | '.join(_naturals(low, high))}) {_fraction(0, nines)}")
    return options


def _fraction(first: int, last: int) -> str:
    """Return the grammar expression for the decimal point and decimal places of the numbers from ``first`` to ``last``,
    which are given in millionths. The numbers have at most 6 decimal places.
    """
    if first == 0 and last == 10**_FRACTION - 1:
        return f'("." [0-9]{{1,{_FRACTION}}})?'
    options = ['""'] if first == 0 else []
    for length in range(1, _FRACTION + 1):
        unit = 10 ** (_FRACTION - length)
        low, high = -(-first // unit), last // unit
        if low <= high:
            options.append(f'"." {_digits(str(low).zfill(length), str(high).zfill(length))}')
    return f"({' | '.join(options)})"


def _digits(low: str, high: str) -> str:
    """Return a grammar expression for the strings of digits from ``low`` to ``high``, which have the same length."""
    if low == high:
        return f'"{low}"'
    length = len(low)
    if low == "0" * length and high == "9" * length:
        return f"[0-9]{{{length}}}"
    if low[0] == high[0]:
        return f'"{low[0]}" {_digits(low[1:], high[1:])}'
    if length == 1:
        return f"[{low}-{high}]"
    rest = length - 1
    first, last, options = int(low[0]), int(high[0]), []
    if low[1:] != "0" * rest:
        options.append(f'"{first}" {_digits(low[1:], "9" * rest)}')
        first += 1
    if high[1:] != "9" * rest:
        options.append(f'"{last}" {_digits("0" * rest, high[1:])}')
        last -= 1
    if first <= last:
        options.append(f"[{first}-{last}] [0-9]{{{rest}}}")
    return f"({' | '.join(options)})"


_SHARED = {
    "char": as_json(ANY),
    "string": '"\\"" end',
    "integer": INTEGER,
    "number": NUMBER,
    "boolean": '"true" | "false"',
    "null": '"null"',
    "any": "string | number | boolean | null | array | object",
}
"""Names and bodies of the rules that all grammars share and that do not depend on whitespace."""
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\[\]|\{\}|[\[\]{},:]|[^\[\]{},:"]+')


class Rules:
    """A grammar under construction: rules by name, including the rules that all JSON grammars share."""

    def __init__(self, whitespace: JsonWhitespace = JsonWhitespace.DUMPS) -> None:
        self._whitespace = whitespace
        self._bodies: dict[str, str] = {}
        self._names = 0
        self._share()

    def _share(self) -> None:
        anywhere = self.layout(None)
        # The rule for strings is recursive and includes a lookahead for the text after the string. The compiler can
        # therefore decide for most tokens in advance whether they are allowed. This makes filling a bitmask inside a
        # string 50 times faster.
        self.add(f'("\\"" | char end) (=({behind_string(self._whitespace)}))', "end")
        for name, body in _SHARED.items():
            self.add(body, name)
        self.add(f"string {anywhere.colon} any", "member")
        for name, brackets, part in (("array", "[]", "any"), ("object", "{}", "member")):
            parts = f"{anywhere.first} {part} ({anywhere.comma} {part})* {anywhere.last}"
            self.add(f'"{brackets[0]}" {anywhere.opened} ({parts})? "{brackets[1]}"', name)

    def layout(self, level: Level) -> Layout:
        """Return the whitespace and separators of an array or object whose members are at ``level``."""
        return layout(self._whitespace, level, self.add)

    def name(self) -> str:
        """Return an unused rule name, for a rule that the caller adds later."""
        self._names += 1
        return f"r{self._names}"

    def add(self, body: str, name: str = "") -> str:
        """Add a rule to the grammar, and return the rule's name."""
        name = name or self.name()
        self._bodies[name] = body
        return name

    @property
    def bodies(self) -> Mapping[str, str]:
        """Bodies of all rules of the grammar, by rule name."""
        return self._bodies

    def text(self, root: str) -> str:
        """Return the text of the complete grammar, which generates the texts of the expression ``root``."""
        return f"root ::= {root}\n" + "".join(f"{name} ::= {body}\n" for name, body in self._bodies.items())

    def value(self, value: Any, level: Level) -> str:
        """Return the grammar expression that generates only the JSON value ``value``. ``level`` is the level of the
        value. Raises ValueError for an unpaired surrogate.
        """
        written, plain = list[str](), ""
        inside: list[Layout] = []
        for part in _TOKEN.findall(_compact(value)):
            if part in ("[", "{"):
                level = deeper(level)
                inside.append(self.layout(level))
                written += [literal(plain + part), inside[-1].opened, inside[-1].first]
                plain = ""
            elif part in ("]", "}"):
                level = None if level is None else level - 1
                written += [literal(plain), inside.pop().last] if plain else [inside.pop().last]
                plain = part
            elif part in (",", ":"):
                written += [literal(plain), inside[-1].comma if part == "," else inside[-1].colon]
                plain = ""
            else:
                plain += part
        written.append(literal(plain))
        return " ".join(part for part in written if part)


def json_literal(value: Any) -> str:
    """Return the grammar expression that generates only one JSON value, which is not an array or object. Raises
    ValueError for an unpaired surrogate.
    """
    return literal(_compact(value))


def _compact(value: Any) -> str:
    """Return the text of a JSON value without whitespace."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=float)
    text.encode()
    return text


def other_strings(rules: Rules, taken: list[str]) -> str:
    """Add a rule for all JSON strings that are not in ``taken``. The rule is a tree over the characters of the strings
    in ``taken``. The rule accepts a string once one of its characters differs from all of these strings.
    """
    body = _remainder(rules, sorted(set(taken)))
    return rules.add(f'"\\"" {body}')


def _remainder(rules: Rules, taken: list[str]) -> str:
    """Return a rule for the remaining characters of a string, including the closing quote. ``taken`` has the remaining
    characters of the excluded strings that begin in the same way.
    """
    by_first: dict[str, list[str]] = {}
    for text in taken:
        by_first.setdefault(text[:1], []).append(text[1:])
    options = [] if "" in by_first else ['"\\""']
    by_first.pop("", None)
    options.append(f"{as_json(ANY - CharSet.of(''.join(by_first)))} end")
    for first, ends in by_first.items():
        written = literal(first if first in PLAIN_IN_JSON else "\\" + ESCAPED.get(first, ""))
        if first in PLAIN_IN_JSON or first in ESCAPED:
            options.append(f"{written} {_remainder(rules, ends)}")
    return rules.add(" | ".join(options))


# Detection of rules that generate no text. A rule generates no text if every alternative needs the rule itself again.

_SYMBOL = re.compile(
    r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|\(=|\{[0-9]+(?:,[0-9]*)?\}|[()|?*+]|[A-Za-z_][A-Za-z0-9_]*'
)


def unproductive(rules: Rules, names: Iterable[str]) -> list[str]:
    """Return the names of the rules in ``names`` that generate no text. The function works only for grammars that
    this package wrote.
    """
    read = {name: _read(body) for name, body in rules.bodies.items()}
    known: set[str] = set()
    users: dict[str, list[str]] = {}
    for name, body in read.items():
        for used in _names(body):
            users.setdefault(used, []).append(name)
    left = list(read)
    while left:
        name = left.pop()
        if name not in known and _ends(read[name], known):
            known.add(name)
            left += users.get(name, ())
    return [name for name in names if name in read and name not in known]


Expression = str | tuple[str, list["Expression"]]
"""Structure of a rule's body: the name of a rule, or a pair of ``all`` or ``any`` and several expressions. Expressions
that refer to no rule are left out.
"""


def _ends(body: Expression, known: set[str]) -> bool:
    if isinstance(body, str):
        return body in known
    kind, parts = body
    return all(_ends(p, known) for p in parts) if kind == "all" else any(_ends(p, known) for p in parts)


def _names(body: Expression) -> Iterable[str]:
    if isinstance(body, str):
        yield body
        return
    for part in body[1]:
        yield from _names(part)


def _read(body: str) -> Expression:
    return _alternatives(_SYMBOL.findall(body), 0)[0]


def _alternatives(tokens: Sequence[str], at: int) -> tuple[Expression, int]:
    options, here = list[Expression](), list[Expression]()
    while at < len(tokens) and tokens[at] != ")":
        word = tokens[at]
        at += 1
        if word == "|":
            options.append(("all", here))
            here = []
            continue
        part: Expression = ("all", [])
        if word in ("(", "(="):
            part, at = _alternatives(tokens, at)
            at += 1
            part = ("all", []) if word == "(=" else part
        elif word[0] not in '"[':
            part = word
        if at < len(tokens) and (tokens[at] in "?*+" or tokens[at][0] == "{"):
            least = tokens[at]
            at += 1
            if least in "?*" or least.startswith("{0,") or least == "{0}":
                part = ("all", [])
        if part != ("all", []):
            here.append(part)
    options.append(("all", here))
    return (options[0] if len(options) == 1 else ("any", options)), at
