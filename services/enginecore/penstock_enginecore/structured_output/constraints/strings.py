"""Translation of string keywords in a JSON schema into grammar rules. A string must fulfil all regular expressions,
formats and lengths together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock_enginecore.structured_output.constraints.automaton import Intersection, TooLargeError, literals, matchers
from penstock_enginecore.structured_output.constraints.json_grammar import Rules
from penstock_enginecore.structured_output.constraints.regex import (
    PLAIN_IN_JSON,
    Anchor,
    CharSet,
    Group,
    Lookahead,
    Node,
    RegexError,
    Repeat,
    as_json,
    in_json_string,
    parse,
)
from penstock_enginecore.structured_output.constraints.schema_document import SchemaError, UnfulfillableError

# The ``format`` keyword: a regular expression for each supported format. Some of these expressions allow fewer texts
# than the standard of the format (no 29 February, no leap second). No expression allows more texts than the standard.

_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = (
    f"{_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,3}}"
_AMOUNT = "[0-9]{1,9}"
_CLOCK = f"T({_AMOUNT}H({_AMOUNT}M({_AMOUNT}S)?)?|{_AMOUNT}M({_AMOUNT}S)?|{_AMOUNT}S)"
_DAYS = f"({_AMOUNT}Y({_AMOUNT}M({_AMOUNT}D)?)?|{_AMOUNT}M({_AMOUNT}D)?|{_AMOUNT}D)"

FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": f"^P({_DAYS}({_CLOCK})?|{_CLOCK}|{_AMOUNT}W)$",
    "email": rf"^[A-Za-z0-9_+-]{{1,32}}(\.[A-Za-z0-9_+-]{{1,32}}){{0,3}}@{_LABEL}(\.{_LABEL}){{1,3}}$",
    "hostname": f"^{_HOST}$",
    "ipv4": rf"^{_OCTET}(\.{_OCTET}){{3}}$",
    "ipv6": "^([0-9A-Fa-f]{1,4}:){7}[0-9A-Fa-f]{1,4}$",
    "uuid": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    "uri": rf"^(https?|ftp)://{_HOST}(:[1-9][0-9]{{0,3}})?(/[A-Za-z0-9._~-]{{0,64}}){{0,16}}"
    r"(\?[A-Za-z0-9._~&=-]{0,256})?(#[A-Za-z0-9._~-]{0,64})?$",
}


_LONG = 16
"""Number of repetitions from which a bounded repetition in the expression of a format counts as unbounded, if the
schema also has a pattern.
"""

Spend = Callable[[int], None]


@dataclass(slots=True)
class Texts:
    """Constraints on the text of one string.

    Attributes:
        low: Minimum number of characters.
        high: Maximum number of characters, or None.
        patterns: Expressions that must match, with their paths in the schema.
        formats: Names of formats, with their paths in the schema.
        unwanted: Expressions that must not match, with their paths in the schema.
        excluded: Texts that are not allowed.
    """

    low: int = 0
    high: int | None = None
    patterns: list[tuple[Group, str]] = field(default_factory=list)
    formats: list[tuple[str, str]] = field(default_factory=list)
    unwanted: list[tuple[Group, str]] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)

    @property
    def free(self) -> bool:
        """Whether the constraints allow every text."""
        return not (
            self.low or self.high is not None or self.patterns or self.formats or self.unwanted or self.excluded
        )

    def at_least(self, low: int | None) -> None:
        """Add the constraint that a text has at least ``low`` characters."""
        self.low = max(self.low, low or 0)

    def at_most(self, high: int | None) -> None:
        """Add the constraint that a text has at most ``high`` characters."""
        if high is not None:
            self.high = high if self.high is None else min(self.high, high)

    def written(self, rules: Rules, path: str, spend: Spend) -> str:
        """Return the grammar expression for the JSON strings that fulfil the constraints. Raises SchemaError if the
        constraints cannot be enforced or no string fulfils them.
        """
        if self.high is not None and self.low > self.high:
            raise UnfulfillableError(path, f"has minLength {self.low}, which is above maxLength {self.high}")
        for formats in ([name for name, _ in self.formats], []) if self.patterns else ([n for n, _ in self.formats],):
            # Some expressions for formats allow fewer texts than the standard of the format. If no text matches both
            # the pattern and the format's expression, use only the pattern.
            try:
                found = self._written(rules, formats, spend)
            except TooLargeError as e:
                if formats and self.patterns:
                    continue
                raise SchemaError(path, f"cannot be enforced: {e}") from None
            except RegexError as e:
                raise SchemaError(self._blamed(e, path, spend), f"cannot be enforced: {e}") from None
            if found is not None:
                return found
        raise UnfulfillableError(
            path, "cannot be fulfilled: no text meets both the limits on the length and the patterns"
        )

    def _blamed(self, error: RegexError, path: str, spend: Spend) -> str:
        """Return the path of the regular expression that caused the error: the first expression that is also refused
        alone.
        """
        for wanted, patterns in ((True, self.patterns), (False, self.unwanted)):
            for pattern, place in patterns:
                try:
                    matchers(pattern, spend, wanted=wanted)
                except RegexError as e:
                    if str(e) == str(error):
                        return place
        return self.patterns[0][1] if len(self.patterns) == 1 else path

    def _written(self, rules: Rules, formats: Sequence[str], spend: Spend) -> str | None:
        """Return the grammar expression for texts that also match ``formats``, or None if no text fulfils all
        constraints.
        """
        patterns = [pattern for pattern, _ in self.patterns]
        patterns += [pattern for name in formats if (pattern := _format(name)) not in patterns]
        if not patterns and not self.unwanted and not self.excluded:
            if not self.low and self.high is None:
                return "string"
            return rules.add(f'"\\"" char{_times(self.low, self.high)} "\\""')
        if len(patterns) == 1 and not self.unwanted and not self.excluded and not _looks(patterns[0]):
            low, high = lengths(patterns[0])
            if self.low <= low and (self.high is None or (high is not None and high <= self.high)):
                return rules.add(f'"\\"" {in_json_string(patterns[0])} "\\""')
            if (repeated := _repeated_class(patterns[0])) is not None:
                return self._class(rules, *repeated)
        shorter = self._shortened(patterns[0]) if len(patterns) == 1 else None
        if len(patterns) > 1:
            patterns = [pattern if i < len(self.patterns) else _loosened(pattern) for i, pattern in enumerate(patterns)]
        parts = [part for pattern in patterns for part in matchers(pattern, spend)]
        parts += [part for pattern, _ in self.unwanted for part in matchers(pattern, spend, wanted=False)]
        parts += [literals(self.excluded, spend)] if self.excluded else []
        both, high = Intersection(parts, spend), self.high
        try:
            if high is not None and high > both.countable():
                # With shorter repetitions, the rules need not count characters. Allowing fewer texts is better than
                # allowing no text.
                if shorter is not None:
                    return rules.add(f'"\\"" {in_json_string(shorter)} "\\""')
                high = max(both.countable(), self.low)
            rule = both.rules(self.low, high, rules.add, rules.name)
        except TooLargeError:
            if shorter is None:
                raise
            return rules.add(f'"\\"" {in_json_string(shorter)} "\\""')
        if rule is None and high != self.high:
            raise TooLargeError(
                f"the regular expressions of the string, together with its maximum length of {self.high}, need too many "
                "automaton states; use simpler expressions or a smaller maximum length"
            )
        return None if rule is None else rules.add(f'"\\"" {rule}')

    def _shortened(self, pattern: Group) -> Group | None:
        """Return the regular expression with fewer repetitions, so that no matching text is longer than the maximum
        length.

        Return None if this is impossible, or if the shortened expression would match only texts below the minimum
        length.
        """
        if self.high is None or self.unwanted or self.excluded or _looks(pattern) or lengths(pattern)[0] < self.low:
            return None
        for most in (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1):
            shorter = _repeated_at_most(pattern, most)
            longest = lengths(shorter)[1]
            if longest is not None and longest <= self.high:
                return shorter
        return None

    def _class(self, rules: Rules, characters: CharSet, low: int, high: int | None) -> str | None:
        low = max(low, self.low)
        high = self.high if high is None else high if self.high is None else min(high, self.high)
        if high is not None and low > high:
            return None
        written = as_json(characters)
        if not written:
            return None if low else rules.add('"\\"\\""')
        return rules.add(f'"\\"" {written}{_times(low, high)} "\\""')


def matches(text: str, patterns: Sequence[Group], spend: Spend, *, unwanted: Sequence[Group] = ()) -> bool:
    """Return whether all of ``patterns`` and none of ``unwanted`` match somewhere in ``text``. Raises RegexError if an
    expression is not supported.
    """
    parts = [part for pattern in patterns for part in matchers(pattern, spend)]
    parts += [part for pattern in unwanted for part in matchers(pattern, spend, wanted=False)]
    return not parts or Intersection(parts, spend).accepts(text)


def pattern_at(pattern: str, path: str) -> Group:
    """Return the parsed regular expression at ``path``. Raises SchemaError if the expression is malformed or not
    supported.
    """
    try:
        return parse(pattern)
    except RegexError as e:
        raise SchemaError(path, f"cannot be enforced: {e}") from None


def writable(text: str) -> bool:
    """Return whether the grammars of this package can write all characters of ``text`` in a JSON string."""
    return all(c in PLAIN_IN_JSON or as_json(CharSet.of(c)) for c in text)


def _format(name: str) -> Group:
    return parse(FORMATS[name])


def _repeated_at_most(node: Group, most: int) -> Group:
    """Return ``node`` with each repetition limited to at most ``most`` times. A repetition is never limited to less
    than its minimum.
    """

    def less(part: Node) -> Node:
        if isinstance(part, Repeat):
            high = max(part.low, most if part.high is None else min(part.high, most))
            return Repeat(less(part.item), part.low, high)
        return _repeated_at_most(part, most) if isinstance(part, Group) else part

    return Group(tuple(tuple(map(less, option)) for option in node.options))


def _loosened(node: Group) -> Group:
    """Return ``node`` with the maximum of long repetitions removed, so that the automaton needs fewer states. The
    function is only for the formats in this module.
    """

    def loose(part: Node) -> Node:
        if isinstance(part, Repeat):
            endless = part.high is not None and part.high >= _LONG
            return Repeat(loose(part.item), part.low, None if endless else part.high)
        return _loosened(part) if isinstance(part, Group) else part

    return Group(tuple(tuple(map(loose, option)) for option in node.options))


def _times(low: int, high: int | None) -> str:
    return f"{{{low},{'' if high is None else high}}}"


def _looks(node: Node) -> bool:
    if isinstance(node, Group):
        return any(_looks(part) for option in node.options for part in option)
    return isinstance(node, Lookahead) or (isinstance(node, Repeat) and _looks(node.item))


def lengths(pattern: Group) -> tuple[int, int | None]:
    """Return the minimum and maximum length of texts in which ``pattern`` matches. The maximum is None if the texts
    have no maximum length.
    """
    least, most = [], list[int | None]()
    for sequence in pattern.options:
        starts = bool(sequence) and isinstance(sequence[0], Anchor) and sequence[0].start
        inner = sequence[1:] if starts else sequence
        ends = bool(inner) and isinstance(inner[-1], Anchor) and not inner[-1].start
        inner = inner[:-1] if ends else inner
        if len(sequence) == 1 and isinstance(sequence[0], Group):
            low, high = lengths(sequence[0])
        else:
            low, high = _sequence_lengths(inner)
            high = high if starts and ends else None
        least.append(low)
        most.append(high)
    return min(least), None if None in most else max(each for each in most if each is not None)


def _sequence_lengths(sequence: Sequence[Node]) -> tuple[int, int | None]:
    low: int = 0
    high: int | None = 0
    for node in sequence:
        least, most = _node_lengths(node)
        low += least
        high = None if high is None or most is None else high + most
    return low, high


def _node_lengths(node: Node) -> tuple[int, int | None]:
    match node:
        case CharSet():
            return 1, 1
        case Repeat():
            least, most = _node_lengths(node.item)
            return least * node.low, None if node.high is None or most is None else most * node.high
        case Group():
            each = [_sequence_lengths(option) for option in node.options]
            highs = [high for _, high in each if high is not None]
            return min(low for low, _ in each), max(highs) if len(highs) == len(each) else None
        case _:
            return 0, 0


def _repeated_class(pattern: Group) -> tuple[CharSet, int, int | None] | None:
    """Return the character set and the bounds of the repetition if ``pattern`` is only one repeated character set
    between ``^`` and ``$``. Otherwise return None.
    """
    if len(pattern.options) != 1 or len(sequence := pattern.options[0]) != 3:
        return None
    first, middle, last = sequence
    if not (isinstance(first, Anchor) and first.start and isinstance(last, Anchor) and not last.start):
        return None
    while isinstance(middle, Group) and len(middle.options) == 1 and len(middle.options[0]) == 1:
        middle = middle.options[0][0]
    if isinstance(middle, Repeat) and isinstance(middle.item, CharSet):
        return middle.item, middle.low, middle.high
    return None
