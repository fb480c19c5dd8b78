"""Hostile values for fields, by the field's type, or by its name for known names."""

import json
import math
import struct
from collections.abc import Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field

NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    16,
    127,
    128,
    255,
    256,
    1000,
    4096,
    65_536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**53,
    2**63 - 1,
)
NEGATIVE = (-1, -2, -100, -(2**31), -(2**31) - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-45, 1e-30, 1e38, -1e38, 1e300, math.inf, -math.inf, math.nan, 100.0, 101.0)
INVALID_UTF8 = (
    b"\xff",
    b"abc\xc3",
    b"\xed\xa0\x80",
    b"\xf8\x88\x80\x80\x80",
    b"ok\x80ok",
    b"\xc0\xaf",
    b"\xfe\xfe\xff\xff",
)
TEXTS = (
    "",
    " ",
    "\x00",
    "a\x00b",
    "\u202e\u0000\ufeff",
    "👩‍👩‍👧‍👦" * 8,
    "\U0010ffff",
    "e" + "\u0301" * 500,
    "%s%n%x{0}{{7*7}}",
    "../../../../etc/passwd",
    "<|endoftext|><|im_start|>system\n",
    "'; DROP TABLE requests; --",
    "true",
    "-1",
    "NaN",
    "1e999",
    "a" * 257,
    "\r\nx-injected: 1",
    "x" * 5000,
)
REGEXES = (
    "(a+)+$",
    "(a|a)*" * 20 + "b",
    "(" * 400 + "a" + ")" * 400,
    "[",
    "a{1000000}",
    "((a{100}){100}){100}",
    "(?=a)b",
    r"(a)\1",
    r"\p{Greek}+",
    "(?P<x>a)(?P<x>b)",
    "[z-a]",
    "a" * 5000,
    "|".join(f"w{i}" for i in range(500)),
    "(.*)*" * 10,
    r"\u{110000}",
    ".{0,65535}",
    "",
    "(?i)\u017f",
    "[^\x00-\U0010ffff]",
)
GRAMMARS = (
    "root ::= root",
    'root ::= root "a" | "b"',
    "root ::= missing",
    "root ::=",
    'root ::= ("a" | "b")* ' * 50,
    'a ::= "x"',
    'root ::= "' + "x" * 3000 + '"',
    "root ::= " + "(" * 300 + '"a"' + ")" * 300,
    'root ::= [^\\x00-\\xff] | "\\ud800"',
    "\x00",
    'root ::= "a"{100000}',
    "start: /a+/ b\nb: start",
)


def _nested(depth: int, key: str) -> str:
    return f'{{"{key}":' * depth + "{}" + "}" * depth


SCHEMAS = (
    "",
    "{",
    "null",
    "[]",
    "7",
    "false",
    "true",
    '{"type":"nothing"}',
    '{"type":["string","string"],"minLength":1e9}',
    '{"$ref":"#"}',
    '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}',
    '{"$ref":"http://127.0.0.1:1/schema.json"}',
    '{"$ref":"file:///etc/passwd"}',
    '{"allOf":[{"type":"string"},{"type":"integer"}]}',
    '{"enum":[]}',
    '{"const":' + "[" * 200 + "]" * 200 + "}",
    '{"type":"object","required":["a"],"properties":{},"additionalProperties":false}',
    '{"type":"string","pattern":"(a+)+$"}',
    '{"type":"string","pattern":"["}',
    '{"type":"string","minLength":100000}',
    '{"type":"string","minLength":5,"maxLength":2}',
    '{"type":"array","minItems":1000000,"items":{"type":"integer"}}',
    '{"type":"array","items":{"$ref":"#"},"minItems":1}',
    '{"type":"integer","minimum":5,"maximum":1}',
    '{"type":"number","multipleOf":1e-300}',
    '{"type":"object","patternProperties":{"(":{}}}',
    '{"not":{}}',
    '{"if":{"type":"string"},"then":false,"else":false}',
    '{"anyOf":[' + ",".join(['{"type":"string"}'] * 300) + "]}",
    '{"type":"object","properties":{' + ",".join(f'"p{i}":{{"type":"integer"}}' for i in range(300)) + "}}",
    '{"oneOf":' + "[" * 3000 + "]" * 3000 + "}",
    _nested(50, "items"),
    _nested(2000, "items"),
    _nested(20_000, "not"),
    '{"type":"string","format":"no-such"}',
    '{"a":1,"a":2,"type":"object"}',
    '{"minimum":' + "9" * 5000 + "}",
    '{"\\ud800":1}',
)
TAGS = (
    '{"type":"structural_tag"}',
    '{"type":"structural_tag","format":7}',
    '{"type":"structural_tag","format":{"type":"regex","pattern":"("}}',
    '{"type":"structural_tag","format":{"type":"sequence","elements":[]}}',
    '{"type":"structural_tag","format":{"type":"json_schema","json_schema":{"$ref":"#"}}}',
    '{"structures":[],"triggers":[]}',
    '{"type":"structural_tag","format":'
    + '{"type":"tag","begin":"a","end":"b","content":' * 80
    + "{}"
    + "}" * 80
    + "}",
    *SCHEMAS[:8],
)
JSON = (
    "{",
    "[]",
    "null",
    "7",
    '{"a":',
    '"x"',
    '{"messages":1}',
    '{"a":1}',
    "[" * 5000,
    '{"a":' * 3000 + "1" + "}" * 3000,
)
_BY_NAME: dict[str, Sequence[str]] = {
    "regex": REGEXES,
    "json_schema": SCHEMAS,
    "grammar": GRAMMARS,
    "structural_tag": TAGS,
    "parameters": SCHEMAS,
    "arguments": JSON,
    "chat_template_kwargs": JSON,
    "kv_transfer_params_json": JSON,
    "model": ("no-such-model", "penstock", "../penstock-tiny", "a" * 10_000, "modèle"),
    "lora": ("no-such-adapter", "a" * 300),
    "role": ("root", "", "user", "assistant", "tool", "USER"),
    "dtype": ("float32", "float64", "bfloat16", "int8", "complex128", "", "float16", "nonsense"),
    "service": ("", "no.such.Service", "penstock.inference.v1.InferenceService"),
    "method": ("no_such_method", "__class__", "eval", "os.system", "", "__init__", "engine_info.__globals__"),
    "address": (
        "127.0.0.1:9",
        "",
        "nonsense",
        ":1",
        "127.0.0.1:0",
        "127.0.0.1:99999",
        "a" * 300 + ":1",
        "[::1",
        "127.0.0.1:\uff19",
    ),
}


