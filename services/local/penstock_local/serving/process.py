"""One child process: its start, its log and its end."""

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

_TAIL_LINES = 12
_CHUNK_BYTES = 64 * 1024
_LONGEST_LINE = 16 * 1024


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A service to run as ``python -m module --config FILE``."""

    name: str
    """Of the service among those of the command, as its log lines show it."""
    module: str
    config: dict[str, Any]
    """What FILE holds."""
    address: str
    """Where the service answers ``grpc.health.v1``, host:port."""
    stop_stage: int
    """Services with a lower stage have stopped before those with a higher one are asked to."""
    stop_timeout: float
    """Seconds after SIGTERM until the service is killed."""
    env: dict[str, str] = {}
    """Variables that the user's environment may override."""
    own_env: dict[str, str] = {}
    """Variables that override the user's environment."""
    plain_health: bool = False
    """Whether ``address`` is without TLS whatever ``config`` says."""

    @property
    def secured(self) -> bool:
        """Whether it serves ``address`` with TLS."""
        return not self.plain_health and bool(self.config.get("server", {}).get("tls", {}).get("certificate"))


class ServiceProcess:
    """A running service in a session of its own, so that the terminal's Ctrl-C reaches it through its parent only."""

    def __init__(self, spec: ProcessSpec, *, on_line: Callable[[str, str], None]) -> None:
        """``on_line`` gets the service's name and each line of its log."""
        self.spec = spec
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """The last lines of its log."""
        self._on_line = on_line
        self._process: asyncio.subprocess.Process | None = None
        self._end: asyncio.Task[int] | None = None

    async def start(self, folder: Path, environ: Mapping[str, str]) -> None:
        """Write the config file into ``folder`` and start the process."""
        file = folder / f"{self.spec.name}.yaml"
        file.write_text(yaml.safe_dump(self.spec.config, sort_keys=False), encoding="utf-8")
        command = ("-m", "penstock_local.serving.child", str(os.getpid()), self.spec.module, "--config", str(file))
        log, write_end = await _open_pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env={**self.spec.env, **environ, **self.spec.own_env},
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        self._end = asyncio.create_task(self._follow(self._process, log), name=f"follow {self.spec.name}")

    @property
    def running(self) -> bool:
        """True from the start of the process until it has ended and its log is read to the end."""
        return self._end is not None and not self._end.done()

    async def wait(self) -> int:
        """The exit code, when the process has ended and its log is read to the end."""
        if self._end is None:
            raise RuntimeError(f"{self.spec.name} was not started")
        return await asyncio.shield(self._end)

    def send(self, which: signal.Signals) -> None:
        """Send a signal to the service; nothing happens when it has ended."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(which)

    async def stop(self) -> int:
        """Ask the service to end; kill it when it has not by its ``stop_timeout``. Returns the exit code."""
        self.send(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.wait(), self.spec.stop_timeout)
        except TimeoutError:
            self._add_line(f"did not stop within {self.spec.stop_timeout:g} s of SIGTERM; killing it")
            self.send(signal.SIGKILL)
            return await self.wait()

    async def _follow(self, process: asyncio.subprocess.Process, log: asyncio.StreamReader) -> int:
        reading = asyncio.create_task(self._read(log))
        exit_code = await process.wait()
        # What the service started itself must not outlive it: it would hold the log's pipe and perhaps a port.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await reading
        return exit_code

    async def _read(self, log: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await log.read(_CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._add_line(_visible(line))
        if rest:
            self._add_line(_visible(rest))

    def _add_line(self, line: str) -> None:
        self.tail.append(line)
        self._on_line(self.spec.name, line)


async def _open_pipe() -> tuple[asyncio.StreamReader, int]:
    """A pipe: the end to read, and the descriptor to write to.

    asyncio's own pipes tie the end of a process to the end of its output, which what the process started may hold open.
    """
    reader = asyncio.StreamReader()
    read_end, write_end = os.pipe()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0))
    return reader, write_end


def _visible(line: bytes) -> str:
    """What a terminal would show of a line that progress bars overwrite with carriage returns."""
    return line.decode("utf-8", errors="replace").rstrip("\r").rsplit("\r", 1)[-1]


def describe_exit(exit_code: int) -> str:
    """An exit code in words."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    which = signal.Signals(-exit_code).name
    return f"was killed by {which}" + (" (out of memory?)" if -exit_code == signal.SIGKILL else "")
