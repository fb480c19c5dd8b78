"""Which adapters are in slots of device memory. A state machine: steps and adapters in, which slot is to be written out."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """``max_loras`` slots, each with room for an update of ``max_rank`` of every layer."""

    max_loras: int
    max_rank: int


class DeviceSlots:
    """``count`` slots. An adapter that needs one takes a free slot, or that of the adapter whose steps are the longest ago."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count))
        self._slots: dict[bytes, int] = {}  # of the adapters in them, those first whose steps are the longest ago
        self._last: frozenset[bytes] = frozenset()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots

    def __getitem__(self, digest: bytes) -> int:
        return self._slots[digest]

    def offer(self, digest: bytes) -> int | None:
        """A slot for an adapter ahead of its first step: to be written. None where it has one already, and where all are those of
        the last step's adapters, whose next step is likely to come.
        """
        return None if digest in self._slots else self._take(digest, self._last)

    def begin_step(self, digests: Collection[bytes]) -> dict[bytes, int]:
        """A step has these adapters. Returns those whose slots are to be written before it, with their slots. ValueError for more
        adapters than there are slots; nothing has changed then.
        """
        wanted = frozenset(digests)
        if len(wanted) > self._count:
            raise ValueError(f"a step has {len(wanted)} adapters, and there are slots for {self._count}")
        fresh = {}
        for digest in dict.fromkeys(digests):
            if digest in self._slots:
                self._slots[digest] = self._slots.pop(digest)
                continue
            if (slot := self._take(digest, wanted)) is not None:  # there is one: others do not need all of them
                fresh[digest] = slot
        self._last = wanted
        return fresh

    def remove(self, digest: bytes) -> None:
        """An adapter is gone; one that has no slot is passed over."""
        if (slot := self._slots.pop(digest, None)) is not None:
            self._free.append(slot)

    def clear(self) -> None:
        """Nothing is in any slot."""
        for digest in list(self._slots):
            self.remove(digest)
        self._last = frozenset()

    def _take(self, digest: bytes, stay: Collection[bytes]) -> int | None:
        if not self._free:
            oldest = next((other for other in self._slots if other not in stay), None)
            if oldest is None:
                return None
            self.remove(oldest)
        slot = self._free.pop(0)
        self._slots[digest] = slot
        return slot
