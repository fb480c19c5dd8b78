"""Runs phases within a time budget. Each phase is a process that may fail, hang or die without affecting other rows."""

import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.device.nursery_process import NurseryProcess
from tests.device.phases import ALWAYS, LAST, Phase, Settings, in_order
from tests.device.records import FILE, RecordFile, RecordReader, Results, tail
from tests.device.rows import POISONED
from tests.device.task import Task, status_words

_POLL = 0.1
_START_SECONDS = 60.0
"""Seconds until a process begins its first row, and until the nursery has imported all modules, if idle."""
_LONGER = 2.0
"""Factor for the expected duration of a phase. After this time, the phase stops after its current row."""
_NURSERIES = 3


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a session.

    Attributes:
        out: Folder of the records.
        until: ``time.monotonic()`` at which the time budget ends.
        patience: Factor for all limits, because a CPU is slower.
        limit: Seconds for each row, instead of the row's own limit.
        only: Names of phases, or prefixes of row names; empty for all.
        faults: See ``faults.inject``.
        tell: Called with a line for each row that ends.
    """

    out: Path
    until: float = float("inf")
    patience: float = 1.0
    limit: float | None = None
    only: Sequence[str] = ()
    faults: dict[str, str] = field(default_factory=dict)
    tell: Callable[[dict[str, Any]], None] = lambda record: None


class Session:
    """One run of ``phases``, which replaces the records of an earlier run in the same folder."""

    def __init__(self, phases: Sequence[Phase], settings: Settings, options: Options) -> None:
        self._phases = in_order(phases)
        self._settings = settings
        self._options = options
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / FILE
        path.unlink(missing_ok=True)
        self._records, self._reader = RecordFile(path), RecordReader(path)
        self.results = Results()
        self._stages: dict[str, list[tuple[str, list[str]]]] = {}
        self._running: dict[int, Task] = {}
        self._count = 0
        self._deferred: list[tuple[Phase, list[str]]] = []
        self._nurseries = 0

    def note(self, **values: Any) -> None:
        """Record the description of this run."""
        self._records.write("session", "session", "session", **values)

    def run(self) -> Results:
        """Run rows until the time budget ends. The remaining rows are recorded as not run."""
        with tempfile.TemporaryDirectory(prefix="penstock-device-", ignore_cleanup_errors=True) as folder:
            self._folder = Path(folder)
            self._nursery = self._start_nursery()
            try:
                self._run_steps()
            finally:
                self._end()
        return self.results

    def _run_steps(self) -> None:
        for step in sorted({phase.step for phase in self._phases}):
            phases = [phase for phase in self._phases if phase.step == step and phase.name in self._stages]
            if step != LAST:
                self._run_tasks(
                    [each for phase in phases for each in self._tasks_of(phase)], len(phases) - 1 + self._settings.jobs
                )
                self._take_machine()
                continue
            for phase in phases:
                self._run_tasks(self._tasks_of(phase), self._settings.jobs)
        for phase, rows in self._deferred:
            self._run_tasks([(phase, rows, self._options.until)], 1)

    def _take_machine(self) -> None:
        """Record the GPU for later phases."""
        machine = self.results.get("machine", "machine")
        if machine is not None and machine.get("capability"):
            self._settings = replace(self._settings, capability=machine["capability"])

    def _tasks_of(self, phase: Phase) -> list[tuple[Phase, list[str], float]]:
        """Return the rows of each process of a phase, and the time after which no row begins.

        Without a device for the phase, there are no processes.
        """
        rows = [row for _, names in self._stages[phase.name] for row in names if self._is_wanted(phase.name, row)]
        if not rows:
            return []
        until = self._options.until
        if phase.isolated:
            return [(phase, [row], until) for row in rows]
        longest = _LONGER * phase.seconds * self._options.patience
        return [(phase, rows, min(until, time.monotonic() + longest))]

    def _is_wanted(self, phase: str, row: str) -> bool:
        only = self._options.only
        if self._phase(phase).step == ALWAYS:
            return True
        return not only or any(phase == name or row.startswith(name) for name in only)

    def _run_tasks(self, waiting: list[tuple[Phase, list[str], float]], width: int) -> None:
        """Run processes, at most ``width`` concurrently."""
        waiting = list(waiting)
        while waiting or self._running:
            while waiting and len(self._running) < max(1, width):
                phase, rows, until = waiting.pop(0)
                if self._can_run(phase):
                    self._start(phase, rows, until)
            for task, status in self._poll():
                if again := self._rows_left(task, status):
                    waiting.insert(0, (self._phase(task.phase), again, task.until))

    def _can_run(self, phase: Phase) -> bool:
        if time.monotonic() >= self._options.until or self._nursery.ended:
            return False
        machine = self.results.get("machine", "machine")
        return phase.host or self._settings.cpu or machine is None or bool(machine.get("capability"))

    def _start(self, phase: Phase, rows: list[str], until: float) -> None:
        self._count += 1
        task = Task(
            self._count,
            phase.name,
            rows,
            until=until,
            start_limit=_START_SECONDS * self._options.patience,
            log=self._folder / f"{self._count}.log",
        )
        self._running[task.number] = task
        self._nursery.request(
            task=task.number,
            phase=phase.name,
            rows=rows,
            until=until,
            patience=self._options.patience,
            limit=self._options.limit,
            settings=asdict(self._settings),
            log=str(task.log),
        )

    def _poll(self) -> list[tuple[Task, int]]:
        """Wait briefly for events of the processes. Returns the ended processes with their exit status."""
        ended = []
        for answer in self._nursery.answers(_POLL):
            task = self._running[answer["task"]]
            if "pid" in answer:
                task.pid = answer["pid"]
            else:
                ended.append((task, answer["ended"]))
        if self._nursery.ended and self._nurseries < _NURSERIES:
            for task in self._running.values():
                task.kill()
            ended = [(task, -signal.SIGKILL) for task in self._running.values()]
            self._nursery.close()
            self._nursery = self._start_nursery()
        self._read()
        now = time.monotonic()
        for task, _ in ended:
            del self._running[task.number]
        for task in self._running.values():
            task.check(now, self._options.until)
        return ended

    def _read(self) -> None:
        """Read new records."""
        for record in self._reader.new():
            self.results.add(record)
            if (task := self._running.get(record.get("task", 0))) is not None:
                task.follow(record)
            if record["kind"] in ("row", "error"):
                self._options.tell(record)

    def _rows_left(self, task: Task, status: int) -> list[str]:
        """Record how a process failed, and return the rows that a new process should run now."""
        if task.current is not None:
            why = task.killed or status_words(status)
            self._error(task, task.current, why, stderr=tail(task.log))
            if task.current in task.left:
                task.left.remove(task.current)
            for stage, rows in self._stages[task.phase]:
                if f"build {stage}" == task.current:
                    self._give_up(task, [row for row in rows if row in task.left], f"not built: {why}")
        if not task.left or time.monotonic() >= self._options.until:
            return []
        if status == 0 and time.monotonic() >= task.until:
            self._deferred.append((self._phase(task.phase), task.left))
            return []
        if len(task.left) == len(task.rows) and status != POISONED:
            self._give_up(
                task, list(task.left), f"its process ended before its first row: {task.killed or status_words(status)}"
            )
        return task.left

    def _give_up(self, task: Task, rows: list[str], why: str) -> None:
        said = tail(task.log)
        for row in rows:
            task.left.remove(row)
            self._error(task, row, why, stderr=said)
            said = ""  # put the output only into the first record

    def _error(self, task: Task, row: str, why: str, **values: Any) -> None:
        self._records.write("error", task.phase, row, task=task.number, error=why, **values)
        self._read()

    def _phase(self, name: str) -> Phase:
        return next(phase for phase in self._phases if phase.name == name)

    def _start_nursery(self) -> NurseryProcess:
        """Start a nursery, and wait until it has imported the phases and reported their rows."""
        self._nurseries += 1
        log = self._folder / f"nursery{self._nurseries}.log"
        nursery = NurseryProcess(
            {
                "phases": [asdict(phase) for phase in self._phases],
                "settings": asdict(self._settings),
                "records": str(self._options.out / FILE),
                "faults": self._options.faults,
                "log": str(log),
            }
        )
        ends = min(time.monotonic() + 4 * _START_SECONDS * self._options.patience, self._options.until)
        while True:
            for answer in nursery.answers(_POLL):
                if answer.get("ready"):
                    return nursery
                if "error" in answer:
                    values = {"error": answer["error"], "traceback": answer["traceback"]}
                    self._records.write("error", answer["rows"], "import", **values)
                else:
                    self._stages[answer["rows"]] = [(stage, rows) for stage, rows in answer["stages"]]
            self._read()
            if nursery.ended or time.monotonic() > ends:
                nursery.close()
                error = "the process that imports the phases ended or took too long"
                self._records.write("error", "session", "import", error=error, stderr=tail(log))
                self._read()
                nursery.ended = True
                return nursery

    def _end(self) -> None:
        """Kill the running processes, and record the rows that never began."""
        for task in self._running.values():
            task.kill()
        self._nursery.close()
        self._read()
        machine = self.results.get("machine", "machine")
        no_device = machine is not None and not machine.get("capability") and not self._settings.cpu
        reason = "there is no CUDA device" if no_device else "the budget was over"
        for phase, stages in self._stages.items():
            for row in (row for _, names in stages for row in names):
                key = phase, row
                if self._is_wanted(*key) and key not in self.results.found and key not in self.results.errors:
                    self._records.write("unrun", phase, row, reason=reason)
        self._read()
        self._records.close()
