"""The ``penstock`` command on a pseudo-terminal, with typed input and the screen as output."""

import os
import pty
import re
import select
import shutil
import subprocess
import time
from typing import Self

import pytest

from tests.fakes.clients.command import PENSTOCK
from tests.fakes.patience import PATIENCE

CTRL_C, CTRL_D, ENTER = "\x03", "\x04", "\r"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|[\x01\x02]")


class Terminal:
    """Process ``penstock ARGUMENTS`` on a pseudo-terminal. The end of the block kills it."""

    def __init__(self, *arguments: str, **environ: str) -> None:
        if shutil.which("setsid") is None:
            pytest.skip("no setsid on PATH (apt-get install util-linux)")
        self._ours, theirs = pty.openpty()
        os.set_blocking(self._ours, False)
        self.process = subprocess.Popen(
            # The command gets a separate session with this terminal, so that the terminal's keys send signals to the
            # command.
            ["setsid", "--ctty", "--wait", *PENSTOCK, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "NO_COLOR": "", **environ},
        )
        os.close(theirs)
        self._raw = b""
        self._seen = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        os.close(self._ours)

    @property
    def screen(self) -> str:
        """Return all output so far, without colors and cursor movements."""
        return _ESCAPES.sub("", self._raw.decode(errors="replace")).replace("\r", "")

    def type(self, text: str) -> None:
        """Type ``text`` on the terminal."""
        os.write(self._ours, text.encode())

    def wait_for(self, text: str) -> None:
        """Wait until ``text`` appears after the text of the last wait."""
        deadline = time.monotonic() + PATIENCE
        while (found := self.screen.find(text, self._seen)) < 0:
            assert self._read(deadline - time.monotonic()), f"{text!r} is not in:\n{self.screen[self._seen :]}"
        self._seen = found + len(text)

    def wait_for_exit(self) -> int:
        """Wait until the command has ended, and return its exit code."""
        while self._read(PATIENCE):
            pass
        return self.process.wait(PATIENCE)

    def _read(self, seconds: float) -> bool:
        """Wait for output and read it. Returns False at the end of the output, or if nothing arrives."""
        if not select.select([self._ours], [], [], max(seconds, 0.0))[0]:
            return False
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # Linux raises this error when the command has ended
            return False
        self._raw += data
        return bool(data)
