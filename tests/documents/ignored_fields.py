"""Generator of docs/reference/ignored-fields.md: ``python -m tests.documents.ignored_fields``, part of ``make settings``."""

import re
import sys
from pathlib import Path

from penstock_frontend.api.ignored_fields import IGNORED

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/ignored-fields.md"

_HEAD = """\
# Ignored request fields

<!-- `make settings` writes this page from services/frontend/penstock_frontend/api/ignored_fields.py; change that file. -->

The server accepts these fields without effect, because they cannot change the output. It neither logs nor refuses them.
Every other known field is served, or [refused by name](request-fields.md). [Unknown fields](openai-api.md#unknown-fields)
explains the policy for fields that no list contains.

| route | accepted without effect | why |
|---|---|---|
"""


def page() -> str:
    """Return the page for the list of ignored fields in the code."""
    rows: dict[tuple[str, str], list[str]] = {}
    for field in IGNORED:
        name = f"`{field.path}`" if re.fullmatch(r"[\w\[\].]+", field.path) else field.path.replace("documents[].", "")
        rows.setdefault((field.protocol, field.why), []).append(name)
    return _HEAD + "".join(f"| {route} | {', '.join(names)} | {why} |\n" for (route, why), names in rows.items())


def main() -> None:
    """Write the page if it has changed."""
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        PAGE.write_text(page(), encoding="utf-8")
        print(f"wrote {PAGE.relative_to(PAGE.parents[2])}", file=sys.stderr)


if __name__ == "__main__":
    main()
