"""Constraints that are refused before compilation, with name and place."""

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_common.errors import InvalidArgument
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.structured_output.constraints.regex import ANY, CharSet
from penstock_enginecore.structured_output.constraints.schema_document import fits
from penstock_enginecore.structured_output.constraints.source import check_constraint, grammar_source

LIMIT = 256 * 1024


def refused(**constraint: Any) -> str:
    """Return why the constraint is refused. Checks that the error's field is the constraint's."""
    with pytest.raises(InvalidArgument) as error:
        check_constraint(StructuredOutput(**constraint), LIMIT)
    kind = next(iter(constraint)) if len(constraint) == 1 else ""
    assert error.value.field == f"sampling_params.structured_output.{kind}".rstrip(".")
    return error.value.message


def schema_refused(schema: Any) -> str:
    message = refused(json_schema=schema if isinstance(schema, str) else json.dumps(schema, default=float))
    return message.removeprefix("sampling_params.structured_output.json_schema").removeprefix(":").lstrip()


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (
            {"type": "array", "uniqueItems": True},
            "#/uniqueItems is only supported where the items are values of an enum",
        ),
        ({"type": "array", "uniqueItems": True, "items": {"type": "string"}}, "#/uniqueItems is only supported where"),
        ({"type": "array", "contains": {}, "minContains": 2}, "#/minContains is 2; only 1 is supported"),
        ({"type": "array", "contains": {}, "maxContains": 2}, "#/maxContains is not supported"),
        (
            {"type": "array", "contains": {}, "maxItems": 65},
            "#/contains is only supported in arrays whose maximum length (maxItems) is at most",
        ),
        (
            {"properties": {"a": {"multipleOf": 0, "type": "integer"}}},
            "#/properties/a/multipleOf is 0; it must be above 0",
        ),
        ({"type": "number", "multipleOf": Decimal("1e-10")}, "#/multipleOf has more than 9 decimal places"),
        (
            {"type": "object", "unevaluatedProperties": {}},
            "#/unevaluatedProperties is only supported with the value false",
        ),
        (
            {"allOf": [{"type": "array", "unevaluatedItems": 1}]},
            "#/allOf/0/unevaluatedItems is only supported with the value false",
        ),
        ({"type": "string", "nullable": 1}, "#/nullable is 1; it must be true or false"),
        ({"$defs": {"a": {"foo": 1}}, "$ref": "#/$defs/a"}, "#/$defs/a/foo is not supported"),
        ({"type": "string", "minLenght": 1}, "#/minLenght is not supported; did you mean 'minLength'?"),
        ({"type": "boolean", "!type": ["null"]}, "#/!type is not supported"),
        ({"not": {"!type": ["null"]}}, "#/not/!type is not supported"),
        (
            {"type": "string", "pattern": "a(?=b)"},
            "#/pattern cannot be enforced: a lookahead at position 1 is",
        ),
        (
            {"type": "string", "pattern": "(?=a)b"},
            "#/pattern cannot be enforced: a lookahead at position 0 is only supported",
        ),
        (
            {"type": "string", "pattern": "(?<=a)b"},
            "#/pattern cannot be enforced: a lookbehind, which is not supported,",
        ),
        (
            {"allOf": [{"pattern": "^a"}, {"pattern": r"\b"}], "type": "string"},
            "#/allOf/1/pattern cannot be enforced: a word",
        ),
        ({"type": "object", "minProperties": 2}, "#/minProperties is 2; a number above 1 is only supported if"),
        ({"properties": {"a": {}}, "minProperties": 2}, "#/minProperties is 2; a number above 1 is only supported"),
        ({"patternProperties": {f"{i}": {} for i in range(5)}}, "# has 5 patternProperties; the limit is 4"),
        ({"type": "object", "propertyNames": {"anyOf": [{}]}}, "#/propertyNames is only supported with type, pattern"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/oneOf/0 requires a number that is not an integer"),
        ({"oneOf": [{"type": "array", "items": {"type": "null"}}, {"type": "array"}]}, "0 and 1 may both fit"),
        ({"not": {"contains": {}}}, "#/not/contains is not supported in a negated schema"),
        ({"type": "number", "not": {"const": 1}}, "#/not excludes numbers, which is only supported for integers"),
        (
            {"type": "array", "not": {"const": []}},
            "#/not excludes an array or object; only other values can be excluded",
        ),
        ({"type": "OBJECT"}, "#/type is 'OBJECT'; write 'object'"),
        ({"type": "boolean", "required": True}, "#/required must be a list of strings"),
    ],
)
def test_unenforceable_constraints_are_refused_by_name(schema: Any, place: str):
    assert place in schema_refused(schema)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "integer", "multipleOf": 100_003}, "#/multipleOf needs more than 3000 rules"),
        (
            {"type": "string", "pattern": "^(a|b)*a(a|b){12}$", "maxLength": 9},
            "# cannot be enforced: the expressions together need more",
        ),
    ],
)
def test_errors_that_are_slow_to_find_are_reported_by_the_compiler(schema: Any, reason: str):
    constraint = StructuredOutput(json_schema=json.dumps(schema))
    check_constraint(constraint, LIMIT)
    with pytest.raises(InvalidArgument) as error:
        grammar_source(constraint, LIMIT)
    assert reason in error.value.message


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{", "is not valid JSON"),
        ('{"minimum": NaN}', "NaN is not JSON"),
        ('{"minimum": 1e999999999}', "is out of range"),
        ("[" * 100_000, "is nested more than 256 levels deep"),
        ([], "# is []; a schema is an object, true or false"),
        (False, "# is false: no value is allowed there"),
        ({"required": ["a"], "properties": {"a": False}}, "#/properties/a is false"),
        ({"type": "foo"}, "#/type is 'foo'"),
        ({"enum": []}, "#/enum allows no value"),
        ({"const": 1, "type": "string"}, "#/const allows no value"),
        ({"anyOf": [False]}, "#/anyOf allows no value"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "cannot be fulfilled"),
        ({"type": "number", "exclusiveMinimum": 3, "maximum": 3}, "cannot be fulfilled"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "has minLength 3, which is above maxLength 2"),
        ({"type": "array", "minItems": 2, "items": False}, "#/minItems is 2; only 0 items are allowed"),
        ({"type": "string", "maxLength": 65_537}, "#/maxLength is 65537; the limit is 65536"),
        ({"type": "array", "maxItems": 10**9}, "the limit is 65536"),
        ({"type": "array", "minItems": -1}, "#/minItems is -1"),
        ({"$ref": "#/$defs/gone"}, "#/$ref is '#/$defs/gone', but this schema has no such part"),
        ({"type": "string", "allOf": [{"type": "null"}]}, "#/allOf/0/type has no type in common with #"),
        (
            {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 6},
            "# cannot be fulfilled: there is no multiple between",
        ),
        (
            {"type": "string", "pattern": "^a+$", "maxLength": 9, "allOf": [{"pattern": "b"}]},
            "# cannot be fulfilled: no text",
        ),
        (
            {"allOf": [{"required": ["a"]}, {"additionalProperties": False}]},
            "#/allOf/0/required names 'a', which the additional",
        ),
        ({"not": {}}, "#/not allows no value"),
        (
            {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [{"$ref": "#"}]}}},
            "refers to itself without end",
        ),
        ({"$ref": "https://example.org/schema"}, "it must refer to a part of this schema"),
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
    assert "is nested more than 64 levels deep" in schema_refused(schema)


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
        ("[b-a]", "a range whose bounds"),
        ("*a", "* repeats nothing"),
        ("a{2,1}", "bounds are out of order"),
        ("a{70000}", "more than 65536"),
        ("a++", "a repetition of a repetition"),
        (r"\q", "the escape \\q"),
        (r"\ud800", "surrogate"),
        ("(" * 70 + ")" * 70, "groups are nested more than 64 levels deep"),
    ],
)
def test_a_regex_that_cannot_be_honoured_is_refused_by_place(pattern: str, reason: str):
    assert reason in refused(regex=pattern)


