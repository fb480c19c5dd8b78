"""Disk for KV blocks, simulated in memory."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from penstock_common.types.kv_transfer import BlockName


class FakeDisk:
    """``BlockStore`` in memory. ``spoiled``: names of damaged blocks."""

    def __init__(self, num_slots: int, slots: dict[int, tuple[BlockName, bytes]] | None = None) -> None:
        self.num_slots = num_slots
        self.slots = slots or {}
        self.entries = [(slot, name) for slot, (name, _) in self.slots.items()]
        self.spoiled: set[BlockName] = set()
        self.fails = False
        self.closed = False

    def read(self, slots: Sequence[tuple[int, BlockName]]) -> Future:
        future: Future[Any] = Future()
        future.set_result([self._get(slot, name) for slot, name in slots])
        return future

    def _get(self, slot: int, name: BlockName) -> bytes | None:
        held, content = self.slots.get(slot, (None, b""))
        return None if held != name or name in self.spoiled else content

    def write(self, slot: int, name: BlockName, content: bytes) -> Future:
        future: Future[Any] = Future()
        if self.fails:
            future.set_exception(OSError("the fake disk is broken"))
        else:
            self.slots[slot] = name, bytes(content)
            future.set_result(None)
        return future

    def clear(self) -> None:
        self.slots.clear()

    def close(self) -> None:
        self.closed = True
