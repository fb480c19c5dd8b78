"""Keywords that constrain: of values that are tried, a grammar lets through exactly those that ``jsonschema`` finds
valid.
"""

import itertools
import json
import sys
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import jsonschema
import numpy as np
import pytest
import xgrammar

from penstock_common.types.sampling import JsonWhitespace, StructuredOutput
from penstock_enginecore.structured_output.constraints.schema_document import identity
from penstock_enginecore.structured_output.constraints.source import check_constraint, grammar_source
from penstock_enginecore.structured_output.core.base import bitmask_words
from penstock_enginecore.structured_output.matcher import XgrammarGrammar

EOS = 256
VOCAB_SIZE = 257
COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo(
        [*(bytes([byte]) for byte in range(256)), b""],
        xgrammar.VocabType.RAW,
        vocab_size=VOCAB_SIZE,
        stop_token_ids=[EOS],
    ),
    max_threads=1,
)


class Written:
    """The compact JSON texts that a schema's grammar admits."""

    def __init__(self, schema: Any) -> None:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        constraint = StructuredOutput(json_schema=text, json_whitespace=JsonWhitespace.COMPACT)
        self._compiled = COMPILER.compile_grammar(grammar_source(constraint, 1 << 20).text)

    def __contains__(self, text: str) -> bool:
        grammar = XgrammarGrammar(self._compiled, VOCAB_SIZE)
        return grammar.accept([*text.encode(), EOS])

    def allows_some(self) -> bool:
        """Return whether the grammar admits any first byte."""
        row = np.zeros(bitmask_words(VOCAB_SIZE), np.int32)
        XgrammarGrammar(self._compiled, VOCAB_SIZE).fill(row)
        return bool(row.any())


def objects(*members: tuple[str, list[Any]]) -> list[Any]:
    """Return all objects with some of the members, in their order, and with each possible value."""
    choices = [[None, *((name, value) for value in values)] for name, values in members]
    return [dict(filter(None, chosen)) for chosen in itertools.product(*choices)]


def lists(items: list[Any], most: int) -> list[Any]:
    return [list(chosen) for size in range(most + 1) for chosen in itertools.product(items, repeat=size)]


