r"""What may stand between the tokens of a JSON text, as expressions of a grammar.

Always bounded: a model that likes blanks runs out of places for them, not out of ``max_tokens``.
"""

from collections.abc import Callable
from typing import NamedTuple

from penstock_common.types.sampling import JsonWhitespace

INDENT = 4
"""Blanks behind a line break per level, where it is known how deep the value stands."""
MAX_INDENT = 32
"""Blanks behind a line break elsewhere: inside references, and values of any form."""

Level = int | None
"""How many arrays and objects a token stands in; None where a rule is used at more than one depth."""


class Layout(NamedTuple):
    """For the members of one array or object. ``opened`` stands behind the opening bracket, ``first`` before the first member,
    ``last`` behind the last one, ``comma`` and ``colon`` with their blanks where these are. An empty string is nothing.
    """

    opened: str
    first: str
    last: str
    comma: str
    colon: str


COMPACT = Layout("", "", "", '","', '":"')
ANY = Layout("ws", "", "ws", 'ws "," ws', 'ws ":" ws')
_WS = f'(" " | "\\n" [ \\t]{{0,{MAX_INDENT}}})?'
_BEHIND_STRING = {
    JsonWhitespace.DUMPS: '("\\n" [ \\t]*)? [,}\\]:]',
    JsonWhitespace.COMPACT: "[,}\\]:]",
    JsonWhitespace.ANY: "ws [,}\\]:]",
}


def deeper(level: Level) -> Level:
    """The level inside an array or object that stands at ``level``."""
    return None if level is None else level + 1


def layout(whitespace: JsonWhitespace, level: Level, add: Callable[[str, str], str]) -> Layout:
    """The layout inside an array or object whose members stand at ``level``. ``add`` makes a rule of a body and a name."""
    if whitespace is JsonWhitespace.COMPACT:
        return COMPACT
    if whitespace is JsonWhitespace.ANY:
        add(_WS, "ws")
        return ANY
    inner, outer = ("", "") if level is None else (str(level), str(level - 1))
    first = add(f"({_line_break(level)})?", f"line{inner}")
    last = add(f"({_line_break(None if level is None else level - 1)})?", f"line{outer}")
    comma = add(f'"," (" " | {_line_break(level)})?', f"comma{inner}")
    return Layout("", first, last, comma, '":" " "?')


def behind_string(whitespace: JsonWhitespace) -> str:
    """What can come behind a string, or more than that."""
    return _BEHIND_STRING[whitespace]


def _line_break(level: Level) -> str:
    blanks = MAX_INDENT if level is None else INDENT * level
    return f'"\\n" [ \\t]{{0,{blanks}}}' if blanks else '"\\n"'
