"""The forms of response_format, and where errors say its value stands."""

from typing import Any

import msgspec
import pytest

from penstock_common.errors import InvalidArgument
from penstock_frontend.api.openai.response_format import Constraint, read_format


def read(value: Any, head: str = "response_format") -> Constraint | None:
    return read_format(msgspec.Raw(msgspec.json.encode(value)), head)


@pytest.mark.parametrize(
    ("value", "place", "kind", "constraint"),
    [
        ({"type": "json_object"}, "", "json_object", True),
        ({"type": "json_object", "schema": {"a": 1}}, ".schema", "json_schema", '{"a":1}'),
        ({"type": "json_object", "schema": None}, "", "json_object", True),
        ({"type": "json_schema", "schema": '{"a":1}'}, ".schema", "json_schema", '{"a":1}'),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
            ".json_schema.schema",
            "json_schema",
            "{}",
        ),
        ({"type": "json_schema", "value": {"name": "a", "schema": {}}}, ".value", "json_schema", "{}"),
        ({"type": "json_schema", "value": {"type": "object"}}, ".value", "json_schema", '{"type":"object"}'),
        ({"type": "json", "value": {"type": "object"}}, ".value", "json_schema", '{"type":"object"}'),
        ({"type": "regex", "regex": "a"}, ".regex", "regex", "a"),
        ({"type": "grammar", "value": "root ::= x"}, ".value", "grammar", "root ::= x"),
        ({"type": "structural_tag", "anything": 1}, "", "structural_tag", '{"type":"structural_tag","anything":1}'),
    ],
    ids=str,
)
def test_each_form_is_one_constraint_at_its_place(value: Any, place: str, kind: str, constraint: Any) -> None:
    assert read(value, "x") == Constraint(f"x{place}", "x", kind, constraint)


@pytest.mark.parametrize("value", [None, {"type": "text"}, {"type": "text", "name": "a", "strict": True}])
def test_what_asks_for_nothing_is_no_constraint(value: Any) -> None:
    assert read(value) is None


@pytest.mark.parametrize(
    ("value", "field", "message"),
    [
        ({"type": "xml"}, "type", "response_format.type is 'xml'; known: text, json_object, json_schema, "),
        ({}, "type", "response_format.type is not set"),
        ({"type": "json_schema"}, "json_schema", "response_format.json_schema is not set"),
        ({"type": "json"}, "schema", "response_format.schema is not set"),
        ({"type": "grammar"}, "grammar", "response_format.grammar is not set"),
        (
            {"type": "regex", "schema": {}},
            "schema",
            "response_format.schema is set, but response_format.type 'regex'",
        ),
        (
            {"type": "json_object", "schem": {}},
            "schem",
            "response_format.schem is not a known field; did you mean 'schema'?",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {}}, "schema": {}},
            "schema",
            "response_format.schema and response_format.json_schema.schema are both set; set only one of them",
        ),
    ],
    ids=str,
)
def test_unenforceable_schemas_are_refused_with_the_place(value: Any, field: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        read(value)
    assert error.value.field == f"response_format.{field}"
    assert error.value.message.startswith(message)
