"""Runs the rows of a phase in this process, and writes a record when each begins and ends."""

import gc
import json
import logging
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from tests.device.faults import inject
from tests.device.phases import Row, Stage, nothing
from tests.device.records import RecordFile, tail

POISONED = 75
"""Exit status after a CUDA error that persists: the remaining rows need a fresh process."""

_POISON = (
    *("illegal memory access", "device-side assert", "unspecified launch failure", "misaligned address"),
    *("illegal instruction", "illegal address", "invalid address space", "invalid program counter"),
    *("hardware stack error", "uncorrectable ECC", "launch timed out", "context is destroyed", "cudaErrorIllegal"),
    *("NVLink error", "Warp Illegal"),
)
_LOG_LINES = 20


class RowRunner:
    """Runs rows one after another.

    Args:
        phase: Name of the phase, for the records.
        task: Number of this process, for the records.
        records: Writer of the records.
        log: File for this process's stdout and stderr.
        until: ``time.monotonic()`` after which no row begins.
        patience: Factor of all limits.
        limit: Seconds for each row, instead of the row's own limit.
        faults: See ``faults.inject``.
    """

    def __init__(
        self,
        phase: str,
        task: int,
        records: RecordFile,
        log: Path,
        *,
        until: float,
        patience: float = 1.0,
        limit: float | None = None,
        faults: dict[str, str] | None = None,
    ) -> None:
        self._phase = phase
        self._task = task
        self._records = records
        self._log = log
        self._until = until
        self._patience = patience
        self._limit = limit
        self._faults = faults or {}
        self._warnings = _Warnings()
        self.built: Any = None
        logging.getLogger("penstock_enginecore").addHandler(self._warnings)

    def run(self, stages: Sequence[Stage], wanted: Sequence[str]) -> int:
        """Run the ``wanted`` rows of ``stages`` in order and return the exit status of this process.

        The process must end afterwards, because the objects of the last stage are not closed.
        """
        left = [(stage, rows) for stage in stages if (rows := [row for row in stage.rows if row.name in wanted])]
        for number, (stage, rows) in enumerate(left):
            if time.monotonic() >= self._until:
                return 0
            with_build = stage.build is not nothing
            opened = stage.build()
            if with_build:
                failed = self._measured(stage.build_name, stage.limit * self._patience, partial(_open, opened, self))
                if failed is not None:
                    self._skip(rows, failed.error)
                    if failed.poisoned:
                        return POISONED
                    continue
            for row in rows:
                if time.monotonic() >= self._until:
                    return 0
                failed = self._measured(row.name, self._limit or row.limit * self._patience, partial(self._call, row))
                if failed is not None and failed.poisoned:
                    return POISONED
            self.built = None
            if with_build and number + 1 < len(left):
                failed = self._measured(stage.close_name, stage.limit * self._patience, partial(_close, opened))
                if failed is not None and failed.poisoned:
                    return POISONED
        return 0

    def _call(self, row: Row) -> dict[str, Any]:
        return row.measure(self.built)

    def _skip(self, rows: Sequence[Row], why: str) -> None:
        for row in rows:
            self._write("error", row.name, error=f"not built: {why}")

    def _measured(self, name: str, limit: float, work: Callable[[], dict[str, Any]]) -> "_Failed | None":
        """Run ``work`` between the begin and end records of a row. Returns the error, if any."""
        begun = time.monotonic()
        self._write("begin", name, limit=limit, at=begun)
        try:
            inject(self._faults, self._phase, name)
            found = json.loads(json.dumps(work()))
        except BaseException as e:
            return self._failed(name, e, time.monotonic() - begun)
        seconds = round(time.monotonic() - begun, 3)
        self._write("row", name, found=found, seconds=seconds, **self._warnings.taken())
        return None

    def _write(self, kind: str, row: str, **values: Any) -> None:
        self._records.write(kind, self._phase, row, task=self._task, **values)

    def _failed(self, name: str, error: BaseException, seconds: float) -> "_Failed":
        said = "".join(traceback.format_exception_only(error)).strip()
        sys.stderr.flush()
        poisoned = any(words in said for words in _POISON)
        values = {
            "error": said[:1000],
            "traceback": "".join(traceback.format_exception(error))[-6000:],
            "stderr": tail(self._log),
            "seconds": round(seconds, 3),
            "poisoned": poisoned,
        }
        # Write the error before using the device again, because the device may hang.
        self._write("error", name, **values, **self._warnings.taken())
        traceback.clear_frames(error.__traceback__)  # the frames refer to tensors
        error.__traceback__ = None
        gc.collect()
        return _Failed(said[:300], poisoned or not _device_answers())


class _Failed:
    def __init__(self, error: str, poisoned: bool) -> None:
        self.error = error
        self.poisoned = poisoned


class _Warnings(logging.Handler):
    """Collects the engine's warnings, which explain why a faster method was not used."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage()[:500])

    def taken(self) -> dict[str, list[str]]:
        """Return the lines since the last call, under ``warnings``."""
        lines, self._lines = self._lines[:_LOG_LINES], []
        return {"warnings": lines} if lines else {}


def _open(opened: AbstractContextManager[Any], runner: RowRunner) -> dict[str, Any]:
    runner.built = opened.__enter__()
    told: dict[str, Any] = runner.built.told() if hasattr(runner.built, "told") else {}
    return told


def _close(opened: AbstractContextManager[Any]) -> dict[str, Any]:
    opened.__exit__(None, None, None)
    gc.collect()
    return {}


def _device_answers() -> bool:
    """Return whether the device still works after an error, if this process has used it. Frees the memory of the failed
    row.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        return bool(torch.ones(1, device="cuda").item() == 1)
    except RuntimeError:
        return False
