r"""The rules that every grammar of JSON texts shares.

Each string has one spelling: what need not be escaped is not, and ``\u`` escapes do not exist. So two spellings cannot name
the same key. Between tokens stands nothing, one space, or a line break with an indentation: enough for every usual layout,
and bounded, so that a model cannot fill its output with blanks. The lengths of numbers are bounded for the same reason.
"""

import json
from typing import Any

from penstock_enginecore.core.structured_output import number
from penstock_enginecore.core.structured_output.charset import ANY, ESCAPED, PLAIN_IN_JSON, CharSet, as_json, literal

MAX_INDENT = 32
"""Blanks behind a line break."""

SEPARATOR = 'ws "," ws'
SHARED = {
    "ws": f'(" " | "\\n" [ \\t]{{0,{MAX_INDENT}}})?',
    "char": as_json(ANY),
    "end": '("\\"" | char end) (=(ws [,}\\]:]))',
    "string": '"\\"" end',
    "integer": number.INTEGER,
    "number": number.NUMBER,
    "boolean": '"true" | "false"',
    "null": '"null"',
    "any": "string | number | boolean | null | array | object",
    "array": f'"[" ws (any ({SEPARATOR} any)* ws)? "]"',
    "member": 'string ws ":" ws any',
    "object": f'"{{" ws (member ({SEPARATOR} member)* ws)? "}}"',
}
"""Names and bodies of the shared rules.

``end``, the rest of a string, is recursive and says what comes behind it: so most of a vocabulary is decided when the rule is
compiled, and filling a bitmask inside a string takes a fiftieth of the time.
"""


class Rules:
    """A grammar being written: rules by name, the shared ones included."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}
        self._names = 0

    def name(self) -> str:
        """A name for a rule that is added later."""
        self._names += 1
        return f"r{self._names}"

    def add(self, body: str, name: str = "") -> str:
        """Add a rule; returns its name."""
        name = name or self.name()
        self._bodies[name] = body
        return name

    def text(self, root: str) -> str:
        """The whole grammar; its sentences are those of the expression ``root``."""
        own = "".join(f"{name} ::= {body}\n" for name, body in self._bodies.items())
        return f"root ::= {root}\n" + own + "".join(f"{name} ::= {body}\n" for name, body in SHARED.items())


def json_literal(value: Any) -> str:
    """The expression for one JSON value, written without blanks. Raises ValueError for half of a surrogate pair."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=float)
    text.encode()
    return literal(text)


def other_strings(rules: Rules, taken: list[str]) -> str:
    """A rule for all JSON strings but those in ``taken``: a tree over their characters, left wherever one differs."""
    body = _remainder(rules, sorted(set(taken)))
    return rules.add(f'"\\"" {body}')


def _remainder(rules: Rules, taken: list[str]) -> str:
    """What may follow a beginning that the strings with these ends in ``taken`` share, the closing quote included."""
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