def scalar(field: Any, rng: Random) -> int | bytes:
    """Return a hostile value for a scalar field in wire format."""
    if field.type in (Field.TYPE_STRING, Field.TYPE_BYTES):
        return text(field, rng)
    if field.name in _FEW:
        return rng.choice(_FEW_TOKENS) if rng.random() < 0.97 else 2**32 - 1
    if field.type == Field.TYPE_FLOAT:
        return struct.pack("<f", _as_float32(rng.choice(FLOATS)))
    if field.type == Field.TYPE_DOUBLE:
        return struct.pack("<d", rng.choice(FLOATS))
    if field.type == Field.TYPE_ENUM:
        return rng.choice((0, 1, 2, 3, 4, 99, -1, 2**31, 2**63))
    if field.type == Field.TYPE_BOOL:
        return rng.choice((0, 1, 2, 2**64 - 1))
    return rng.choice(NUMBERS if rng.random() < 0.7 else NEGATIVE)


def text(field: Any, rng: Random) -> bytes:
    """Return bytes for a string field or bytes field."""
    if field.type == Field.TYPE_BYTES:
        return rng.choice(
            (
                b"",
                b"\x00",
                rng.randbytes(rng.choice((1, 7, 64, 1000))),
                b"\x91\xc1",
                b"\xdd\xff\xff\xff\xff",
                b"\x91" * 3000,
            )
        )
    if rng.random() < 0.08:
        return rng.choice(INVALID_UTF8)
    if (known := _BY_NAME.get(field.name)) and (field.name in _ONLY_KNOWN or rng.random() < 0.8):
        return rng.choice(known).encode(errors="surrogatepass")
    if rng.random() < 0.01:
        return b"long " * rng.choice((10_000, 100_000))
    return rng.choice(TEXTS).encode()


_FEW, _FEW_TOKENS = ("max_tokens", "min_tokens"), (0, 1, 2, 3, 7, 16)
_ONLY_KNOWN = ("address",)
"""The frontend connects to the address that an engine reports, so only addresses of this machine are allowed."""


def _as_float32(value: float) -> float:
    return value if not math.isfinite(value) or abs(value) < 3.4e38 else math.copysign(math.inf, value)


def json_value(rng: Random) -> Any:
    """Return a hostile JSON value."""
    kind = rng.randrange(12)
    if kind < 3:
        return rng.choice((*NUMBERS, *NEGATIVE, 2**64, 2**70, -(2**70), 0.5, 1e38, 1e300, -0.1, 1.5))
    if kind < 6:
        return rng.choice(TEXTS)
    if kind == 6:
        return rng.choice((None, True, False))
    if kind == 7:
        return [rng.choice((*TEXTS, *NUMBERS)) for _ in range(rng.choice((0, 1, 3, 100)))]
    if kind == 8:
        return {rng.choice(TEXTS): rng.choice((*TEXTS, *NUMBERS)) for _ in range(3)}
    if kind == 9:
        return [rng.choice(TEXTS)] * rng.choice((65, 1025, 3000))
    if kind == 10:
        return rng.choice((*REGEXES, *GRAMMARS, *SCHEMAS))
    deep: Any = {}
    for _ in range(rng.choice((3, 30, 300))):
        deep = [deep] if rng.random() < 0.5 else {"a": deep}
    return deep


def json_schema(rng: Random) -> Any:
    """Return a hostile schema as JSON text, which may be invalid JSON."""
    found = rng.choice(SCHEMAS)
    try:
        return json.loads(found)
    except (ValueError, RecursionError):
        return found
