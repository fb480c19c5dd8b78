"""JSON schemas made up from a seed: small objects, of which an answer has a few dozen tokens."""

import random
from collections.abc import Callable
from typing import Any

_NAMES = (
    *("name", "city", "country", "street", "title", "author", "language", "category", "status", "color"),
    *("count", "age", "year", "price", "rating", "size", "width", "height", "active", "verified"),
)
_WORDS = ("low", "medium", "high", "new", "open", "closed", "red", "green", "blue", "unknown")
_LONGEST_TEXT, _LARGEST_NUMBER, _MOST_ITEMS = 12, 999, 3
_PROPERTIES = (2, 5)


def made_schema(rng: random.Random) -> dict[str, Any]:
    """A schema of an object, one property of which is an object, too, in one of three."""
    schema = _object(rng)
    if rng.random() < 1 / 3:
        name = rng.choice(list(schema["properties"]))
        schema["properties"][name] = _object(rng)
    return schema


def _object(rng: random.Random) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(*_PROPERTIES))
    properties = {name: rng.choice(_VALUES)(rng) for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def _text(_: random.Random) -> dict[str, Any]:
    return {"type": "string", "maxLength": _LONGEST_TEXT}


def _number(_: random.Random) -> dict[str, Any]:
    return {"type": "integer", "minimum": 0, "maximum": _LARGEST_NUMBER}


def _truth(_: random.Random) -> dict[str, Any]:
    return {"type": "boolean"}


def _word(rng: random.Random) -> dict[str, Any]:
    return {"enum": rng.sample(_WORDS, 3)}


def _list(rng: random.Random) -> dict[str, Any]:
    return {"type": "array", "items": rng.choice((_number, _word))(rng), "minItems": 1, "maxItems": _MOST_ITEMS}


_VALUES: tuple[Callable[[random.Random], dict[str, Any]], ...] = (_text, _number, _truth, _word, _list)
