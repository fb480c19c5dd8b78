"""Grammar rules for texts of limited length that match some regular expressions and do not match other regular
expressions.

Each expression becomes a nondeterministic automaton over sets of characters. The states of the intersection of all
automata are created when they are reached, so unreachable parts of an automaton cost no work. If an expression must not
match, the expression's automaton must not be in an accepting state at the end of the text.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from penstock_enginecore.structured_output.constraints.regex import (
    ANY,
    Anchor,
    CharSet,
    Group,
    Lookahead,
    Node,
    Range,
    RegexError,
    Repeat,
    as_json,
)

MAX_STATES = 2000
"""Maximum number of states of an intersection of automata. The limit exists because each state is compiled for the
complete vocabulary.
"""
_MAX_NODES = 20_000
"""Maximum number of states of one expression's automaton."""
_MAX_CLASSES = 256
"""Maximum number of classes of characters that the regular expressions of one string distinguish."""


class TooLargeError(RegexError):
    """Raised when an automaton needs more states or character classes than allowed."""


@dataclass(slots=True)
class Nfa:
    """A nondeterministic finite automaton. States are numbers.

    Attributes:
        spend: Function that is called for each state, to count the work of the translation.
        edges: For each state, pairs of a set of characters and the state that these characters lead to.
        free: For each state, the states that are reached without a character.
    """

    spend: Callable[[int], None]
    edges: list[list[tuple[CharSet, int]]] = field(default_factory=list)
    free: list[list[int]] = field(default_factory=list)

    def add(self) -> int:
        """Add a state without edges, and return its number."""
        if len(self.edges) >= _MAX_NODES:
            raise TooLargeError(f"the expression needs more than {_MAX_NODES} states; use fewer repetitions")
        self.spend(1)
        self.edges.append([])
        self.free.append([])
        return len(self.edges) - 1

    def closure(self, states: Iterator[int] | Sequence[int]) -> frozenset[int]:
        """Return ``states`` and all states that are reached from ``states`` without characters."""
        found, left = set[int](), list(states)
        while left:
            state = left.pop()
            if state not in found:
                found.add(state)
                left += self.free[state]
        return frozenset(found)


@dataclass(slots=True)
class Matcher:
    """Automaton of one regular expression. ``wanted`` is true if the expression must match, and false if the expression
    must not match.
    """

    nfa: Nfa
    start: int
    end: int
    wanted: bool = True


def matchers(pattern: Group, spend: Callable[[int], None], *, wanted: bool = True) -> list[Matcher]:
    """Return automata that together decide whether ``pattern`` matches somewhere in a text.

    There is one automaton for the pattern itself, and one for each lookahead at its start. Raises RegexError for
    unsupported lookaheads.
    """
    looks: list[Lookahead] = []
    if len(pattern.options) == 1:
        sequence = pattern.options[0]
        starts = bool(sequence) and isinstance(sequence[0], Anchor) and sequence[0].start
        for node in sequence[1:] if starts else sequence:
            if not isinstance(node, Lookahead):
                break
            looks.append(node)
        if looks and not starts:
            raise RegexError(f"a lookahead at position {looks[0].position} is only supported directly after ^")
        if looks:
            pattern = Group(((sequence[0], *sequence[1 + len(looks) :]),))
    if looks and not wanted:
        raise RegexError("an expression with a lookahead is not supported in a negated schema")
    found = [_matcher(pattern, spend, wanted=wanted)]
    for look in looks:
        options = tuple(map(_from_the_start, look.item.options))
        found.append(_matcher(Group(options), spend, wanted=not look.negative))
    return found


def _from_the_start(sequence: tuple[Node, ...]) -> tuple[Node, ...]:
    if sequence and isinstance(sequence[0], Anchor) and sequence[0].start:
        return sequence
    return (Anchor(True, 0), *sequence)


def literals(texts: Sequence[str], spend: Callable[[int], None]) -> Matcher:
    """Return an automaton that excludes exactly ``texts``."""
    anchored: list[tuple[Node, ...]] = [(Anchor(True, 0), *map(CharSet.of, text), Anchor(False, 0)) for text in texts]
    return _matcher(Group(tuple(anchored)), spend, wanted=False)


def _matcher(pattern: Group, spend: Callable[[int], None], *, wanted: bool) -> Matcher:
    nfa = Nfa(spend)
    start, end = nfa.add(), nfa.add()
    _add_search(nfa, pattern, start, end, anchored=(False, False))
    return Matcher(nfa, start, end, wanted)


