"""Which blocks are in slots of a fixed number, those used least recently first."""

from collections.abc import Iterable

from penstock_common.types.kv_transfer import BlockName


class SlotIndex:
    """A slot is free, holds a block that can be found, or was taken by somebody who fills it. ``entries``: what is there from
    before.
    """

    def __init__(self, num_slots: int, entries: Iterable[tuple[int, BlockName]] = ()) -> None:
        self.num_slots = num_slots
        self._slots: dict[BlockName, int] = {name: slot for slot, name in entries}
        taken = set(self._slots.values())
        self._free = [slot for slot in range(num_slots - 1, -1, -1) if slot not in taken]

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._slots)

    def __contains__(self, name: BlockName) -> bool:
        return name in self._slots

    @property
    def names(self) -> list[BlockName]:
        """Of the blocks that can be found, those used least recently first."""
        return list(self._slots)

    def get(self, name: BlockName) -> int | None:
        """The slot of a block."""
        return self._slots.get(name)

    def touch(self, name: BlockName) -> int:
        """A block is used: others go first. Returns its slot. KeyError for one that is not there."""
        slot = self._slots[name] = self._slots.pop(name)
        return slot

    def take(self) -> tuple[int, BlockName | None] | None:
        """A slot to fill, and the block that it held, which cannot be found any more. None when all are being filled."""
        if self._free:
            return self._free.pop(), None
        name = next(iter(self._slots), None)
        return None if name is None else (self._slots.pop(name), name)

    def put(self, name: BlockName, slot: int) -> None:
        """A slot that was taken holds this block now. Of two with the same the first stays."""
        if name in self._slots:
            self._free.append(slot)
        else:
            self._slots[name] = slot

    def give_back(self, slot: int) -> None:
        """A slot that was taken holds nothing."""
        self._free.append(slot)

    def remove(self, name: BlockName) -> None:
        """What is in the slot of a block is of no use. One that is not there is passed over."""
        if (slot := self._slots.pop(name, None)) is not None:
            self._free.append(slot)

    def clear(self) -> None:
        """No block can be found any more."""
        self._free += self._slots.values()
        self._slots.clear()
