"""Streamed Markdown on a terminal: finished lines stay, the rest is redrawn, and both together are the whole text."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_local.commands.markdown_view import MarkdownView, dimmed, split_blocks

FENCED = "So:\n\n```python\na = 1\n\nb = 2\n```\n\nDone"


@pytest.mark.parametrize(
    ("text", "done", "rest"),
    [
        ("one", [], "one"),
        ("one\ntwo\n", [], "one\ntwo\n"),
        ("one\n\n", ["one\n\n"], ""),
        ("one\n\ntwo\n \nthree", ["one\n\n", "two\n \n"], "three"),
        ("\n\none", [], "one"),
        (FENCED[:25], ["So:\n\n"], FENCED[5:25]),
        (FENCED, ["So:\n\n", FENCED[5:-4]], "Done"),
        ("```\na\n\n", [], "```\na\n\n"),
    ],
)
def test_blocks_end_at_blank_lines_outside_of_fences(text: str, done: list[str], rest: str) -> None:
    assert split_blocks(text) == (done, rest)


class Screen(io.StringIO):
    """A terminal of 20 columns, as far as rich can tell."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("LINES", "6")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")


def shown(pieces: list[str]) -> list[str]:
    """Return the lines on the screen at the end. A file that is no terminal gets only the finished lines."""
    stream = io.StringIO()
    view = MarkdownView(stream)
    for piece in pieces:
        view.write(piece)
    view.end()
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_words_are_not_split_at_the_edge() -> None:
    assert shown(["The quick brown ", "fox jumps over"]) == ["The quick brown fox", "jumps over"]


def test_addresses_of_links_are_written_out() -> None:
    assert shown(["See [here](http://a.b/c)."]) == ["See here", "(http://a.b/c)."]


def test_markdown_is_rendered() -> None:
    assert shown(["some\n\n- **one**\n- `two`\n\nnext"]) == ["some", "", " • one", " • two", "", "next"]


@given(points=st.lists(st.integers(0, len(FENCED)), max_size=6))
def test_what_stays_does_not_depend_on_the_pieces(points: list[int]) -> None:
    ends = sorted({*points, len(FENCED)})
    pieces = [FENCED[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    assert shown(pieces) == shown([*FENCED])


def test_a_block_is_redrawn_with_every_piece() -> None:
    screen = Screen()
    view = MarkdownView(screen, render=dimmed)
    view.write("one")
    assert "one" in screen.getvalue()
    view.write(" two")
    assert "one two" in screen.getvalue()
    view.end()
    assert screen.getvalue().endswith("\x1b[2mone two\x1b[0m\n")


def test_a_block_that_is_higher_than_the_screen_shows_its_end() -> None:
    screen = Screen()
    view = MarkdownView(screen, render=dimmed)
    view.write("\n".join(f"line{number}" for number in range(20)))
    assert "line19" in screen.getvalue()
    assert "line3\n" not in screen.getvalue()
    view.end()
    assert all(f"line{number}" in screen.getvalue() for number in range(20))
