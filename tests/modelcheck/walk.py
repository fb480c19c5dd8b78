"""Random walks through networks that are too large for a full exploration.

python -m tests.modelcheck.walk                        # two processes, five minutes python -m tests.modelcheck.walk
--walks 40 --seed 3    # 40 walks, reproducible
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from tests.modelcheck.bounds import Bounds
from tests.modelcheck.explore import come_to_rest, shown
from tests.modelcheck.numbers import State
from tests.modelcheck.protocol import Protocol
from tests.modelcheck.violation import Violation
from tests.modelcheck.world import Label, World

MANY = Bounds(
    ranks=6,
    spares=2,
    frontends=3,
    requests=(0, 1, 2, 0, 1, 2),
    steps=2,
    duplicates=2,
    losses=2,
    early_ticks=2,
    aborts=1,
    refusals=1,
    pause_calls=("keep", "resume", "wait", "resume"),
    coordinator_crashes=1,
    frontend_crashes=1,
    rank_crashes=2,
    broken_collectives=1,
    scales=(8, 5),
    failed_preparations=1,
)
"""Bounds of the walk: eight ranks and three frontends, with every kind of fault."""
LONGEST = 60
"""Number of choices in a walk. Three of ten choices are runs of up to twenty events without faults."""


class Walked(NamedTuple):
    """One walk: its events, and the violation, if there was one."""

    labels: list[Label]
    violation: Violation | None


def walk(bounds: Bounds, seed: str, protocol: Protocol | None = None) -> Walked:
    """Take one random path through a network.

    From each of its states, a run without further faults must come to rest.
    """
    world, labels = World(bounds, protocol or Protocol()), []
    state, rests = world.initial(), set[State]()
    chance = random.Random(seed)
    try:
        for _ in range(LONGEST):
            for label, after in _steps(world, state, chance):
                labels.append(world.described(label))
                state = after
            come_to_rest(world, state, rests)
    except Violation as violation:
        return Walked(labels, violation)
    return Walked(labels, None)


def _steps(world: World, state: State, chance: random.Random) -> Iterator[tuple[Label, State]]:
    """Yield a run without faults, or one event.

    The event is any event, or any event of a random kind. Choosing by kind makes rare events as frequent as others.
    """
    if chance.random() < 0.3:
        for _ in range(chance.randint(1, 20)):
            step = world.calm(state)
            if step is None:
                return
            yield step
            state = step[1]
        return
    events = list(world.successors(state))
    if events and chance.random() < 0.5:
        kind = chance.choice(sorted({label[0] for label, _ in events}))
        events = [event for event in events if event[0][0] == kind]
    if events:
        yield chance.choice(events)


def walk_all(seed: str, walks: int, until: float) -> tuple[int, Walked | None]:
    """Take random walks until a violation. Returns the number of walks, and the walk with the violation."""
    for number in range(walks):
        if time.monotonic() > until:
            return number, None
        walked = walk(MANY, f"{seed} {number}")
        if walked.violation:
            return number + 1, walked
    return walks, None


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.modelcheck.walk", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32), help="default: any")
    parser.add_argument("--walks", type=int, default=1_000_000, help="of each process, at most")
    parser.add_argument("--seconds", type=float, default=300, help="at most (default: 300)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    options = parser.parse_args()
    until, jobs = time.monotonic() + options.seconds, range(options.jobs)
    walks, broken = 0, 0
    with ProcessPoolExecutor(max_workers=options.jobs) as pool:
        seeds = [f"{options.seed} {job}" for job in jobs]
        for seed, (number, found) in zip(
            seeds, pool.map(walk_all, seeds, [options.walks for _ in jobs], [until for _ in jobs]), strict=True
        ):
            walks += number
            if found:
                broken += 1
                print(f'walk "{seed} {number - 1}": {found.violation}')
                print("\n".join(f"  {shown(label)}" for label in found.labels))
    print(f"{walks} walks from seed {options.seed}, {broken} of which broke an invariant")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
