"""Which rules of a grammar have sentences at all: a rule that always needs another one of its kind has none."""

import re
from collections.abc import Iterable, Sequence

from penstock_enginecore.structured_output.constraints.json_grammar import Rules

_TOKEN = re.compile(
    r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|\(=|\{[0-9]+(?:,[0-9]*)?\}|[()|?*+]|[A-Za-z_][A-Za-z0-9_]*'
)


def unproductive(rules: Rules, names: Iterable[str]) -> list[str]:
    """Those of the rules ``names`` that have no sentence. The grammar is one that was written here."""
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
"""A rule's name, or ``all`` or ``any`` of expressions. What needs nothing is left out."""


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
    return _alternatives(_TOKEN.findall(body), 0)[0]


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
