"""What of a constraint is refused before anything is compiled, by name and place."""

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_common.errors import InvalidArgument
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.structured_output.constraints.charset import ANY, CharSet
from penstock_enginecore.structured_output.constraints.json_types import fits
from penstock_enginecore.structured_output.constraints.source import check_constraint, grammar_source

LIMIT = 256 * 1024


def refused(**constraint: Any) -> str:
    """Why the constraint is refused; the error's field is that of the constraint."""
    with pytest.raises(InvalidArgument) as error:
        check_constraint(StructuredOutput(**constraint), LIMIT)
    kind = next(iter(constraint)) if len(constraint) == 1 else ""
    assert error.value.field == f"sampling_params.structured_output.{kind}".rstrip(".")
    return error.value.message


def schema_refused(schema: Any) -> str:
    message = refused(json_schema=schema if isinstance(schema, str) else json.dumps(schema))
    return message.removeprefix("sampling_params.structured_output.json_schema: ")


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"not": {"type": "null"}}, "#/not is not supported"),
        ({"if": {}, "then": {}}, "#/if is not supported"),
        ({"type": "array", "uniqueItems": True}, "#/uniqueItems is not supported"),
        ({"type": "array", "contains": {}}, "#/contains is not supported"),
        ({"properties": {"a": {"multipleOf": 3, "type": "integer"}}}, "#/properties/a/multipleOf is not supported"),
        ({"type": "number", "multipleOf": 0.5}, "#/multipleOf is not supported"),
        ({"type": "object", "dependentSchemas": {}}, "#/dependentSchemas is not supported"),
        ({"type": "object", "dependentRequired": {}}, "#/dependentRequired is not supported"),
        ({"type": "object", "propertyNames": {}}, "#/propertyNames is not supported"),
        ({"type": "object", "unevaluatedProperties": False}, "#/unevaluatedProperties is not supported"),
        ({"type": "string", "nullable": True}, "#/nullable is not supported"),
        ({"$defs": {"a": {"foo": 1}}, "$ref": "#/$defs/a"}, "#/$defs/a/foo is not supported"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "# has pattern and maxLength; only one of"),
        ({"type": "string", "format": "regex"}, "#/format is 'regex'; supported: date,"),
        (
            {"type": "string", "pattern": "(?=a)"},
            "#/pattern cannot be honoured: a lookahead, which is not supported, at",
        ),
        ({"type": "object", "minProperties": 1}, "#/minProperties is not supported without required properties"),
        ({"properties": {"a": {}}, "minProperties": 1}, "#/minProperties is 1; it is only honoured up to"),
        ({"properties": {"a": {}, "b": {}}, "maxProperties": 1}, "#/maxProperties is not supported beside properties"),
        ({"patternProperties": {"a": {}, "b": {}}}, "#/patternProperties is only supported with one pattern"),
        ({"type": "integer", "anyOf": [{}]}, "#/anyOf is not supported beside type"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "minimum": 1}, "#/$ref is not supported beside minimum"),
        ({"enum": [1], "minimum": 0}, "#/enum is not supported beside minimum"),
        ({"allOf": [{}, {}]}, "#/allOf is only supported with one schema"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "0 and 1 may both fit"),
        ({"oneOf": [{"properties": {"a": {"const": 1}}}, {"type": "string"}]}, "0 and 1 may both fit"),
        ({"oneOf": [{"minLength": 2}, {"type": "integer"}]}, "0 and 1 may both fit"),
        ({"minimum": 1, "maxLength": 2}, "# has keywords of string and number, but no type"),
        ({"type": "string", "minimum": 1}, "#/minimum does not go with type 'string'"),
        ({"type": "array", "items": [{}]}, "#/items must be one schema"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(schema: Any, place: str):
    assert place in schema_refused(schema)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{", "is not valid JSON"),
        ('{"minimum": NaN}', "NaN is not JSON"),
        ('{"minimum": 1e999999999}', "is out of range"),
        ("[" * 100_000, "nests more than 256 deep"),
        ([], "# is []; a schema is an object, true or false"),
        (False, "# is false: no value is allowed there"),
        ({"required": ["a"], "properties": {"a": False}}, "#/properties/a is false"),
        ({"type": "foo"}, "#/type is 'foo'"),
        ({"enum": []}, "#/enum allows no value"),
        ({"const": 1, "type": "string"}, "#/const allows no value"),
        ({"anyOf": [False]}, "#/anyOf allows no value"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "cannot be fulfilled"),
        ({"type": "number", "exclusiveMinimum": 3, "maximum": 3}, "cannot be fulfilled"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "has minLength 3 above maxLength 2"),
        ({"type": "array", "minItems": 2, "items": False}, "#/minItems is 2; only 0 items are allowed"),
        ({"type": "string", "maxLength": 65_537}, "#/maxLength is 65537; the limit is 65536"),
        ({"type": "array", "maxItems": 10**9}, "the limit is 65536"),
        ({"type": "array", "minItems": -1}, "#/minItems is -1"),
        ({"$ref": "#/$defs/gone"}, "#/$ref is '#/$defs/gone', which this schema does not have"),
        ({"$ref": "https://example.org/schema"}, "only places of this schema can be referred to"),
        ({"$ref": "#"}, "# refers to itself without end"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "refers to itself without end"),
        ({"additionalProperties": False, "required": ["a"]}, "names 'a', which additionalProperties forbids"),
        ({"const": "\ud800"}, "cannot be written"),
    ],
)
def test_a_schema_that_is_wrong_or_cannot_be_fulfilled_is_refused(schema: Any, reason: str):
    assert reason in schema_refused(schema)


