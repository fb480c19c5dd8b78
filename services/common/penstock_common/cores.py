"""How many cores this process may use."""

import math
import os
from pathlib import Path

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(cpu_max: Path = _CPU_MAX) -> int:
    """Cores that the process may run on, and no more than a container's CPU limit allows, rounded up.

    ``cpu_max``: the limit as control groups (version 2) tell it, ``"max 100000"`` or microseconds per period; where it is not
    there, nothing limits.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))
