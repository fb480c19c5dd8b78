"""Services under a soak test, and the hooks by which a feature adds its requests, accidents and leak checks."""

import random
from collections.abc import Mapping

from tests.chaos.client import Client
from tests.chaos.flow import catalogue
from tests.chaos.killing import address
from tests.chaos.outages import Known
from tests.chaos.outcome import Outcome
from tests.chaos.requests import Request, short_ones
from tests.fakes.systems.cluster import Cluster
from tests.soak.havoc import Accidents

STREAMS, COUNT = 16, 120


class SoakCluster(Cluster):
    """A cluster with a text model, and hooks for the tested feature.

    Attributes:
        lasting: Number of engines that are never ended. They are the first ones.
        fresh: Fraction of requests that get their own cache salt.
    """

    lasting = 1
    fresh = 0.0

    async def known(self, tokens: int) -> Known:
        """Return requests of about ``tokens`` tokens each, with the outcomes that they have without faults."""
        async with Client(*map(address, self.frontends)) as client:
            return await catalogue(client, self.requests(tokens), streams=STREAMS)

    def requests(self, tokens: int) -> list[Request]:
        """Return all requests to send."""
        return short_ones(COUNT, tokens)

    def next_turn(self, request: Request) -> tuple[Request, Outcome] | None:
        """Return a follow-up to a known request, with its expected outcome; None if there is no follow-up."""
        return None

    def accidents(self, rng: random.Random) -> Accidents:
        """Return additional accidents by name, each with its weight."""
        return {}

    def look(self) -> None:
        """Check the services right before an accident, while all processes run."""

    def excuses(self, outcome: Outcome) -> bool:
        """Whether a request may have failed because its own frontend was ended."""
        return False

    async def left(self) -> str:
        """Describe resources that are still in use while there are no requests. Empty if there are none."""
        return ""

    async def done(self) -> Mapping[str, float]:
        """Return event counts of the feature under test, summed over the processes that are alive."""
        return {}

    @property
    def wrong(self) -> list[str]:
        """Violations found so far, as text. After the services have ended, their remaining files are violations too."""
        return []