def _add_search(nfa: Nfa, group: Group, start: int, end: int, anchored: tuple[bool, bool]) -> None:
    """Add the alternatives of ``group`` to the automaton, for a match anywhere in a text. Each alternative at the
    outermost level may have anchors. If an alternative consists only of a group, the alternatives of that group are
    added instead.
    """
    for sequence in group.options:
        starts = bool(sequence) and isinstance(sequence[0], Anchor) and sequence[0].start
        inner = sequence[1:] if starts else sequence
        ends = bool(inner) and isinstance(inner[-1], Anchor) and not inner[-1].start
        inner = inner[:-1] if ends else inner
        here = (starts or anchored[0], ends or anchored[1])
        if len(inner) == 1 and isinstance(inner[0], Group):
            _add_search(nfa, inner[0], start, end, here)
            continue
        first, last = nfa.add(), nfa.add()
        nfa.free[start].append(first)
        nfa.free[last].append(end)
        for state, bound in ((first, here[0]), (last, here[1])):
            if not bound:
                nfa.edges[state].append((ANY, state))
        _add_sequence(nfa, inner, first, last)


def _add_sequence(nfa: Nfa, sequence: Sequence[Node], start: int, end: int) -> None:
    # Each node gets new states, so that a loop at the last state is only possible at the end of the sequence.
    at = start
    for node in sequence:
        then = nfa.add()
        _add(nfa, node, at, then)
        at = then
    nfa.free[at].append(end)


def _add(nfa: Nfa, node: Node, start: int, end: int) -> None:
    match node:
        case CharSet():
            nfa.edges[start].append((node, end))
        case Anchor():
            sign = "^" if node.start else "$"
            raise RegexError(f"{sign} at position {node.position} is not at an end of the expression")
        case Lookahead():
            raise RegexError(f"a lookahead at position {node.position} is only supported directly after ^")
        case Group():
            for option in node.options:
                first = nfa.add()
                nfa.free[start].append(first)
                _add_sequence(nfa, option, first, end)
        case Repeat():
            _add_repeat(nfa, node, start, end)


def _add_repeat(nfa: Nfa, node: Repeat, start: int, end: int) -> None:
    at = start
    for _ in range(node.low):
        then = nfa.add()
        _add(nfa, node.item, at, then)
        at = then
    if node.high is None:
        loop = nfa.add()
        again = nfa.add()
        nfa.free[at].append(loop)
        _add(nfa, node.item, loop, again)
        nfa.free[again].append(loop)
        nfa.free[loop].append(end)
        return
    nfa.free[at].append(end)
    for _ in range(node.high - node.low):
        then = nfa.add()
        _add(nfa, node.item, at, then)
        nfa.free[then].append(end)
        at = then


State = tuple[frozenset[int], ...]
Counted = tuple[State, int]


