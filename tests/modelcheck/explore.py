"""Breadth-first exploration of all states of a network."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tests.modelcheck.numbers import State
from tests.modelcheck.violation import Violation
from tests.modelcheck.world import Label, World

LONGEST_REST = 250
"""Maximum number of events until a run without faults is at rest."""
BEAT = 250_000
"""Number of states between two progress messages."""


@dataclass(frozen=True)
class Explored:
    """Result of an exploration without a violation.

    ``complete`` tells whether all states were explored. ``seconds`` is processor time.
    """

    states: int
    transitions: int
    depth: int
    complete: bool
    seconds: float


@dataclass(frozen=True)
class Found:
    """The shortest sequence of events that violates an invariant: ``trace``, then ``calm``, then ``last``.

    ``calm`` is a run without faults. If an event of the exploration violates the invariant, ``calm`` is empty. If the
    run without faults violates the invariant, ``last`` is empty.
    """

    violation: Violation
    trace: tuple[Label, ...]
    calm: tuple[Label, ...]
    last: Label
    states: int

    def lines(self) -> Iterator[str]:
        yield f"{self.violation}"
        yield from (f"  {shown(label)}" for label in self.trace)
        if self.calm:
            yield f"  and without a fault, {len(self.calm)} steps later, the end of which are"
            yield from (f"    {shown(label)}" for label in self.calm[-5:])
        if self.last:
            yield f"  {shown(self.last)}"


def shown(label: Sequence[Any]) -> str:
    return " ".join(str(part) for part in label)


def explore(world: World, limit: int, *, said: Callable[[str], None] | None = None) -> Explored | Found:
    """Explore the states breadth first, up to about ``limit``. From each state, a run without further faults must come
    to rest.
    """
    with world.protocol.in_force():
        return _explore(world, limit, said or (lambda _: None))


def _explore(world: World, limit: int, said: Callable[[str], None]) -> Explored | Found:
    start = time.process_time()
    first = world.initial()
    came_from: dict[State, State | None] = {first: None}
    rests: set[State] = set()
    level, depth, transitions, beat = [first], 0, 0, BEAT
    complete = True
    while level:
        following: list[State] = []
        for state in level:
            try:
                if state not in rests:
                    come_to_rest(world, state, rests)
                for _, after in world.successors(state):
                    transitions += 1
                    if after not in came_from:
                        came_from[after] = state
                        following.append(after)
            except Violation as violation:
                return _found(world, state, came_from, violation)
            if len(came_from) >= beat:
                said(f"{len(came_from)} states, {depth} events from the start")
                beat += BEAT
            if len(came_from) >= limit:
                complete, following = False, []
                break
        level, depth = following, depth + bool(following)
    return Explored(len(came_from), transitions, depth, complete, time.process_time() - start)


def come_to_rest(world: World, state: State, rests: set[State]) -> None:
    """Check that a run without faults ends, and that its final state is valid.

    ``rests`` are states for which this is already known.
    """
    way: dict[State, None] = {}
    while state not in rests:
        if state in way or len(way) > LONGEST_REST:
            raise Violation("2 the group never comes to rest")
        way[state] = None
        step = world.calm(state)
        if step is None:
            break
        state = step[1]
    rests.update(way)


def _found(world: World, state: State, came_from: dict[State, State | None], violation: Violation) -> Found:
    path = [state]
    while (before := came_from[path[-1]]) is not None:
        path.append(before)
    path.reverse()
    trace: list[Label] = []
    for before, after in pairwise(path):
        trace.append(next(world.described(label) for label, later in world.successors(before) if later == after))
    way = _calm_way(world, state)
    if way is None:
        return Found(violation, tuple(trace), (), _breaks(world, state), len(came_from))
    return Found(violation, tuple(trace), way, (), len(came_from))


def _calm_way(world: World, state: State) -> tuple[Label, ...] | None:
    """Return the run without faults if it violates an invariant, or None."""
    way: list[Label] = []
    seen: set[State] = set()
    while state not in seen and len(way) <= LONGEST_REST:
        seen.add(state)
        try:
            step = world.calm(state)
        except Violation:
            return tuple(way)
        if step is None:
            return None
        way.append(world.described(step[0]))
        state = step[1]
    return tuple(way)


def _breaks(world: World, state: State) -> Label:
    """Return the event of this state that violates an invariant; empty if there is none."""
    try:
        for _ in world.successors(state):
            pass
    except Violation:
        return world.breaking
    return ()


def replay(world: World, found: Found) -> bool:
    """Return whether the trace reproduces the violation."""
    with world.protocol.in_force():
        state = world.initial()
        for label in found.trace:
            state = next(after for there, after in world.successors(state) if world.described(there) == label)
        if found.last:
            return _breaks(world, state) == found.last
        return _calm_way(world, state) == found.calm
