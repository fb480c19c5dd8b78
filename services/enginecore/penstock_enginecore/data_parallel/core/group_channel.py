"""What connects a rank with the others of one epoch, and the thread that waits for them."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from penstock_enginecore.core.collective_errors import UnpreparedError
from penstock_enginecore.data_parallel.core.events import Broke, Connected, Gathered, GroupEvent


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