class Intersection:
    """Intersection of automata: the texts that all automata in ``parts`` allow. ``spend`` is called for each
    transition, and may raise an exception.
    """

    def __init__(self, parts: Sequence[Matcher], spend: Callable[[int], None]) -> None:
        self._parts = parts
        self._spend = spend
        self._classes = _classes({c.ranges for part in parts for edges in part.nfa.edges for c, _ in edges}, spend)
        self._covered: dict[tuple[Range, ...], frozenset[int]] = {}
        self._start: State = tuple(part.nfa.closure([part.start]) for part in parts)
        self._next: dict[State, dict[int, State]] = {}
        self._finishing: set[State] | None = None
        self._edge_classes = [
            [[(self._covering(characters), target) for characters, target in edges] for edges in part.nfa.edges]
            for part in parts
        ]

    def _covering(self, characters: CharSet) -> frozenset[int]:
        found = self._covered.get(characters.ranges)
        if found is None:
            self._spend(len(self._classes))
            among = _Ranges(characters)
            found = frozenset(i for i, each in enumerate(self._classes) if each.ranges[0][0] in among)
            self._covered[characters.ranges] = found
        return found

    def _accepts(self, state: State) -> bool:
        return all((part.end in mine) == part.wanted for part, mine in zip(self._parts, state, strict=True))

    def _follow(self, state: State) -> dict[int, State]:
        """Return the state to which each character class leads from ``state``. Classes without a following state are
        left out.
        """
        found = self._next.get(state)
        if found is not None:
            return found
        by_part: list[dict[int, set[int]]] = []
        for index, mine in enumerate(state):
            moves: dict[int, set[int]] = {}
            for node in mine:
                for classes, target in self._edge_classes[index][node]:
                    for each in classes:
                        moves.setdefault(each, set()).add(target)
            by_part.append(moves)
        found = {}
        known: dict[tuple[int, frozenset[int]], frozenset[int]] = {}
        for each in range(len(self._classes)):
            self._spend(1)
            parts: list[frozenset[int]] = []
            for index, part in enumerate(self._parts):
                targets = frozenset(by_part[index].get(each, ()))
                if part.wanted and not targets:
                    break
                if (index, targets) not in known:
                    known[index, targets] = part.nfa.closure([*targets])
                parts.append(known[index, targets])
            else:
                found[each] = tuple(parts)
        self._next[state] = found
        return found

    def accepts(self, text: str) -> bool:
        """Return whether all automata allow ``text``."""
        state = self._start
        for character in text:
            code = ord(character)
            each = next((i for i, c in enumerate(self._classes) if code in _Ranges(c)), None)
            following = self._follow(state)
            if each is None or each not in following:
                return False
            state = following[each]
        return self._accepts(state)

    def _useful(self) -> set[State]:
        """Return the states from which an allowed text can still be completed."""
        if self._finishing is not None:
            return self._finishing
        before: dict[State, set[State]] = {}
        left, seen = [self._start], {self._start}
        while left:
            state = left.pop()
            for target in self._follow(state).values():
                before.setdefault(target, set()).add(state)
                if target not in seen:
                    if len(seen) >= MAX_STATES:
                        raise TooLargeError(f"the expressions together need more than {MAX_STATES} states")
                    seen.add(target)
                    left.append(target)
        useful, left = set[State](), [state for state in seen if self._accepts(state)]
        while left:
            state = left.pop()
            if state not in useful:
                useful.add(state)
                left += before.get(state, ())
        self._finishing = useful
        return useful

    def countable(self) -> int:
        """Return the maximum length in characters up to which the grammar rules can count without more than
        ``MAX_STATES`` states. Raises TooLargeError if the expressions need too many states.
        """
        return MAX_STATES // max(len(self._useful()), 1) - 1

    def rules(self, low: int, high: int | None, add: Callable[[str, str], str], name: Callable[[], str]) -> str | None:
        """Return the name of a grammar rule for the allowed texts of ``low`` to ``high`` characters, or None if there
        are no such texts.

        The texts are written as in a JSON string and include the closing quote. ``add`` creates a rule from a body and
        a name. Raises TooLargeError if the rules need too many states.
        """
        if self._start not in self._useful():
            return None
        arrows = self._counted(low if high is None else high, high)
        first, *_ = arrows
        ends = {key for key in arrows if key[1] >= low and self._accepts(key[0])}
        names = {key: name() for key in _backwards(arrows, ends)}
        if first not in names:
            return None
        for key, mine in names.items():
            options = ['"\\""'] if key in ends else []
            for target, classes in arrows[key].items():
                if target in names:
                    characters = CharSet(span for each in classes for span in self._classes[each].ranges)
                    options.append(f"{as_json(characters)} {names[target]}")
            add(" | ".join(options), mine)
        return names[first]

    def _counted(self, top: int, high: int | None) -> "dict[Counted, dict[Counted, list[int]]]":
        """Return the transitions of the automaton with a count of characters. A key is a state and the number of
        characters before that state. The value has the following keys, each with the character classes that lead to the
        key. The first key is the start.

        The count stops at ``top`` characters.
        """
        useful, first = self._useful(), (self._start, 0)
        arrows: dict[Counted, dict[Counted, list[int]]] = {}
        left, seen = [first], {first}
        while left:
            state, length = key = left.pop()
            mine: dict[Counted, list[int]] = {}
            arrows[key] = mine
            for each, target in self._follow(state).items() if high is None or length < high else ():
                if target not in useful or not as_json(self._classes[each]):
                    continue
                reached = (target, min(length + 1, top))
                mine.setdefault(reached, []).append(each)
                if reached not in seen:
                    if len(seen) >= MAX_STATES:
                        raise TooLargeError(f"the expressions and lengths together need more than {MAX_STATES} states")
                    seen.add(reached)
                    left.append(reached)
        return arrows


class _Ranges:
    """Membership test for code points in a set of characters."""

    def __init__(self, characters: CharSet) -> None:
        self._ranges = characters.ranges

    def __contains__(self, code: int) -> bool:
        return any(low <= code <= high for low, high in self._ranges)


def _classes(sets: set[tuple[Range, ...]], spend: Callable[[int], None]) -> list[CharSet]:
    """Return a partition of all characters into classes. Each of ``sets`` contains either all or none of the characters
    of a class.
    """
    cuts = sorted({0, 0x110000, *(edge for ranges in sets for low, high in ranges for edge in (low, high + 1))})
    if len(cuts) > 8 * _MAX_CLASSES:
        raise TooLargeError("the expressions have too many different characters")
    signs = [0] * len(cuts)
    for number, ranges in enumerate(sets):
        spend(1 + len(cuts) // 8)
        for low, high in ranges:
            for place in range(bisect_left(cuts, low), bisect_left(cuts, high + 1)):
                signs[place] |= 1 << number
    by_sign: dict[int, list[Range]] = {}
    for (low, after), sign in zip(pairwise(cuts), signs, strict=False):
        by_sign.setdefault(sign, []).append((low, after - 1))
    found = [characters for ranges in by_sign.values() if (characters := CharSet(ranges))]
    if len(found) > _MAX_CLASSES:
        raise TooLargeError(f"the expressions distinguish more than {_MAX_CLASSES} classes of characters")
    return found


def _backwards(arrows: dict[Counted, dict[Counted, list[int]]], ends: set[Counted]) -> list[Counted]:
    """Return the keys of ``arrows`` from which a text can be completed, in the order of ``arrows``."""
    before: dict[Counted, list[Counted]] = {}
    for source, targets in arrows.items():
        for target in targets:
            before.setdefault(target, []).append(source)
    found, left = set[Counted](), [*ends]
    while left:
        key = left.pop()
        if key not in found:
            found.add(key)
            left += before.get(key, ())
    return [key for key in arrows if key in found]
