"""Child processes that compile constraints and compute masks: their start, messages and limits.

Importing the grammar library xgrammar takes seconds. The fork server imports the library early, and the other child
processes are forks of the fork server (see ``fork_server``). This module imports no slow packages, so that the engine
can start the fork server before its own slow imports.
"""

import contextlib
import multiprocessing
import os
import resource
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
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock_common.errors import Internal, Unavailable
from penstock_common.process import cpu_seconds, end_with_parent, start_python
from penstock_enginecore.config import StructuredOutputConfig
from penstock_enginecore.structured_output.constraints.source import FIELD

# Functions that a child process calls: priority, signals and memory limit. They are needed because the process shares a
# machine with the engine.

NICENESS = 10
"""Niceness (lower scheduling priority) of a child process, so that the process takes no CPU time from the engine's
steps.
"""
_OUT_OF_MEMORY = ("bad_alloc", "std::length_error", "cannot allocate")


def detach(niceness: int) -> None:
    """Set the niceness of this process, make the process end when its parent ends, ignore Ctrl-C, and detach the
    process from the terminal.
    """
    os.nice(niceness)
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def limit_memory(headroom: int) -> None:
    """Limit the address space of this process to its current size plus ``headroom`` bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + headroom
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def out_of_memory(error: Exception) -> bool:
    """Return whether ``error`` means that xgrammar or Python could not allocate memory."""
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY)


# Each message is one packet of a Unix socket of type SOCK_SEQPACKET. A process that is killed while it sends therefore
# leaves no partial message. Large data (a serialized grammar, the initial tokens) is passed as an open file with the
# packet. Each replacement of the mask process has a higher ``generation``. Messages with an earlier ``generation``
# belong to a mask process that has ended.

MAX_PACKET = 64 * 1024
"""Maximum size of a packet in bytes. A packet to the engine may exceed this size by the size of one mask."""


class Settings(msgspec.Struct, frozen=True):
    """Limits and options of the mask process.

    Attributes:
        token_budget: Maximum CPU time for one token, in seconds.
        begin_budget: Maximum CPU time for all initial tokens of a request, in seconds.
        patience: CPU time in seconds. If a token took more CPU time than this, the lane ``SLOW`` handles the next token
            of its grammar.
        memory: Memory limit in bytes, in addition to the memory that the process uses before the first grammar.
        kept: Maximum number of compiled grammars in the cache of the process.
        forced: Whether to look for output text that a grammar requires next.
    """

    token_budget: float
    begin_budget: float
    patience: float
    memory: int
    kept: int
    forced: bool = False


class Compile(msgspec.Struct, frozen=True, tag="compile"):
    """Message to the fork server: fork a process that compiles constraints. ``memory`` is the process's memory limit in
    bytes, in addition to the memory in use before the first job.
    """

    memory: int


class Follow(msgspec.Struct, frozen=True, tag="follow"):
    """Message to the fork server: fork the mask process."""

    settings: Settings


Fork = Compile | Follow


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Message to the mask process: start the grammar of a request. ``number`` identifies the request's grammar, and
    ``grammar`` is the number of the compiled grammar.

    The packet carries one or two open files. The first file has the initial tokens as int32. The second file has the
    compiled grammar, if the engine has not sent it to the process yet.
    """

    generation: int
    number: int
    grammar: int


class Advance(msgspec.Struct, frozen=True, tag="advance"):
    """Message to the mask process: advance grammars by one token for each pair (number, token), and drop the grammars
    whose numbers are in ``ended``.
    """

    generation: int
    tokens: list[tuple[int, int]]
    ended: list[int]


class Draft(msgspec.Struct, frozen=True, tag="draft"):
    """Message to the mask process: compute the masks after draft tokens, without changing the state of the grammars.
    Each entry is (number of the grammar, count of tokens that it accepted before, turn, draft tokens).

    ``turn`` distinguishes several lists of draft tokens for the same grammar. When a failed step is repeated, its draft
    tokens may differ although the accepted tokens are the same.
    """

    generation: int
    drafts: list[tuple[int, int, int, list[int]]]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Message from a new mask process that it is ready.

    Attributes:
        suspects: Numbers of the grammars on which the previous mask process was working when it ended.
        costly: Whether the previous mask process ended because the first of ``suspects`` took too much CPU time.
    """

    generation: int
    suspects: list[int]
    costly: bool


class Result(msgspec.Struct, frozen=True, array_like=True):
    """Result for one grammar, which ``number`` identifies.

    Attributes:
        kind: Kind of the result. "unknown" means that the mask process does not have the compiled grammar of a Begin
            message.
        taken: Total number of tokens that the grammar has accepted.
        cost: CPU time that the last token took, in seconds.
        text: Error text if the kind is "failed".
        forced: Tokens of text that the grammar requires next.
        count: Number of masks after draft tokens: the mask after the first draft token of ``turn``, after the first
            two, and so on.
        turn: ``turn`` of the Draft message to which the result belongs.
    """

    number: int
    kind: Literal["mask", "drafted", "refused", "costly", "memory", "failed", "unknown"]
    taken: int = 0
    cost: float = 0.0
    text: str = ""
    forced: list[int] = []
    count: int = 0
    turn: int = 0


class Masks(msgspec.Struct, frozen=True, tag="masks"):
    """Message from the mask process with several results. ``rows`` has the concatenated masks of the results with kind
    "mask" or "drafted".
    """

    generation: int
    results: list[Result]
    rows: bytes


ToFollower = Begin | Advance | Draft
ToEngine = Ready | Masks
encode = msgspec.msgpack.Encoder().encode


def memory_file(name: str, content: bytes) -> int:
    """Create a file in memory, and return its descriptor."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    return descriptor


