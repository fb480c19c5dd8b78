"""Observation of media decoder processes from outside: their ids, long decoding work, and kills."""

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

_NAMES = ("media-worker", "media.worker")
"""Names of a working process and of a starting process."""
_EVERY = 0.005
_LONG = 0.02
"""Minimum seconds of continuous computing that identify a large file."""


class _Work(NamedTuple):
    """Work of a process: ``pauses`` is the number of waits, and ``computed`` is the CPU time in seconds."""

    pauses: int
    computed: float


def decoders(parent: int) -> list[int]:
    """Return the process ids of a frontend's media workers."""
    return [pid for pid in _children(parent) if any(name in _read(pid, "cmdline") for name in _NAMES)]


def kill_all(parent: int) -> int:
    """Kill all media workers of a frontend. Returns the number of killed workers."""
    found = decoders(parent)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(found)


async def kill_at_work(parent: int, seconds: float, spared: Collection[int] = ()) -> int:
    """Kill the first media worker that decodes something long.

    Return its id, or 0 if there was none within the time.
    """
    until = time.monotonic() + seconds
    begun: dict[int, _Work] = {}
    while time.monotonic() < until:
        for pid in decoders(parent):
            now = _work(pid)
            if now is None or pid in spared:
                continue
            before = begun.get(pid)
            if before is None or before.pauses != now.pauses:
                begun[pid] = now
            elif now.computed - before.computed > _LONG:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    return pid
        await asyncio.sleep(_EVERY)
    return 0


def _children(parent: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{parent}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (thread / "children").read_text().split())
    return found


def _work(pid: int) -> _Work | None:
    """Return None for a starting worker: it may not write files once it decodes."""
    if not re.search(r"^Max file size +0 ", _read(pid, "limits"), re.MULTILINE):
        return None
    for line in _read(pid, "status").splitlines():
        if line.startswith("voluntary_ctxt_switches:") and (stat := _read(pid, "schedstat")):
            return _Work(int(line.split()[1]), int(stat.split()[0]) / 1e9)
    return None


def _read(pid: int, name: str) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/{name}").read_text()
    return ""
