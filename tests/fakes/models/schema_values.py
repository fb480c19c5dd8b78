"""Values that satisfy a schema of ``random_schemas``."""

import random
from typing import Any

_OF_PATTERN = {
    r"^[A-Z]{2}\d{3}$": "AB123",
    r"^\w+$": "word",
    "b": "abc",
    r'^["\\/]{1,3}$': '"\\',
    "^(yes|no)?$": "no",
    r"^[^a-z\s]{2,4}$": "X-Y",
    r"\.$": "end.",
    "^(a|bc){2,3}$": "abca",
    "^(a|bc){2,3}": "abca",
}
_OF_FORMAT = {
    "date": "2024-02-28",
    "time": "12:30:00Z",
    "date-time": "2024-02-28T12:30:00Z",
    "uuid": "12345678-1234-4234-8234-123456789abc",
    "ipv4": "10.0.0.1",
    "email": "a@example.org",
}


def random_value(schema: Any, rng: random.Random) -> Any:
    """Return a random value that satisfies the schema, with properties in the schema's order."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "anyOf" in schema:
        return random_value(rng.choice(schema["anyOf"]), rng)
    return _TYPED[schema["type"]](schema, rng)


def _string(schema: Any, rng: random.Random) -> str:
    if "pattern" in schema:
        return _OF_PATTERN[schema["pattern"]]
    if "format" in schema:
        return _OF_FORMAT[schema["format"]]
    low = schema.get("minLength", 0)
    return "".join(rng.choice('aü "\\\n{,:') for _ in range(rng.randint(low, schema.get("maxLength", low + 5))))


def _number(schema: Any, _rng: random.Random) -> Any:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is None or high is None:
        value = 0 if low is None and high is None else (high - 1 if low is None else low + 1)
    elif schema["type"] == "integer":
        value = low if "minimum" in schema else low + 1
    else:
        value = (low + high) / 2
    return value if schema["type"] == "integer" else round(value, 6)


def _object(schema: Any, rng: random.Random) -> dict[str, Any]:
    required = schema.get("required", ())
    value = {
        name: random_value(part, rng)
        for name, part in schema["properties"].items()
        if name in required or rng.random() < 0.6
    }
    more = schema.get("additionalProperties", False)
    if more and rng.random() < 0.6:
        value["something else"] = [{"of": {}}, 1] if more is True else random_value(more, rng)
    return value


def _array(schema: Any, rng: random.Random) -> list[Any]:
    low = schema.get("minItems", 0)
    count = rng.randint(low, schema.get("maxItems", low + 3))
    prefix = schema.get("prefixItems", [])[:count]
    return [random_value(part, rng) for part in prefix + [schema["items"]] * (count - len(prefix))]


_TYPED: Any = {
    "string": _string,
    "integer": _number,
    "number": _number,
    "boolean": lambda _schema, rng: rng.random() < 0.5,
    "null": lambda _schema, _rng: None,
    "object": _object,
    "array": _array,
}
