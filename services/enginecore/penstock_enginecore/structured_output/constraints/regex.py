"""Translation of regular expressions to grammar expressions.

The dialect is the common subset of ECMA-262 (the dialect of JSON Schema) and most other dialects: alternation, groups,
character classes, greedy and lazy repetition, and anchors at the beginning and the end. Features that a grammar cannot
express (lookaround, back references, word boundaries) are refused with their name and position, never ignored.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

# Sets of characters, and how a grammar writes them.

Range = tuple[int, int]
"""First and last code point of a range of characters. Both belong to the range."""

_SURROGATES = (0xD800, 0xDFFF)
_LAST = 0x10FFFF
ESCAPED = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
"""Characters that a JSON string escapes with a backslash. The value is the character after the backslash."""


class CharSet:
    """An immutable set of Unicode characters, without surrogates."""

    __slots__ = ("ranges",)

    def __init__(self, ranges: Iterable[Range]) -> None:
        self.ranges = tuple(_merged(ranges))

    @classmethod
    def of(cls, characters: str) -> "CharSet":
        """Return the set of the characters in a string."""
        return cls((ord(c), ord(c)) for c in characters)

    def __or__(self, other: "CharSet") -> "CharSet":
        return CharSet((*self.ranges, *other.ranges))

    def __invert__(self) -> "CharSet":
        edges = [(-1, -1), *sorted((*self.ranges, _SURROGATES)), (_LAST + 1, _LAST + 1)]
        return CharSet((low[1] + 1, high[0] - 1) for low, high in pairwise(edges) if low[1] + 1 <= high[0] - 1)

    def __sub__(self, other: "CharSet") -> "CharSet":
        return ~(~self | other)

    def __and__(self, other: "CharSet") -> "CharSet":
        return ~(~self | ~other)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __contains__(self, character: str) -> bool:
        return any(low <= ord(character) <= high for low, high in self.ranges)


def _merged(ranges: Iterable[Range]) -> Iterator[Range]:
    below, above = (0, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, _LAST)
    parts = [
        (max(low, part[0]), min(high, part[1]))
        for low, high in ranges
        for part in (below, above)
        if max(low, part[0]) <= min(high, part[1])
    ]
    current: Range | None = None
    for low, high in sorted(parts):
        if current is not None and low <= current[1] + 1:
            current = (current[0], max(current[1], high))
            continue
        if current is not None:
            yield current
        current = (low, high)
    if current is not None:
        yield current


ANY = CharSet([(0, _LAST)])
PLAIN_IN_JSON = CharSet([(0x20, _LAST)]) - CharSet.of('"\\')
"""Characters that a JSON string may contain without an escape."""


def as_text(characters: CharSet) -> str:
    """Return the grammar expression for one of ``characters``. The set must not be empty."""
    return (
        "["
        + "".join(_escape(low) + ("" if low == high else "-" + _escape(high)) for low, high in characters.ranges)
        + "]"
    )


def as_json(characters: CharSet) -> str:
    """Return the grammar expression for one of ``characters`` inside a JSON string. The expression allows only one
    spelling of each character.

    Control characters without an escape letter cannot be written. Returns ``""`` if none of ``characters`` can be
    written.
    """
    parts = [as_text(plain)] if (plain := characters & PLAIN_IN_JSON) else []
    if letters := "".join(letter for c, letter in ESCAPED.items() if c in characters):
        parts.append('"\\\\" ' + as_text(CharSet.of(letters)))
    return f"({' | '.join(parts)})" if len(parts) > 1 else "".join(parts)


def literal(text: str) -> str:
    """Return the grammar expression for exactly ``text``."""
    return '"' + "".join(_escape(ord(c)) for c in text) + '"'


def _escape(code: int) -> str:
    character = chr(code)
    if character.isascii() and character.isalnum():
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


MAX_REPEAT = 65_536
"""Maximum number of repetitions that an expression may specify."""
MAX_DEPTH = 64
"""Maximum depth to which groups may be nested."""
MAX_EMPTY_REPEAT = 8
"""Maximum number of repetitions of an item that can match the empty text. The numbers of nested repetitions are
multiplied. The limit exists because the compiler tries every combination of empty and other repetitions.
"""

_DIGIT = CharSet.of("0123456789")
_WORD = _DIGIT | CharSet([(ord("a"), ord("z")), (ord("A"), ord("Z")), (ord("_"), ord("_"))])
_SPACE = CharSet.of(" \t\n\r\f\v\u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff") | CharSet([(0x2000, 0x200A)])
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE, "D": ~_DIGIT, "W": ~_WORD, "S": ~_SPACE}
_DOT = ANY - CharSet.of("\n\r\u2028\u2029")
_CONTROL = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_HEX = {"x": 2, "u": 4}
_REFUSED_ESCAPES = {
    "b": "a word boundary",
    "B": "a word boundary",
    "p": "a Unicode property",
    "P": "a Unicode property",
}
_REFUSED_GROUPS = {
    "<=": "a lookbehind",
    "<!": "a lookbehind",
    ">": "an atomic group",
}


class RegexError(ValueError):
    """Raised when a regular expression is malformed or uses an unsupported feature."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """``^`` or ``$`` at character ``position`` of a regular expression."""

    start: bool
    position: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """Repetition of ``item``, from ``low`` to ``high`` times. ``high`` is None if there is no limit."""

    item: "Node"
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Group:
    """Group of alternatives. Each alternative is a sequence of nodes."""

    options: tuple[tuple["Node", ...], ...]


@dataclass(frozen=True, slots=True)
class Lookahead:
    """An expression that must match at this point of the text, or must not match if ``negative``. A lookahead consumes
    no characters. ``position`` is its position in the pattern.
    """

    item: Group
    negative: bool
    position: int


Node = CharSet | Anchor | Repeat | Group | Lookahead


def parse(pattern: str) -> Group:
    """Return a parsed regular expression. Raises RegexError if the expression is malformed or uses an unsupported
    feature.
    """
    return _Parser(pattern).parse()


def whole(pattern: str) -> str:
    """Return the grammar expression for the texts that ``pattern`` matches completely. Raises RegexError if the
    expression is malformed or uses an unsupported feature.
    """
    return _emit_options(parse(pattern), in_json=False, search=False)


def in_json_string(pattern: Group) -> str:
    """Return the grammar expression for the content of a JSON string in which ``pattern`` matches somewhere, as the
    keyword ``pattern`` of JSON Schema requires.

    Raises RegexError if the expression uses an unsupported feature.
    """
    return _emit_options(pattern, in_json=True, search=True)


def _emit_options(group: Group, *, in_json: bool, search: bool) -> str:
    """Return grammar expressions for the alternatives of a group. Each alternative at the outermost level may have
    anchors. If an alternative consists only of a group, the alternatives of that group are written instead.
    """
    options = []
    for sequence in group.options:
        if len(sequence) == 1 and isinstance(sequence[0], Group):
            options.append(_emit_options(sequence[0], in_json=in_json, search=search))
            continue
        starts = bool(sequence) and isinstance(sequence[0], Anchor) and sequence[0].start
        inner = sequence[1:] if starts else sequence
        ends = bool(inner) and isinstance(inner[-1], Anchor) and not inner[-1].start
        inner = inner[:-1] if ends else inner
        if (starts or ends) and len(inner) == 1 and isinstance(inner[0], Group) and not (search and starts != ends):
            options.append(_emit_options(inner[0], in_json=in_json, search=False))
            continue
        anything = (as_json if in_json else as_text)(ANY) + "*"
        before, after = search and not starts, search and not ends
        body = _emit_sequence(inner, in_json)
        options.append(" ".join([anything] * before + [body] + [anything] * after))
    return f"({' | '.join(options)})"


def _emit_sequence(sequence: tuple[Node, ...], in_json: bool) -> str:
    return " ".join(_emit(node, in_json) for node in sequence) or '""'


def _emit(node: Node, in_json: bool) -> str:
    if isinstance(node, CharSet):
        if expression := (as_json if in_json else as_text)(node) if node else "":
            return expression
        raise RegexError(
            "a character class matches no character, or only control characters that JSON strings cannot contain"
        )
    if isinstance(node, Lookahead):
        raise RegexError(f"a lookahead at position {node.position} is not supported in this expression")
    if isinstance(node, Anchor):
        raise RegexError(f"{'^' if node.start else '$'} at position {node.position} is not at an end of the expression")
    if isinstance(node, Repeat):
        if node.high == 0:
            return '""'
        high = "" if node.high is None else node.high
        return f"({_emit(node.item, in_json)}){{{node.low},{high}}}"
    return f"({' | '.join(_emit_sequence(option, in_json) for option in node.options)})"


class _Parser:
    """Recursive descent parser for the regular expression ``text``."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0

    def parse(self) -> Group:
        group = self.group()
        if self.position < len(self.text):
            raise self.error("unbalanced )")
        return group

    def error(self, what: str, at: int | None = None) -> RegexError:
        return RegexError(f"{what} at position {self.position if at is None else at}")

    def peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def take(self, what: str = "") -> bool:
        if not what or not self.text.startswith(what, self.position):
            return False
        self.position += len(what)
        return True

    def next(self, inside: str) -> str:
        if self.position >= len(self.text):
            raise self.error(f"{inside} is not finished")
        self.position += 1
        return self.text[self.position - 1]

    def group(self) -> Group:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error(f"groups are nested more than {MAX_DEPTH} levels deep")
        options = [self.sequence()]
        while self.take("|"):
            options.append(self.sequence())
        self.depth -= 1
        return Group(tuple(options))

    def sequence(self) -> tuple[Node, ...]:
        nodes: list[Node] = []
        while self.peek() and self.peek() not in "|)":
            nodes.append(self.repeated(self.atom()))
        return tuple(nodes)

    def atom(self) -> Node:
        at = self.position
        character = self.next("the expression")
        if character == "(":
            return self.parentheses(at)
        if character == "[":
            return self.bracket(at)
        if character == ".":
            return _DOT
        if character in "^$":
            return Anchor(character == "^", at)
        if character == "\\":
            return self.escape(at)
        if character in "*+?":
            raise self.error(f"{character} repeats nothing", at)
        if character == "{" and (self.peek().isdigit() or self.peek() == ","):
            raise self.error("{ repeats nothing or has no lower bound", at)
        return CharSet.of(character)

    def parentheses(self, at: int) -> Node:
        looks = next((sign for sign in ("?=", "?!") if self.take(sign)), "")
        if not looks and self.take("?"):
            for sign, name in _REFUSED_GROUPS.items():
                if self.text.startswith(sign, self.position):
                    raise self.error(f"{name}, which is not supported,", at)
            if not self.take(":"):
                self.group_name(at)
        group = self.group()
        if not self.take(")"):
            raise self.error("( is not closed", at)
        return Lookahead(group, looks == "?!", at) if looks else group

    def group_name(self, at: int) -> None:
        end = self.text.find(">", self.position)
        if not (self.take("P<") or self.take("<")) or end < 0 or not self.text[self.position : end].isidentifier():
            raise self.error("a kind of group that is not supported", at)
        self.position = end + 1

    def repeated(self, item: Node) -> Node:
        at = self.position
        bounds = self.bounds()
        if bounds is None:
            return item
        low, high = bounds
        if isinstance(item, Anchor | Lookahead):
            raise self.error("an anchor or a lookahead is repeated", at)
        if max(low, high or 0) > MAX_REPEAT:
            raise self.error(f"a repetition of more than {MAX_REPEAT}", at)
        if high is not None and high < low:
            raise self.error("a repetition whose bounds are out of order", at)
        if (high or low) > 1 and (times := _empty_repeats(item) * (high or low)) > MAX_EMPTY_REPEAT and _nullable(item):
            raise self.error(
                f"an item that may be empty is repeated up to {times} times (the limit is {MAX_EMPTY_REPEAT}); "
                "repeat only items that cannot be empty",
                at,
            )
        self.take("?")  # Ignore the ? of a lazy repetition, because lazy and greedy repetitions match the same texts.
        if self.peek() in ("*", "+", "?") or (self.peek() == "{" and self.bounds() is not None):
            raise self.error("a repetition of a repetition", at)
        return Repeat(item, low, high)

    def bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(sign):
                return bounds
        end = self.text.find("}", self.position)
        if self.peek() != "{" or end < 0:
            return None
        low, comma, high = self.text[self.position + 1 : end].partition(",")
        if not _number(low) or not (high == "" or _number(high)):
            return None
        self.position = end + 1
        return int(low), int(high) if high else None if comma else int(low)

    def bracket(self, at: int) -> CharSet:
        negated = self.take("^")
        parts: list[CharSet] = []
        while not self.take("]"):
            low = self.class_item()
            if self.peek() == "-" and self.text[self.position + 1 : self.position + 2] not in ("]", ""):
                dash = self.position
                self.position += 1
                low = self.span(low, self.class_item(), dash)
            parts.append(low)
        found = CharSet(span for part in parts for span in part.ranges)
        found = ~found if negated else found
        if not found:
            raise self.error("a character class that matches nothing", at)
        return found

    def class_item(self) -> CharSet:
        at = self.position
        character = self.next("a character class")
        if character == "\\":
            return CharSet.of("\b") if self.take("b") else CharSet.of("-") if self.take("-") else self.escape(at)
        if character == "[" and self.peek() in (":", "=", "."):
            raise self.error("a POSIX character class, which is not supported,", at)
        return CharSet.of(character)

    def span(self, low: CharSet, high: CharSet, at: int) -> CharSet:
        ends = (*low.ranges, *high.ranges)
        if len(ends) != 2 or any(first != last for first, last in ends) or ends[1][0] < ends[0][0]:
            raise self.error("a range whose bounds are not two characters in ascending order", at)
        return CharSet([(ends[0][0], ends[1][0])])

    def escape(self, at: int) -> CharSet:
        character = self.next("an escape")
        if character in _CLASSES:
            return _CLASSES[character]
        if character in _CONTROL:
            return CharSet.of(_CONTROL[character])
        if character == "0" and not self.peek().isdigit():
            return CharSet.of("\0")
        if character in _HEX:
            return self.code_point(_HEX[character], at)
        if character.isdigit() or character == "k":
            raise self.error("a back reference, which is not supported,", at)
        if character in _REFUSED_ESCAPES:
            raise self.error(f"{_REFUSED_ESCAPES[character]}, which is not supported,", at)
        if character.isalnum():
            raise self.error(f"the escape \\{character}, which is not known,", at)
        return CharSet.of(character)

    def code_point(self, digits: int, at: int) -> CharSet:
        text = self.text[self.position : self.position + digits]
        self.position += len(text)
        if len(text) < digits or any(c not in "0123456789abcdefABCDEF" for c in text):
            raise self.error(f"an escape without its {digits} hexadecimal digits", at)
        found = CharSet.of(chr(int(text, 16)))
        if not found:
            raise self.error("an unpaired surrogate", at)
        return found


def _number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9


def _nullable(node: Node) -> bool:
    """Return whether a node matches the empty text."""
    if isinstance(node, Repeat):
        return node.low == 0 or _nullable(node.item)
    if isinstance(node, Group):
        return any(all(_nullable(part) for part in option) for option in node.options)
    return isinstance(node, Anchor | Lookahead)


def _empty_repeats(node: Node) -> int:
    """Return the maximum number of times that ``node`` repeats an item that can match the empty text. The numbers of
    nested repetitions are multiplied.
    """
    if isinstance(node, Repeat):
        times = node.high or node.low
        return _empty_repeats(node.item) * (max(times, 1) if _nullable(node.item) else 1)
    if isinstance(node, Group):
        return max((_empty_repeats(part) for option in node.options for part in option), default=1)
    return 1
