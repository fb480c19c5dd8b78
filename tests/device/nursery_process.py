"""Client of the nursery, used by the process that starts the nursery."""

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_PATIENCE = 10


class NurseryProcess:
    """Starts a nursery and communicates with it. ``options``: see ``nursery.Nursery``."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.device.nursery", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,
        )
        self._pending = b""
        self.ended = False
        """Whether the nursery has ended; ``answers`` returns nothing more."""

    def request(self, **values: Any) -> None:
        """Request a process. Does nothing if the nursery has ended."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{json.dumps(values)}\n".encode())
            self._process.stdin.flush()

    def answers(self, seconds: float) -> list[dict[str, Any]]:
        """Return the new answers, after ``seconds`` at most."""
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        if self.ended or not select.select([output], [], [], seconds)[0]:
            return []
        data = os.read(output, 65536)
        self.ended = not data
        *lines, self._pending = (self._pending + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End the nursery and its children."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
