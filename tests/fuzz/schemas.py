"""JSON schemas, structural tags and tools, to be changed keyword by keyword."""

from random import Random
from typing import Any

from tests.fuzz import json_places

KEYWORDS: dict[str, dict[str, Any]] = {
    "properties": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "required": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "additionalProperties": {"type": "object", "additionalProperties": {"type": "boolean"}},
    "patternProperties": {"type": "object", "patternProperties": {"^a+$": {"type": "null"}}},
    "minProperties": {"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 1},
    "maxProperties": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "items": {"type": "array", "items": {"type": "integer"}},
    "prefixItems": {"type": "array", "prefixItems": [{"type": "integer"}], "items": False},
    "minItems": {"type": "array", "items": {"type": "boolean"}, "minItems": 1},
    "maxItems": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    "uniqueItems": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": False},
    "minLength": {"type": "string", "minLength": 1},
    "maxLength": {"type": "string", "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[ab]+$"},
    "format": {"type": "string", "format": "date"},
    "minimum": {"type": "integer", "minimum": 0},
    "maximum": {"type": "integer", "maximum": 9},
    "exclusiveMinimum": {"type": "number", "exclusiveMinimum": 0},
    "exclusiveMaximum": {"type": "number", "exclusiveMaximum": 9},
    "multipleOf": {"type": "integer", "multipleOf": 2},
    "type": {"type": ["string", "null"]},
    "const": {"const": {"a": [1, "b"]}},
    "enum": {"enum": ["a", 1, None, {"b": 2}]},
    "anyOf": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    "oneOf": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    "allOf": {"allOf": [{"type": "string"}]},
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {}, "else": {}},
    "$ref": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}},
    "$defs": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}}},
    "$id": {"$id": "https://example.org/a", "type": "string"},
    "$schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "string"},
    "title": {"title": "t", "description": "d", "type": "string"},
    "default": {"default": 1, "examples": [1], "type": "integer"},
    "nullable": {"nullable": False, "type": "string"},
}
"""A valid or almost valid schema for each keyword."""

_ANY = {"type": "any_text"}
_REGEX = {"type": "regex", "pattern": "[ab]+"}
_SCHEMA = {"type": "json_schema", "json_schema": KEYWORDS["required"]}
_TAG = {"type": "tag", "begin": "<f>", "content": _SCHEMA, "end": "</f>"}
_FORMATS: tuple[dict[str, Any], ...] = (
    _REGEX,
    _SCHEMA,
    _TAG,
    {"type": "grammar", "grammar": 'root ::= "a" | "b"'},
    {"type": "const_string", "value": "abc"},
    {"type": "sequence", "elements": [{"type": "const_string", "value": "a"}, _REGEX]},
    {"type": "or", "elements": [_REGEX, _SCHEMA]},
    {"type": "triggered_tags", "triggers": ["<f"], "tags": [_TAG], "at_least_one": True, "stop_after_first": True},
    {"type": "tags_with_separator", "tags": [_TAG], "separator": ",", "at_least_one": True, "stop_after_first": False},
    {"type": "tag", "begin": "<f>", "content": _ANY, "end": ["</f>", "</g>"]},
)


def schema(rng: Random) -> str:
    """Return a JSON schema with a hostile value for one of its keywords, at any depth."""
    keyword = rng.choice(list(KEYWORDS))
    value: Any = KEYWORDS[keyword]
    how = rng.random()
    if how < 0.25:  # alone, so that nothing before it is refused
        return json_places.text({**value, keyword: rng.choice((None, None, *json_places.EMPTY))})
    if how < 0.3:
        return _deep_value(rng)
    if how < 0.6:
        value = {**value, keyword: json_places.hostile(rng)}
    elif how < 0.72:
        value = json_places.changed(value, rng)
    elif how < 0.77:
        value = json_places.renamed(value, rng)
    elif how < 0.85:
        value = {"const": json_places.deep(rng)} if rng.random() < 0.6 else {"enum": [json_places.deep(rng)]}
    elif how < 0.93:
        value = {**value, **KEYWORDS[rng.choice(list(KEYWORDS))]}
    for _ in range(rng.choice((0, 0, 1, 2, 12, 40))):
        value = _wrapped(value, rng)
    return json_places.text(value)


def _deep_value(rng: Random) -> str:
    """Return a value with the maximum depth of a parser, inside schema branches of the maximum depth.

    Together, they are too deep to encode.
    """
    depth = rng.randrange(600, 960)
    text = f'{{"const":{"[" * depth}1{"]" * depth}}}'
    for _ in range(rng.choice((10, 20, 30, 45, 60))):
        text = f'{{"anyOf":[{text},{{"type":"string"}}]}}'
    return text


def _wrapped(value: Any, rng: Random) -> Any:
    other = rng.choice(({"type": "boolean"}, {"type": "null"}, {}, {"const": 1}, KEYWORDS[rng.choice(list(KEYWORDS))]))
    return rng.choice(
        (
            {"anyOf": [value, other]},
            {"anyOf": [other, value]},
            {"oneOf": [{"type": "boolean"}, value]},
            {"allOf": [value]},
            {"type": "array", "items": value},
            {"type": "array", "prefixItems": [value]},
            {"type": "object", "properties": {"p": value}, "required": ["p"]},
            {"type": "object", "additionalProperties": value},
            {"$ref": "#/$defs/d", "$defs": {"d": value}},
        )
    )


def tag(rng: Random) -> str:
    """Return a structural tag with a hostile part."""
    value: Any = {"type": "structural_tag", "format": rng.choice(_FORMATS)}
    for _ in range(rng.choice((0, 0, 1, 30))):
        value = {**value, "format": {"type": "sequence", "elements": [value["format"]]}}
    how = rng.random()
    if how < 0.65:
        value = json_places.changed(value, rng)
    elif how < 0.75:
        value = json_places.renamed(value, rng)
    elif how < 0.95:  # one of the keywords that describe a part
        found = [at for at in json_places.places(value) if at and at[-1] in ("type", "format", "elements", "tags")]
        value = json_places.put(value, rng.choice(found), json_places.hostile(rng))
    return json_places.text(value)


def template_kwargs(rng: Random) -> str:
    """Return hostile variables of a chat template."""
    value = {"enable_thinking": True, "documents": [{"title": "t", "text": "x"}], "a": {"b": [1, None]}}
    known = ("messages", "tools", "add_generation_prompt", "bos_token", "raise_exception", "range", "self", "loop")
    if rng.random() < 0.4:
        value[rng.choice(known)] = json_places.hostile(rng)
    return json_places.text(json_places.changed(value, rng))
