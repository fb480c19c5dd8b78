"""Processed items by identifier: each made once, while it is kept here or some request has it."""

import asyncio
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from penstock_common.types.media import TensorData
from penstock_frontend.processing.media.item import ProcessedItem


class _Alive(NamedTuple):
    """An item as long as somebody has its tensors."""

    item: ProcessedItem
    """Without tensors."""
    tensors: dict[str, "weakref.ref[TensorData]"]

    def whole(self) -> ProcessedItem | None:
        """The item with its tensors; None when they are gone."""
        data = {name: found for name, tensor in self.tensors.items() if (found := tensor()) is not None}
        if len(data) < len(self.tensors):
            return None
        return _with_data(self.item, data)


class _Flight:
    """An item in the making, and how many wait for it."""

    __slots__ = ("task", "waiting")

    def __init__(self, task: "asyncio.Task[ProcessedItem]") -> None:
        self.task = task
        self.waiting = 0


class MediaStore:
    """The least recently used of what it keeps goes when that has more than ``max_bytes``.

    Requests pin items by their tensors: those of a request that lives are found, kept or not, and are not made a second time.
    On one event loop.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        on_lookup: Callable[[bool], None] = lambda _: None,
        on_size: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``on_lookup``: told whether an item was there, or in the making. ``on_size``: told of the bytes that are kept."""
        self._max_bytes = max_bytes
        self._on_lookup, self._on_size = on_lookup, on_size
        self._kept: OrderedDict[str, ProcessedItem] = OrderedDict()
        self._alive: dict[str, _Alive] = {}
        self._flights: dict[str, _Flight] = {}
        self.num_bytes = 0
        """Of what is kept, whoever else has it."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_alive(self) -> int:
        """Items that can be found: kept, or pinned by requests."""
        return len(self._alive)

    async def get(self, identifier: str, make: Callable[[], Awaitable[ProcessedItem]]) -> ProcessedItem:
        """The item, made by ``make`` where it is not there. All who ask meanwhile get what it makes, or what it raises; it is
        cancelled only when none of them waits any more.
        """
        flight = self._flights.get(identifier)
        found = self._find(identifier) if flight is None else None
        self._on_lookup(flight is not None or found is not None)
        if found is not None:
            return found
        if flight is None:
            flight = self._flights[identifier] = _Flight(asyncio.create_task(self._make(identifier, make)))
            flight.task.add_done_callback(_look_at)
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                flight.task.cancel()
                if self._flights.get(identifier) is flight:  # whoever comes now begins anew
                    del self._flights[identifier]

    def clear(self) -> None:
        """Forget all items; requests keep theirs."""
        self._kept.clear()
        self._alive.clear()
        self.num_bytes = 0
        self._on_size(0)

    async def _make(self, identifier: str, make: Callable[[], Awaitable[ProcessedItem]]) -> ProcessedItem:
        task = asyncio.current_task()
        try:
            item = await make()
        finally:
            if (flight := self._flights.get(identifier)) is not None and flight.task is task:
                del self._flights[identifier]
        self._keep(identifier, item)
        return item

    def _find(self, identifier: str) -> ProcessedItem | None:
        if (kept := self._kept.get(identifier)) is not None:
            self._kept.move_to_end(identifier)
            return kept
        if (alive := self._alive.get(identifier)) is None or (item := alive.whole()) is None:
            return None
        self._keep(identifier, item)
        return item

    def _keep(self, identifier: str, item: ProcessedItem) -> None:
        self._watch(identifier, item)
        if item.num_bytes > self._max_bytes:
            return
        if (old := self._kept.pop(identifier, None)) is not None:
            self.num_bytes -= old.num_bytes
        self._kept[identifier] = item
        self.num_bytes += item.num_bytes
        while self.num_bytes > self._max_bytes:
            _, gone = self._kept.popitem(last=False)
            self.num_bytes -= gone.num_bytes
        self._on_size(self.num_bytes)

    def _watch(self, identifier: str, item: ProcessedItem) -> None:
        def gone(tensor: "weakref.ref[TensorData]") -> None:
            now = self._alive.get(identifier)
            if now is not None and any(tensor is each for each in now.tensors.values()):
                del self._alive[identifier]

        tensors = {name: weakref.ref(tensor, gone) for name, tensor in item.data.items()}
        self._alive[identifier] = _Alive(_with_data(item, {}), tensors)


def _with_data(item: ProcessedItem, data: dict[str, TensorData]) -> ProcessedItem:
    return ProcessedItem(modality=item.modality, data=data, num_embeds=item.num_embeds, layout=item.layout)


def _look_at(task: "asyncio.Task[ProcessedItem]") -> None:
    """So that nobody is told of an error that nobody waited for."""
    if not task.cancelled():
        task.exception()
