"""Code on pages in docs/guides/clients equals the code in examples/clients, which tests/clients runs."""

import inspect
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock_client import Client
from penstock_client.requests import CallOptions, ChatOptions, EmbedOptions, GenerateOptions, ScoreOptions

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs/guides/clients").glob("*.md"))
LANGUAGES = {"python", "ts", "go", "java", "kotlin", "rust", "cpp", "cmake"}
FENCE = re.compile(r"^(?:<!-- (?P<file>\S+) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
TOPICS = {
    "python": ["Install", "A streaming call", "Structured output", "Chat and sessions", "Cancellation", "Deadline"],
    "node": ["Stubs", "A streaming call", "Chat and sessions", "Cancellation and deadline"],
    "go": ["Stubs", "A streaming call", "Chat and sessions", "Cancellation and deadline"],
    "java": ["Stubs", "A streaming call", "Chat and sessions", "Cancellation", "Deadline"],
    "kotlin": ["Stubs", "A streaming call", "Chat and sessions", "Cancellation and deadline"],
    "rust": ["Stubs", "A streaming call", "Chat and sessions", "Cancellation and deadline"],
    "cpp": ["Stubs", "A streaming call", "Chat and sessions", "Cancellation and deadline"],
}


class Snippet(NamedTuple):
    """A code block of a page, and the file that the page names as the source."""

    page: str
    file: str
    language: str
    code: str


def snippets() -> list[Snippet]:
    return [
        Snippet(page.stem, found["file"] or "", found["language"], found["code"])
        for page in PAGES
        for found in FENCE.finditer(page.read_text())
        if found["language"] in LANGUAGES
    ]


def blocks(source: str, length: int) -> set[str]:
    """Yield every sequence of ``length`` lines, without the common indentation."""
    lines = source.splitlines()
    return {textwrap.dedent("\n".join(lines[i : i + length])) for i in range(len(lines) - length + 1)}


@pytest.mark.parametrize("snippet", snippets(), ids=lambda s: f"{s.page}:{s.code.splitlines()[0].strip()}")
def test_a_snippet_is_a_part_of_the_example_it_names(snippet: Snippet) -> None:
    assert snippet.file, "a line <!-- file --> before the code says where it is from"
    source = (ROOT / snippet.file).read_text()
    assert snippet.code.rstrip("\n") in blocks(source, len(snippet.code.splitlines()))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_page_has_every_topic(page: Path) -> None:
    headings = re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE)
    assert headings == [*TOPICS[page.stem], "Balancing, retries, keepalive", "TLS and keys", "Errors"]


OPTIONS = {
    **dict.fromkeys(("generate", "stream"), GenerateOptions),
    **dict.fromkeys(("chat", "stream_chat"), ChatOptions),
    "embed": EmbedOptions,
    "classify": CallOptions,
    "score": ScoreOptions,
}
"""Types of the keyword arguments that a method passes to the request."""


def test_the_python_page_lists_the_keyword_arguments_of_every_method() -> None:
    page = (ROOT / "docs/guides/clients/python.md").read_text()
    table = re.search(r"^\| methods \| optional keyword arguments \|\n(?:\|.*\n)+", page, re.MULTILINE)
    assert table is not None
    cells = [row.split("|")[1:3] for row in table[0].splitlines()[2:]]
    listed = [(re.findall(r"`(\w+)`", methods), set(re.findall(r"`(\w+)`", names))) for methods, names in cells]
    for method, options in OPTIONS.items():
        parameters = inspect.signature(getattr(Client, method)).parameters.values()
        own = {each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}
        found = set().union(*(names for methods, names in listed if method in methods or not methods))
        assert found == own | options.__optional_keys__, method