TEXTS = [
    "",
    "a",
    "b",
    "ab",
    "aab",
    "abab",
    "ABC",
    "a-b",
    "a-",
    "-a",
    "no",
    "none",
    "x" * 9,
    'q"',
    "sk-1",
    "0.5",
    ".",
    "+7",
    "é",
]
INTEGERS = [*range(-30, 140), 995, 1000, 1005, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 10**15 + 5]
ANYTHING = [None, True, False, 0, 1, 7, -3, "", "a", "ab", [], [1], ["a"], {}, {"a": 1}]
PLAIN = {"type": "object", "additionalProperties": False}
TWO = PLAIN | {"properties": {"a": {"enum": [1, 2]}, "b": {"enum": [1, 2]}}}
A_B = objects(("a", [1, 2]), ("b", [1, 2]))
KIND = PLAIN | {"properties": {"k": {"enum": ["x", "y", "z"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}}}
K_N = objects(("k", ["x", "y", "z"]), ("n", [0, 5, 9, 10, 50, 99]))
RGB = {"type": "array", "items": {"enum": ["r", "g", "b"]}}

CASES: dict[str, tuple[Any, list[Any]]] = {
    "pattern and lengths": ({"type": "string", "pattern": "^[ab]+$", "minLength": 2, "maxLength": 3}, TEXTS),
    "pattern found inside, and a length": ({"type": "string", "pattern": "b", "maxLength": 3}, TEXTS),
    "patterns of two schemas": (
        {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "b$"}], "maxLength": 4},
        TEXTS,
    ),
    "pattern with lookaheads": (
        {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
        [*TEXTS, "12.", "1.5", "", "+", "-.", "007", "1..2"],
    ),
    "positive lookahead": ({"type": "string", "pattern": "^(?=.*b)[ab-]{2,}$"}, TEXTS),
    "slug": ({"type": "string", "pattern": "^[a-z]+(?:-[a-z]+)*$", "minLength": 2, "maxLength": 3}, TEXTS),
    "not a pattern": ({"type": "string", "maxLength": 4, "not": {"pattern": "^a"}}, TEXTS),
    "not an enum": ({"type": "string", "not": {"enum": ["no", "none", 3]}}, TEXTS),
    "not a const, of integers": ({"type": "integer", "minimum": -5, "maximum": 5, "not": {"const": 0}}, INTEGERS),
    "not types": ({"type": ["string", "integer", "null"], "not": {"type": ["null", "integer"]}}, ANYTHING),
    "not, twice": ({"type": "integer", "not": {"not": {"minimum": 3}}, "maximum": 9}, INTEGERS),
    "not a bound": ({"type": "integer", "not": {"exclusiveMaximum": 4}, "maximum": 9}, INTEGERS),
    "not required": (TWO | {"not": {"required": ["a", "b"]}}, A_B),
    "not these properties": (TWO | {"not": {"properties": {"a": {"const": 1}}, "required": ["a"]}}, A_B),
    "not any of": ({"enum": ANYTHING, "not": {"anyOf": [{"type": "string"}, {"const": 7}]}}, ANYTHING),
    "enum beside bounds": ({"enum": ANYTHING, "minimum": 1}, ANYTHING),
    "enum beside anyOf": (
        {"enum": ANYTHING, "anyOf": [{"type": "null"}, {"minLength": 2, "type": "string"}]},
        ANYTHING,
    ),
    "const beside enum": ({"const": "a", "enum": ["a", "b"]}, ANYTHING),
    "anyOf beside type": ({"type": "string", "anyOf": [{"const": "a"}, {"pattern": "^b$"}]}, TEXTS),
    "anyOf beside properties": (TWO | {"anyOf": [{"required": ["a"]}, {"properties": {"b": {"const": 2}}}]}, A_B),
    "allOf of bounds": (
        {"type": "integer", "allOf": [{"minimum": 3}, {"maximum": 9}, {"exclusiveMinimum": 3}]},
        INTEGERS,
    ),
    "allOf of objects": (
        {
            "allOf": [
                {"properties": {"a": {"enum": [1, 2]}}},
                {"properties": {"a": {"enum": [2, 3]}}, "required": ["a"]},
            ]
        },
        [{}, {"a": 1}, {"a": 2}, {"a": 3}],
    ),
    "type beside $ref": (
        {"$defs": {"n": {"minimum": 3}}, "type": "integer", "$ref": "#/$defs/n", "maximum": 9},
        INTEGERS,
    ),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, INTEGERS),
    "multipleOf, of several": ({"type": "integer", "multipleOf": 4, "allOf": [{"multipleOf": 6}]}, INTEGERS),
    "multipleOf and bounds": ({"type": "integer", "multipleOf": 7, "minimum": -20, "exclusiveMaximum": 98}, INTEGERS),
    "multipleOf a half, of integers": ({"type": "integer", "multipleOf": 1.5, "minimum": 0, "maximum": 30}, INTEGERS),
    "multipleOf 1000": ({"type": "integer", "multipleOf": 1000}, INTEGERS),
    "multipleOf and not": ({"type": "integer", "multipleOf": 5, "not": {"enum": [10, 15]}}, INTEGERS),
    "uniqueItems": (RGB | {"uniqueItems": True}, lists(["r", "g", "b"], 4)),
    "uniqueItems and lengths": (RGB | {"uniqueItems": True, "minItems": 1, "maxItems": 2}, lists(["r", "g", "b"], 4)),
    "uniqueItems of booleans": (
        {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
        lists([True, False], 3),
    ),
    "uniqueItems of one": (
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 1},
        lists([1, 2], 2),
    ),
    "uniqueItems of equal numbers": (
        {"type": "array", "items": {"enum": [1, 1.0, 2]}, "uniqueItems": True},
        lists([1, 2], 3),
    ),
    "contains": (RGB | {"contains": {"const": "b"}}, lists(["r", "g", "b"], 3)),
    "contains and lengths": (RGB | {"contains": {"const": "b"}, "minItems": 2, "maxItems": 3}, lists(["r", "b"], 4)),
    "contains and a least length": (RGB | {"contains": {"const": "b"}, "minItems": 3}, lists(["r", "b"], 5)),
    "contains none": (RGB | {"contains": {"const": "b"}, "minContains": 0}, lists(["r", "x"], 3)),
    "if, then, else": (
        KIND
        | {
            "if": {"properties": {"k": {"const": "x"}}, "required": ["k"]},
            "then": {"properties": {"n": {"maximum": 9}}},
        }
        | {"else": {"properties": {"n": {"minimum": 10}}}},
        K_N,
    ),
    "if, which an absent property fulfils": (
        KIND | {"if": {"properties": {"k": {"enum": ["x", "y"]}}}, "then": {"required": ["n"]}},
        K_N,
    ),
    "if, of several conditions": (
        KIND
        | {
            "allOf": [
                {
                    "if": {"properties": {"k": {"const": k}}, "required": ["k"]},
                    "then": {"properties": {"n": {"maximum": m}}},
                }
                for k, m in (("x", 5), ("y", 9))
            ]
        },
        K_N,
    ),
    "dependentRequired": (TWO | {"dependentRequired": {"a": ["b"]}}, A_B),
    "dependentRequired, both ways": (TWO | {"dependentRequired": {"a": ["b"], "b": ["a"]}}, A_B),
    "dependentSchemas": (TWO | {"dependentSchemas": {"a": {"properties": {"b": {"const": 2}}}}}, A_B),
    "oneOf by required": (TWO | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, A_B),
    "oneOf of bounds that overlap": (
        {"type": "integer", "oneOf": [{"minimum": 3}, {"maximum": 9}], "minimum": -20, "maximum": 20},
        INTEGERS,
    ),
    "minProperties": (TWO | {"minProperties": 1}, A_B),
    "maxProperties": (TWO | {"maxProperties": 1}, A_B),
    "both counts": (
        PLAIN
        | {
            "properties": {name: {"const": 1} for name in "abcd"},
            "minProperties": 2,
            "maxProperties": 3,
            "required": ["b"],
        },
        objects(*((name, [1]) for name in "abcd")),
    ),
    "minProperties of any names": (
        {"type": "object", "additionalProperties": {"const": 1}, "minProperties": 1},
        objects(("a", [1, 2]), ("b", [1])),
    ),
    "propertyNames": (
        {"type": "object", "propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": {"const": 1}},
        objects(("a", [1]), ("b", [1, 2]), ("c", [1])),
    ),
    "propertyNames of an enum": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"const": 1}},
        objects(("a", [1]), ("b", [1, 2]), ("c", [1])),
    ),
    "patternProperties beside properties": (
        PLAIN | {"properties": {"a": {"const": 1}}, "patternProperties": {"^x": {"const": 2}, "y$": {"enum": [2, 3]}}},
        objects(("a", [1, 2]), ("x", [2, 3]), ("xy", [2, 3]), ("y", [2, 3]), ("z", [1])),
    ),
    "patternProperties and additional ones": (
        {"type": "object", "patternProperties": {"^x": {"const": 2}}, "additionalProperties": {"const": 1}},
        objects(("x", [1, 2]), ("z", [1, 2])),
    ),
    "draft 4": (
        {"type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 5, "exclusiveMaximum": False},
        INTEGERS,
    ),
    "draft 7 tuple": (
        {"type": "array", "items": [{"const": 1}, {"const": 2}], "additionalItems": {"const": 3}, "minItems": 1},
        lists([1, 2, 3], 4),
    ),
    "draft 7 dependencies": (TWO | {"dependencies": {"a": ["b"]}}, A_B),
    "unevaluatedProperties": (
        {
            "allOf": [{"properties": {"a": {"const": 1}}}],
            "properties": {"b": {"const": 1}},
            "unevaluatedProperties": False,
        }
        | {"type": "object"},
        objects(("a", [1, 2]), ("b", [1]), ("c", [1])),
    ),
}
OLD = {
    "draft 4": jsonschema.Draft4Validator,
    "draft 7 tuple": jsonschema.Draft7Validator,
    "draft 7 dependencies": jsonschema.Draft7Validator,
}


