"""Breadth-first exploration of all states of a world."""

from dataclasses import dataclass
from typing import Any

from tests.modelcheck.kv.world import Bounds, Event, Machines, World
from tests.modelcheck.violation import Violation

LONGEST_REST = 400
"""Maximum number of events until a run without faults is at rest."""


@dataclass(frozen=True)
class Explored:
    """Result of an exploration without a violation. ``complete`` tells whether all states were explored."""

    states: int
    transitions: int
    depth: int
    complete: bool


@dataclass(frozen=True)
class Found:
    """The shortest sequence of events that violates an invariant, or after which a run without faults violates one."""

    violation: Violation
    trace: tuple[Event, ...]
    states: int


def explore(bounds: Bounds, machines: Machines | None = None, *, limit: int = 1_000_000) -> Explored | Found:
    """Explore the states breadth first, up to about ``limit``. From each state, a run without further faults must come
    to rest.
    """
    first = World(bounds, machines or Machines())
    came_from: dict[Any, tuple[Any, Event] | None] = {first.key(): None}
    rests: set[Any] = set()
    level, depth, transitions = [first], 0, 0
    while level:
        following = []
        for world in level:
            key = world.key()
            event: Event = ()
            try:
                come_to_rest(world, rests)
                for event in world.events():
                    transitions += 1
                    after = world.apply(event)
                    if (new := after.key()) not in came_from:
                        came_from[new] = key, event
                        following.append(after)
            except Violation as violation:
                return Found(violation, (*_trace(came_from, key), *([event] if event else [])), len(came_from))
            if len(came_from) >= limit:
                return Explored(len(came_from), transitions, depth, complete=False)
        level, depth = following, depth + bool(following)
    return Explored(len(came_from), transitions, depth, complete=True)


def come_to_rest(world: World, rests: set[Any]) -> None:
    """Check that a run without faults ends, and that its final state is valid.

    ``rests`` are states for which this is already known.
    """
    way = []
    for _ in range(LONGEST_REST):
        key = world.key()
        if key in rests:
            break
        way.append(key)
        following = _next(world, key)
        if following is None:
            world.check_rest()
            break
        world = following
    else:
        raise Violation("4 it never comes to rest")
    rests.update(way)


def _next(world: World, key: Any) -> World | None:
    """Return the world after the first event without a fault that changes it, else after a clock tick; None if nothing
    can happen.
    """
    for event in world.calm_events():
        if (after := world.apply(event)).key() != key:
            return after
    return None if world.leases.next_expiry() is None else world.apply(("tick",))


def _trace(came_from: dict[Any, tuple[Any, Event] | None], key: Any) -> list[Event]:
    events = []
    while (before := came_from[key]) is not None:
        key, event = before
        events.append(event)
    return events[::-1]


def replay(bounds: Bounds, machines: Machines, found: Found) -> bool:
    """Return whether the trace reproduces the violation."""
    world = World(bounds, machines)
    try:
        for event in found.trace:
            world = world.apply(event)
        come_to_rest(world, set())
    except Violation as violation:
        return violation.rule == found.violation.rule
    return False
