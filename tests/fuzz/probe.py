"""Service with a monitor of its event loop: ``python -m tests.fuzz.probe penstock_frontend --flags``.

Once per second it writes a line of JSON to the file that ``FUZZ_PROBE`` names, with ``{pid}`` in it: the number of
tasks, and the longest time that one callback blocked the loop. ``blocks`` lists long blocks with the stack of the
loop's thread.
"""

import asyncio
import contextlib
import gc
import json
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from penstock_common.rpc.loop import GrpcEventLoop
from tests.fuzz.media import names

FILE = "FUZZ_PROBE"
_BEAT = 0.002
_LONG = 0.02
"""CPU seconds of the loop's thread in one callback that count as blocking."""

_STARVED = 0.15
"""Seconds without a beat although a CPU was available, because another thread held the interpreter lock."""


class Probe:
    """Periodic beat in the event loop, and a thread that monitors the beat."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beat = 0.0
        self._cpu_clock = 0
        self._thread_id = 0
        self._longest = self._longest_wall = 0.0
        self._blocks: list[dict[str, Any]] = []

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Monitor a loop. Called in the thread that will run the loop. The first loop belongs to the service."""
        if self._loop is not None:
            return
        self._loop = loop
        self._thread_id = threading.get_ident()
        self._cpu_clock = time.pthread_getcpuclockid(self._thread_id)
        self._schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._mark(loop)
        threading.Thread(target=self._look, name="probe", daemon=True).start()

    def _mark(self, loop: asyncio.AbstractEventLoop) -> None:
        self._beat = time.monotonic()
        loop.call_later(_BEAT, self._mark, loop)

    def _look(self) -> None:
        written = time.monotonic()
        beat, cpu, delay = self._beat, time.clock_gettime(self._cpu_clock), self._run_delay()
        stack: list[str] = []
        while self._loop is not None and not self._loop.is_closed():
            time.sleep(_BEAT)
            now = time.monotonic()
            if self._beat == beat and now - beat > _LONG and not stack:
                stack = self._stack()
            elif self._beat != beat:
                used, waited = time.clock_gettime(self._cpu_clock) - cpu, self._beat - beat
                queued = self._run_delay() - delay
                if stack and (used > _LONG or waited - queued > _STARVED) and len(self._blocks) < 50:
                    times = {"cpu_ms": used, "wall_ms": waited, "queue_ms": queued}
                    self._blocks.append({name: round(1e3 * value) for name, value in times.items()} | {"stack": stack})
                if stack:
                    self._longest, self._longest_wall = (
                        max(self._longest, used),
                        max(self._longest_wall, waited - queued),
                    )
                beat, cpu, delay, stack = self._beat, time.clock_gettime(self._cpu_clock), self._run_delay(), []
            if now - written > 1.0:
                written = now
                self._write()

    def _run_delay(self) -> float:
        """Return the seconds for which the loop's thread was runnable while other programs used the CPUs."""
        return int(self._schedstat.read_text().split()[1]) / 1e9

    def _stack(self) -> list[str]:
        """Return stacks: the innermost calls of the other threads, and then the stack of the loop's thread.

        The other threads may hold the interpreter lock.
        """
        ours = (threading.get_ident(), self._thread_id)
        with _alone():
            frames = sys._current_frames()
            own = _calls(frames.get(self._thread_id), 6)
            tops = [call for thread, frame in frames.items() if thread not in ours for call in _calls(frame, 2)]
        return [f"{Path(filename).name}:{line} {name}" for filename, line, name in (*tops, *own)]

    def _write(self) -> None:
        assert self._loop is not None
        line = {
            "tasks": len(asyncio.all_tasks(self._loop)),
            "longest_ms": round(1e3 * self._longest),
            "longest_wall_ms": round(1e3 * self._longest_wall),
            "blocks": self._blocks,
        }
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._blocks = []


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hold the interpreter lock while the block runs.

    If another thread runs while its frames are read, the frames change, and reading them can crash the process. Garbage
    collection is off, because finalizers would let other threads run.
    """
    interval, collects = sys.getswitchinterval(), gc.isenabled()
    sys.setswitchinterval(60.0)
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        sys.setswitchinterval(interval)


def _calls(frame: FrameType | None, count: int) -> list[tuple[str, int, str]]:
    """Return file, line and function of the innermost ``count`` calls, innermost last.

    The function reads no files, because that would let other threads run.
    """
    calls: list[tuple[str, int, str]] = []
    while frame is not None and len(calls) < count:
        calls.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return calls[::-1]


def install(file: Path) -> None:
    """Monitor the first event loop of this process."""
    probe = Probe(file)
    kinds: tuple[type[asyncio.AbstractEventLoop], ...] = (
        asyncio.BaseEventLoop,
        GrpcEventLoop,
    )  # the base class of uvloop's policy
    for kind in kinds:
        kind.run_forever = _watched(kind.run_forever, probe)  # type: ignore[method-assign]


def _watched(
    run_forever: Callable[[asyncio.AbstractEventLoop], None], probe: Probe
) -> Callable[[asyncio.AbstractEventLoop], None]:
    def watched(self: asyncio.AbstractEventLoop) -> None:
        probe.watch(self)
        run_forever(self)

    return watched


if __name__ == "__main__":
    install(Path(os.environ[FILE].format(pid=os.getpid())))
    if names.VARIABLE in os.environ:
        names.install()
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
