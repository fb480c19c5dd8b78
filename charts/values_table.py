"""Table of values in the chart's README, generated from the chart's schema and defaults."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from penstock_common.config.settings import PATTERN as SIZE_PATTERN
from penstock_common.config.settings import format_bytes

CHART = Path(__file__).resolve().parent / "penstock"
README = CHART / "README.md"
SCHEMA = CHART / "values.schema.json"
BEGIN = "<!-- values: written by make settings -->\n"
END = "<!-- end of values -->\n"


def resolve(schema: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Return ``part``, or the definition in ``schema`` to which ``part`` refers."""
    if "$ref" not in part:
        return part
    definition = schema
    for key in part["$ref"].removeprefix("#/").split("/"):
        definition = definition[key]
    return definition


def leaves(schema: dict[str, Any], part: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of values without nested values, in the schema's order."""
    for key, child in part["properties"].items():
        resolved = resolve(schema, child)
        if resolved.get("properties"):
            yield from leaves(schema, resolved, (*path, key))
        else:
            yield (*path, key)


def part_at(schema: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Return the schema of the value at ``path``."""
    part = schema
    for key in path:
        part = resolve(schema, part["properties"][key])
    return part


def default_values() -> dict[str, Any]:
    """Return the content of ``values.yaml``."""
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    return values


def default(values: dict[str, Any], path: tuple[str, ...]) -> str:
    """Return the chart's default at ``path`` as JSON in backticks. Empty if the service's own default applies."""
    here: Any = values
    for key in path:
        if not isinstance(here, dict) or key not in here:
            return ""
        here = here[key]
    return f"`{json.dumps(here)}`"


def allowed(part: dict[str, Any]) -> str:
    """Return the choices or the range of a value from its schema. Empty if there is neither."""
    if "enum" in part:
        return ", ".join(f"`{choice}`" if choice else '`""`' for choice in part["enum"])
    if "minimum" not in part and "maximum" not in part:
        return ""
    low, high = (_limit(part, word) for word in ("minimum", "maximum"))
    return f"{low} to {high}" if low and high else f"at least {low}" if low else f"at most {high}"


def _limit(part: dict[str, Any], word: str) -> str:
    if word not in part:
        return ""
    return format_bytes(part[word]) if part.get("pattern") == SIZE_PATTERN else str(part[word])


def table(schema: dict[str, Any]) -> str:
    """Return the table in Markdown."""
    values = default_values()
    rows = ["| value | default | range | meaning |", "|---|---|---|---|"]
    for path in leaves(schema, schema):
        part = part_at(schema, path)
        shown = default(values, path) or (f"`{json.dumps(part['default'])}`" if "default" in part else "")
        meaning = part["description"].replace("|", "\\|")
        rows.append(f"| `{'.'.join(path)}` | {shown} | {allowed(part)} | {meaning} |")
    return "\n".join(rows) + "\n"


def with_table(readme: str, schema: dict[str, Any]) -> str:
    """Return ``readme`` with the table regenerated."""
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the chart's README must contain the lines {BEGIN!r} and {END!r}, which mark the table")
    return f"{head}{BEGIN}\n{table(schema)}\n{END}{tail}"
