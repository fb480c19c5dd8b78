"""Every keyword, at every place of a schema and with every kind of value, is accepted or refused."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.structured_output.constraints.source import check_constraint, grammar_source

KEYWORDS = {
    "object": [
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "minProperties",
        "maxProperties",
        "propertyNames",
        "dependentRequired",
        "dependentSchemas",
        "unevaluatedProperties",
    ],
    "array": [
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
        "uniqueItems",
        "contains",
        "minContains",
        "additionalItems",
    ],
    "string": ["minLength", "maxLength", "pattern", "format"],
    "number": ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"],
}
ANY_TYPE = ["type", "$ref", "const", "enum", "anyOf", "oneOf", "allOf", "title", "default", "$defs", "$id", "$schema"]
OTHERS = ["not", "if", "nullable", "dependencies", "unevaluatedItems", "!enum", "$anchor", "id", "x-unknown", "unknown"]
ALL = [*ANY_TYPE, *OTHERS, *(name for names in KEYWORDS.values() for name in names)]


def nested(opening: str, closing: str, depth: int) -> str:
    return opening * depth + "1" + closing * depth


VALUES = [
    *(
        "null",
        "{}",
        "[]",
        '""',
        "true",
        "false",
        "-1",
        "0.5",
        "1e400",
        "1e99999999999999999999",
        "1e300",
        "9" * 400,
        '"x"',
    ),
    *(
        "[null]",
        "[{}]",
        "[[]]",
        "[true]",
        '["a", "a"]',
        '{"a": null}',
        '{"a": {}}',
        '{"a": []}',
        '{"": true}',
        '"\\ud800"',
    ),
    *(
        '{"\\ud800": {}}',
        '["\\ud800"]',
        '"#/"',
        '"#/²"',
        '"#/anyOf/99999999999999999999"',
        '[{"type": {}}]',
        '{"type": [{}]}',
    ),
    *(
        '{"minLength": null}',
        '[{"$ref": {}}]',
        '"(a{0,1000}){0,1000}"',
        '"["',
        nested("[", "]", 90),
        nested("[", "]", 300),
    ),
    *(nested("[", "]", 5000), nested('{"a":', "}", 200), nested('{"a":', "}", 5000), nested('{"anyOf":[', "]}", 60)),
    *(nested('{"anyOf":[', "]}", 120), nested('{"items":', "}", 70), nested('[{"const":', "}]", 100)),
]


def places(name: str) -> Iterator[str]:
    """Yield schemas with the keyword ``name`` and the value VALUE, at each place where a schema is possible."""
    base: dict[str, Any] = {name: "VALUE"}
    kinds = [kind for kind, names in KEYWORDS.items() if name in names]
    typed = base | {"type": kinds[0]} if kinds else base
    for schema in [base, typed] if kinds else [base]:
        for place in (
            schema,
            {"type": "object", "properties": {"p": schema}, "required": ["p"]},
            {"type": "object", "additionalProperties": schema},
            {"type": "object", "patternProperties": {"^a$": schema}},
            {"type": "array", "items": schema},
            {"type": "array", "prefixItems": [schema]},
            {"anyOf": [{"type": "null"}, schema]},
            {"oneOf": [{"type": "null"}, schema]},
            {"oneOf": [schema, copy.deepcopy(schema)]},
            {"allOf": [schema]},
            {"$ref": "#/$defs/d", "$defs": {"d": schema}},
            {"oneOf": [{"$ref": "#/$defs/d"}, {"type": "null"}], "$defs": {"d": schema}},
        ):
            yield json.dumps(place)


def verdict(constraint: StructuredOutput) -> str:
    """Return ``taken``, or the reason of the refusal. Any other exception fails the test."""
    try:
        check_constraint(constraint, 256 * 1024)
    except (InvalidArgument, Unimplemented) as e:
        error = e
    else:
        return "taken"
    assert error.field.startswith("sampling_params.structured_output.")
    assert len(error.message.encode()) < 5000
    return error.message


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_keyword_of_any_value_is_taken_or_refused(name: str):
    for schema in places(name):
        for value in VALUES:
            verdict(StructuredOutput(json_schema=schema.replace('"VALUE"', value)))


@pytest.mark.parametrize("name", [n for n in ALL if n != "const"])
def test_a_keyword_that_is_null_is_absent(name: str):
    for schema in places(name):
        with_null = StructuredOutput(json_schema=schema.replace('"VALUE"', "null"))
        without = StructuredOutput(
            json_schema=schema.replace(f'"{name}": "VALUE", ', "").replace(f'"{name}": "VALUE"', "")
        )
        assert verdict(with_null) == verdict(without)
        if verdict(without) == "taken":
            assert grammar_source(with_null, 1 << 20) == grammar_source(without, 1 << 20)


@pytest.mark.parametrize("value", ["{}", "[{}]", "-1", '"x"', "1e400", nested("[", "]", 90)])
@pytest.mark.parametrize(
    "name",
    [n for names in KEYWORDS.values() for n in names if n not in ("additionalProperties", "items", "additionalItems")],
)
def test_a_wrong_type_is_refused_with_the_place_of_its_keyword(name: str, value: str):
    fine = {
        "properties": ["{}"],
        "patternProperties": ["{}"],
        "pattern": ['"x"'],
        "format": ['"x"'],
        "prefixItems": ["[{}]"],
    }
    fine |= {key: ["{}"] for key in ("propertyNames", "dependentRequired", "dependentSchemas", "contains")}
    fine |= {bound: ["-1"] for bound in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")}
    if value in fine.get(name, ()):
        return
    kind = next(kind for kind, names in KEYWORDS.items() if name in names)
    schema = f'{{"type": "array", "items": {{"type": "{kind}", "{name}": {value}}}}}'
    message = verdict(StructuredOutput(json_schema=schema))
    assert f"#/items/{name}" in message or "out of range" in message


TAG = '{"type": "structural_tag", "format": %s}'
PARTS = [
    '{"type": VALUE}',
    '{"type": "json_schema", "json_schema": VALUE}',
    '{"type": "json_schema", "json_schema": {"minLength": VALUE}}',
    '{"type": "regex", "pattern": VALUE}',
    '{"type": "tag", "begin": VALUE, "content": {"type": "any_text"}, "end": VALUE}',
    '{"type": "tag", "begin": "", "content": {"type": VALUE}, "end": ""}',
    '{"type": "sequence", "elements": [{"type": VALUE}]}',
    '{"type": "triggered_tags", "triggers": VALUE, "tags": [{"type": VALUE}]}',
    "VALUE",
]


@pytest.mark.parametrize("part", PARTS)
def test_a_structural_tag_of_any_value_is_taken_or_refused(part: str):
    for value in VALUES:
        verdict(StructuredOutput(structural_tag=TAG % part.replace("VALUE", value)))
        verdict(StructuredOutput(structural_tag=part.replace("VALUE", value)))


def test_a_type_that_is_no_string_is_refused_by_place():
    for value in ("{}", "[]", "null", "1"):
        assert "#/format/type is" in verdict(StructuredOutput(structural_tag=TAG % f'{{"type": {value}}}'))


@pytest.mark.parametrize("depth", [64, 200, 900, 3000])
def test_a_deep_constant_under_nested_any_of_is_refused_with_the_limit(depth: int):
    schema = nested('{"anyOf":[', "]}", 50).replace("1", f'{{"const":{nested("[", "]", depth)}}}')
    message = verdict(StructuredOutput(json_schema=schema))
    assert message == "taken" if depth == 64 else "is nested more than 256 levels deep" in message


def test_an_error_quotes_the_beginning_of_a_value():
    message = verdict(StructuredOutput(json_schema=json.dumps({"items": "x" * 10_000})))
    assert "#/items is 'xxx" in message
    assert len(message) < 300


def test_a_class_of_many_characters_is_read_in_one_go(monkeypatch: pytest.MonkeyPatch):
    from penstock_enginecore.structured_output.constraints import regex as charset

    merged, seen = charset._merged, []
    monkeypatch.setattr(charset, "_merged", lambda ranges: merged(seen.append(1) or ranges))
    characters = "".join(chr(0x4E00 + 2 * i) for i in range(500))
    check_constraint(StructuredOutput(regex=f"[{characters}]"), 1 << 20)
    assert len(seen) < 1.5 * len(characters)


@pytest.mark.parametrize(
    "regex", ["(a{0,9}){0,9}", "(a*){1,9}", "(a?b*){2,9}", "((a?){3}){3}", "(|a){9}", "(^a?$|b){9}"]
)
def test_a_long_repetition_of_what_may_be_empty_is_refused(regex: str):
    assert "an item that may be empty is repeated up to" in verdict(StructuredOutput(regex=regex))


@pytest.mark.parametrize(
    "regex", ["(a{0,9}){0,8}", "(a*)*", "(a+){1,99}", "(a{1,9}b?){0,99}", "(a?){8}", "(a?b)*", "(ab?c*){0,999}"]
)
def test_other_repetitions_are_taken(regex: str):
    assert verdict(StructuredOutput(regex=regex)) == "taken"
