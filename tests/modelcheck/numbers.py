"""Numbers in place of values. Numbers keep states small, and each effect of an event on a value is computed once."""

from typing import Any, NamedTuple

from penstock_enginecore.data_parallel.core.rank import Forward

State = tuple[int, ...]


class Left(NamedTuple):
    """Remaining bounds on events, and the requests that exist."""

    submitted: int = 0
    live: int = 0
    duplicates: int = 0
    losses: int = 0
    early_ticks: int = 0
    aborts: int = 0
    refusals: int = 0
    pause_calls: int = 0
    scales: int = 0
    coordinator_crashes: int = 0
    frontend_crashes: int = 0
    rank_crashes: int = 0
    broken_collectives: int = 0
    failed_preparations: int = 0


class Table:
    """Values by number, and numbers by value."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        found = self._numbers.get(value)
        if found is None:
            found = self._numbers[value] = len(self.values)
            self.values.append(value)
        return found


class Step(NamedTuple):
    """Effect of an event on an engine, in numbers."""

    engine: int
    messages: int
    ended: int
    moved: int
    entered: bool
    forward: Forward | None


DOWN = -1
NOTHING = 0