def read_file(descriptor: int) -> bytes:
    """Read a complete file and close the descriptor. Other processes may read the same file at the same time."""
    try:
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new channel for packets."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


# Code that runs in the engine: start of the child processes.

FORK_SERVER = "penstock_enginecore.structured_output.fork_server"
START_TIMEOUT = 120.0
"""Maximum time in seconds until a new process is ready. Before a process is ready, the fork server may have to import
xgrammar and read the vocabulary.
"""


class Forked:
    """Handle of a fork of the fork server. ``pid``, ``poll``, ``wait`` and ``kill`` are as in ``subprocess.Popen``.
    Thread-safe.
    """

    def __init__(self, pid: int, pidfd: int, pipe: int) -> None:
        """Create a handle for a fork. The fork server writes the fork's exit code to ``pipe``. If the fork server
        itself ends, the pipe closes without an exit code.
        """
        self.pid = pid
        self._pidfd = pidfd
        self._pipe = pipe
        self._lock = threading.Lock()
        self._code: int | None = None
        for descriptor in (pidfd, pipe):
            # Do not close the descriptors at the interpreter's exit, because other finalizers may still need them to
            # end the process.
            weakref.finalize(self, os.close, descriptor).atexit = False

    def poll(self) -> int | None:
        """Return the exit code of the process, or None while the process runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended, and return the exit code. Raises subprocess.TimeoutExpired after
        ``timeout`` seconds.
        """
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def cpu_seconds(self) -> float:
        """Return the CPU time of all threads of the process in seconds, or 0 after the process has ended."""
        return cpu_seconds(self.pid)

    def kill(self) -> None:
        """Kill the process. Idempotent."""
        if self.poll() is None:
            try:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except ProcessLookupError:
                return  # The process has ended since the call of poll.

    def _look(self, timeout: float | None) -> int | None:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        if self._code is None and poll.poll(None if timeout is None else 1000 * timeout):
            with self._lock:
                if self._code is None:
                    told = os.read(self._pipe, 4)
                    # The fork server has ended, and its forks end with it.
                    self._code = int(struct.unpack("=i", told)[0]) if told else -signal.SIGKILL
        return self._code


class Children:
    """Starts the fork server, and through it the other child processes.

    ``compiler`` and ``follower`` must be called on ``thread``. This thread must outlive all children, because a child
    dies with the thread that started it.
    """

    def __init__(self, config: StructuredOutputConfig, module: str = FORK_SERVER) -> None:
        self._config = config
        self._module = module
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-grammar")
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._reads = False  # Whether the vocabulary was sent to the fork server.

    @property
    def pid(self) -> int | None:
        """Process ID of the fork server, or None if it was not started."""
        return self._process.pid if self._process is not None else None

    def start_early(self) -> None:
        """Start the fork server. The call returns without waiting."""
        self.thread.submit(self._start)

    def compiler(self, tokenizer: bytes) -> "tuple[Forked, Connection[Any, Any]]":
        """Start a process that compiles constraints for a serialized vocabulary. Return the process and the engine's
        end of the connection to it.

        See ``compiling_process.main``. Raises Internal if the process does not start.
        """
        ours, theirs = multiprocessing.Pipe()
        with theirs, _closed_unless_done(ours):
            process = self._fork(Compile(self._config.compile_memory), theirs.fileno(), tokenizer)
        return process, ours

    def follower(self, tokenizer: bytes, settings: Settings) -> tuple[Forked, socket.socket]:
        """Start a mask process. Return the process and the engine's end of the channel to it.

        See ``following_process.main``. Raises Internal if the process does not start.
        """
        ours, theirs = packet_pair()
        with theirs, _closed_unless_done(ours):
            process = self._fork(Follow(settings), theirs.fileno(), tokenizer)
        return process, ours

    def close(self) -> None:
        """End all child processes, so that none can be started again. Idempotent."""
        with self._lock:
            self._closed = True
        self.stop()

    def stop(self) -> None:
        """End all child processes. If a child process is needed later, it is started again."""
        with self._lock:
            process, channel = self._process, self._channel
        if process is not None:
            process.kill()
            process.wait()
        if channel is not None:
            channel.close()

    def _start(self) -> socket.socket:
        """Return the channel to a running fork server. Raises Unavailable if this object was closed."""
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
            raise self._not_started("compiles constraints" if isinstance(fork, Compile) else "computes grammar masks")
        return Forked(int(data), files[0], ending)

    def _not_started(self, does: str) -> Internal | Unavailable:
        with self._lock:
            if self._closed or self._process is None:
                return Unavailable("the engine is stopping", field=FIELD)
            process = self._process
        process.kill()
        return Internal(f"the process that {does} did not start (exit code {process.wait()})", field=FIELD)


@contextlib.contextmanager
def _closed_unless_done(end: "Connection[Any, Any] | socket.socket") -> Iterator[None]:
    try:
        yield
    except BaseException:
        end.close()
        raise
