"""Writes docs/development/code-map.md: all packages and modules of the services, with their first sentences."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/development/code-map.md"
SERVICES = ("frontend", "enginecore", "coordinator", "common", "local", "client")


def page() -> str:
    """Return the text of the page for the current code."""
    lines = [
        "# Code map",
        "",
        "Every package and module of the services, with the first sentence of its docstring. `make settings` writes this page. "
        "[Architecture](../explanation/architecture.md) shows how the parts work together.",
    ]
    for service in SERVICES:
        (package,) = (ROOT / "services" / service).glob("penstock_*")
        lines += ["", f"## {package.name}"]
        for folder in _packages(package):
            lines += _section(package, folder)
    return "\n".join(lines) + "\n"


def first_sentence(source: str) -> str:
    """Return the first sentence of a module's docstring as one line; empty if the module has none."""
    docstring = ast.get_docstring(ast.parse(source)) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split()).replace("``", "`")
    return re.split(r"(?<=[a-z0-9`)\]])\.(?= [A-Z`])", paragraph, maxsplit=1)[0].rstrip(".").replace("|", "\\|")


def _packages(package: Path) -> Iterator[Path]:
    yield package
    yield from sorted(path.parent for path in package.rglob("__init__.py") if path.parent != package)


def _section(package: Path, folder: Path) -> list[str]:
    inner = folder.relative_to(package)
    heading = [] if folder == package else ["", f"### {inner}/"]
    rows = [
        f"| {path.name} | {first_sentence(path.read_text(encoding='utf-8'))} |"
        for path in sorted(folder.glob("*.py"))
        if path.name != "__init__.py"
    ]
    table = ["", "| file | purpose |", "|---|---|", *rows] if rows else []
    return [*heading, "", f"{first_sentence((folder / '__init__.py').read_text(encoding='utf-8'))}.", *table]


def main() -> None:
    """Write the page if it has changed."""
    text = page()
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        PAGE.write_text(text, encoding="utf-8")
        print("wrote docs/development/code-map.md", file=sys.stderr)


if __name__ == "__main__":
    main()
