"""Copier for blocks of the fake executor, whose content is known. Copies are made as late as allowed, or on request."""

import queue
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from penstock_enginecore.kv_transfer.core.base import Copy
from tests.fakes.engines.fake_states import GARBAGE, FakeStates

BLOCK_BYTES = 64
STATE_BYTES = 100
Content = tuple
"""Content of the slots of a block, in order. None for slots that were not computed."""


class AwaitedFuture(Future):
    """Future of a copy. A wait for it makes all copies up to this one, and then its result."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._work = work

    def result(self, timeout: float | None = None) -> Any:
        self._work()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> Any:
        self._work()
        return super().exception(timeout)


class NewsOfCopies:
    """Queue of a connector's events. A fake copier has no thread, so a wait for the next event makes copies."""

    def __init__(self, copy: Callable[[], bool]) -> None:
        """Create the queue. ``copy`` makes all requested copies, and returns whether there was one."""
        self._copy = copy
        self._events: deque[Callable[[], None]] = deque()

    def put(self, event: Callable[[], None]) -> None:
        self._events.append(event)

    def empty(self) -> bool:
        return not self._events

    def get(self, timeout: float | None = None) -> Callable[[], None]:
        while not self._events:
            if not self._copy():
                assert timeout is not None, "the connector waits for an event, but no copy is in progress"
                raise queue.Empty
        return self._events.popleft()


class FakeCopier:
    """``BlockCopier`` for ``kv``, the fake executor's content by slot of a token.

    Requested copies read their sources and write their targets only in ``work``. Until then the targets have wrong
    content. ``fails``: returns, for the name of a call, whether the call fails.
    """

    block_bytes = BLOCK_BYTES
    order = "fake"
    numerics = "fake"

    def __init__(self, kv: dict[int, Any], block_size: int, run_steps: Callable[[], None]) -> None:
        """Create the copier. ``run_steps``: lets the device run the steps that it was given."""
        self._kv = kv
        self._block_size = block_size
        self._run_steps = run_steps
        self.at_once = False
        self.host: dict[int, Content] = {}
        self.num_slots = 0
        self.damaged: set[int] = set()
        """Slots of host memory whose checksum does not match, until they are written again."""
        self.fails: Callable[[str], bool] = lambda name: False
        self.num_copied: dict[str, int] = {}
        self._queued: deque[tuple[str, Callable[[], Any], Future]] = deque()

    def __len__(self) -> int:
        """Return the number of calls in progress."""
        return len(self._queued)

    def work(self, count: int | None = None) -> bool:
        """Execute the oldest ``count`` calls, or all calls if None. Returns whether there was a call."""
        any_done = False
        while self._queued and (count is None or count > 0):
            self._run_steps()
            name, call, future = self._queued.popleft()
            if self.fails(name):
                future.set_exception(OSError("the fake copier cannot do this"))
            else:
                future.set_result(call())
            any_done = True
            count = None if count is None else count - 1
        return any_done

    def _ask(self, name: str, call: Callable[[], Any], number: int) -> Future:
        future = AwaitedFuture(lambda: self._work_to(future))
        self.num_copied[name] = self.num_copied.get(name, 0) + number
        self._queued.append((name, call, future))
        if self.at_once:
            self.work()
        return future

    def _work_to(self, future: Future) -> None:
        while any(queued is future for _, _, queued in self._queued):
            self.work(1)

    def _content(self, block_id: int) -> Content:
        start = block_id * self._block_size
        return tuple(self._kv.get(slot) for slot in range(start, start + self._block_size))

    def _set(self, block_id: int, content: Content) -> None:
        start = block_id * self._block_size
        for slot, value in zip(range(start, start + self._block_size), content, strict=True):
            self._kv[slot] = value

    def _begin_writing(self, block_ids: Sequence[int]) -> None:
        """Make the content of blocks wrong until the copy is made. A copy begins after the steps before it."""
        self._run_steps()
        for block_id in block_ids:
            self._spoil(block_id)

    def _spoil(self, block_id: int) -> None:
        self._set(block_id, ("being written",) * self._block_size)

    def reserve(self, num_slots: int) -> "Future[None]":
        self.num_slots = num_slots
        reserved: Future[None] = Future()
        if self.fails("reserve"):
            reserved.set_exception(MemoryError("the fake host is full"))
        else:
            reserved.set_result(None)
        return reserved

    def save(self, copies: Sequence[Copy]) -> "Future[None]":
        def save() -> None:
            for block_id, slot in copies:
                assert 0 <= slot < self.num_slots
                self.host[slot] = self._content(block_id)
                self.damaged.discard(slot)

        return self._ask("save", save, len(copies))

    def load(self, copies: Sequence[Copy]) -> "Future[list[int]]":
        self._begin_writing([copy.block_id for copy in copies])

        def load() -> list[int]:
            good = [copy for copy in copies if copy.slot not in self.damaged]
            for block_id, slot in good:
                self._set(block_id, self.host[slot])
            return [copy.slot for copy in copies if copy not in good]

        return self._ask("load", load, len(copies))

    def read(self, block_ids: Sequence[int]) -> "Future[list[bytes]]":
        return self._ask("read", lambda: [repr(self._content(b)).encode() for b in block_ids], len(block_ids))

    def write(self, block_ids: Sequence[int], contents: Sequence[bytes]) -> "Future[None]":
        self._begin_writing(block_ids)

        def write() -> None:
            for block_id, content in zip(block_ids, contents, strict=True):
                self._set(block_id, eval(bytes(content).decode()))

        return self._ask("write", write, len(block_ids))

    def read_slots(self, slots: Sequence[int]) -> "Future[list[bytes | None]]":
        def read() -> list[bytes | None]:
            return [None if slot in self.damaged else repr(self.host[slot]).encode() for slot in slots]

        return self._ask("read_slots", read, len(slots))

    def write_slots(self, slots: Sequence[int], contents: Sequence[bytes]) -> "Future[None]":
        def write() -> None:
            for slot, content in zip(slots, contents, strict=True):
                self.host[slot] = eval(bytes(content).decode())

        return self._ask("write_slots", write, len(slots))


class FakeStateCopier(FakeCopier):
    """``BlockCopier`` for the slots of fake states."""

    block_bytes = STATE_BYTES

    def __init__(self, states: Callable[[], FakeStates], run_steps: Callable[[], None]) -> None:
        """Create the copier. ``states`` returns the allocated states."""
        super().__init__({}, 1, run_steps)
        self._states = states

    def _content(self, block_id: int) -> Content:
        return self._states().content(block_id)

    def _set(self, block_id: int, content: Content) -> None:
        self._states().set_content(block_id, content)

    def _spoil(self, block_id: int) -> None:
        self._states().set_content(block_id, GARBAGE)