@pytest.mark.parametrize("name", CASES)
def test_of_values_that_are_tried_those_that_are_valid_are_let_through(name: str) -> None:
    schema, values = CASES[name]
    written = Written(schema)
    validator = OLD.get(name, jsonschema.Draft202012Validator)(schema)
    texts = {json.dumps(value, separators=(",", ":"), ensure_ascii=False): value for value in values}
    valid = {text for text, value in texts.items() if validator.is_valid(value)}
    assert 0 < len(valid) < len(texts), "the values tell something"
    assert {text for text in texts if text in written} == valid


@pytest.mark.parametrize("step", ["0.01", "0.5", "2.5", "0.125", "3"])
def test_decimals_are_multiples_however_many_zeros_they_end_with(step: str) -> None:
    schema = f'{{"type": "number", "multipleOf": {step}, "minimum": -1, "maximum": 10}}'
    written = Written(schema)
    texts = {f"{number:.{digits}f}" for digits in range(4) for number in (Decimal(i) / 40 for i in range(-60, 460))}
    texts = {text for text in texts if not (text.startswith("-") and Decimal(text) == 0)}
    digits = len(step.partition(".")[2])
    found = {text for text in texts if text in written}
    assert found == {
        text
        for text in texts
        if Decimal(text) % Decimal(step) == 0 and -1 <= Decimal(text) <= 10 and len(text.partition(".")[2]) <= digits
    }


