"""File of a run's records: one JSON object per line, appended by the parent process and by the processes of phases.

``kind`` is one of:

- ``session``: the run's settings;
- ``begin``: a row has begun;
- ``row``: a row has ended, with its values in ``found``;
- ``error``: a row has failed, with the error in ``error``;
- ``unrun``: a row never began, with the reason in ``reason``.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = "rows.jsonl"
TAIL_BYTES = 8192
"""Maximum size of a process's output in an error record."""


class RecordFile:
    """Appends records. Each line is one write, so that processes may share the file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, kind: str, phase: str, row: str, **values: Any) -> None:
        """Append a record. Raises TypeError for values that JSON cannot represent."""
        line = json.dumps({"kind": kind, "phase": phase, "row": row, **values})
        # Begin with a line break too, because a killed process may have written half a line.
        os.write(self._file, f"\n{line}\n".encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class RecordReader:
    """Reads the records that have been appended since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """Return complete records, in the order of the file."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [record for line in whole.splitlines() if (record := _parse(line)) is not None]


@dataclass(slots=True)
class Results:
    """Results of a run, by phase and row."""

    session: dict[str, Any] = field(default_factory=dict)
    found: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    errors: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    unrun: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, record: dict[str, Any]) -> None:
        """Add a record. If a row ran several times, its last record counts."""
        key = record["phase"], record["row"]
        if record["kind"] == "session":
            self.session |= record
        elif record["kind"] == "row":
            self.found[key] = record["found"]
            self.errors.pop(key, None)
        elif record["kind"] == "error":
            self.errors[key] = record
        elif record["kind"] == "unrun":
            self.unrun[key] = record["reason"]

    def get(self, phase: str, row: str) -> dict[str, Any] | None:
        """Return the values of a row, or None if the row was not measured."""
        return self.found.get((phase, row))

    def of(self, phase: str) -> dict[str, dict[str, Any]]:
        """Return the values of all measured rows of a phase, by row."""
        return {row: found for (name, row), found in self.found.items() if name == phase}


def read(path: Path) -> Results:
    """Return the results of a run so far."""
    results = Results()
    for record in RecordReader(path).new():
        results.add(record)
    return results


def tail(path: Path) -> str:
    """Return the end of a process's output."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace")


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return a record, or None for an empty or incomplete line."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and {"kind", "phase", "row"} <= record.keys() else None
