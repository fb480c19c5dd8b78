"""The values of a schema's keywords, each refused by its name and place when it is of no use."""

from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from penstock_enginecore.structured_output.constraints.json_types import (
    Schema,
    SchemaError,
    shown,
)
from penstock_enginecore.structured_output.constraints.regex import MAX_REPEAT


def bound(
    keywords: Schema, name: str, exclusive: str, path: str, pick: Callable[[Decimal, Decimal], Decimal]
) -> tuple[Decimal | None, bool]:
    """What ``pick`` takes of a keyword and its exclusive form, None without either, and whether that is excluded itself."""
    bounds = {}
    for keyword in (name, exclusive):
        if keyword in keywords:
            value = keywords[keyword]
            if isinstance(value, bool) or not isinstance(value, int | Decimal) or len(str(int(value))) > 30:
                raise SchemaError(f"{path}/{keyword}", "must be a number of at most 30 digits")
            bounds[keyword] = Decimal(value)
    if not bounds:
        return None, False
    both = [*bounds.values()]
    picked = pick(both[0], both[-1])
    return picked, bounds.get(exclusive) == picked


def count(keywords: Schema, name: str, path: str) -> Any:
    """The count, 0 for an unset least one, None for an unset greatest one."""
    value = keywords.get(name, 0 if name.startswith("min") else None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | Decimal) or value != int(value) or value < 0:
        raise SchemaError(f"{path}/{name}", f"is {shown(value)}; it must be a whole number of at least 0")
    if value > MAX_REPEAT:
        raise SchemaError(f"{path}/{name}", f"is {shown(value)}; the limit is {MAX_REPEAT}")
    return int(value)


def in_order(low: int, high: int | None, what: str, path: str) -> None:
    """Raise SchemaError where nothing can be between the two."""
    if high is not None and low > high:
        raise SchemaError(path, f"has min{what} {low} above max{what} {high}")


def mapping(keywords: Schema, name: str, path: str) -> Mapping[str, Any]:
    """A keyword's object, empty where it is not set."""
    value = keywords.get(name, {})
    if not isinstance(value, dict):
        raise SchemaError(f"{path}/{name}", "must be an object")
    return value


def required_names(keywords: Schema, path: str) -> list[str]:
    """The required names, each once."""
    given = keywords.get("required", [])
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise SchemaError(f"{path}/required", "must be a list of strings")
    return list(dict.fromkeys(given))
