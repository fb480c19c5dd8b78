"""Starts Python modules as processes that have already imported torch, xgrammar and gRPC, which takes seconds each
time.

One process per test session imports them; each started process is a fork of it, with its own arguments, environment,
files and exit code. It dies when the process that started it ends. Tests about starting processes do not use this.
"""

import contextlib
import gc
import importlib
import os
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from fcntl import F_DUPFD_CLOEXEC, fcntl
from pathlib import Path
from typing import Any

import msgspec

from penstock_common import process as child_process
from tests.fakes.patience import PATIENCE

IMPORTED = (
    "penstock_enginecore.executor.worker",
    "penstock_enginecore.parallel.group_collectives",
    "penstock_enginecore.structured_output.backend",
    "penstock_enginecore.structured_output.compiling_process",
    "penstock_enginecore.structured_output.following_process",
    "penstock_enginecore.app",
    "penstock_coordinator.app",
    "penstock_frontend.app.app",
)
STARTING = ("penstock_enginecore.structured_output.grammar_processes", "penstock_enginecore.executor.multiproc.workers")
"""Modules whose processes ``warm_processes`` starts."""
_MAX_REQUEST = 1 << 17
_MAX_FILES = 64
_FREE = 512
"""Lowest descriptor for received files, until each file gets its final number."""


class Request(msgspec.Struct):
    """A module to run. ``files``: descriptor numbers of the files that are sent with the request, in order."""

    module: str
    arguments: list[str]
    environ: dict[str, str]
    folder: str
    files: list[int]


class Process:
    """A started process, with the part of ``subprocess.Popen`` that services and tests use."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self._connection = connection
        self._code: int | None = None
        weakref.finalize(self, connection.close)

    @property
    def returncode(self) -> int | None:
        """The exit code; None while the process runs."""
        return self.poll()

    def poll(self) -> int | None:
        """See ``returncode``."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises subprocess.TimeoutExpired."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self._code is None and select.select([self._connection], [], [], timeout)[0]:
            told = self._connection.recv(4, socket.MSG_PEEK)  # peek, because several threads may wait for the code
            self._code = struct.unpack("=i", told)[0] if told else -signal.SIGKILL
        return self._code


class WarmPython:
    """Process that is forked. Any thread of any fork may call ``start`` and ``start_python``."""

    def __init__(self, address: bytes) -> None:
        self._address = address

    def start_python(
        self,
        module: str,
        arguments: Sequence[str],
        descriptors: Sequence[int],
        environ: Mapping[str, str] | None = None,
    ) -> Process:
        """Start a module like ``child_process.start_python``."""
        return self.start(module, arguments, {each: each for each in (1, 2, *descriptors)}, environ)

    def start(
        self, module: str, arguments: Sequence[str], files: Mapping[int, int], environ: Mapping[str, str] | None = None
    ) -> Process:
        """Run ``module``. ``files``: map from its descriptors, from 1 on, to the files of this process."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(self._address)
        request = Request(
            module, list(arguments), dict(os.environ if environ is None else environ), str(Path.cwd()), [*files]
        )
        socket.send_fds(connection, [msgspec.msgpack.encode(request)], list(files.values()))
        assert select.select([connection], [], [], PATIENCE)[0], "no process was started"
        return Process(connection, struct.unpack("=i", connection.recv(4))[0])


@contextlib.contextmanager
def warm_python() -> Iterator[WarmPython]:
    """Start the process that is forked, and end it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # the kernel chooses an address that is no file
        listener.listen(64)
        address = listener.getsockname()
        process = child_process.start_python(__name__, [str(listener.fileno())], [listener.fileno()])
    try:
        yield WarmPython(address)
    finally:
        process.kill()
        process.wait()


def use(warm: WarmPython, set_attribute: Callable[[object, str, object], None]) -> None:
    """Let the modules of ``STARTING`` start their processes from ``warm``."""
    for name in STARTING:
        set_attribute(importlib.import_module(name), "start_python", warm.start_python)


def _serve(listener: socket.socket) -> Request:
    """Fork for each connection. Returns in the forks."""
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener, wake, *running.values()], [], [])
        for pid, connection in list(running.items()):
            if connection in ready:  # the process that started it has ended
                os.kill(pid, signal.SIGKILL)
                running.pop(pid).close()
        if wake in ready:
            wake.recv(4096)
            _reap(running)
        if listener not in ready:
            continue
        connection, _ = listener.accept()
        data, files, _, _ = socket.recv_fds(connection, _MAX_REQUEST, _MAX_FILES)
        if not (pid := os.fork()):
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in (listener, wake, woken, connection, *running.values()):
                inherited.close()
            request = msgspec.msgpack.decode(data, type=Request)
            _take(files, request.files)
            return request
        for each in files:
            os.close(each)
        running[pid] = connection
        with contextlib.suppress(BrokenPipeError):
            connection.send(struct.pack("=i", pid))


def _reap(running: dict[int, socket.socket]) -> None:
    """Send the exit codes of forks that have ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if (connection := running.pop(ended[0], None)) is not None:
                with contextlib.suppress(BrokenPipeError):
                    connection.send(struct.pack("=i", os.waitstatus_to_exitcode(ended[1])))
                connection.close()


def _take(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Move the received files to their descriptor numbers, and make standard input empty."""
    kept = [fcntl(each, F_DUPFD_CLOEXEC, _FREE) for each in (os.open(os.devnull, os.O_RDONLY), *files)]
    for each in files:
        os.close(each)
    for each, number in zip(kept, (0, *numbers), strict=True):
        os.dup2(each, number)
        os.close(each)


def main(descriptor: str) -> None:
    """Import all modules, then serve. In a fork, run the requested module."""
    listener = socket.socket(fileno=int(descriptor))
    child_process.end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in IMPORTED:
        importlib.import_module(name)
    use(WarmPython(listener.getsockname()), setattr)
    gc.freeze()  # a collection would copy every page that the forks share
    request = _serve(listener)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    numpy: Any = sys.modules["numpy"]
    numpy.random.seed(random.randrange(2**32))
    os.environ.clear()
    os.environ.update(request.environ)
    os.chdir(request.folder)
    sys.argv = [request.module, *request.arguments]
    sys.modules.pop(request.module, None)
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
