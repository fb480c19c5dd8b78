r"""The rules that every grammar of JSON texts shares.

Each string has one spelling: what need not be escaped is not, and ``\u`` escapes do not exist. So two spellings cannot name
the same key. Blanks between tokens are bounded, see ``layout``, so that a model cannot fill its output with them. The lengths of
numbers are bounded for the same reason.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from penstock_common.types.sampling import JsonWhitespace
from penstock_enginecore.structured_output.constraints import number
from penstock_enginecore.structured_output.constraints.charset import (
    ANY,
    ESCAPED,
    PLAIN_IN_JSON,
    CharSet,
    as_json,
    literal,
)
from penstock_enginecore.structured_output.constraints.layout import Layout, Level, behind_string, deeper, layout

_SHARED = {
    "char": as_json(ANY),
    "string": '"\\"" end',
    "integer": number.INTEGER,
    "number": number.NUMBER,
    "boolean": '"true" | "false"',
    "null": '"null"',
    "any": "string | number | boolean | null | array | object",
}
"""Names and bodies of shared rules; the others depend on the blanks."""
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\[\]|\{\}|[\[\]{},:]|[^\[\]{},:"]+')


class Rules:
    """A grammar being written: rules by name, the shared ones included."""

    def __init__(self, whitespace: JsonWhitespace = JsonWhitespace.DUMPS) -> None:
        self._whitespace = whitespace
        self._bodies: dict[str, str] = {}
        self._names = 0
        self._share()

    def _share(self) -> None:
        anywhere = self.layout(None)
        # Recursive, and says what comes behind it: so most of a vocabulary is decided when the rule is compiled, and filling a
        # bitmask inside a string takes a fiftieth of the time.
        self.add(f'("\\"" | char end) (=({behind_string(self._whitespace)}))', "end")
        for name, body in _SHARED.items():
            self.add(body, name)
        self.add(f"string {anywhere.colon} any", "member")
        for name, brackets, part in (("array", "[]", "any"), ("object", "{}", "member")):
            parts = f"{anywhere.first} {part} ({anywhere.comma} {part})* {anywhere.last}"
            self.add(f'"{brackets[0]}" {anywhere.opened} ({parts})? "{brackets[1]}"', name)

    def layout(self, level: Level) -> Layout:
        """The blanks around the members of an array or object, which stand at ``level``."""
        return layout(self._whitespace, level, self.add)

    def name(self) -> str:
        """A name for a rule that is added later."""
        self._names += 1
        return f"r{self._names}"

    def add(self, body: str, name: str = "") -> str:
        """Add a rule; returns its name."""
        name = name or self.name()
        self._bodies[name] = body
        return name

    @property
    def bodies(self) -> Mapping[str, str]:
        """The rules' bodies by name."""
        return self._bodies

    def text(self, root: str) -> str:
        """The whole grammar; its sentences are those of the expression ``root``."""
        return f"root ::= {root}\n" + "".join(f"{name} ::= {body}\n" for name, body in self._bodies.items())

    def value(self, value: Any, level: Level) -> str:
        """The expression for one JSON value that stands at ``level``. Raises ValueError for half of a surrogate pair."""
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
    """The expression for one JSON value that has no parts. Raises ValueError for half of a surrogate pair."""
    return literal(_compact(value))


def _compact(value: Any) -> str:
    """A JSON value without blanks."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=float)
    text.encode()
    return text


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
