"""Phases of ``make check-gpu``. There is one phase, and each of its rows is a separate process."""

from functools import partial
from typing import Any

from tests.device.phases import ALWAYS, Phase, Row, Settings, Stage

PHASES = [
    Phase("machine", "tests.benchmarks.gpu.machine:stages", seconds=4, step=ALWAYS),
    Phase("checks", "tests.device.check_phases:stages", seconds=120, isolated=True),
]
_LIMIT = 120.0
_CPU_LIMIT = 15.0
"""Time limit of a row on a CPU in seconds, before multiplication with ``patience``."""


def stages(settings: Settings) -> list[Stage]:
    """Return a row for each check."""
    from tests.device.checks import CHECKS  # imported here, because it imports torch and transformers

    device = "cpu" if settings.cpu else "cuda"

    def run(check: Any, _: None) -> dict[str, Any]:
        found: dict[str, Any] = check(device)
        return found

    limit = _CPU_LIMIT if settings.cpu else _LIMIT
    return [Stage("checks", [Row(name, partial(run, check), limit) for name, check in CHECKS.items()])]
