"""The processes beside the engine: one that is started early, because importing the library takes it seconds, and its forks.

Imports nothing that takes long itself, so that it can be started before the engine imports what it needs.
"""

import contextlib
import multiprocessing
import os
import select
import signal
import socket
import struct
import subprocess
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from penstock_common.child_process import start_python
from penstock_common.errors import Internal, Unavailable
from penstock_common.process import cpu_seconds
from penstock_enginecore.config import StructuredOutputConfig
from penstock_enginecore.structured_output.constraints.source import FIELD
from penstock_enginecore.structured_output.messages import (
    MAX_PACKET,
    Compile,
    Follow,
    Fork,
    Settings,
    encode,
    memory_file,
    packet_pair,
)

FORKING = "penstock_enginecore.structured_output.forking"
START_TIMEOUT = 120.0
"""Seconds until a new process must be ready: it imports the library and reads the vocabulary."""


class Forked:
    """A fork of the child process: ``pid``, ``poll``, ``wait`` and ``kill`` as ``subprocess.Popen`` has them. From any thread."""

    def __init__(self, pid: int, pidfd: int, pipe: int) -> None:
        """``pipe``: where its exit code is written; it is closed without one when the process that would write has ended."""
        self.pid = pid
        self._pidfd = pidfd
        self._pipe = pipe
        self._lock = threading.Lock()
        self._code: int | None = None
        for descriptor in (pidfd, pipe):
            # Not at the interpreter's exit, whose own finalizers may still end the process.
            weakref.finalize(self, os.close, descriptor).atexit = False

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when it has ended. Raises subprocess.TimeoutExpired."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def cpu_seconds(self) -> float:
        """What it has computed, in all its threads; 0 once it is gone."""
        return cpu_seconds(self.pid)

    def kill(self) -> None:
        """End it. Idempotent."""
        if self.poll() is None:
            try:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except ProcessLookupError:
                return  # it has just ended

    def _look(self, timeout: float | None) -> int | None:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        if self._code is None and poll.poll(None if timeout is None else 1000 * timeout):
            with self._lock:
                if self._code is None:
                    told = os.read(self._pipe, 4)
                    # Who would tell has ended, and took this one along.
                    self._code = int(struct.unpack("=i", told)[0]) if told else -signal.SIGKILL
        return self._code


class Compiler(NamedTuple):
    """A process that compiles, and the engine's end of what is between them."""

    process: Forked
    channel: "Connection[Any, Any]"


class Follower(NamedTuple):
    """The same of one that follows."""

    process: Forked
    channel: socket.socket


class Children:
    """``compiler`` and ``follower`` belong to ``thread``, which outlives all children: they die with the thread that started
    them.
    """

    def __init__(self, config: StructuredOutputConfig, module: str = FORKING) -> None:
        self._config = config
        self._module = module
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-grammar")
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._reads = False  # the vocabulary was handed over

    @property
    def pid(self) -> int | None:
        """The process that all others are forks of, if it was started."""
        return self._process.pid if self._process is not None else None

    def start_early(self) -> None:
        """Start it. Returns at once."""
        self.thread.submit(self._start)

    def compiler(self, tokenizer: bytes) -> Compiler:
        """A process that compiles for this vocabulary, serialized: see ``compiler.main``. Raises Internal when there is none."""
        ours, theirs = multiprocessing.Pipe()
        with theirs, _closed_unless_done(ours):
            process = self._fork(Compile(self._config.compile_memory), theirs.fileno(), tokenizer)
        return Compiler(process, ours)

    def follower(self, tokenizer: bytes, settings: Settings) -> Follower:
        """One that follows: see ``following.main``. Raises Internal when there is none."""
        ours, theirs = packet_pair()
        with theirs, _closed_unless_done(ours):
            process = self._fork(Follow(settings), theirs.fileno(), tokenizer)
        return Follower(process, ours)

    def close(self) -> None:
        """End all of them, for good. Idempotent."""
        with self._lock:
            self._closed = True
        self.stop()

    def stop(self) -> None:
        """End all of them. Whoever asks for one gets another."""
        with self._lock:
            process, channel = self._process, self._channel
        if process is not None:
            process.kill()
            process.wait()
        if channel is not None:
            channel.close()

    def _start(self) -> socket.socket:
        """What is between the engine and a process that runs. Raises Unavailable when closed meanwhile."""
        with self._lock:
            if self._closed:
                raise Unavailable("the engine is stopping", field=FIELD)
            if self._process is not None and self._channel is not None:
                if self._process.poll() is None:
                    return self._channel
                self._channel.close()
            ours, theirs = packet_pair()
            ours.settimeout(START_TIMEOUT)
            with theirs:
                self._process = start_python(self._module, [str(theirs.fileno())], [theirs.fileno()])
            self._channel, self._reads = ours, False
            return ours

    def _fork(self, fork: Fork, theirs: int, tokenizer: bytes) -> Forked:
        channel = self._start()
        ending, told = os.pipe()
        try:
            if not self._reads:
                file = memory_file("tokenizer", tokenizer)
                try:
                    socket.send_fds(channel, [b"tokenizer"], [file])
                finally:
                    os.close(file)
                self._reads = True
            socket.send_fds(channel, [encode(fork)], [theirs, told])
            data, files, _, _ = socket.recv_fds(channel, MAX_PACKET, 1)
        except OSError:
            data, files = b"", []
        finally:
            os.close(told)
        if not data:
            os.close(ending)
            raise self._not_started("compiles" if isinstance(fork, Compile) else "follows")
        return Forked(int(data), files[0], ending)

    def _not_started(self, does: str) -> Internal | Unavailable:
        with self._lock:
            if self._closed or self._process is None:
                return Unavailable("the engine is stopping", field=FIELD)
            process = self._process
        process.kill()
        return Internal(f"the process that {does} constraints did not start (exit code {process.wait()})", field=FIELD)


@contextlib.contextmanager
def _closed_unless_done(end: "Connection[Any, Any] | socket.socket") -> Iterator[None]:
    try:
        yield
    except BaseException:
        end.close()
        raise
