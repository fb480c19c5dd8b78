"""Generator of the tables of ignored and refused request fields.

Run ``python -m tests.documents.field_tables``; ``make settings`` does so.
"""

import re
import sys
from pathlib import Path

from penstock_frontend.api.ignored_fields import IGNORED
from penstock_frontend.api.unsupported_fields import GENERATING, POOLING_ROUTES, ROUTES, UNSUPPORTED

REFERENCE = Path(__file__).resolve().parents[2] / "docs/reference"
HEADERS = {
    "ignored-fields.md": "| Route | Accepted without effect | Reason |\n|---|---|---|\n",
    "request-fields.md": "| Field | Asks for | Use instead | Routes |\n|---|---|---|---|\n",
}
_GROUPS = {GENERATING: "text", POOLING_ROUTES: "pooling"}


def ignored() -> str:
    """Return the rows of the ignored fields, grouped by route and reason."""
    rows: dict[tuple[str, str], list[str]] = {}
    for field in IGNORED:
        name = f"`{field.path}`" if re.fullmatch(r"[\w\[\].]+", field.path) else field.path.replace("documents[].", "")
        rows.setdefault((field.protocol, field.why), []).append(name)
    return "".join(f"| {route} | {', '.join(names)} | {why} |\n" for (route, why), names in rows.items())


def refused() -> str:
    """Return the rows of the fields that are refused by name."""
    rows = []
    for field in UNSUPPORTED:
        routes = ", ".join(dict.fromkeys(ROUTES[struct] for struct in field.structs))
        names = ", ".join(f"`{name}`" for name in field.names)
        rows.append(f"| {names} | {field.effect} | {field.instead} | {_GROUPS.get(field.structs, routes)} |\n")
    return "".join(rows)


def updated(name: str) -> str:
    """Return the page ``name`` with its table replaced by the table from the code."""
    before, header, after = (REFERENCE / name).read_text(encoding="utf-8").partition(HEADERS[name])
    if not header:
        raise ValueError(f"docs/reference/{name} has no table with the header {HEADERS[name].splitlines()[0]!r}")
    rest = after[re.search(r"^(?!\|)|\Z", after, re.MULTILINE).start() :]  # type: ignore[union-attr]
    return before + header + (ignored() if name == "ignored-fields.md" else refused()) + rest


def main() -> None:
    """Write the pages that have changed."""
    for name in HEADERS:
        text = updated(name)
        if (REFERENCE / name).read_text(encoding="utf-8") != text:
            (REFERENCE / name).write_text(text, encoding="utf-8")
            print(f"wrote docs/reference/{name}", file=sys.stderr)


if __name__ == "__main__":
    main()
