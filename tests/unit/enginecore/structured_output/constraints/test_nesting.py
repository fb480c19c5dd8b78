"""Nested values from clients are accepted or refused with the limit, whatever their depth."""

from collections.abc import Iterator

import pytest

from penstock_common.errors import InvalidArgument
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.structured_output.constraints.source import check_constraint

DEPTHS = (50, 63, 64, 65, 200, 255, 256, 257, 900, 960, 980, 1000, 5000)
SCHEMAS = (
    ("[", "]"),
    ('{"a":', "}"),
    ('{"items":', "}"),
    ('{"prefixItems":[', "]}"),
    ('{"properties":{"a":', "}}"),
    ('{"additionalProperties":', "}"),
    ('{"patternProperties":{"^a$":', "}}"),
    ('{"anyOf":[', "]}"),
    ('{"allOf":[', "]}"),
    ('{"oneOf":[{"type":"null"},', "]}"),
    ('{"not":', "}"),
)
LEAVES = ("1", "true", '{"type":"string","pattern":"' + "(?:a|" * 60 + "a" + ")*" * 60 + '"}')
FORMATS = (
    ('{"type":"sequence","elements":[', "]}"),
    ('{"type":"or","elements":[', "]}"),
    ('{"type":"tag","begin":"a","end":"b","content":', "}"),
    ('{"type":"triggered_tags","triggers":["a"],"tags":[{"begin":"a","end":"b","content":', "}]}"),
)
TAG = '{"type":"structural_tag","format":%s}'
SCHEMA_TAG = TAG % '{"type":"json_schema","json_schema":%s}'


def nested(brackets: tuple[str, str], leaf: str, depth: int) -> str:
    return brackets[0] * depth + leaf + brackets[1] * depth


def constraints(depth: int) -> Iterator[StructuredOutput]:
    for brackets in SCHEMAS:
        for leaf in LEAVES:
            value = nested(brackets, leaf, depth)
            for schema in (value, f'{{"const":{value}}}', f'{{"enum":[{value}]}}', f'{{"title":{value}}}'):
                yield StructuredOutput(json_schema=schema)
            yield StructuredOutput(structural_tag=SCHEMA_TAG % value)
            yield StructuredOutput(structural_tag=TAG % value)
    for brackets in FORMATS:
        yield StructuredOutput(structural_tag=TAG % nested(brackets, '{"type":"any_text"}', depth))
    for group in (("(", ")"), ("(?:a|", ")?"), ("[", "]")):
        yield StructuredOutput(regex=nested(group, "a", depth))
    chain = ",".join(f'"d{i}":{{"$ref":"#/$defs/d{i + 1}"}}' for i in range(depth))
    yield StructuredOutput(json_schema=f'{{"$ref":"#/$defs/d0","$defs":{{{chain},"d{depth}":{{}}}}}}')


def refusal(constraint: StructuredOutput) -> InvalidArgument | None:
    try:
        check_constraint(constraint, 1 << 24)
    except InvalidArgument as e:
        return e
    return None


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_constraint_of_any_depth_is_taken_or_refused_with_its_place(depth: int):
    for constraint in constraints(depth):
        if (refused := refusal(constraint)) is not None:
            assert refused.field.startswith("sampling_params.structured_output.")
            assert "recursion" not in refused.message
            assert "is nested too deep" not in refused.message, "a limit of ours comes before that of the interpreter"
