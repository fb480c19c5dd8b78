"""Process that has imported the modules of phases and forks a process for each: ``python -m tests.device.nursery
OPTIONS``.

Importing torch and transformers takes longer than most rows, and a fork need not repeat it. This process uses no device
itself, because CUDA does not survive a fork. It reads requests from stdin and writes answers to its original stdout, a
JSON object per line. Prints of this process and of imported modules go to a file. When stdin ends, it kills its
children and ends.
"""

import faulthandler
import json
import os
import select
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.device.phases import Phase, Settings
from tests.device.records import RecordFile
from tests.device.rows import RowRunner


class Nursery:
    """Forks processes for phases.

    ``options`` has ``phases`` (name, stages), ``settings``, ``records`` (path), ``faults``.
    """

    def __init__(self, options: dict[str, Any], answers: int) -> None:
        self._phases = {each["name"]: Phase(**each) for each in options["phases"]}
        self._settings = Settings(**options["settings"])
        self._records = RecordFile(Path(options["records"]))
        self._faults = options["faults"]
        self._answers = answers
        self._running: dict[int, int] = {}

    def tell_rows(self) -> None:
        """Import every phase, and write its stages' rows or its import error as an answer."""
        for phase in self._phases.values():
            try:
                stages = phase.load(self._settings)
                self._answer(
                    rows=phase.name, stages=[[stage.name, [row.name for row in stage.rows]] for stage in stages]
                )
            except BaseException as e:
                self._answer(
                    rows=phase.name, error=f"{type(e).__name__}: {e}"[:1000], traceback=traceback.format_exc()[-6000:]
                )
        self._answer(ready=True)

    def serve(self) -> None:
        """Answer requests until stdin ends."""
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(woken, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        pending = b""
        while True:
            ready, _, _ = select.select([0, woken], [], [])
            if woken in ready:
                with suppress(BlockingIOError):
                    os.read(woken, 4096)
                self._reap()
            if 0 in ready:
                data = os.read(0, 65536)
                if not data:
                    break
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._fork(json.loads(line))
        for pid in self._running:
            _kill_group(pid)

    def _fork(self, request: dict[str, Any]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _become_child(request["log"], self._answers)
            status = 70
            try:
                status = self._run(request)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)  # Skip the cleanup of engine resources.
        self._running[pid] = request["task"]
        self._answer(task=request["task"], pid=pid)

    def _run(self, request: dict[str, Any]) -> int:
        settings = Settings(**request["settings"])
        runner = RowRunner(
            request["phase"],
            request["task"],
            self._records,
            Path(request["log"]),
            until=request["until"],
            patience=request["patience"],
            limit=request["limit"],
            faults=self._faults,
        )
        return runner.run(self._phases[request["phase"]].load(settings), request["rows"])

    def _reap(self) -> None:
        while self._running:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            _kill_group(ended.si_pid)  # Kill its remaining services before the id can be reused.
            _, status = os.waitpid(ended.si_pid, 0)
            task = self._running.pop(ended.si_pid, None)
            if task is not None:
                self._answer(task=task, ended=os.waitstatus_to_exitcode(status))

    def _answer(self, **values: Any) -> None:
        os.write(self._answers, f"{json.dumps(values)}\n".encode())


def _become_child(log: str, answers: int) -> None:
    """Start a process group with all output in ``log``; SIGUSR1 writes every thread's stack there."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.close(answers)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def main() -> None:
    """Run the nursery with the options in ``argv[1]``."""
    options = json.loads(sys.argv[1])
    answers = os.dup(1)
    output = os.open(options["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    nursery = Nursery(options, answers)
    nursery.tell_rows()
    nursery.serve()


if __name__ == "__main__":
    main()
