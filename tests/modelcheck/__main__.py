"""Explores every network configuration, or shows that known defects are found.

python -m tests.modelcheck                      # every configuration, two at a time python -m tests.modelcheck --states
100000      # at most this many states of each python -m tests.modelcheck --only pause         # only configurations
with the word in their names python -m tests.modelcheck --mutations          # each defect, and the shortest sequence of
events to it python -m tests.modelcheck --replay FOLDER      # traces that processes wrote to the folder
"""

import argparse
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.modelcheck.configurations import EVERY, Configuration, explored
from tests.modelcheck.explore import Found, explore
from tests.modelcheck.mutations import MUTATIONS
from tests.modelcheck.replay import replay
from tests.modelcheck.violation import Violation
from tests.modelcheck.world import World


def check(configurations: Iterable[Configuration], jobs: int) -> bool:
    """Return whether all invariants hold in all configurations."""
    chosen, states, sound = list(configurations), 0, True
    began = time.monotonic()
    with ProcessPoolExecutor(max_workers=jobs, max_tasks_per_child=1) as pool:
        for configuration, (found, memory) in zip(chosen, pool.map(explored, chosen), strict=True):
            print(f"{configuration.name}: {configuration.bounds}")
            states += found.states
            if isinstance(found, Found):
                sound = False
                print("\n".join(f"  {line}" for line in found.lines()), flush=True)
                continue
            extent = "all" if found.complete else "the nearest"
            print(
                f"  {extent} {found.states:,} states, {found.transitions:,} transitions, up to {found.depth} events,"
                f" {found.seconds:.0f} s, {memory} MiB",
                flush=True,
            )
    print(f"{states:,} states of {len(chosen)} networks in {time.monotonic() - began:.0f} s")
    return sound


def show_mutations() -> bool:
    """Print the exploration's result for each defect. Returns whether every defect was found."""
    every = True
    for mutation in MUTATIONS:
        found = explore(World(mutation.bounds, mutation.protocol), 100_000)
        print(mutation.name)
        if isinstance(found, Found):
            print("\n".join(f"  {line}" for line in found.lines()))
        else:
            every = False
            print(f"  NOT FOUND in {found.states} states")
    return every


def show_replay(folder: Path) -> bool:
    """Return whether the traces agree with the state machines."""
    try:
        print(replay(folder))
    except Violation as violation:
        print(violation)
        return False
    return True


def main() -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.modelcheck", description=__doc__.splitlines()[0])
    parser.add_argument("--states", type=int, help="maximum number of states of each network")
    parser.add_argument("--only", default="", help="only networks with this text in their names")
    parser.add_argument("--jobs", type=int, default=2, help="networks at a time (default: 2)")
    parser.add_argument("--mutations", action="store_true", help="show the defects that must be found")
    parser.add_argument("--replay", type=Path, metavar="FOLDER", help="replay the traces of a group's processes")
    options = parser.parse_args()
    if options.replay:
        return 0 if show_replay(options.replay) else 1
    if options.mutations:
        return 0 if show_mutations() else 1
    chosen = [configuration for configuration in EVERY if options.only in configuration.name]
    if options.states:
        chosen = [c._replace(limit=min(options.states, c.limit)) for c in chosen]
    return 0 if chosen and check(chosen, options.jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
