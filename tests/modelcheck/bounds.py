"""Bounds of an explored network: the possible events, and the maximum number of each."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Bounds:
    """Maximum number of events of each kind in one run. ``requests`` is the number of requests of each frontend."""

    ranks: int = 2
    frontends: int = 1
    interval: int = 1
    requests: tuple[int, ...] = (0, 0)
    steps: int = 1
    duplicates: int = 0
    losses: int = 0
    early_ticks: int = 0
    aborts: int = 0
    refusals: int = 0
    pause_calls: tuple[str, ...] = ()
    coordinator_crashes: int = 0
    frontend_crashes: int = 0
    rank_crashes: int = 0
    broken_collectives: int = 0
    scales: tuple[int, ...] = ()
    spares: int = 0
    min_size: int = 1
    failed_preparations: int = 0
    ticks: bool = True
    coordinator_returns: bool = True

    def __str__(self) -> str:
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        differing = {f.name for f in fields(self) if told[f.name] != f.default} | {"ranks", "frontends", "requests"}
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in told.items() if name in differing)
