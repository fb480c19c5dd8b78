"""Runs the ``penstock`` command as a process, and reads its output and exit code."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from tests.fakes.patience import PATIENCE

FAKE_SERVICES = Path(__file__).parents[1] / "systems" / "services"
PENSTOCK = (sys.executable, "-m", "penstock_local")


def environment(*, fake_services: bool) -> dict[str, str]:
    """Return this process's environment. If ``fake_services`` is set, the command starts fake services."""
    if not fake_services:
        return dict(os.environ)
    path = os.pathsep.join([str(FAKE_SERVICES), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


class Command:
    """Process ``penstock ARGUMENTS`` with both outputs on one stream. The end of the block kills it and its children."""

    def __init__(
        self,
        *arguments: str,
        program: Sequence[str] = PENSTOCK,
        fake_services: bool = False,
        cwd: Path | None = None,
        **environ: str,
    ) -> None:
        self.process = subprocess.Popen(
            [*program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            cwd=cwd,
            env=environment(fake_services=fake_services) | environ,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def output(self) -> str:
        with self._changed:
            return "\n".join(self.lines)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until ``pattern`` matches the output, and return the first match."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or re.search(pattern, "\n".join(self.lines)), PATIENCE)
            match = re.search(pattern, "\n".join(self.lines))
        assert match is not None, f"{pattern!r} is not in the output:\n{self.output}"
        return match

    def wait_for_exit(self) -> int:
        """Wait until the process has ended and its output is read. Return the exit code."""
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def pid_and_port(self, service: str) -> tuple[int, int]:
        """Return the process id and the gRPC port of a fake service."""
        match = self.wait_for(rf"{service} +\| ready with pid (\d+) on port (\d+)")
        return int(match[1]), int(match[2])

    def interrupt(self) -> None:
        """Send the signal that Ctrl-C sends to the command."""
        self.process.send_signal(signal.SIGINT)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def listening(port: int) -> bool:
    """Return whether a process accepts connections on the loopback port."""
    with contextlib.closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def eventually(condition: Callable[[], bool]) -> bool:
    """Return whether ``condition`` becomes true within ``PATIENCE`` seconds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
