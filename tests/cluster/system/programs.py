"""Programs that run while the cluster runs, in this network namespace or in a node's namespaces."""

import contextlib
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.cluster.tools.build import PROGRAMS, ROOT

PATIENCE = 120.0


class NotUpError(Exception):
    """A program of the cluster ended, or did not become ready. The message has the end of the program's log."""


def built(component: str, program: str) -> str:
    """Return the path of a program that ``make cluster-tools`` builds. Raises NotUpError if the program is missing."""
    path = PROGRAMS / component / program
    if not path.exists():
        raise NotUpError(f"{path.name} is not built: make cluster-tools")
    return str(path)


def run(*command: str, stdin: str | None = None) -> str:
    """Run a short command and return its output. Raises NotUpError with its error output if it fails."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, input=stdin)
    if done.returncode != 0:
        raise NotUpError(
            f"{' '.join(command)}: exit status {done.returncode}: {done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout


def until(what: str, ready: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait until ``ready`` returns True. Raises NotUpError with ``what`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise NotUpError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold a lock on the files that all clusters on this machine use."""
    with (ROOT / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Program:
    """A command with a log file. The command can be stopped and restarted."""

    def __init__(self, name: str, command: Sequence[str], log: Path, *, enter: Sequence[str] = ()) -> None:
        """Prepare a program.

        Args:
            enter: Command prefix that runs ``command`` in a node. It starts one child process and waits for the child.
        """
        self.name = name
        self.log = log
        self._command = [*enter, *command]
        self._enters = bool(enter)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Program":
        """Start the program and return immediately."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        return self

    @property
    def alive(self) -> bool:
        """Return whether the program runs."""
        return self._process is not None and self._process.poll() is None

    def tail(self, lines: int = 20) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""

    def ready(self, check: Callable[[], bool]) -> "Program":
        """Wait until ``check`` returns True. Raises NotUpError with the log if the program ends first."""

        def checked() -> bool:
            if not self.alive:
                raise NotUpError(f"{self.name} ended:\n{self.tail()}")
            return check()

        try:
            until(self.name, checked)
        except NotUpError as error:
            raise NotUpError(f"{error}\n{self.tail()}") from error
        return self

    def stop(self, sign: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal ``sign`` and wait until the program ends. Kill the program after 20 seconds."""
        if self._process is None:
            return
        for each in [sign, signal.SIGKILL]:
            if self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # the program may have ended in the meantime
                    os.kill(self._child(), each)
                try:
                    self._process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    continue
        self._process = None

    def _child(self) -> int:
        """Return the process id of the command itself, which may be a child of the ``enter`` command."""
        assert self._process is not None
        pid = self._process.pid
        if not self._enters:
            return pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else pid