def test_a_choice_needs_options_with_text():
    assert "option 1 is empty" in refused(choice=("a", ""))
    assert "the limit is 10000" in refused(choice=tuple(map(str, range(10_001))))
    assert "surrogate" in refused(choice=("\ud800",))


def test_exactly_one_constraint_is_given():
    assert "exactly one constraint, but it has: regex and grammar" in refused(regex="a", grammar="root ::= a")
    assert "exactly one constraint, but it has: none" in refused()


@pytest.mark.parametrize("constraint", [{"regex": "é" * 200_000}, {"choice": ("a" * 200_000, "b" * 200_000)}])
def test_a_constraint_has_a_largest_size(constraint: dict[str, Any]):
    assert "has 400000 bytes; the limit is 262144" in refused(**constraint)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"type": "json_schema", "json_schema": {"foo": {}}}, "#/format/content/json_schema/foo is not supported"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "#/format/content/style is 'qwen_xml'"),
        ({"type": "regex", "pattern": r"\b"}, "#/format/content/pattern a word boundary"),
        ({"type": "token", "token": 3}, "#/format/content/type is 'token'"),
    ],
)
def test_contents_of_a_structural_tag_are_checked_too(content: Any, reason: str):
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<", "content": content, "end": ">"}}
    assert reason in refused(structural_tag=json.dumps(tag))


def test_a_structural_tag_is_a_json_object_with_a_format():
    assert refused(structural_tag="{").startswith("sampling_params.structured_output.structural_tag is not valid JSON")
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
    check_constraint(StructuredOutput(json_schema=json.dumps(schema | {"minProperties": 2})), LIMIT)
    assert "#/minProperties is 3" in schema_refused(schema | {"minProperties": 3})
