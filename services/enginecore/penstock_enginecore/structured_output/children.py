"""Starts the processes beside the engine; the first of them early, because importing the library takes them seconds.

Imports nothing that takes long itself, so that they can be started before the engine imports what it needs.
"""

import multiprocessing
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from penstock_enginecore.config import StructuredOutputConfig
from penstock_enginecore.structured_output.child import start_python
from penstock_enginecore.structured_output.messages import packet_pair

COMPILER = "penstock_enginecore.structured_output.compiler"
FOLLOWER = "penstock_enginecore.structured_output.following"


class Compiler(NamedTuple):
    """A process that compiles, and the engine's end of what is between them."""

    process: "subprocess.Popen[bytes]"
    channel: "Connection[Any, Any]"


class Follower(NamedTuple):
    """The same of one that follows."""

    process: "subprocess.Popen[bytes]"
    channel: socket.socket


class Children:
    """``compiler`` and ``follower`` belong to ``thread``, which outlives all children: they die with the thread that started
    them.
    """

    def __init__(self, config: StructuredOutputConfig, modules: tuple[str, str] = (COMPILER, FOLLOWER)) -> None:
        self._config = config
        self._compiler_module, self._follower_module = modules
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-grammar")
        self._lock = threading.Lock()
        self._closed = False
        self._early_compiler: Compiler | None = None
        self._early_follower: Follower | None = None

    def start_early(self) -> None:
        """Start one of each, for whoever asks first. Returns at once."""
        self.thread.submit(self._start_early)

    def _start_early(self) -> None:
        compiler, follower = self._compiler(), self._follower()
        with self._lock:
            if not self._closed:
                self._early_compiler, self._early_follower = compiler, follower
                return
        _end(compiler, follower)

    def compiler(self) -> Compiler:
        """A process that wants the vocabulary, and then compiles: see ``compiler.main``."""
        with self._lock:
            early, self._early_compiler = self._early_compiler, None
        return early or self._compiler()

    def follower(self) -> Follower:
        """A process that wants its settings and the vocabulary, and then follows: see ``following``."""
        with self._lock:
            early, self._early_follower = self._early_follower, None
        return early or self._follower()

    def close(self) -> None:
        """End those that nobody asked for. Idempotent."""
        with self._lock:
            self._closed = True
            left = (self._early_compiler, self._early_follower)
            self._early_compiler = self._early_follower = None
        _end(*left)

    def _compiler(self) -> Compiler:
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            arguments = [str(theirs.fileno()), str(self._config.compile_memory)]
            return Compiler(start_python(self._compiler_module, arguments, [theirs.fileno()]), ours)

    def _follower(self) -> Follower:
        ours, theirs = packet_pair()
        with theirs:
            return Follower(start_python(self._follower_module, [str(theirs.fileno())], [theirs.fileno()]), ours)


def _end(*children: Compiler | Follower | None) -> None:
    for child in children:
        if child is not None:
            child.channel.close()
            child.process.kill()
            child.process.wait()
