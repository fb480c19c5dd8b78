"""Constraints with a short text and a high cost."""

import json
from random import Random
from typing import Any, NamedTuple

from tests.fuzz import schemas

RAW = "(raw)"
"""Placeholder in a body for JSON text that no JSON encoder could write."""
_COUNTS = (3, 10, 50, 200, 1000, 1000, 4000)


class Constraint(NamedTuple):
    """A constraint. ``kind`` is the field of StructuredOutput."""

    kind: str
    text: str


def constraint(rng: Random) -> Constraint:
    """Return a random hostile constraint."""
    return rng.choice((*(_nested,) * 7, _ambiguous, _alternatives, _deep_rules, _large_schema, _damaged))(rng)


def _nested(rng: Random) -> Constraint:
    """Return nested bounded repetitions. The number of parses of each token is the product of the bounds."""
    inner = rng.choice(("a", "a", "a?", "a?", "[ab]", "(a|b)", "a{0,3}"))
    for _ in range(rng.choice((1, 2, 2, 2, 2, 3))):
        low, high = rng.choice((0, 0, 1)), rng.choice(_COUNTS)
        inner = f"({inner}){{{low},{high}}}"
    if rng.random() < 0.5:
        return Constraint("regex", inner + rng.choice(("b", "", "c$")))
    text = inner.replace("[ab]", "@").replace("a", '"a"').replace("b", '"b"').replace("@", "[ab]")
    return Constraint("grammar", f"root ::= {text.replace('|', ' | ')} {rng.choice(('', chr(34) + 'b' + chr(34)))}")


def _ambiguous(rng: Random) -> Constraint:
    """Return ambiguous rules, whose number of parses grows with the text."""
    return Constraint(
        "grammar",
        rng.choice(
            (
                'root ::= root root | "a" | ""',
                'root ::= s "b"\ns ::= s s s | s s | "a"',
                'root ::= ("a" | "a" "a" | "a" "a" "a")* "b"',
                'root ::= (x x? x? x?)* "c"\nx ::= "a" | "aa" | y\ny ::= "a" x?',
                'root ::= ("a"? "a"? "a"?){0,1000} "b"',
                'root ::= a* a* a* a* a* a* a* a* "b"\na ::= [a-z]',
                'root ::= ([a-z]* [a-z ]* [a-z]+){1,500} "0"',
            )
        ),
    )


def _alternatives(rng: Random) -> Constraint:
    """Return thousands of alternatives with the same beginning."""
    count = rng.choice((200, 2000, 9000))
    words = [f"{'a' * (i % 40)}{i}" for i in range(count)]
    if rng.random() < 0.5:
        return Constraint("regex", f"({'|'.join(words)}){{0,{rng.choice(_COUNTS)}}}")
    return Constraint("grammar", "root ::= (" + " | ".join(f'"{word}"' for word in words) + ")*")


def _deep_rules(rng: Random) -> Constraint:
    """Return rules, each of which uses the next rule several times."""
    depth = rng.choice((5, 12, 30, 200))
    rules = [f"root ::= r0 {json.dumps('b')}"]
    rules += [f"r{i} ::= r{i + 1} r{i + 1} | r{i + 1}?" for i in range(depth)]
    return Constraint("grammar", "\n".join([*rules, f'r{depth} ::= "a"?']))


def _large_schema(rng: Random) -> Constraint:
    """Return a JSON schema with nested counts."""
    value: Any = {"type": "string", "maxLength": rng.choice(_COUNTS), "minLength": rng.choice((0, 1))}
    if rng.random() < 0.5:
        value = {"type": "string", "pattern": f"^([a-z]{{0,{rng.choice(_COUNTS)}}}[0-9]?){{0,{rng.choice(_COUNTS)}}}$"}
    for _ in range(rng.choice((1, 2, 3))):
        value = {"type": "array", "items": value, "maxItems": rng.choice(_COUNTS), "minItems": rng.choice((0, 1))}
    return Constraint("json_schema", json.dumps(value))


def _damaged(rng: Random) -> Constraint:
    """Return a grammar with an invalid part."""
    text = 'root ::= item ("," item){0,4}\nitem ::= [a-z]+ | "(" root ")"'
    at = rng.randrange(len(text))
    piece = rng.choice(("{", "}", "{0,99999999}", "{5,2}", "[", "\x00", '"', "::=", "\\", "(", "\n", "root", "\ufffe"))
    return Constraint("grammar", text[:at] + piece + text[at + rng.choice((0, 1)) :])


def any_text(rng: Random) -> Constraint:
    """Return a text that is parsed as JSON before it is a grammar."""
    if rng.random() < 0.35:
        return Constraint("structural_tag", schemas.tag(rng))
    return Constraint("json_schema", schemas.schema(rng))


def as_json(found: Constraint, rng: Random) -> tuple[dict[str, Any], str]:
    """Return the HTTP body fields for the constraint, and the JSON text that replaces ``RAW`` in these fields."""
    match found.kind:
        case "json_schema":
            named = {"type": "json_schema", "json_schema": {"name": "s", "schema": RAW}}
            return rng.choice(({"structured_outputs": {"json": RAW}}, {"response_format": named})), found.text
        case "structural_tag":
            if rng.random() < 0.5:
                return {"structured_outputs": {"structural_tag": RAW}}, json.dumps(found.text)
            return {"response_format": RAW}, found.text
        case _:
            return {"structured_outputs": {found.kind: RAW}}, json.dumps(found.text)
