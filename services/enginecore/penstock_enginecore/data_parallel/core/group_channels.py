"""The links of a rank: of the epoch that serves, and of the one that is prepared."""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from penstock_common.types.data_parallel import RankGroup
from penstock_enginecore.core.collective_errors import CollectiveBroken
from penstock_enginecore.data_parallel.core.events import Broke, GroupEvent
from penstock_enginecore.data_parallel.core.group_channel import GroupLink, LinkThread, Prepare, prepare_nothing

logger = logging.getLogger(__name__)

MakeLink = Callable[[RankGroup, Mapping[str, str]], GroupLink]
"""Makes the link of a group, which this rank is in. The mapping: by rank, the address of its store."""


class Meets(Protocol):
    """Lets a rank meet others."""

    meeting_address: str
    """host:port of the store where a group meets whose first rank this one is."""
    lease: float
    """Seconds after which the coordinator takes a silent rank for dead, and links made from then on a silent peer; 0: unknown."""

    def make(self, group: RankGroup, meetings: Mapping[str, str]) -> GroupLink:
        """See ``MakeLink``."""


class Links:
    """One link per epoch, from when it is first wanted until a later one has begun."""

    def __init__(self, make: MakeLink, prepare: Prepare = prepare_nothing) -> None:
        self.post: Callable[[GroupEvent], None] = lambda _: None
        """Called on the links' threads."""
        self._make = make
        self._prepare = prepare
        self._lock = threading.Lock()
        self._threads: dict[int, LinkThread] = {}

    def open(self, group: RankGroup, meetings: Mapping[str, str]) -> None:
        """Begin to meet the ranks of a group, unless that has begun."""
        with self._lock:
            if group.epoch in self._threads:
                return
            try:
                link = self._make(group, meetings)
            except CollectiveBroken as e:
                self.post(Broke(group.epoch, str(e)))
            else:
                self._threads[group.epoch] = LinkThread(group.epoch, link, self.post, self._prepare)

    def exchange(self, epoch: int, row: bytes) -> None:
        """Enter an exchange of an epoch that is open; of one that could not be opened nothing comes but what was told already."""
        if (thread := self._threads.get(epoch)) is not None:
            thread.exchange(row)

    def link(self, epoch: int) -> GroupLink:
        """The link of an epoch that is open."""
        return self._threads[epoch].link

    def give_up_before(self, epoch: int) -> None:
        """End what waits in collectives of earlier epochs, as if a peer were lost. Any thread may call it."""
        with self._lock:
            threads = [thread for number, thread in self._threads.items() if number < epoch]
        for thread in threads:
            thread.abort()

    def close_before(self, epoch: int) -> None:
        """Nobody uses the links of earlier epochs any more."""
        with self._lock:
            old = [self._threads.pop(number) for number in list(self._threads) if number < epoch]
        for thread in old:
            thread.close()

    def close(self) -> None:
        """Leave all groups. Idempotent."""
        with self._lock:
            threads = list(self._threads.values())
            self._threads.clear()
        for thread in threads:
            thread.close()
