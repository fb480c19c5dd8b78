"""Explores leases, pulls and loads, and checks that known defects are found: ``python -m tests.modelcheck.kv
[STATES]``.
"""

import sys
import time
from dataclasses import fields

from tests.modelcheck.kv.explore import Explored, explore, replay
from tests.modelcheck.kv.mutations import MUTATIONS
from tests.modelcheck.kv.world import Bounds

CONFIGURATIONS = (
    Bounds(prompts=("ab", "ac")),
    Bounds(prompts=("ab",), breaks=1, silences=1, ticks=2, deaths=1, aborts=1, give_ups=1),
    Bounds(prompts=("ab",), pressure=5, pressures=2, sleeps=1, ticks=2, breaks=1, aborts=1),
    Bounds(prompts=("a", "a"), pressure=4, pressures=1, sleeps=1, ticks=1, breaks=1),
    Bounds(prompts=("ab", "ac"), ticks=1, breaks=1),
    Bounds(prompts=("ab", "ac"), pressure=5, pressures=1, aborts=1),
    Bounds(prompts=("ab", "ac"), deaths=1, sleeps=1),
    Bounds(prompts=("ab", "ac"), give_ups=1, room=4),
    Bounds(prompts=("a", "ab", "cd"), num_blocks=8, max_leased=4, pressure=6, pressures=1),
)
"""Configurations that are explored up to the limit. The last one has three requests and eight blocks."""


def main(limit: int) -> int:
    """Return the number of configurations with a violation, plus the number of defects that were not found."""
    failures = 0
    for bounds in CONFIGURATIONS:
        began = time.process_time()
        result = explore(bounds, limit=limit)
        said = ", ".join(
            f"{each.name} {value}" for each in fields(bounds) if (value := getattr(bounds, each.name)) not in (0, ())
        )
        print(f"{said}\n  {result}, {time.process_time() - began:.0f} s", flush=True)
        failures += not isinstance(result, Explored)
    for mutation in MUTATIONS:
        result = explore(mutation.bounds, mutation.machines, limit=limit)
        found = not isinstance(result, Explored) and result.violation.rule.split()[0] in mutation.rules
        found = found and not isinstance(result, Explored) and replay(mutation.bounds, mutation.machines, result)
        print(f"{'found' if found else 'NOT FOUND'}: {mutation.name}", flush=True)
        failures += not found
    return failures


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000))
