"""Runs a set of services: starts all, waits until all are ready, starts again those that die, stops them in order."""

import asyncio
import contextlib
import itertools
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock_common.config.settings import ENV_PREFIX
from penstock_common.errors import PenstockError
from penstock_local.rpc.connect import VARIABLES
from penstock_local.rpc.health import wait_until_serving
from penstock_local.serving.process import ProcessSpec, ServiceProcess, describe_exit
from penstock_local.settings import of_environment
from penstock_local.terminal.console import fail, say

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
MAX_DEATHS = 3
"""Deaths of one service within ``DEATHS_WINDOW`` seconds after which it is not started again."""
DEATHS_WINDOW = 60.0


class ServiceDiedError(PenstockError):
    """A service ended on its own. The message has its name, how it ended and the end of its log."""

    def __init__(self, process: ServiceProcess, exit_code: int) -> None:
        log = "".join(f"\n  {line}" for line in process.tail) or " none"
        self.what = f"{process.spec.name} {describe_exit(exit_code)}"
        super().__init__(f"{self.what}. Its last lines:{log}")


class StopRequest:
    """What the user wants: the first SIGINT, SIGTERM or SIGHUP asks for a clean stop, a second Ctrl-C for an immediate one."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.kill = asyncio.Event()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals of this process."""
        loop = asyncio.get_running_loop()
        signals = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
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
    """The services of one command, from start to end."""

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
        """The services that are to run, in the order in which they were started."""
        return [process.spec.name for process in self._processes if process.spec.name not in self._retired]

    async def add(self, spec: ProcessSpec) -> None:
        """Start one more service, and keep it running as the others. Its name is new, or that of one that was retired."""
        self._retired.discard(spec.name)
        self._processes = [process for process in self._processes if process.spec.name != spec.name]
        process = ServiceProcess(spec, on_line=self._on_line)
        self._processes.append(process)
        await process.start(self._folder, self._environ)
        self._added.set()

    async def retire(self, name: str) -> None:
        """Stop a service for good, and wait until it has ended."""
        self._retired.add(name)
        await asyncio.gather(*(process.stop() for process in self._processes if process.spec.name == name))

    async def start(self, folder: Path) -> None:
        """Start every service at once; their config files go into ``folder``.

        Settings in this environment are for a single service and would be read by all, so they are left out.
        """
        environ = {key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX)}
        if ignored := sorted(os.environ.keys() - environ.keys() - VARIABLES):
            for name in ignored:
                setting = of_environment(name)
                instead = f"use --set {setting}=VALUE" if setting else "it is no setting that --set takes"
                say(f"ignoring {name} of the environment, which all services would read: {instead}")
        environ["PYTHONUNBUFFERED"] = "1"
        self._folder, self._environ = folder, environ
        for process in self._processes:
            await process.start(folder, environ)

    async def wait_ready(self) -> None:
        """Return when every service reports SERVING. One that dies from then on is started again."""
        specs = [process.spec for process in self._processes]
        await asyncio.gather(*(wait_until_serving(spec.address, secured=spec.secured) for spec in specs))
        self._ready = True

    async def keep_running(self) -> ServiceDiedError:
        """Start services again that nobody asked to end. Returns when one has died before all were ready, or too often."""
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
        """None when it was retired."""
        deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        while True:
            died = ServiceDiedError(process, await process.wait())
            if process.spec.name in self._retired:
                return None
            deaths.append(time.monotonic())
            if not self._ready or (len(deaths) == MAX_DEATHS and deaths[-1] - deaths[0] < DEATHS_WINDOW):
                return died
            say(f"{died.what}; starting it again")
            await process.start(self._folder, self._environ)

    async def stop(self) -> list[str]:
        """Stop the services stage by stage. Returns a line for each that failed or had to be killed on the way."""
        unclean = []
        by_stage = sorted(self._running(), key=lambda process: process.spec.stop_stage)
        for _, group in itertools.groupby(by_stage, key=lambda process: process.spec.stop_stage):
            stage = list(group)
            for process, exit_code in zip(stage, await asyncio.gather(*(p.stop() for p in stage)), strict=True):
                # A service that gets SIGTERM before it has installed its handler ends by the signal.
                if exit_code not in (0, -signal.SIGTERM):
                    unclean.append(f"{process.spec.name} {describe_exit(exit_code)}")
        return unclean

    async def kill(self) -> None:
        """End every service at once."""
        running = self._running()
        for process in running:
            process.send(signal.SIGKILL)
        await asyncio.gather(*(process.wait() for process in running))

    def _running(self) -> list[ServiceProcess]:
        return [process for process in self._processes if process.running]


async def run(supervisor: Supervisor, request: StopRequest, work: Callable[[], Awaitable[None]]) -> int:
    """Start the services, run ``work`` when they are ready, stop them when it returns or ``request`` asks for it.

    Returns the exit code of the command. Raises ServiceDiedError, or what ``work`` raises, after everything is stopped.
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
    """The result of whichever ends first; the others are cancelled."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    first = next(task for task in reversed(tasks) if task in done)
    return first.result()
