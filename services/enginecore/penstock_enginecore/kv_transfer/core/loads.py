"""Loads under way: whose they are, who else waits for them, and that a block is on its way once at a time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock_common.types.kv_transfer import BlockName
from penstock_enginecore.kv_transfer.core.base import Place


@dataclass(slots=True)
class Load:
    """``owner``: key of the request that has it in place of its turn; None once that has left. ``waiting``: keys of others whose
    blocks it brings.
    """

    number: int
    places: tuple[Place, ...]
    owner: str | None
    waiting: dict[str, None] = field(default_factory=dict)


class Loads:
    """A load begins with an owner. That may leave before it is over: nobody wants the load any more then, and its blocks stay as
    they are until it has ended, which it does once.
    """

    def __init__(self) -> None:
        self._loads: dict[int, Load] = {}
        self._bringing: dict[BlockName, int] = {}
        self._of_owner: dict[str, int] = {}
        self._of_waiting: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def num_blocks(self) -> int:
        """That are on their way."""
        return len(self._bringing)

    @property
    def num_left_blocks(self) -> int:
        """Of these, those that nobody wants."""
        return sum(len(load.places) for load in self._loads.values() if load.owner is None)

    def bringing(self, names: Iterable[BlockName]) -> int | None:
        """The load that brings the first of these that is on its way."""
        bringing = self._bringing
        return next((bringing[name] for name in names if name in bringing), None) if bringing else None

    def begin(self, number: int, places: Sequence[Place], owner: str) -> None:
        """ValueError for a block that is on its way already, or an owner that has a load or waits for one."""
        if owner in self._of_owner or owner in self._of_waiting:
            raise ValueError(f"{owner} has a load already")
        if any(place.name in self._bringing for place in places):
            raise ValueError(f"load {number} brings what is on its way already")
        self._loads[number] = Load(number, tuple(places), owner)
        self._of_owner[owner] = number
        for place in places:
            self._bringing[place.name] = number

    def wait(self, number: int, key: str) -> None:
        """A request waits for the end of a load. ValueError for one that waits already."""
        if key in self._of_owner or key in self._of_waiting:
            raise ValueError(f"{key} waits already")
        self._loads[number].waiting[key] = None
        self._of_waiting[key] = number

    def leave(self, key: str) -> int | None:
        """A request has ended, or has lost its turn. Returns the number of the load that nobody wants any more."""
        if (number := self._of_waiting.pop(key, None)) is not None:
            del self._loads[number].waiting[key]
            return None
        number = self._of_owner.pop(key, None)
        if number is not None:
            self._loads[number].owner = None
        return number

    def end(self, number: int) -> Load:
        """It is over. KeyError for one that is not under way."""
        load = self._loads.pop(number)
        for place in load.places:
            del self._bringing[place.name]
        if load.owner is not None:
            del self._of_owner[load.owner]
        for key in load.waiting:
            del self._of_waiting[key]
        return load
