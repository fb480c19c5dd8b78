"""What the command writes: the joined logs of the services on standard error, results on standard output."""

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TextIO

_PREFIX_COLORS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
BOLD, DIM, RED, GREEN = 1, 2, 31, 32


def use_color(stream: TextIO) -> bool:
    """True when ``stream`` is a terminal and NO_COLOR (no-color.org) is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def paint(text: str, code: int, stream: TextIO) -> str:
    """``text`` with an ANSI color or style where ``stream`` shows it."""
    return f"\x1b[{code}m{text}\x1b[0m" if use_color(stream) else text


def dim(text: str) -> str:
    """``text`` for standard error, dimmed."""
    return paint(text, DIM, sys.stderr)


def say(text: str) -> None:
    """A line of the command itself, on standard error."""
    with contextlib.suppress(OSError):  # a closed terminal must not keep the services from being stopped
        sys.stderr.write(f"{paint('penstock', BOLD, sys.stderr)}: {text}\n")
        sys.stderr.flush()


def fail(text: str) -> None:
    """An error of the command itself, on standard error."""
    say(f"{paint('error', RED, sys.stderr)}: {text}")


class JoinedLog:
    """The log lines of several services on one stream, ``engine-0    | ...``, each service with a color of its own.

    While ``muted`` lines are dropped. When the reader of the stream has gone (a closed terminal, ``| head``) ``on_closed`` is
    called once and the rest is dropped: the services must be able to go on writing until they have stopped.
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
        """Add one line of one service."""
        if self.muted or self._closed:
            return
        try:
            self._stream.write(f"{self._prefix(service)} {line}\n")
            self._stream.flush()
        except OSError:
            self._closed = True
            self._on_closed()

    def _prefix(self, service: str) -> str:
        """Of a service, also of one that was not there at first."""
        if service not in self._prefixes:
            color = _PREFIX_COLORS[len(self._prefixes) % len(_PREFIX_COLORS)]
            self._prefixes[service] = paint(f"{service:<{self._width}} |", color, self._stream)
        return self._prefixes[service]
