"""Services as separate processes: start, kill, restart on the same port, and stop like Kubernetes."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock_common.addresses import with_port
from penstock_common.rpc.channel import make_channel
from tests.fakes.network.ports import free_port
from tests.fakes.patience import PATIENCE
from tests.fakes.warm_python import Process, WarmPython

START_TIMEOUT = PATIENCE
KEPT: dict[str, Any] = {"server__max_connection_age": 0, "http__max_connection_age": 0}
"""Flags of a frontend whose clients keep their connections: it ends once no call is running, even if clients are
connected.
"""


def children() -> set[int]:
    """Return the ids of this process's children that have not ended."""
    found: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has just ended
            found.update(map(int, (thread / "children").read_text().split()))
    return found


class Service:
    """Service ``python -m module`` with flags, on a loopback port that stays the same after restarts."""

    warm: ClassVar[WarmPython | None] = None
    """Forks the processes, if it is set and ``enter`` is empty."""

    def __init__(
        self, module: str, *words: str, host: str = "127.0.0.1", metrics_flag: str = "", **flags: object
    ) -> None:
        """Create a service.

        Args:
            words: Words before the flags.
            flags: Config keys, with two underscores for each dot.
            metrics_flag: Flag for the address of ``/metrics``. It gets a free port, ``metrics_port``.
            host: Address of the loopback interface.
            config: Config file, which also sets the log level. Without one, only warnings are logged.
        """
        self.host = host
        self.module = module
        self.port = free_port()
        self.metrics_port = 0
        named = {key.replace("__", ".").replace("_", "-"): value for key, value in flags.items()}
        named |= {"server.host": host, "server.port": self.port}
        if "config" not in named:
            named["log.level"] = "warning"
        if metrics_flag:
            self.metrics_port = named[metrics_flag] = free_port()
        self._arguments = [*words, *(f"--{key}={value}" for key, value in named.items())]
        self.environment: dict[str, str] = {}
        """Environment variables in addition to the test's own, for the next start."""
        self.enter: tuple[str, ...] = ()
        """Words before the command, for the next start."""
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "log"
        self._process: asyncio.subprocess.Process | Process | None = None

    def add_flag(self, key: str, value: object) -> None:
        """Add a flag for the next start."""
        self._arguments.append(f"--{key}={value}")

    def run_by(self, module: str, *words: object) -> None:
        """Let later starts run ``module`` with the arguments ``words``, the name of this service's module, and
        the flags.
        """
        self._arguments = [*map(str, words), self.module, *self._arguments]
        self.module = module

    @property
    def address(self) -> str:
        """Address (host:port) of the gRPC server."""
        return with_port(self.host, self.port)

    @property
    def pid(self) -> int:
        """Id of the running process."""
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process is not None and self._process.returncode is None

    def log(self) -> str:
        """Return all output of this service's processes."""
        return self._log.read_text(errors="backslashreplace") if self._log.exists() else ""

    async def start(self) -> "Service":
        """Start the process and return immediately."""
        environment = os.environ | self.environment
        with self._log.open("ab") as output:
            if self.warm is not None and not self.enter:
                log = output.fileno()
                self._process = self.warm.start(self.module, self._arguments, {1: log, 2: log}, environment)
                return self
            self._process = await asyncio.create_subprocess_exec(
                *self.enter,
                sys.executable,
                "-m",
                self.module,
                *self._arguments,
                stdout=output,
                stderr=output,
                env=environment,
            )
        return self

    async def serving(self) -> "Service":
        """Wait until the service accepts requests. Raises RuntimeError with the log if the service ends instead."""
        async with asyncio.timeout(START_TIMEOUT), make_channel(self.address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)  # its published types lack the methods
            while True:
                if not self.alive:
                    raise RuntimeError(f"{self.module} ended:\n{self.log()}")
                with contextlib.suppress(grpc.aio.AioRpcError):
                    answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=2)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return self
                await asyncio.sleep(0.05)

    async def restart(self) -> "Service":
        """Restart a process that has ended, and wait as ``serving`` does."""
        return await (await self.start()).serving()

    def remove_log(self) -> None:
        """Discard the output of the processes."""
        self._folder.cleanup()

    async def ended(self) -> int:
        """Wait until the process has ended by itself. Returns the exit code."""
        assert self._process is not None
        if isinstance(self._process, Process):
            return await asyncio.to_thread(self._process.wait)
        return await self._process.wait()

    async def kill(self) -> None:
        """Send SIGKILL, and wait until the process has ended."""
        assert self._process is not None
        self._process.kill()
        await self.ended()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the running process and return immediately."""
        assert self._process is not None
        self._process.send_signal(number)

    async def stop(self) -> int:
        """Send SIGTERM, and wait until the process has ended. Returns the exit code. Idempotent."""
        assert self._process is not None
        if self.alive:
            self._process.send_signal(signal.SIGTERM)
        return await self.ended()

    async def __aenter__(self) -> "Service":
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        self.remove_log()