def test_nesting_has_a_limit():
    schema: Any = {"type": "null"}
    for _ in range(70):
        schema = {"type": "array", "items": schema}
    assert "nests more than 64 deep" in schema_refused(schema)


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "string"}, {"type": "null"}],
        [{"const": "a"}, {"enum": ["b", 1]}],
        [{"const": 1}, {"const": True}],
        [
            {"type": "object", "properties": {"k": {"const": kind}, "v": {}}, "required": ["k"]}
            for kind in ("circle", "square")
        ],
    ],
)
def test_one_of_is_allowed_where_no_value_fits_two_branches(branches: list[Any]):
    check_constraint(StructuredOutput(json_schema=json.dumps({"oneOf": branches})), LIMIT)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"\bword", "a word boundary"),
        (r"(a)\1", "a back reference"),
        ("(?<!a)b", "a lookbehind"),
        ("(?i)a", "a kind of group"),
        (r"\p{L}", "a Unicode property"),
        ("a^b", "^ at position 1 is not at an end"),
        ("a$b", "$ at position 1 is not at an end"),
        ("(a", "( is not closed at position 0"),
        ("a)", "unbalanced )"),
        ("[a", "a character class is not finished"),
        ("[b-a]", "a range whose ends"),
        ("*a", "* repeats nothing"),
        ("a{2,1}", "bounds are out of order"),
        ("a{70000}", "more than 65536"),
        ("a++", "a repetition of a repetition"),
        (r"\q", "the escape \\q"),
        (r"\ud800", "surrogate"),
        ("(" * 70 + ")" * 70, "groups nest more than 64 deep"),
    ],
)
def test_a_regex_that_cannot_be_honoured_is_refused_by_place(pattern: str, reason: str):
    assert reason in refused(regex=pattern)


def test_a_choice_needs_options_with_text():
    assert "option 1 is empty" in refused(choice=("a", ""))
    assert "the limit is 10000" in refused(choice=tuple(map(str, range(10_001))))
    assert "surrogate" in refused(choice=("\ud800",))


def test_exactly_one_constraint_is_given():
    assert "regex and grammar is set" in refused(regex="a", grammar="root ::= a")
    assert "none is set" in refused()


@pytest.mark.parametrize("constraint", [{"regex": "é" * 200_000}, {"choice": ("a" * 200_000, "b" * 200_000)}])
def test_a_constraint_has_a_largest_size(constraint: dict[str, Any]):
    assert "has 400000 bytes; the limit is 262144" in refused(**constraint)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"type": "json_schema", "json_schema": {"not": {}}}, "#/format/content/json_schema #/not is not supported"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "#/format/content/style is 'qwen_xml'"),
        ({"type": "regex", "pattern": r"\b"}, "#/format/content/pattern a word boundary"),
        ({"type": "token", "token": 3}, "#/format/content/type is 'token'"),
    ],
)
def test_what_stands_inside_a_structural_tag_is_checked_too(content: Any, reason: str):
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<", "content": content, "end": ">"}}
    assert reason in refused(structural_tag=json.dumps(tag))


def test_a_structural_tag_is_a_json_object_with_a_format():
    assert "is not valid JSON" in refused(structural_tag="{")
    assert "must be a JSON object" in refused(structural_tag="[]")


def test_an_empty_grammar_is_refused():
    assert "is empty" in refused(grammar=" \n")


@given(st.lists(st.tuples(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF)).map(sorted).map(tuple), max_size=5))
def test_a_character_is_either_in_a_set_or_in_its_complement(ranges: list[tuple[int, int]]):
    characters = CharSet(ranges)
    assert (characters | ~characters).ranges == ANY.ranges
    assert not characters & ~characters
    assert (~~characters).ranges == characters.ranges


def test_annotations_do_not_change_the_grammar():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    noted = {"type": "object", "title": "T", "$schema": "s", "properties": {"a": {"type": "integer", "default": 1}}}
    sources = [grammar_source(StructuredOutput(json_schema=json.dumps(s)), LIMIT) for s in (schema, noted)]
    assert sources[0] == sources[1]


@pytest.mark.parametrize(
    ("value", "kinds"),
    [
        (True, {"boolean"}),
        (None, {"null"}),
        (1, {"integer", "number"}),
        (Decimal("1.0"), {"integer", "number"}),
        (Decimal("1.5"), {"number"}),
        ("", {"string"}),
        ([], {"array"}),
        ({}, {"object"}),
    ],
)
def test_a_value_has_the_types_of_json_schema(value: Any, kinds: set[str]):
    known = ("object", "array", "string", "number", "integer", "boolean", "null")
    assert {kind for kind in known if fits(value, kind)} == kinds


def test_a_name_that_is_required_twice_is_required_once():
    schema = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "a"]}
    once = json.dumps(schema | {"required": ["a"]})
    given, expected = (StructuredOutput(json_schema=text) for text in (json.dumps(schema), once))
    assert grammar_source(given, LIMIT) == grammar_source(expected, LIMIT)
    assert "#/minProperties is 2" in schema_refused(schema | {"minProperties": 2})