def test_conditions_on_one_property_are_many() -> None:
    kinds = [f"v{i}" for i in range(40)]
    schema = PLAIN | {
        "properties": {"k": {"enum": kinds}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["k", "n"],
        "allOf": [
            {
                "if": {"properties": {"k": {"const": kind}}, "required": ["k"]},
                "then": {"properties": {"n": {"maximum": most}}},
            }
            for most, kind in enumerate(kinds)
        ],
    }
    written = Written(schema)
    assert '{"k":"v7","n":7}' in written
    assert '{"k":"v7","n":8}' not in written
    assert '{"k":"v39","n":39}' in written


def calls(work: Callable[[], object]) -> int:
    """Return the number of function calls, which is the same on every machine."""
    count = 0

    def called(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(6)]} for i in range(12)]},
        {"oneOf": [{"type": "object", "properties": {"a": {"type": "integer", "minimum": i}}} for i in range(100)]},
        {
            "oneOf": [{"$ref": "#/$defs/d0"}] * 9,
            "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 9} for i in range(9)},
        },
        {"type": "object", "properties": {f"p{i}": {} for i in range(600)}, "minProperties": 300},
        {"type": "string", "pattern": "^(a|b)*a(a|b){14}$", "maxLength": 30, "allOf": [{"pattern": "b"}]},
        {"type": "string", "pattern": "^(ab{0,9000}){0,3}$", "maxLength": 30},
        {
            "type": "object",
            "patternProperties": {f"{c}.{{9}}{c}": {} for c in "abcd"},
            "properties": {name: {} for name in "efgh"},
        },
    ],
)
def test_a_check_where_requests_come_in_takes_few_steps(schema: Any) -> None:
    constraint = StructuredOutput(json_schema=json.dumps(schema))
    assert calls(lambda: check_constraint(constraint, 1 << 20)) < 60_000


@pytest.mark.parametrize("excluded", [[None, 1], [True], ["a", ""], [[1], {}], [7, "ab", False]])
def test_values_that_must_not_be_are_not_whatever_their_type(excluded: list[Any]) -> None:
    written = Written({"properties": {"v": {"not": {"enum": excluded}}}})
    allowed = [value for value in ANYTHING if f'{{"v":{json.dumps(value, separators=(",", ":"))}}}' in written]
    assert allowed
    assert not {identity(value) for value in allowed} & {identity(value) for value in excluded}


