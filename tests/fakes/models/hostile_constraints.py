"""Constraints written to cost an engine time or memory, or to make it fail, with the expected outcome of each.

``refused``: INVALID_ARGUMENT before a token is sampled. ``served``: cheap after all. ``either``: depends on the
machine; INVALID_ARGUMENT, RESOURCE_EXHAUSTED or a normal end.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

Verdict = Literal["refused", "served", "either"]


def _tag(content: dict[str, Any]) -> str:
    tag = {"type": "tag", "begin": "", "content": content, "end": "."}
    return json.dumps({"type": "structural_tag", "format": tag})


def _nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


_AMBIGUOUS = 'root ::= s "b"\ns ::= "a" s "a" | s "a" | "a" s | "a" | s s | s s s\n'
_EMPTY = 'root ::= x{0,1000} "b"\nx ::= "a"{0,1000}\n'

HOSTILE: Mapping[str, tuple[dict[str, Any], Verdict]] = {
    "regex: bounded twice": ({"regex": "(a{0,1000}){0,1000}b"}, "refused"),
    "regex: bounded three times": ({"regex": "((a{0,30}){0,30}){0,30}b"}, "refused"),
    "regex: star repeated": ({"regex": "(a*){0,1000}b"}, "refused"),
    "regex: optional repeated": ({"regex": "(a?){0,1000}b"}, "refused"),
    "regex: alternatives that may be empty": ({"regex": "(a{0,20}c?|b*){1,500}d"}, "refused"),
    "regex: plus repeated": ({"regex": "(a{1,1000}){1,1000}b"}, "either"),
    "regex: star of star": ({"regex": "(a*)*b"}, "served"),
    "regex: overlapping alternatives": ({"regex": "(a|aa|aaa|aaaa){1,300}b"}, "either"),
    "regex: exponential automaton": ({"regex": "(a|b)*a(a|b){200}"}, "either"),
    "regex: huge class": ({"regex": f"[{''.join(chr(0x4E00 + 2 * i) for i in range(2500))}]{{1,9}}"}, "served"),
    "grammar: empty item repeated": ({"grammar": _EMPTY}, "refused"),
    "grammar: every way to split": ({"grammar": _AMBIGUOUS}, "either"),
    "grammar: empty recursion": ({"grammar": 'root ::= s "b"\ns ::= s s s | "a" | ""\n'}, "either"),
    "grammar: without end": ({"grammar": 'root ::= again\nagain ::= again "a"\n'}, "refused"),
    "json_schema: pattern bounded twice": (
        {"json_schema": json.dumps({"type": "string", "pattern": "^(a{0,500}){0,500}$"})},
        "refused",
    ),
    "json_schema: arrays of arrays": (
        {
            "json_schema": json.dumps(
                {"type": "array", "maxItems": 60_000, "items": {"type": "array", "maxItems": 60_000, "items": {}}}
            )
        },
        "either",
    ),
    "json_schema: alternatives that multiply": (
        {
            "json_schema": json.dumps(
                {"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(6)]} for i in range(12)]}
            )
        },
        "refused",
    ),
    "json_schema: expressions that multiply": (
        {"json_schema": json.dumps({"type": "string", "allOf": [{"pattern": f"{c}.{{5}}{c}"} for c in "abcdefghij"]})},
        "refused",
    ),
    "json_schema: deep constant": ({"json_schema": json.dumps({"anyOf": [{"const": _nested(500)}]})}, "refused"),
    "structural_tag: regex bounded twice": (
        {"structural_tag": _tag({"type": "regex", "pattern": "(a{0,1000}){0,1000}"})},
        "refused",
    ),
    "structural_tag: grammar bounded twice": (
        {"structural_tag": _tag({"type": "grammar", "grammar": _EMPTY})},
        "refused",
    ),
    "choice: many beginnings": ({"choice": tuple("a" * i for i in range(1, 600))}, "either"),
}
