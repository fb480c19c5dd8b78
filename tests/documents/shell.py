"""The commands of the pages' shell blocks."""

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from tests.documents.pages import blocks

SHELL = "sh"
TRANSCRIPT = "console"
"""Language of session blocks. Lines that begin with ``$`` are commands, and all other lines are output."""


class Command(NamedTuple):
    """One command of a page. ``text`` is the command with its lines joined, without the comment after it."""

    page: str
    line: int
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def calls(self) -> list[list[str]]:
        """Return the words of each program call in the command, without leading variable assignments.

        Pipes, ``&&`` and ``;`` separate the calls.
        """
        try:
            return [call for call in _split(self.text) if call]
        except ValueError as e:
            raise AssertionError(f"{self.place}: {self.text!r} is no shell command: {e}") from None

    def calls_of(self, *program: str) -> list[list[str]]:
        """Return the arguments of each call of a program, such as ``penstock`` or ``python -m``."""
        return [call[len(program) :] for call in self.calls if tuple(call[: len(program)]) == program]


def commands() -> list[Command]:
    """Return all commands of all pages, in order."""
    found = []
    for block in blocks(SHELL, TRANSCRIPT):
        numbered = list(enumerate(block.code.splitlines(), block.line))
        if block.language == TRANSCRIPT:
            numbered = [(number, line.removeprefix("$ ")) for number, line in numbered if line.startswith("$ ")]
        found += [Command(block.page, number, text) for number, text in _joined(numbered)]
    return found


def _joined(lines: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Join lines that continue on the next line (a backslash, an open loop, a pipe) into one command."""
    first, text = 0, ""
    for number, line in lines:
        bare = _without_remark(line)
        if not text and not bare.strip():
            continue
        first = first if text else number
        text = f"{text}\n{bare}" if text else bare
        if text.endswith("\\") or text.rstrip().endswith("|") or _open(text):
            continue
        yield first, text.strip()
        text = ""
    assert not text, f"line {first}: {text!r} has no end"


def _open(text: str) -> bool:
    words = re.findall(r"(?m)(?:^|;|\s)(for|done)\b", text)
    return words.count("for") > words.count("done")


def _without_remark(line: str) -> str:
    """Remove the comment at the beginning or after two spaces.

    The project's commands contain no other ``#`` like that.
    """
    return re.sub(r"(^|\s{2,})#.*$", "", line).rstrip()


def _split(text: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(text.replace("\\\n", " ").replace("\n", " ; "), posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    lexer.commenters = ""
    call: list[str] = []
    for word in lexer:
        if set(word) <= set("|&;"):
            yield call
            call = []
        elif call or not re.fullmatch(r"\w+=.*|do|then", word):
            call.append(word)
    yield call
