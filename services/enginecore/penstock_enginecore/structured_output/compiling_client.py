"""The engine's side of the compiling process. The engine starts the process for the first constraint, and kills the
process if a constraint exceeds a limit.
"""

import contextlib
import subprocess
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from penstock_common.errors import Internal, InvalidArgument, Unavailable
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.config import StructuredOutputConfig
from penstock_enginecore.structured_output import compiling_process
from penstock_enginecore.structured_output.constraints.source import FIELD
from penstock_enginecore.structured_output.grammar_processes import START_TIMEOUT, Children, Forked

TOO_COSTLY = "GRAMMAR_TOO_COSTLY"
"""Error reason for a constraint whose mask takes too much CPU time for one token."""
LIMIT = "COMPILE_LIMIT"
"""Error reason for a constraint that took too much time or memory to compile."""
_ATTEMPTS = 3
"""Maximum number of processes to which a constraint is sent, one after the other, if each process ends before it
accepts the constraint.
"""
_JOIN_TIMEOUT = 10.0
_LOOK = 0.1
"""Time in seconds between two checks of the compiling process's CPU time."""
_STARVED = 6
"""Maximum wall-clock time of a compilation, as a multiple of its CPU time limit. On machines with busy cores, a process
gets only part of a core.
"""
_LAST_MOMENT = 0.2
"""Time in seconds that the engine waits for a process to exit before it kills the process. A process that exits within
this time has its own exit code.
"""


class CompileProcess:
    """Handle of the compiling process. Only one thread may call ``compile``, and this thread must outlive the process.
    ``close`` is thread-safe.
    """

    def __init__(self, config: StructuredOutputConfig, tokenizer: bytes, children: Children) -> None:
        self._config = config
        self._children = children
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._closed = False
        self._process: Forked | None = None
        self._connection: Connection[Any, Any] | None = None
        self._decoder = msgspec.msgpack.Decoder(compiling_process.Reply)

    @property
    def pid(self) -> int | None:
        """Process ID of the running process, or None."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        """Start a process and wait until it is ready. Raises Internal if the process does not start, and Unavailable if
        this object was closed.
        """
        self._started()

    def compile(self, constraint: StructuredOutput) -> str:
        """Return the compiled, serialized grammar.

        Raises:
            InvalidArgument: The constraint cannot be compiled within the limits.
            Unavailable: This object was closed.
            Internal: The process failed for another reason.
        """
        kind, _ = constraint.constraint
        field = f"{FIELD}.{kind}"
        job = compiling_process.Job(constraint, self._config.max_constraint_bytes, self._config.token_budget)
        connection = self._handed_over(msgspec.msgpack.encode(job))
        try:
            reply = None if connection is None else self._compiled(connection, self._config.compile_timeout)
        except (EOFError, OSError):
            code = self._stop()
            self._raise_if_closed()
            # When xgrammar runs out of memory or stack, it cannot report the error and aborts the process.
            raise self._over(
                field, f"ended the process that compiles constraints (exit code {code});", "memory"
            ) from None
        if reply is None:
            self._stop()
            self._raise_if_closed()
            raise self._over(field, "takes too long to compile;", "timeout")
        if reply.kind == "memory":
            self._stop()
            raise self._over(field, "takes too much memory to compile;", "memory")
        if reply.kind == "costly":
            raise InvalidArgument(over_budget(field, self._config.token_budget), field=field, reason=TOO_COSTLY)
        if reply.kind == "refused":
            raise InvalidArgument(reply.text, field=field)
        return reply.text

    def close(self) -> None:
        """Kill the process. A pending compilation fails with Unavailable. Idempotent."""
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            process.kill()
            process.wait(_JOIN_TIMEOUT)

    def _over(self, field: str, what: str, limit: str) -> InvalidArgument:
        value = self._config.compile_timeout if limit == "timeout" else self._config.compile_memory
        unit = "seconds" if limit == "timeout" else "bytes"
        return InvalidArgument(
            f"{field} {what} the limit is {value} {unit} (structured_output.compile_{limit})", field=field, reason=LIMIT
        )

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise Unavailable("the engine is stopping", field=FIELD)

    def _started(self) -> "Connection[Any, Any]":
        """Return the connection to a ready compiling process. Start the process if necessary."""
        if self._process is not None and self._connection is not None and self._process.poll() is None:
            return self._connection
        self._stop()
        with self._lock:
            self._raise_if_closed()
        process, ours = self._children.compiler(self._tokenizer)
        with self._lock:
            self._process, self._connection = process, ours
            closed = self._closed
        if closed:
            process.kill()
        try:
            ready = self._receive(ours, START_TIMEOUT)
        except (EOFError, OSError):
            ready = None
        if ready is None or ready.kind != "ready":
            code = self._stop()
            self._raise_if_closed()
            raise Internal(f"the process that compiles constraints did not start (exit code {code})", field=FIELD)
        return ours

    def _handed_over(self, job: bytes) -> "Connection[Any, Any] | None":
        """Return the connection to a process that has accepted ``job``, or None if the process does not confirm the job
        in time.

        If the process was killed while it was idle, the engine first notices this when it sends a job. Raises Internal
        if several processes end before they accept ``job``.
        """
        for _ in range(_ATTEMPTS):
            connection = self._started()
            try:
                connection.send_bytes(job)
                taken = self._receive(connection, _STARVED * self._config.compile_timeout)
                return None if taken is None else connection
            except (EOFError, OSError):
                code = self._stop()
                self._raise_if_closed()
        raise Internal(
            f"the process that compiles constraints ended before it accepted the constraint (exit code {code})",
            field=FIELD,
        )

    def _compiled(self, connection: "Connection[Any, Any]", limit: float) -> compiling_process.Reply | None:
        """Return the reply of the process. Return None if the process used ``limit`` seconds of CPU time without a
        reply, or ``_STARVED`` times as much wall-clock time.
        """
        process, until = self._process, time.monotonic() + _STARVED * limit
        before = process.cpu_seconds() if process is not None else 0.0
        while (left := until - time.monotonic()) > 0:
            if connection.poll(min(left, _LOOK)):
                return self._receive(connection, left)
            if process is None or process.cpu_seconds() - before >= limit:
                return None
        return None

    def _receive(self, connection: "Connection[Any, Any]", timeout: float) -> compiling_process.Reply | None:
        """Return the next reply, or None after ``timeout`` seconds. Raises EOFError if the process has ended."""
        return self._decoder.decode(connection.recv_bytes()) if connection.poll(timeout) else None

    def _stop(self) -> int | None:
        """Kill the process if it is running, and return its exit code. If the process had already ended, the exit code
        is the one with which it ended.
        """
        process, connection = self._process, self._connection
        if process is None:
            return None
        if connection is not None:
            connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_MOMENT)
        process.kill()
        code = process.wait(_JOIN_TIMEOUT)
        self._process = self._connection = None
        return code


def over_budget(field: str, budget: float) -> str:
    """Return the error text for a constraint that uses more than ``budget`` seconds of CPU time for one token."""
    return (
        f"{field} takes more than {1000 * budget:g} ms of CPU time for one token (structured_output.token_budget). "
        "Repeat only items that cannot be empty, and make sure that each text matches in only one way"
    )
