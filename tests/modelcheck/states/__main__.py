"""Explores slots of states, and checks that known defects are found: ``python -m tests.modelcheck.states [STATES]``."""

import sys
import time
from dataclasses import fields

from tests.modelcheck.states.explore import Explored, explore
from tests.modelcheck.states.mutations import MUTATIONS
from tests.modelcheck.states.world import Bounds

CONFIGURATIONS = (
    Bounds(("ab", "ac"), drafts=True),
    Bounds(("ab", "ab"), preemptions=1),
    Bounds(("ab", "ab"), kept=2, losses=1),
    Bounds(("abc", "ab"), interval=2, aborts=1, failures=1),
    Bounds(("a", "a", "ab"), drafts=True, preemptions=1),
)
"""Configurations that are explored up to the limit."""


def main(limit: int) -> int:
    """Return the number of configurations with a violation, plus the number of defects that were not found."""
    failures = 0
    for bounds in CONFIGURATIONS:
        began = time.process_time()
        result = explore(bounds, limit=limit)
        said = ", ".join(f"{each.name} {value}" for each in fields(bounds) if (value := getattr(bounds, each.name)))
        print(f"{said}\n  {result}, {time.process_time() - began:.0f} s", flush=True)
        failures += not isinstance(result, Explored)
    for mutation in MUTATIONS:
        found = explore(mutation.bounds, mutation.slots, limit=limit)
        was_found = not isinstance(found, Explored) and found.violation.rule.split()[0] in mutation.rules
        print(f"{'found' if was_found else 'NOT FOUND'}: {mutation.name}", flush=True)
        failures += not was_found
    return failures


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000))
