"""Configurations of the networks to explore, with their bounds and their limits on the number of states."""

import resource
from typing import NamedTuple

from tests.modelcheck.bounds import Bounds
from tests.modelcheck.explore import Explored, Found, explore
from tests.modelcheck.protocol import Protocol
from tests.modelcheck.world import World


class Configuration(NamedTuple):
    name: str
    bounds: Bounds
    limit: int = 250_000


def bounds(**more) -> Bounds:
    """Return bounds. The defaults are two ranks, one frontend and one request."""
    return Bounds(**{"requests": (0,), **more})


WAVES = (
    Configuration("two requests, a coordinator that dies", bounds(requests=(0, 0), coordinator_crashes=1)),
    Configuration(
        "two frontends of which one dies, and no coordinator any more",
        bounds(frontends=2, requests=(0, 1), frontend_crashes=1, coordinator_crashes=1, coordinator_returns=False),
    ),
    Configuration("pause and resume, and a message is lost", bounds(pause_calls=("keep", "resume"), losses=1)),
    Configuration(
        "a pause that waits, a duplicate, a refusal",
        bounds(pause_calls=("wait", "resume"), duplicates=1, refusals=1),
    ),
    Configuration(
        "exchanges at every other step, a pause that waits, an abort",
        bounds(interval=2, steps=2, pause_calls=("wait", "resume"), aborts=1),
    ),
    Configuration("nothing is lost, and nobody repeats himself", bounds(requests=(0, 0), ticks=False, refusals=1)),
    Configuration(
        "two frontends, two requests, pause and resume",
        bounds(frontends=2, requests=(0, 1), pause_calls=("keep", "resume")),
    ),
    Configuration("pauses that abort, and one more", bounds(pause_calls=("abort", "resume", "keep"), early_ticks=1)),
    Configuration("three ranks, and a message is lost", bounds(ranks=3, losses=1)),
)
EPOCHS = (
    Configuration("a collective breaks", bounds(requests=(0, 0), broken_collectives=1)),
    Configuration("a rank dies, and the coordinator", bounds(rank_crashes=1, coordinator_crashes=1)),
    Configuration(
        "a rank dies, and the coordinator, and a message is lost",
        bounds(rank_crashes=1, coordinator_crashes=1, losses=1),
    ),
    Configuration("a rank dies in a pause", bounds(rank_crashes=1, pause_calls=("wait", "resume"))),
    Configuration("a rank dies, and another takes its place", bounds(rank_crashes=1, spares=1, min_size=2)),
    Configuration(
        "a collective breaks, and a rank cannot go on with both that are needed",
        bounds(min_size=2, broken_collectives=1, failed_preparations=1),
    ),
    Configuration("from two to three", bounds(scales=(3,), spares=1)),
    Configuration("from two to three, and the coordinator dies", bounds(scales=(3,), spares=1, coordinator_crashes=1)),
    Configuration("from two to three, and a rank dies", bounds(scales=(3,), spares=1, rank_crashes=1)),
    Configuration("from two to three, and a rank cannot", bounds(scales=(3,), spares=1, failed_preparations=1)),
    Configuration(
        "from two to three, and a rank cannot, and a message is lost",
        bounds(requests=(), scales=(3,), spares=1, failed_preparations=1, losses=1),
    ),
    Configuration("from two to three, and a message is lost", bounds(scales=(3,), spares=1, losses=1)),
    Configuration(
        "from two to three without requests, and rank and coordinator die",
        bounds(requests=(), scales=(3,), spares=1, rank_crashes=1, coordinator_crashes=1),
    ),
    Configuration("from two to three and back", bounds(requests=(), scales=(3, 2), spares=1)),
    Configuration("from three to two", bounds(ranks=3, scales=(2,))),
    Configuration("from three to two, and a rank dies", bounds(ranks=3, scales=(2,), rank_crashes=1)),
    Configuration("from three to two, and a collective breaks", bounds(ranks=3, scales=(2,), broken_collectives=1)),
    Configuration("from two to three in a pause", bounds(scales=(3,), spares=1, pause_calls=("keep",))),
)
EVERY = tuple(configuration._replace(limit=700_000) for configuration in WAVES) + EPOCHS
QUICK = 200_000
"""Number of states that the tests explore, over all configurations."""


def explored(configuration: Configuration) -> tuple[Explored | Found, int]:
    """Return the result of the exploration, and the process's peak memory in MiB."""
    found = explore(World(configuration.bounds, Protocol()), configuration.limit)
    return found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
