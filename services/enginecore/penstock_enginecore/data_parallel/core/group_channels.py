"""Connections of a rank to its group: one link for each epoch (membership of the group), and the events that links
report.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from penstock_common.types.data_parallel import RankGroup, Reconfigure, StartDpWave
from penstock_enginecore.core.collective_errors import CollectiveBroken, UnpreparedError

# Events for a rank's driver, which gets them in order through the engine's input queue.


class Connected(msgspec.Struct, frozen=True):
    """Event: the ranks of an epoch's group have connected to each other."""

    epoch: int


class Gathered(msgspec.Struct, frozen=True):
    """Event: an exchange of an epoch has ended."""

    epoch: int
    rows: list[bytes]
    """Row of each member of the group, in the order of ranks."""
    seconds: float = 0.0
    """Duration of the exchange in seconds, from the time at which this rank entered the exchange."""


class Broke(msgspec.Struct, frozen=True):
    """Event: a group could not connect, or one of its collectives failed. This is the last event of the epoch."""

    epoch: int
    why: str
    unprepared: bool = False
    """Whether the group broke because this rank cannot join it."""


class Named(msgspec.Struct, frozen=True):
    """Event: the coordinator has announced a group. ``meetings`` has the address of each rank's rendezvous store."""

    message: Reconfigure
    meetings: Mapping[str, str]


class Refused(msgspec.Struct, frozen=True):
    """Event: the engine refused a request before the request reached the busy loop. The request had this epoch and
    wave.
    """

    epoch: int
    wave: int


GroupEvent = Connected | Gathered | Broke | Named | Refused | StartDpWave


# Link to the ranks of one epoch's group, and the thread that waits for these ranks.


class GroupLink(Protocol):
    """A connection between the ranks of one epoch's group. Only one thread at a time may call the methods, except for
    ``abort``.
    """

    collectives: Any
    """Collective operations for tensors within steps. These operations never run at the same time as an exchange."""

    def connect(self) -> None:
        """Wait until all ranks have connected. Raises an error if a rank does not connect, or after ``abort``."""

    def exchange(self, row: bytes) -> list[bytes]:
        """Send this rank's row, and return the rows of all ranks, in the order of ranks. All rows have the same length.
        Raises an error if a rank is lost, or after ``abort``.
        """

    def abort(self) -> None:
        """Make all waiting calls fail, on this rank and on other ranks, without blocking. Thread-safe."""

    def close(self) -> None:
        """Free the resources of the link. No call may be in progress."""


Prepare = Callable[[int, GroupLink, Callable[[], bool]], None]
"""Function that is called on all ranks of an epoch, once they have connected. The last argument is a function that
returns whether the group was given up in the meantime. Raises UnpreparedError if this rank cannot join the group.
"""


def prepare_nothing(epoch: int, link: GroupLink, given_up: Callable[[], bool]) -> None:
    """Do nothing. Used if ranks need no preparation after they have connected."""


class LinkThread:
    """Runs a link's blocking calls on a separate thread and reports the results, so that the engine can process other
    input.

    The thread calls ``post`` first with ``Connected``, then with ``Gathered`` for each exchange. If a call fails, the
    last event is ``Broke``.
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
        """Number of calls (connection attempts and exchanges) that have begun, and number of calls that have ended. The
        link's thread updates the second number.
        """
        self._thread = threading.Thread(target=self._run, name=f"group-{epoch}", daemon=True)
        self._thread.start()

    def exchange(self, row: bytes) -> None:
        """Enter an exchange. The exchange starts when all exchanges that were entered before have ended."""
        self._begun += 1
        self._rows.put(row)

    def abort(self) -> None:
        """Make all calls of the link that are in progress fail. Thread-safe."""
        self._given_up.set()
        self.link.abort()

    def close(self) -> None:
        """Make all calls of the link that are in progress fail, and end the thread. If no call is in progress, the link
        is not aborted, because other ranks may still be completing the last exchange.
        """
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
        # Report every error as an event, because the coordinator decides how the group continues.
        except Exception as e:
            self._post(Broke(self.epoch, f"{type(e).__name__}: {e}"))
        finally:
            self.link.close()


logger = logging.getLogger(__name__)

MakeLink = Callable[[RankGroup, Mapping[str, str]], GroupLink]
"""Function that creates the link of a group that includes this rank. The mapping has the address of each rank's
rendezvous store.
"""


class Meets(Protocol):
    """Creates links between a rank and the other ranks of a group."""

    meeting_address: str
    """The host:port of this rank's rendezvous store. A group connects through the rendezvous store of its first rank."""
    lease: float
    """Time in seconds after which a rank that sends nothing counts as dead. The coordinator uses the same value. Links
    use the value that is set when they are created. 0 if the value is unknown.
    """

    def make(self, group: RankGroup, meetings: Mapping[str, str]) -> GroupLink:
        """Create the link of a group, see ``MakeLink``."""


