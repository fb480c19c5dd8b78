"""Docstrings begin with a noun or a verb, and their sentences are short: the writing rules that a program can check."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 45
"""Maximum number of words in a sentence. The rule for writers is 25, and the higher limit allows lists of names."""
FRAGMENT = re.compile(
    r"(it|they|he|she|these|those|its|theirs|none(?! (if|until))|both|some|such|others|what|who|whose|whom|whoever|where|how"
    r"|of|for|to|in|on|by|with|as|from|at|beside|behind|likewise|so)\b(?!-)",
    re.IGNORECASE,
)
"""First words that need an earlier sentence. A docstring is read alone, in an editor's popup."""
FOLDERS = ("services", "protos", "charts")


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring, including docstrings of attributes."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for item in body if isinstance(body, list) else ():
            if (
                isinstance(item, ast.Expr)
                and isinstance(item.value, ast.Constant)
                and isinstance(item.value.value, str)
            ):
                yield item.lineno, item.value.value


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a docstring. Code, lists of arguments and indented blocks are left out."""
    for paragraph in re.split(r"\n\s*\n", text):
        if re.match(r"\s*(Args|Attributes|Returns|Raises|Yields|Example)s?:", paragraph):
            continue
        prose = " ".join(line.strip() for line in paragraph.splitlines() if not re.match(r"\s*(- |\||[├└│])", line))
        plain = re.sub(r"``[^`]*``|`[^`]*`", "code", prose)
        yield from (part for part in re.split(r"(?<=[.!?;:])\s+", plain) if part)


def faults(text: str) -> list[str]:
    """Return the faults of one docstring."""
    found = []
    if first := FRAGMENT.match(text):
        found.append(f"begins with {first[1]!r}")
    found += [f"has a sentence of {n} words" for part in sentences(text) if (n := len(part.split())) > LONGEST]
    return found


def files() -> list[Path]:
    """Return the Python files whose docstrings follow the rules."""
    return sorted(
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not {"build", "node_modules"} & set(path.parts) and not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
    )


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Return the leases of an engine.", 0),
        ("Tracks leases; each ends once.", 0),
        ("Those of an engine, oldest first.", 1),
        ("What a rank holds.", 1),
        ("In-memory store of responses.", 0),
        ("``of``: a name.", 0),
        ("Return " + "word " * 50, 1),
        ("Return a list.\n\nArgs:\n    x: " + "word " * 60, 0),
    ],
)
def test_faults_are_found(text: str, count: int) -> None:
    assert len(faults(text)) == count


def test_docstrings_follow_the_rules() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in files()
        for line, text in docstrings(path.read_text(encoding="utf-8"))
        for fault in faults(text)
    ]
    assert found == []