def test_unique_values_that_are_many_keep_their_order() -> None:
    names = [f"v{i}" for i in range(12)]
    written = Written({"type": "array", "items": {"enum": names}, "uniqueItems": True, "minItems": 2, "maxItems": 11})
    assert json.dumps(names[:11], separators=(",", ":")) in written
    assert '["v0","v7"]' in written
    assert not {'["v7","v0"]', '["v0","v0"]', '["v0"]', json.dumps(names, separators=(",", ":"))} & {
        text
        for text in ('["v7","v0"]', '["v0","v0"]', '["v0"]', json.dumps(names, separators=(",", ":")))
        if text in written
    }


def test_a_format_of_integers_bounds_them() -> None:
    for form, low, high in (("int32", -(2**31), 2**31 - 1), ("uint8", 0, 255), ("uint64", 0, 10**18 - 1)):
        written = Written({"type": "integer", "format": form})
        assert str(low) in written
        assert str(high) in written
        assert str(low - 1) not in written
        assert str(high + 1) not in written


def test_nullable_adds_null_but_not_to_an_enum() -> None:
    assert "null" in Written({"type": "string", "nullable": True})
    assert "null" not in Written({"type": "string", "nullable": False})
    assert "null" not in Written({"type": "string", "nullable": True, "enum": ["a"]})
    assert "null" in Written({"type": "string", "nullable": True, "enum": ["a", None]})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "color"},
        {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png"},
        {"type": "string", "x-order": 1, "$comment": "c", "readOnly": True, "enumDescriptions": ["a"]},
        {"type": "string", "minimum": 5, "required": ["a"], "uniqueItems": True},
        {"type": "string", "dependentRequired": {}, "not": False},
        {"type": "string", "$id": "https://example.org/a", "$anchor": "a", "id": "b"},
        {"type": "string", "discriminator": {"propertyName": "a"}, "nullable": False},
        {"type": "string", "if": {"minLength": 3}},
    ],
)
def test_keywords_without_effect_change_nothing(schema: Any) -> None:
    sources = [
        grammar_source(StructuredOutput(json_schema=json.dumps(s)), 1 << 20) for s in (schema, {"type": "string"})
    ]
    assert sources[0].text.split("\n")[0] == sources[1].text.split("\n")[0] == "root ::= string"


@pytest.mark.parametrize(
    ("reference", "extra"),
    [
        ("#/$defs/f", {}),
        ("#flag", {}),
        ("f.json", {"$id": "https://example.org/root.json"}),
        ("https://example.org/f.json", {"$id": "https://example.org/root.json"}),
        ("f.json#/$defs/inner", {"$id": "https://example.org/root.json"}),
    ],
)
def test_a_reference_names_a_place_by_pointer_anchor_or_id(reference: str, extra: Any) -> None:
    flag = {"$anchor": "flag", "type": "boolean", "$defs": {"inner": {"type": "boolean"}}}
    flag |= {"$id": "f.json"} if extra else {}
    written = Written({"$defs": {"f": flag}, "properties": {"a": {"$ref": reference}}, **extra})
    assert '{"a":true}' in written
    assert '{"a":1}' not in written


@pytest.mark.parametrize(
    ("schema", "high"),
    [
        ({"type": "string", "format": "email", "maxLength": 100}, 100),
        ({"type": "string", "pattern": "^[a-z]+(\\.[a-z]+)*$", "maxLength": 5000}, 5000),
    ],
)
def test_a_great_length_beside_an_expression_leaves_texts_that_are_short(schema: Any, high: int) -> None:
    written = Written(schema)
    assert '"a@b.cd"' in written or '"a.b"' in written
    assert f'"{"a" * (high + 1)}"' not in written


def test_the_grammar_of_a_recursion_through_a_conjunction_has_an_end() -> None:
    node = {
        "type": "object",
        "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/n", "required": ["v"]}}},
    }
    schema = {"$defs": {"n": node | {"additionalProperties": {"const": 1}}}, "$ref": "#/$defs/n"}
    written = Written(schema)
    assert '{"kids":[{"kids":[],"v":1}]}' in written
    assert '{"kids":[{"kids":[]}]}' not in written
