"""Processes: what they are called in ``ps`` and ``top``, and how much they have computed."""

import os
from pathlib import Path

import setproctitle


def name_process(service: str, name: str = "") -> None:
    """Show the process as ``penstock-<service> <name>``: an engine among a dozen python processes is hard to find."""
    setproctitle.setproctitle(f"penstock-{service} {name}".rstrip())


def cpu_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process, in seconds; 0 once it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    fields = text.rpartition(")")[2].split()  # behind its name, which may hold spaces
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
