"""Which blocks are in slots of a fixed number, those used least recently first."""

from collections.abc import Callable, Iterable

from penstock_common.types.kv_transfer import BlockName

Told = Callable[[BlockName, bool], None]
"""Called with a block that can be found from now on (True), or no more."""


class SlotIndex:
    """A slot is free, holds a block that can be found, or was taken by somebody who fills it. ``entries``: what is there from
    before. ``told``: see ``Told``; of the entries as well.
    """

    def __init__(self, num_slots: int, told: Told, entries: Iterable[tuple[int, BlockName]] = ()) -> None:
        self.num_slots = num_slots
        self._told = told
        self._slots: dict[BlockName, int] = {name: slot for slot, name in entries}
        taken = set(self._slots.values())
        self._free = [slot for slot in range(num_slots - 1, -1, -1) if slot not in taken]
        for name in self._slots:
            told(name, True)

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
        if name is None:
            return None
        slot = self._slots.pop(name)
        self._told(name, False)
        return slot, name

    def put(self, name: BlockName, slot: int) -> None:
        """A slot that was taken holds this block now. Of two with the same the first stays."""
        if name in self._slots:
            self._free.append(slot)
        else:
            self._slots[name] = slot
            self._told(name, True)

    def give_back(self, slot: int) -> None:
        """A slot that was taken holds nothing."""
        self._free.append(slot)

    def remove(self, name: BlockName) -> None:
        """What is in the slot of a block is of no use. One that is not there is passed over."""
        if (slot := self._slots.pop(name, None)) is not None:
            self._free.append(slot)
            self._told(name, False)

    def clear(self) -> None:
        """No block can be found any more."""
        slots, self._slots = self._slots, {}
        self._free += slots.values()
        for name in slots:
            self._told(name, False)
