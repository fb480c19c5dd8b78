"""The engine's side of the compiling process: started when needed, killed when a constraint takes too much."""

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

# The child process that compiles: started when needed, kept warm, killed when a constraint takes too much.

TOO_COSTLY = "GRAMMAR_TOO_COSTLY"
"""Reason of an error for a constraint whose tokens cost too much to follow."""
LIMIT = "COMPILE_LIMIT"
"""Reason of an InvalidArgument for a constraint that took too much time or memory."""
_ATTEMPTS = 3
"""Processes that are handed a constraint, where each ends before it takes it."""
_JOIN_TIMEOUT = 10.0
_LOOK = 0.1
"""Seconds between two looks at what a process has computed."""
_STARVED = 6
"""Times its limit that a constraint may take by the clock, where other processes have the cores."""
_LAST_MOMENT = 0.2
"""Seconds that a process has to end by itself, which gives it an exit code of its own."""


class CompileProcess:
    """``compile`` belongs to one thread, which must outlive the process; ``close`` may be called from any."""

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
        """The process that is running, if any."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        """Have a process that is ready. Raises Internal when it cannot be had, Unavailable when closed meanwhile."""
        self._started()

    def compile(self, constraint: StructuredOutput) -> str:
        """The compiled grammar, serialized. Raises InvalidArgument for a constraint that cannot be compiled within the
        limits, Unavailable when closed meanwhile, Internal when the process fails otherwise.
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
            # The library ends its process where it cannot report an error: out of memory or of stack.
            raise self._over(field, f"ended the compiling process (exit code {code}); it may use", "memory") from None
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
        """Kill the process. Idempotent; what is being compiled fails as Unavailable."""
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
        """The connection to a process that is ready."""
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
        """The connection to a process that has taken ``job``; None when it does not say so in time. One that was killed while it
        had nothing to do is seen to be gone only now. Raises Internal when several end before they take it.
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
            f"the process that compiles constraints ended before it took one (exit code {code})", field=FIELD
        )

    def _compiled(self, connection: "Connection[Any, Any]", limit: float) -> compiling_process.Reply | None:
        """The reply; None once the process has computed for ``limit`` seconds, or waited for a core for many times that."""
        process, until = self._process, time.monotonic() + _STARVED * limit
        before = process.cpu_seconds() if process is not None else 0.0
        while (left := until - time.monotonic()) > 0:
            if connection.poll(min(left, _LOOK)):
                return self._receive(connection, left)
            if process is None or process.cpu_seconds() - before >= limit:
                return None
        return None

    def _receive(self, connection: "Connection[Any, Any]", timeout: float) -> compiling_process.Reply | None:
        """The next reply; None after ``timeout`` seconds. Raises EOFError when the process has ended."""
        return self._decoder.decode(connection.recv_bytes()) if connection.poll(timeout) else None

    def _stop(self) -> int | None:
        """Kill the process, if there is one. Returns its exit code; if it had ended by itself, its own."""
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
    """Why a constraint ends its request that costs more than ``budget`` seconds of CPU time for one token."""
    return (
        f"{field} takes more than {1000 * budget:g} ms of processor time for one token (structured_output.token_budget). "
        "Repeat only what cannot be empty, and let each text be read in one way only"
    )
