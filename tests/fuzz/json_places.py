"""Mutations at every place of a JSON value."""

import json
import re
from collections.abc import Iterator
from random import Random
from typing import Any

Path = tuple[str | int, ...]

_DEEP = "deep:{kind}:{depth}"
_DEEP_TEXT = re.compile(r'"deep:(\w+):(\d+)"')
_NESTING = {"list": ("[", "]"), "dict": ('{"a":', "}"), "schema": ('{"items":', "}"), "any": ('{"anyOf":[', "]}")}
EMPTY: tuple[Any, ...] = (None, {}, [])
_SCALARS: tuple[Any, ...] = (
    "",
    "x",
    "\x00",
    True,
    False,
    0,
    1,
    -1,
    1.5,
    -0.5,
    1e308,
    2**31,
    2**53 + 1,
    2**63,
    2**64,
    -(2**63),
    10**40,
)
_SHAPES: tuple[Any, ...] = (
    [None],
    [{}],
    [[]],
    {"": None},
    {"type": None},
    {"type": {}},
    {"type": []},
    ["a", "a"],
    [0] * 3000,
)


def places(value: Any, at: Path = ()) -> Iterator[Path]:
    """Return the paths of the value and of all nested values."""
    yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*at, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, (*at, index))


def put(value: Any, at: Path, new: Any) -> Any:
    """Return a copy of the value with ``new`` at a path."""
    if not at:
        return new
    copy = value.copy()
    copy[at[0]] = put(value[at[0]], at[1:], new)
    return copy


def hostile(rng: Random) -> Any:
    """Return a hostile value: null, empty, huge, negative, deeply nested, or of a wrong type.

    ``text`` encodes the value.
    """
    how = rng.random()
    if how < 0.45:
        return rng.choice(EMPTY)
    if how < 0.75:
        return rng.choice(_SCALARS)
    if how < 0.9:
        return rng.choice(_SHAPES)
    return deep(rng)


def deep(rng: Random) -> str:
    """Return a placeholder for a value that is nested too deeply to exist as an object."""
    return _DEEP.format(kind=rng.choice(list(_NESTING)), depth=rng.choice((20, 60, 100, 200, 400, 1000, 5000)))


def text(value: Any) -> str:
    """Return the value as JSON, with placeholders replaced by nested values."""
    return _DEEP_TEXT.sub(_written, json.dumps(value))


def _written(match: re.Match[str]) -> str:
    opening, closing = _NESTING[match[1]]
    return opening * int(match[2]) + "null" + closing * int(match[2])


def changed(value: Any, rng: Random) -> Any:
    """Return the value with hostile values at one or two paths, mostly deep ones."""
    for _ in range(rng.choice((1, 1, 1, 2))):
        found = list(places(value))
        value = put(value, max(rng.sample(found, min(2, len(found))), key=len), hostile(rng))
    return value


def renamed(value: Any, rng: Random) -> Any:
    """Return the value with a removed or renamed key in one of its objects."""
    found = [at for at in places(value) if at and isinstance(at[-1], str)]
    if not found:
        return value
    at = rng.choice(found)
    inner = value
    for step in at[:-1]:
        inner = inner[step]
    kept = {key: held for key, held in inner.items() if key != at[-1]}
    if rng.random() < 0.5:
        kept[rng.choice(("", "type", "$ref", "x" * 300, "\ud800"))] = inner[at[-1]]
    return put(value, at[:-1], kept)
