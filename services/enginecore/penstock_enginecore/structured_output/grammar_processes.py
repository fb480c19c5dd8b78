"""The processes that compile and follow grammars beside the engine: their start, messages and limits.

Importing the library takes seconds: one process does it early, and the others are its forks (see ``fork_server``). Imports
nothing that takes long itself, so that the process can be started before the engine imports what it needs.
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

# In such a process: how it behaves towards the machine that it shares with the engine.

NICENESS = 10
"""Of a child: it takes no core that the engine's steps could have."""
_OUT_OF_MEMORY = ("bad_alloc", "std::length_error", "cannot allocate")


def detach(niceness: int) -> None:
    """Die with the process that started this one, leave Ctrl-C to the engine, and keep its terminal clean."""
    os.nice(niceness)
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def limit_memory(headroom: int) -> None:
    """Let this process's address space grow by ``headroom`` bytes and no more."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + headroom
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def out_of_memory(error: Exception) -> bool:
    """Whether the library, or Python, could not allocate."""
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY)


# One message per packet of a Unix socket that keeps packets whole, so that a process killed in the middle of one leaves none
# behind in part. What may be large travels as an open file beside it: a compiled grammar, serialized, and the tokens to begin
# with. Messages of an earlier ``generation`` were for, or from, a process that is gone.

MAX_PACKET = 64 * 1024
"""Bytes of a packet; those to the engine hold at most one mask more."""


class Settings(msgspec.Struct, frozen=True):
    """``token_budget``, ``begin_budget``: seconds of CPU time for one token, and for all tokens a request begins with.
    ``patience``: seconds of CPU time above which the next token counts as slow. ``memory``: bytes above what the process needs
    itself. ``kept``: compiled grammars that stay when nobody follows them. ``forced``: look for text that must come.
    """

    token_budget: float
    begin_budget: float
    patience: float
    memory: int
    kept: int
    forced: bool = False


class Compile(msgspec.Struct, frozen=True, tag="compile"):
    """Become a process that compiles. ``memory``: bytes above what it needs itself."""

    memory: int


class Follow(msgspec.Struct, frozen=True, tag="follow"):
    """Become the process whose forks follow."""

    settings: Settings


Fork = Compile | Follow


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Follow grammar ``grammar`` as ``number``. Its files: the tokens to begin with as int32 and, unless the process should
    have it, the compiled grammar.
    """

    generation: int
    number: int
    grammar: int


class Advance(msgspec.Struct, frozen=True, tag="advance"):
    """Take in one token per pair (number, token), and forget the numbers in ``ended``."""

    generation: int
    tokens: list[tuple[int, int]]
    ended: list[int]


class Draft(msgspec.Struct, frozen=True, tag="draft"):
    """Compute the masks behind drafts, as (number, tokens taken before, turn, drafts), and be where it was before. ``turn``
    tells apart the drafts of a number: a step that failed has others when it is made again, behind the same tokens.
    """

    generation: int
    drafts: list[tuple[int, int, int, list[int]]]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """A process took up its work. ``suspects``: numbers that the one before was working on when it ended, ``costly`` if it
    was ended because of what the first of them took.
    """

    generation: int
    suspects: list[int]
    costly: bool


class Result(msgspec.Struct, frozen=True, array_like=True):
    """What became of a number's tokens, of which it has ``taken`` so many in all. ``cost``: seconds of CPU time of the last one.
    ``forced``: tokens that must come next. ``drafted``: there are ``count`` masks, behind one draft of ``turn``, two, and so on.
    ``text``: what failed. ``unknown``: the process does not have the grammar to begin with.
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
    """``rows``: the masks of the results of kind mask and drafted, one behind the other."""

    generation: int
    results: list[Result]
    rows: bytes


ToFollower = Begin | Advance | Draft
ToEngine = Ready | Masks
encode = msgspec.msgpack.Encoder().encode


def memory_file(name: str, content: bytes) -> int:
    """The descriptor of a file in memory."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    return descriptor


def read_file(descriptor: int) -> bytes:
    """All of a file that others may read at the same time. Closes the descriptor."""
    try:
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a channel."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


# In the engine: starts the processes.

FORK_SERVER = "penstock_enginecore.structured_output.fork_server"
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


class Children:
    """``compiler`` and ``follower`` belong to ``thread``, which outlives all children: they die with the thread that started
    them.
    """

    def __init__(self, config: StructuredOutputConfig, module: str = FORK_SERVER) -> None:
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

    def compiler(self, tokenizer: bytes) -> "tuple[Forked, Connection[Any, Any]]":
        """A process that compiles for this vocabulary, serialized, and the engine's end of what is between them: see
        ``compiling_process.main``. Raises Internal.
        """
        ours, theirs = multiprocessing.Pipe()
        with theirs, _closed_unless_done(ours):
            process = self._fork(Compile(self._config.compile_memory), theirs.fileno(), tokenizer)
        return process, ours

    def follower(self, tokenizer: bytes, settings: Settings) -> tuple[Forked, socket.socket]:
        """The same of one that follows: see ``following_process.main``. Raises Internal when there is none."""
        ours, theirs = packet_pair()
        with theirs, _closed_unless_done(ours):
            process = self._fork(Follow(settings), theirs.fileno(), tokenizer)
        return process, ours

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
