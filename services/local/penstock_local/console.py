"""Terminal output of the command: service logs and messages on standard error, results on standard output."""

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TextIO

_PREFIX_COLORS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
BOLD, DIM, RED, GREEN = 1, 2, 31, 32


def use_color(stream: TextIO) -> bool:
    """Return True if ``stream`` is a terminal and NO_COLOR (no-color.org) is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def paint(text: str, code: int, stream: TextIO) -> str:
    """Return ``text`` with an ANSI color or style if ``stream`` supports it."""
    return f"\x1b[{code}m{text}\x1b[0m" if use_color(stream) else text


def dim(text: str) -> str:
    """Return ``text`` dimmed for standard error."""
    return paint(text, DIM, sys.stderr)


def say(text: str) -> None:
    """Write a message of the command to standard error."""
    with contextlib.suppress(OSError):  # the command must stop its services even if the terminal is closed
        sys.stderr.write(f"{paint('penstock', BOLD, sys.stderr)}: {text}\n")
        sys.stderr.flush()


def fail(text: str) -> None:
    """Write an error of the command to standard error."""
    say(f"{paint('error', RED, sys.stderr)}: {text}")


class JoinedLog:
    """Writer that merges the log lines of several services into one stream, with prefixes such as ``engine-0 | ...``.

    Each service has its own color. While ``muted`` is True, lines are dropped. If the reader of the stream has exited
    (a closed terminal, ``| head``), ``on_closed`` is called once and later lines are dropped. So services can continue
    to write until they have stopped.
    """

    def __init__(self, services: list[str], *, stream: TextIO, on_closed: Callable[[], None]) -> None:
        self.muted = False
        self._stream = stream
        self._on_closed = on_closed
        self._closed = False
        self._width = max(map(len, services), default=0)
        self._prefixes: dict[str, str] = {}
        for name in services:
            self._prefix(name)

    def write(self, service: str, line: str) -> None:
        """Write one line of a service."""
        if self.muted or self._closed:
            return
        try:
            self._stream.write(f"{self._prefix(service)} {line}\n")
            self._stream.flush()
        except OSError:
            self._closed = True
            self._on_closed()

    def _prefix(self, service: str) -> str:
        """Return the prefix of a service, which may have been added later."""
        if service not in self._prefixes:
            color = _PREFIX_COLORS[len(self._prefixes) % len(_PREFIX_COLORS)]
            self._prefixes[service] = paint(f"{service:<{self._width}} |", color, self._stream)
        return self._prefixes[service]
