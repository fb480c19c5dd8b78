"""The services that a soak watches, and what a soak of some part of them adds: requests, accidents, what may be left."""

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
    """A cluster whose model answers in words. ``lasting``: how many engines, the first ones, are never ended. ``fresh``: share of
    the requests that get a salt of their own.
    """

    lasting = 1
    fresh = 0.0

    async def known(self, tokens: int) -> Known:
        """Requests of about ``tokens`` tokens each, with what comes of them undisturbed."""
        async with Client(*map(address, self.frontends)) as client:
            return await catalogue(client, self.requests(tokens), streams=STREAMS)

    def requests(self, tokens: int) -> list[Request]:
        """All that are sent."""
        return short_ones(COUNT, tokens)

    def next_turn(self, request: Request) -> tuple[Request, Outcome] | None:
        """What its client may ask behind a known request, and what comes of that."""
        return None

    def accidents(self, rng: random.Random) -> Accidents:
        """Those beside the usual ones, by their names, with their weights."""
        return {}

    def look(self) -> None:
        """All processes run, and the next accident is about to happen."""

    def excuses(self, outcome: Outcome) -> bool:
        """Whether a request may have failed because its own frontend was ended."""
        return False

    async def left(self) -> str:
        """What is still held when nothing is asked, in words; empty when that is nothing."""
        return ""

    async def done(self) -> Mapping[str, float]:
        """How often what is soaked has happened, as far as the processes that live have counted."""
        return {}

    @property
    def wrong(self) -> list[str]:
        """What must never be, in words; when all services have ended, what they have left, too."""
        return []
