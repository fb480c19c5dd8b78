"""Copies the pages of ``docs`` to a working folder and adds the navigation, in the order of the home page."""

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
HOME = "index.md"
KINDS = ("tutorials", "guides", "reference", "explanation", "development")
"""Folders of pages, one kind each. The home page has a section for each kind, with the same name."""
COLLECTIONS = {"adr": "Decisions", "reports": "Reports"}
"""Folders that are one entry of the navigation each, and the titles of the entries."""
API_REFERENCE = "API reference"
API_FOLDER = "reference/api"
"""The folder of generated pages."""

_SECTION = re.compile(r"^## (.+)\n", re.MULTILINE)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_LINK = re.compile(r"\]\(([\w./-]+\.md)\)")


def stage(docs: Path, out: Path, generated: Mapping[str, str]) -> None:
    """Fill the folder ``out`` with the pages of the folder ``docs``, the ``generated`` pages by name, and the navigation."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(docs, out, ignore=shutil.ignore_patterns("site", "__pycache__"))
    for name, text in generated.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for folder, title in COLLECTIONS.items():
        if (out / folder).is_dir():
            _add_index(out / folder, title)
    home = out / HOME
    home.write_text(
        home.read_text(encoding="utf-8") + "\n" + "\n".join(navigation(out, list(generated))), encoding="utf-8"
    )


def navigation(pages: Path, generated: list[str]) -> Iterator[str]:
    """Yield a table of contents for each kind: the pages that the home page links, in its order, then the others."""
    linked = _linked(pages / HOME)
    collections = [f"{folder}/README" for folder in COLLECTIONS if (pages / folder).is_dir()]
    for kind in KINDS:
        own = [str(path.relative_to(pages)) for path in sorted((pages / kind).rglob("*.md"))]
        own = [page for page in own if page not in generated]
        first = [page for page in linked.get(kind, ()) if page in own or (kind == "development" and "/" not in page)]
        entries = [*first, *(page for page in own if page not in first)]
        if kind == "development":
            entries += collections
        yield _toctree(kind.capitalize(), entries)
        if kind == "reference" and generated:
            # Pages in folders further down are listed by the index of their folder.
            yield _toctree(API_REFERENCE, [page for page in generated if page.count("/") == API_FOLDER.count("/") + 1])


def _linked(home: Path) -> dict[str, list[str]]:
    """Return the pages that the home page links, by the name of the section in lower case."""
    _, *parts = _SECTION.split(home.read_text(encoding="utf-8"))
    return {
        title.lower(): list(dict.fromkeys(_LINK.findall(text)))
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }


def _toctree(caption: str, entries: list[str]) -> str:
    names = [entry.removesuffix(".md").removesuffix(".rst") for entry in entries]
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```", ""])


def _add_index(folder: Path, title: str) -> None:
    """Append a list of the pages that the folder's README.md does not link. The README.md is created if it is missing.

    The navigation does not list these pages. Every page repeats the navigation, so the build would take three times as long.
    """
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else f"# {title}\n"
    others = sorted(path for path in folder.glob("*.md") if path != readme)
    if folder.name == "reports":
        others.reverse()  # newest first: names begin with the date
    linked = set(_LINK.findall(text))
    rows = [f"- [{_title(path)}]({path.name})" for path in others if path.name not in linked]
    for path in others:
        path.write_text("---\norphan: true\n---\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    readme.write_text("\n".join([text, *rows, ""]), encoding="utf-8")


def _title(page: Path) -> str:
    """Return the heading of a page, after the date of its name if it has one."""
    title = page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    date = _DATE.match(page.name)
    return f"{date[0]}: {title}" if date else title
