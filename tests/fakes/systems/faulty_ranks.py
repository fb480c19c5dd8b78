"""Data-parallel group whose processes are killed at named points."""

from pathlib import Path
from typing import Any

from tests.fakes.engines.rank_faults import NAME, VARIABLE
from tests.fakes.engines.worker_faults import Fault, fired, installed
from tests.fakes.processes import Service
from tests.fakes.systems.rank_group import RankGroup


class FaultyRanks(RankGroup):
    """``RankGroup`` with the plugin ``rank_faults`` in its engines."""

    def __init__(self, model: Path, directory: Path, **options: Any) -> None:
        """Create the group. ``directory`` is a new one for the plugin and armed faults. ``options`` are those of
        ``RankGroup``.
        """
        super().__init__(model, plugins=f'["{NAME}"]', **options)
        self._directory = directory
        found = installed(directory / "plugin", NAME, "tests.fakes.engines.rank_faults")
        for engine in self.engines:
            engine.environment = {**found, VARIABLE: str(self._armed(engine))}

    def _armed(self, engine: Service) -> Path:
        return self._directory / str(engine.port)

    def arm(self, engine: Service, point: str, victim: Service | None = None) -> None:
        """Let the victim be killed when the engine next reaches the point. Without a victim, the engine itself is
        killed.
        """
        self._armed(engine).with_suffix(".done").unlink(missing_ok=True)
        pid = 0 if victim is None or victim is engine else victim.pid
        Fault(0, point, "kill", pid).arm(self._armed(engine))

    def fired(self, engine: Service) -> bool:
        """Return whether the engine has reached the point that was armed last."""
        return fired(self._armed(engine)) is not None
