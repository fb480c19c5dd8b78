"""Random schemas with many keywords: ``jsonschema`` accepts every output that the grammar admits."""

import json
import random
from typing import Any

import jsonschema
import pytest

from penstock_common.errors import InvalidArgument
from tests.unit.enginecore.structured_output.constraints.test_enforced_keywords import Written

PLAIN: list[Any] = [None, True, False, 0, 1, 2, 3, 4, 6, -1, 1.5, "", "a", "b", "ab", "ba", "abc"]
LEAVES: list[Any] = [
    {"const": "a"},
    {"enum": [0, 1, "ab", None, True]},
    {"type": "integer", "minimum": -1, "maximum": 4},
    {"type": ["string", "null"], "maxLength": 1},
    {"type": "boolean"},
    {"type": "number"},
    {"type": "string", "pattern": "^[ab]+$", "maxLength": 2},
    {"type": "string", "pattern": "a", "minLength": 2},
    {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 9},
    {"not": {"enum": [1, "a", None]}},
    {"not": {"type": "string"}},
    {"maximum": 2},
    {"minLength": 1},
]


def an_object(rng: random.Random, depth: int) -> Any:
    names = rng.sample("abc", rng.randint(0, 3))
    schema: Any = {"type": "object", "properties": {name: a_schema(rng, depth + 1) for name in names}}
    options: list[Any] = [
        {"required": rng.sample("abc", 2)},
        {"additionalProperties": rng.choice([False, True, rng.choice(LEAVES)])},
        {"patternProperties": {rng.choice(["^a", "b", "c$"]): rng.choice(LEAVES)}},
        {"dependentRequired": {rng.choice("abc"): [rng.choice("abc")]}},
        {"minProperties": 1, "maxProperties": 2},
        {"propertyNames": {"pattern": "^[ab]$"}},
        {"unevaluatedProperties": False},
    ]
    for option in options:
        schema |= option if rng.random() < 0.2 else {}
    return schema


def an_array(rng: random.Random, _depth: int) -> Any:
    schema: Any = {"type": "array", "maxItems": rng.randint(1, 3), "items": rng.choice(LEAVES)}
    for option in ({"uniqueItems": True}, {"contains": rng.choice(LEAVES)}, {"prefixItems": [rng.choice(LEAVES)]}):
        schema |= option if rng.random() < 0.3 else {}
    return schema


def a_schema(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.choice([an_object, an_object, an_array]) if depth < 2 and rng.random() < 0.6 else None
    schema = dict(rng.choice(LEAVES)) if kind is None else kind(rng, depth)
    if depth > 1:
        return schema
    for keyword in ("allOf", "anyOf", "oneOf"):
        if rng.random() < 0.2:
            schema[keyword] = [a_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.15:
        schema |= {"if": rng.choice(LEAVES), "then": a_schema(rng, depth + 1), "else": a_schema(rng, depth + 1)}
    return schema


def values(rng: random.Random) -> list[Any]:
    objects = [{name: rng.choice(PLAIN) for name in ("a", "b", "c", "x") if rng.random() < 0.4} for _ in range(60)]
    return [*PLAIN, *objects, *([rng.choice(PLAIN) for _ in range(rng.randint(0, 3))] for _ in range(30))]


@pytest.mark.parametrize(
    "seeds", [range(400), pytest.param(range(400, 10_000), marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_admitted_outputs_are_valid(seeds: range) -> None:
    served = let_through = 0
    for seed in seeds:
        rng = random.Random(seed)
        schema = a_schema(rng)
        try:
            written = Written(schema)
        except InvalidArgument:
            continue
        served += 1
        validator = jsonschema.Draft202012Validator(schema)
        for value in values(rng):
            if json.dumps(value, separators=(",", ":")) in written:
                let_through += 1
                assert validator.is_valid(value), (seed, value, schema)
    assert served > len(seeds) / 10
    assert let_through > len(seeds)
