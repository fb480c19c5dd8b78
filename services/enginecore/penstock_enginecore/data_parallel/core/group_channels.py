"""What connects a rank with its group: the links of the epoch that serves and of the one that is prepared, and what they tell."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from penstock_common.types.data_parallel import RankGroup, Reconfigure, StartDpWave
from penstock_enginecore.core.collective_errors import CollectiveBroken, UnpreparedError

# What happens to a rank that is not a request: what its driver is told, in the order of the engine's input.


class Connected(msgspec.Struct, frozen=True):
    """The ranks of an epoch's group have met."""

    epoch: int


class Gathered(msgspec.Struct, frozen=True):
    """An exchange of an epoch is over."""

    epoch: int
    rows: list[bytes]
    """Of all members, in order."""
    seconds: float = 0.0
    """From this rank's entering it."""


class Broke(msgspec.Struct, frozen=True):
    """A group could not meet, or a collective of it broke off. Nothing more comes of it."""

    epoch: int
    why: str
    unprepared: bool = False
    """Whether it is this rank that cannot be in the group."""


class Named(msgspec.Struct, frozen=True):
    """The coordinator names a group. ``meetings``: by rank, the address of its store."""

    message: Reconfigure
    meetings: Mapping[str, str]


class Refused(msgspec.Struct, frozen=True):
    """A request that was stamped with this wave of this epoch was refused before it got here."""

    epoch: int
    wave: int


GroupEvent = Connected | Gathered | Broke | Named | Refused | StartDpWave


# What connects a rank with the others of one epoch, and the thread that waits for them.


class GroupLink(Protocol):
    """The ranks of one epoch's group. Each method but ``abort`` is called from one thread at a time."""

    collectives: Any
    """What steps exchange tensors by, for who knows them; in turn with exchanges."""

    def connect(self) -> None:
        """Wait for all ranks. Raises where they do not come, and once ``abort`` was called."""

    def exchange(self, row: bytes) -> list[bytes]:
        """The rows of all ranks, which are of one length, in order. Raises where one is gone, and once ``abort`` was called."""

    def abort(self) -> None:
        """End whatever waits for others, here and there. Waits for nothing. Any thread may call it."""

    def close(self) -> None:
        """Give back what the group holds. Nothing is under way."""


Prepare = Callable[[int, GroupLink, Callable[[], bool]], None]
"""Called once the ranks of an epoch have met, on all of them. The last says whether the epoch was given up meanwhile. Raises
UnpreparedError where this rank cannot be in the group.
"""


def prepare_nothing(epoch: int, link: GroupLink, given_up: Callable[[], bool]) -> None:
    """Ranks that have met are ready."""


class LinkThread:
    """Does on a link what waits for others, and tells how it went; the engine takes its other input meanwhile.

    ``post`` is called on the thread, with ``Connected`` first, then a ``Gathered`` per exchange; or with ``Broke``, which is the
    last.
    """

    def __init__(
        self, epoch: int, link: GroupLink, post: Callable[[GroupEvent], None], prepare: Prepare = prepare_nothing
    ) -> None:
        self.epoch = epoch
        self.link = link
        self._post = post
        self._prepare = prepare
        self._given_up = threading.Event()
        self._rows: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._begun, self._over = 1, 0
        """Of the meeting and the exchanges; the second is the thread's to count."""
        self._thread = threading.Thread(target=self._run, name=f"group-{epoch}", daemon=True)
        self._thread.start()

    def exchange(self, row: bytes) -> None:
        """Enter an exchange, behind what was begun before."""
        self._begun += 1
        self._rows.put(row)

    def abort(self) -> None:
        """End what is under way. Any thread may call it."""
        self._given_up.set()
        self.link.abort()

    def close(self) -> None:
        """End what is under way, and the thread. Where nothing is, others may still be ending what is over here: they are let."""
        if self._over < self._begun:
            self.abort()
        self._rows.put(None)

    def _run(self) -> None:
        try:
            self.link.connect()
            self._prepare(self.epoch, self.link, self._given_up.is_set)
            self._over += 1
            self._post(Connected(self.epoch))
            while (row := self._rows.get()) is not None:
                began = time.perf_counter()
                rows = self.link.exchange(row)
                self._over += 1
                self._post(Gathered(self.epoch, rows, time.perf_counter() - began))
        except UnpreparedError as e:
            self._post(Broke(self.epoch, str(e), unprepared=True))
        except Exception as e:  # the coordinator decides what follows
            self._post(Broke(self.epoch, f"{type(e).__name__}: {e}"))
        finally:
            self.link.close()


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

    def __init__(self, make: MakeLink, post: Callable[[GroupEvent], None], prepare: Prepare = prepare_nothing) -> None:
        """``post`` is called on the links' threads."""
        self.post = post
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


# What the ranks of a group share of a model, as the rank's driver sees it.


class SharedExperts(Protocol):
    """The experts of a rank, from group to group. ``prepare`` is called on the links' threads, all else on the busy loop's.

    Steps go wrong alone as well: ``EngineCore.step_together`` raises CollectiveBroken for any that does, since others wait for
    what this rank was to compute.
    """

    def prepare(self, epoch: int, link: GroupLink, given_up: Callable[[], bool]) -> None:
        """All ranks of the epoch call it, once they have met: they agree on who holds which experts, and each gets those that it
        lacks. Where a group serves meanwhile, that goes on with what it has. Raises CollectiveBroken, also soon after
        ``given_up`` says so, and UnpreparedError.
        """

    def leave(self) -> None:
        """No step of the group so far follows."""

    def join(self, epoch: int, link: GroupLink) -> None:
        """Steps are those of this epoch, which is prepared, from now on. Raises UnpreparedError."""

    def after_step(self) -> None:
        """All ranks call it behind the same steps. Raises CollectiveBroken."""

    @property
    def balance(self) -> float:
        """The mean of the ranks' tokens over the highest, when they were last counted; 1 before."""

    @property
    def num_moved(self) -> int:
        """Experts that have come to this rank from others, for the sake of balance, in all layers."""

    @property
    def num_experts(self) -> int:
        """Of a layer: no group has more ranks."""

    @property
    def layout(self) -> str:
        """What must be the same on all ranks: how many experts each has room for, and how their weights lie in memory."""
