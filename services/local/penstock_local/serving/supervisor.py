"""Supervisor of the services: starts them as child processes, restarts those that die, and stops them in order."""

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from penstock_common.config.settings import ENV_PREFIX
from penstock_common.errors import PenstockError
from penstock_common.types.cluster import ClusterView
from penstock_common.types.data_parallel import engine_of
from penstock_local.console import fail, say
from penstock_local.rpc.connect import VARIABLES, cluster_view, wait_until_serving
from penstock_local.settings import of_environment

_TAIL_LINES = 12
_CHUNK_BYTES = 64 * 1024
_LONGEST_LINE = 16 * 1024


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a service to run as ``python -m module --config FILE``."""

    name: str
    """Name of the service within the command, shown in its log lines."""
    module: str
    config: dict[str, Any]
    """Content of FILE."""
    address: str
    """Address at which the service answers ``grpc.health.v1``, as host:port."""
    stop_stage: int
    """Stage of the shutdown. Services of a lower stage stop before services of a higher stage."""
    stop_timeout: float
    """Seconds after SIGTERM until the service is killed."""
    env: dict[str, str] = {}
    """Environment variables that the user's environment may override."""
    own_env: dict[str, str] = {}
    """Environment variables that override the user's environment."""
    plain_health: bool = False
    """Whether ``address`` never uses TLS, regardless of ``config``."""

    @property
    def secured(self) -> bool:
        """Whether the service uses TLS at ``address``."""
        return not self.plain_health and bool(self.config.get("server", {}).get("tls", {}).get("certificate"))


class ServiceProcess:
    """A service process in a separate session, so that Ctrl-C in the terminal reaches only the parent process."""

    def __init__(self, spec: ProcessSpec, *, on_line: Callable[[str, str], None]) -> None:
        """Create the process without starting it. ``on_line`` is called with the service's name and each log line."""
        self.spec = spec
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """Last lines of the service's log."""
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
        """True from the start of the process until it has ended and its log has been read completely."""
        return self._end is not None and not self._end.done()

    async def wait(self) -> int:
        """Wait until the process has ended and its log has been read. Returns the exit code."""
        if self._end is None:
            raise RuntimeError(f"{self.spec.name} was not started")
        return await asyncio.shield(self._end)

    def send(self, which: signal.Signals) -> None:
        """Send a signal to the service. Does nothing if the service has ended."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(which)

    async def stop(self) -> int:
        """Send SIGTERM, and SIGKILL if the service has not ended after ``stop_timeout``. Returns the exit code."""
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
        # Also kill the child processes of the service, because they would keep the log pipe and perhaps a port open.
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
    """Create a pipe. Returns its reading end, and the file descriptor of its writing end.

    With a pipe of asyncio, the wait for a process would also wait until all its children have closed the pipe.
    """
    reader = asyncio.StreamReader()
    read_end, write_end = os.pipe()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0))
    return reader, write_end


def _visible(line: bytes) -> str:
    """Return a line as a terminal shows it: the text after the last carriage return, with which progress bars
    overwrite.
    """
    return line.decode("utf-8", errors="replace").rstrip("\r").rsplit("\r", 1)[-1]


def describe_exit(exit_code: int) -> str:
    """Describe an exit code in words."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    which = signal.Signals(-exit_code).name
    return f"was killed by {which}" + (" (out of memory?)" if -exit_code == signal.SIGKILL else "")


EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
MAX_DEATHS = 3
"""Number of deaths of one service within ``DEATHS_WINDOW`` seconds after which it is not restarted."""
DEATHS_WINDOW = 60.0


class ServiceDiedError(PenstockError):
    """Error if a service ends although the command has not stopped it.

    The message has the service's name, exit code or signal, and last log lines.
    """

    def __init__(self, process: ServiceProcess, exit_code: int) -> None:
        log = "".join(f"\n  {line}" for line in process.tail) or " none"
        self.what = f"{process.spec.name} {describe_exit(exit_code)}"
        super().__init__(f"{self.what}. Its last lines:{log}")


