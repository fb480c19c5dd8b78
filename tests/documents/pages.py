"""Contents of the repository's pages: fenced blocks, code spans, links."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(page for page in (ROOT / "docs").rglob("*.md") if page.parts[len(ROOT.parts) + 1] not in {"adr", "reports"}),
        *(page for page in (ROOT / "examples").rglob("*.md") if "node_modules" not in page.parts),
        *(ROOT / "charts").rglob("*.md"),
        *(ROOT / "tests").glob("*/README.md"),
    ]
)
"""Pages that describe the current state.

Decisions (docs/adr) and reports (docs/reports) describe the state at their date.
"""

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block. ``page`` is its path in the repository, and ``language`` is the word after the fence."""

    page: str
    line: int
    language: str
    code: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


class Span(NamedTuple):
    """A code span: text between backquotes on one line of running text."""

    page: str
    line: int
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Return the fenced blocks of all pages. If ``languages`` are given, return only blocks in these languages."""
    return [block for page in PAGES for block in _blocks(page) if not languages or block.language in languages]


def spans() -> list[Span]:
    """Return the code spans of all pages except the changelog, which also names removed things."""
    return [span for page in PAGES if page.name != "CHANGELOG.md" for span in _spans(page)]


def links(page: Path) -> list[str]:
    """Return the link targets of a page, without web addresses."""
    return [link for link in _LINK.findall(_without_blocks(page.read_text())) if "://" not in link]


def anchors(page: Path) -> set[str]:
    """Return the link fragments of a page's headings."""
    headings = _HEADING.findall(_without_blocks(page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 2
        yield Block(str(page.relative_to(ROOT)), line, found[2], textwrap.dedent(found[3]))


def _spans(page: Path) -> Iterator[Span]:
    text = _without_blocks(page.read_text())
    for found in _SPAN.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield Span(str(page.relative_to(ROOT)), line, " ".join(found[1].split()))


def _without_blocks(text: str) -> str:
    """Return the text with empty lines in place of blocks, so that line numbers stay the same."""
    return _FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)
