"""Waiting requests for whose media nothing has been begun."""

from collections.abc import Iterator
from typing import NamedTuple

from penstock_common.types.media import MultiModalFeature
from penstock_enginecore.core.request import Request
from penstock_enginecore.core.scheduler.waiting_queue import FairQueue


class Wanted(NamedTuple):
    """A waiting request, and the item that it needs first."""

    request: Request
    feature: MultiModalFeature


class MediaLine:
    """In the policy's order. Tenants take turns by their weights, by embeddings: who comes with many items keeps nobody waiting
    for all of them.
    """

    def __init__(self, *, by_priority: bool, fair: bool) -> None:
        self._wanted: dict[str, Wanted] = {}
        self._turns = FairQueue(by_priority=by_priority, fair=fair, cost=self._num_embeds)

    def __len__(self) -> int:
        return len(self._wanted)

    def __iter__(self) -> Iterator[str]:
        return iter(self._wanted)

    def add(self, wanted: Wanted) -> None:
        """Take in a request that is not in the line."""
        self._wanted[wanted.request.key] = wanted
        self._turns.add(wanted.request)

    def head(self) -> Wanted:
        """The one whose turn is next. There must be one."""
        return self._wanted[self._turns.peek().key]

    def take(self, identifier: str) -> list[Wanted]:
        """Take out those that need an item, which is begun for the head."""
        head = self.head() if self._wanted else None
        taken = [wanted for wanted in self._wanted.values() if wanted.feature.identifier == identifier]
        for wanted in taken:
            if wanted is head:
                self._turns.take(wanted.request)
                del self._wanted[wanted.request.key]
            else:
                self.remove(wanted.request)
        return taken

    def remove(self, request: Request) -> None:
        """Take out a request; one that is not in the line is passed over."""
        if request.key in self._wanted:
            self._turns.remove(request)
            del self._wanted[request.key]

    def _num_embeds(self, request: Request) -> int:
        return self._wanted[request.key].feature.num_embeds