class StopRequest:
    """State of the user's stop signals.

    The first SIGINT, SIGTERM or SIGHUP requests a clean stop. A second Ctrl-C requests to kill the services.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.kill = asyncio.Event()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the stop signals of this process inside a ``with`` block."""
        loop = asyncio.get_running_loop()
        signals = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup makes the process ignore SIGHUP
            signals.append(signal.SIGHUP)
        for which in signals:
            loop.add_signal_handler(which, self._on_signal, which)
        try:
            yield
        finally:
            for which in signals:
                loop.remove_signal_handler(which)

    def _on_signal(self, which: signal.Signals) -> None:
        if which is signal.SIGINT and self.stop.is_set():
            self.kill.set()
        self.stop.set()


class Supervisor:
    """Supervisor of the services of one command, from the start to the end of the command."""

    def __init__(self, specs: Sequence[ProcessSpec], *, on_line: Callable[[str, str], None]) -> None:
        self._on_line = on_line
        self._processes = [ServiceProcess(spec, on_line=on_line) for spec in specs]
        self._folder = Path()
        self._environ: dict[str, str] = {}
        self._ready = False
        self._retired: set[str] = set()
        self._added = asyncio.Event()

    @property
    def names(self) -> list[str]:
        """Names of the services that should run, in start order."""
        return [process.spec.name for process in self._processes if process.spec.name not in self._retired]

    async def add(self, spec: ProcessSpec) -> None:
        """Start one more service and keep it running. Its name must be new, or the name of a retired service."""
        self._retired.discard(spec.name)
        self._processes = [process for process in self._processes if process.spec.name != spec.name]
        process = ServiceProcess(spec, on_line=self._on_line)
        self._processes.append(process)
        await process.start(self._folder, self._environ)
        self._added.set()

    async def retire(self, name: str) -> None:
        """Stop a service permanently, and wait until it has ended."""
        self._retired.add(name)
        await asyncio.gather(*(process.stop() for process in self._processes if process.spec.name == name))

    async def start(self, folder: Path) -> None:
        """Start all services in parallel. Their config files are written to ``folder``.

        Environment variables that are settings are dropped. All services would read these variables, even if a variable
        is meant for one service.
        """
        environ = {key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX)}
        if ignored := sorted(os.environ.keys() - environ.keys() - VARIABLES):
            for name in ignored:
                setting = of_environment(name)
                instead = f"use --set {setting}=VALUE" if setting else "no setting has this name"
                say(f"ignoring the environment variable {name}, because all services would read it: {instead}")
        environ["PYTHONUNBUFFERED"] = "1"
        self._folder, self._environ = folder, environ
        for process in self._processes:
            await process.start(folder, environ)

    async def wait_ready(self) -> None:
        """Wait until every service reports SERVING. From then on, a service that dies is restarted."""
        specs = [process.spec for process in self._processes]
        await asyncio.gather(*(wait_until_serving(spec.address, secured=spec.secured) for spec in specs))
        self._ready = True

    async def keep_running(self) -> ServiceDiedError:
        """Restart services that die. Returns the error if a service dies before all are ready, or dies too often."""
        kept: dict[ServiceProcess, asyncio.Task[ServiceDiedError | None]] = {}
        try:
            while True:
                self._added.clear()
                for process in self._processes:
                    if process not in kept:
                        kept[process] = asyncio.create_task(self._keep(process))
                added = asyncio.create_task(self._added.wait())
                running = [task for task in kept.values() if not task.done()]
                await asyncio.wait({added, *running}, return_when=asyncio.FIRST_COMPLETED)
                added.cancel()
                for task in running:
                    if task.done() and (died := task.result()) is not None:
                        return died
        finally:
            for task in kept.values():
                task.cancel()
            await asyncio.gather(*kept.values(), return_exceptions=True)

    async def _keep(self, process: ServiceProcess) -> ServiceDiedError | None:
        """Keep one service running. Returns None when the service is retired."""
        deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        while True:
            died = ServiceDiedError(process, await process.wait())
            if process.spec.name in self._retired:
                return None
            deaths.append(time.monotonic())
            if not self._ready or (len(deaths) == MAX_DEATHS and deaths[-1] - deaths[0] < DEATHS_WINDOW):
                return died
            say(f"{died.what}; restarting it")
            await process.start(self._folder, self._environ)

    async def stop(self) -> list[str]:
        """Stop the services stage by stage. Returns a line of text for each service that failed or had to be killed."""
        unclean = []
        by_stage = sorted(self._running(), key=lambda process: process.spec.stop_stage)
        for _, group in itertools.groupby(by_stage, key=lambda process: process.spec.stop_stage):
            stage = list(group)
            for process, exit_code in zip(stage, await asyncio.gather(*(p.stop() for p in stage)), strict=True):
                # SIGTERM itself ends a service that has not installed its signal handler yet. That is no failure.
                if exit_code not in (0, -signal.SIGTERM):
                    unclean.append(f"{process.spec.name} {describe_exit(exit_code)}")
        return unclean

    async def kill(self) -> None:
        """Kill all services immediately."""
        running = self._running()
        for process in running:
            process.send(signal.SIGKILL)
        await asyncio.gather(*(process.wait() for process in running))

    def _running(self) -> list[ServiceProcess]:
        return [process for process in self._processes if process.running]


