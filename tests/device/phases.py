"""Parts of a run. A phase is a process, its stages build objects that rows share, and a row is one measurement or
check.

Standard library only: the parent process, which imports neither torch nor this project's services, reads these classes
too.
"""

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

ALWAYS = 0
"""Step of phases that always run, also with ``--only``."""
LAST = 9
"""Step of phases that run alone on the device."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of every phase of a run. ``capability`` is the GPU's compute capability (90 is 9.0); None on a CPU."""

    shape: str = "8B"
    cpu: bool = False
    capability: int | None = None
    jobs: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement.

    Attributes:
        measure: Gets the object that the stage has built and returns values that JSON can hold.
        limit: Maximum seconds.
    """

    name: str
    measure: Callable[[Any], dict[str, Any]]
    limit: float = 30.0


def nothing() -> AbstractContextManager[Any]:
    """Return an empty context for stages whose rows have no common object."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Stage:
    """Rows that use one object, which ``build`` opens. ``limit`` is the time limit of the build. The build counts as a
    row named after the stage.
    """

    name: str
    rows: Sequence[Row]
    build: Callable[[], AbstractContextManager[Any]] = nothing
    limit: float = 60.0

    @property
    def build_name(self) -> str:
        """Name of the row for building."""
        return f"build {self.name}"

    @property
    def close_name(self) -> str:
        """Name of the row for closing, if other stages follow."""
        return f"close {self.name}"


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase, without importing it.

    Attributes: name: Short name, for ``--only``. stages: ``module:function``; the function takes ``Settings`` and
    returns the phase's stages without touching a device. seconds: Expected duration on a GPU. After twice this time
    the phase stops, and its other rows run after all phases. worth: Importance of the results. Phases run in the
    order of worth per second. step: Number of the step. Phases with the same number run concurrently, before phases
    with higher numbers. Phases with ``LAST`` run alone. isolated: Whether every row runs in a separate process.
    Several such processes run concurrently. host: Whether the phase needs no device.
    """

    name: str
    stages: str
    seconds: float = 60.0
    worth: float = 1.0
    step: int = LAST
    isolated: bool = False
    host: bool = False

    def load(self, settings: Settings) -> list[Stage]:
        """Import the phase's module and return its stages. Raises whatever the import raises."""
        module, _, function = self.stages.partition(":")
        found: list[Stage] = getattr(importlib.import_module(module), function)(settings)
        return found


def in_order(phases: Sequence[Phase]) -> list[Phase]:
    """Return the phases by step, then by worth per second."""
    return sorted(phases, key=lambda phase: (phase.step, -phase.worth / phase.seconds))
