"""Every state of a world of slots, nearest first."""

from dataclasses import dataclass
from typing import Any

from penstock_enginecore.states.core.slots import StateSlots
from tests.modelcheck.states.world import Bounds, Event, World
from tests.modelcheck.violation import Violation


@dataclass(frozen=True)
class Explored:
    """Result of an exploration without a violation. ``complete`` tells whether all states were explored."""

    states: int
    transitions: int
    depth: int
    complete: bool


@dataclass(frozen=True)
class Found:
    """The shortest way to a state that breaks an invariant."""

    violation: Violation
    trace: tuple[Event, ...]
    states: int


def explore(bounds: Bounds, slots: type[StateSlots] = StateSlots, *, limit: int = 1_000_000) -> Explored | Found:
    """Explore the states breadth first, up to about ``limit``."""
    first = World.begin(bounds, slots)
    came_from: dict[Any, tuple[Any, Event] | None] = {first.key(): None}
    level, depth, transitions = [first], 0, 0
    while level:
        following = []
        for world in level:
            key = world.key()
            for event in world.events():
                transitions += 1
                try:
                    after = world.apply(event)
                except Violation as violation:
                    return Found(violation, (*_trace(came_from, key), event), len(came_from))
                if (new := after.key()) not in came_from:
                    came_from[new] = key, event
                    following.append(after)
            if len(came_from) >= limit:
                return Explored(len(came_from), transitions, depth, complete=False)
        level, depth = following, depth + bool(following)
    return Explored(len(came_from), transitions, depth, complete=True)


def _trace(came_from: dict[Any, tuple[Any, Event] | None], key: Any) -> list[Event]:
    events = []
    while (before := came_from[key]) is not None:
        key, event = before
        events.append(event)
    return events[::-1]