async def run(supervisor: Supervisor, request: StopRequest, work: Callable[[], Awaitable[None]]) -> int:
    """Start the services, run ``work`` when they are ready, and then stop them. ``request`` can stop the services
    earlier.

    Returns the exit code of the command. Raises ServiceDiedError, or the error of ``work``, after all services have
    stopped.
    """
    exit_code = 0
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        try:
            await supervisor.start(Path(folder))
            died = await first_of(_when_ready(supervisor, work), supervisor.keep_running(), request.stop.wait())
            if isinstance(died, ServiceDiedError):
                say(f"{died.what}; stopping the others")
                raise died
            if request.stop.is_set():
                say("stopping; Ctrl-C again kills the services at once")
        finally:
            exit_code = await _stop(supervisor, request)
    return exit_code


async def _when_ready(supervisor: Supervisor, work: Callable[[], Awaitable[None]]) -> None:
    await supervisor.wait_ready()
    await work()


async def _stop(supervisor: Supervisor, request: StopRequest) -> int:
    unclean = await first_of(supervisor.stop(), request.kill.wait())
    if request.kill.is_set():
        say("killing the services")
        await supervisor.kill()
        return EXIT_INTERRUPTED
    if isinstance(unclean, list) and unclean:
        fail(f"the stop was not clean: {', '.join(unclean)}")
        return EXIT_FAILED
    return 0


async def first_of(*coroutines: Coroutine[Any, Any, object]) -> object:
    """Return the result of the coroutine that ends first, and cancel the others."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    first = next(task for task in reversed(tasks) if task in done)
    return first.result()


# GroupRanks: keeps the number of engine processes equal to the target number of ranks of the data-parallel group.

_POLL_SECONDS = 0.25
_DEADLINE = 2.0


class GroupRanks:
    """Controller that starts ranks when the data-parallel group must grow, and stops ranks that have left the group.

    ``make_spec`` returns the process of the engine with a given number.
    """

    def __init__(self, supervisor: Supervisor, coordinator: str, make_spec: Callable[[int], ProcessSpec]) -> None:
        self._supervisor = supervisor
        self._coordinator = coordinator
        self._make_spec = make_spec

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            view = await cluster_view(self._coordinator, deadline=_DEADLINE)
            if view is not None and view.groups:
                await self._follow(view)
            await asyncio.sleep(_POLL_SECONDS)

    async def _follow(self, view: ClusterView) -> None:
        group = view.groups[0]
        members = {engine_of(rank)[0] for rank in group.view.group.members}
        names = [name for name in self._supervisor.names if name.startswith("engine-")]
        if len(names) < group.target_size:
            free = (number for number in range(len(names) + 1) if f"engine-{number}" not in names)
            spec = self._make_spec(next(free))
            say(f"the target size of the group is {group.target_size} ranks: starting {spec.name}")
            await self._supervisor.add(spec)
        elif len(members) == group.target_size < len(names):
            let_go = [name for name in names if name not in members]
            for name in let_go[: len(names) - group.target_size]:
                say(f"the group has {group.target_size} ranks: stopping {name}")
                await self._supervisor.retire(name)
