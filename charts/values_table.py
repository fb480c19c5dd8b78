"""Writes the table of values in the chart's README from its schema and defaults: ``python charts/values_table.py``."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parent / "penstock"
README = CHART / "README.md"
BEGIN = "<!-- values: written by charts/values_table.py -->\n"
END = "<!-- end of values -->\n"


def resolve(schema: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """``part``, or the definition of ``schema`` that it refers to."""
    if "$ref" not in part:
        return part
    definition: dict[str, Any] = schema["definitions"][part["$ref"].rsplit("/", 1)[-1]]
    return definition


def leaves(schema: dict[str, Any], part: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of the values that are set as a whole, in the schema's order."""
    for key, child in part["properties"].items():
        resolved = resolve(schema, child)
        if resolved.get("properties"):
            yield from leaves(schema, resolved, (*path, key))
        else:
            yield (*path, key)


def describe(schema: dict[str, Any], path: tuple[str, ...]) -> str:
    """The description of the value at ``path``."""
    part = schema
    for key in path:
        part = resolve(schema, part["properties"][key])
    description: str = part["description"]
    return description


def default(values: dict[str, Any], path: tuple[str, ...]) -> str:
    """The default at ``path`` as JSON in backticks; empty where the service's own default holds."""
    here: Any = values
    for key in path:
        if not isinstance(here, dict) or key not in here:
            return ""
        here = here[key]
    return f"`{json.dumps(here)}`"


def table() -> str:
    """The table in Markdown."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    rows = ["| value | default | meaning |", "|---|---|---|"]
    for path in leaves(schema, schema):
        meaning = describe(schema, path).replace("|", "\\|")
        rows.append(f"| `{'.'.join(path)}` | {default(values, path)} | {meaning} |")
    return "\n".join(rows) + "\n"


def with_table(readme: str) -> str:
    """``readme`` with its table brought up to date."""
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the README must hold the lines {BEGIN!r} and {END!r}")
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote the values into {README}", file=sys.stderr)