class Links:
    """The links of a rank, one for each epoch. A link stays open until a later epoch has begun."""

    def __init__(self, make: MakeLink, post: Callable[[GroupEvent], None], prepare: Prepare = prepare_nothing) -> None:
        """Create an object without links. The threads of the links call ``post`` with each event."""
        self.post = post
        self._make = make
        self._prepare = prepare
        self._lock = threading.Lock()
        self._threads: dict[int, LinkThread] = {}

    def open(self, group: RankGroup, meetings: Mapping[str, str]) -> None:
        """Begin to connect to the ranks of a group, unless a link of this epoch already exists."""
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
        """Enter an exchange with the group of an epoch. If the link of this epoch could not be created, do nothing,
        because the failure was already reported.
        """
        if (thread := self._threads.get(epoch)) is not None:
            thread.exchange(row)

    def link(self, epoch: int) -> GroupLink:
        """Return the link of an epoch. The link must exist."""
        return self._threads[epoch].link

    def give_up_before(self, epoch: int) -> None:
        """Abort the collectives of all epochs before this epoch, as if another rank were lost. Thread-safe."""
        with self._lock:
            threads = [thread for number, thread in self._threads.items() if number < epoch]
        for thread in threads:
            thread.abort()

    def close_before(self, epoch: int) -> None:
        """Close the links of all epochs before this epoch. These links must not be in use any more."""
        with self._lock:
            old = [self._threads.pop(number) for number in list(self._threads) if number < epoch]
        for thread in old:
            thread.close()

    def close(self) -> None:
        """Close the links to all groups. Idempotent."""
        with self._lock:
            threads = list(self._threads.values())
            self._threads.clear()
        for thread in threads:
            thread.close()


# The driver's interface to experts that are distributed over the ranks of a group.


class SharedExperts(Protocol):
    """The experts of a rank, across changes of its group. The thread of a link calls ``prepare``. Only the busy loop's
    thread calls the other methods.

    If a step fails on this rank alone, ``EngineCore.step_together`` raises CollectiveBroken, because other ranks wait
    for this rank's results.
    """

    def prepare(self, epoch: int, link: GroupLink, given_up: Callable[[], bool]) -> None:
        """Distribute the experts of an epoch. All ranks of the epoch call this method once they have connected.

        The ranks agree on the placement of experts, and each rank gets the experts that it does not have yet.
        Meanwhile, a serving group continues with its current experts. Raises UnpreparedError if this rank cannot join
        the epoch's group. Raises CollectiveBroken if a rank is lost, or soon after ``given_up`` returns True.
        """

    def leave(self) -> None:
        """Stop using the current group. The group computes no more steps."""

    def join(self, epoch: int, link: GroupLink) -> None:
        """Use the group of this epoch for later steps. The epoch must be prepared. Raises UnpreparedError if the switch
        to the group fails.
        """

    def after_step(self) -> None:
        """Run the load balancer of the experts. All ranks call this method after the same steps. Raises
        CollectiveBroken.
        """

    @property
    def balance(self) -> float:
        """Mean number of tokens per rank divided by the highest number of a rank, in the last window of steps. 1 before
        the end of the first window.
        """

    @property
    def num_moved(self) -> int:
        """Number of experts that this rank has received from other ranks for load balance, summed over all layers."""

    @property
    def num_experts(self) -> int:
        """Number of experts per layer, which is the maximum number of ranks."""

    @property
    def layout(self) -> str:
        """Description of properties that must be equal on all ranks: expert slots per rank, and memory layout of
        weights.
        """
