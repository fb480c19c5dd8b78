"""The rings between an engine and its workers: their shapes."""

from typing import NamedTuple

from penstock_enginecore.executor.multiproc.ring_memory import RingMemory


class Shape(NamedTuple):
    """Slots and their bytes. A message is read in one piece while it fits; a longer one passes through."""

    num_slots: int
    slot_bytes: int

    def create(self, num_readers: int) -> int:
        """A descriptor of a new ring."""
        return RingMemory.create(self.num_slots, self.slot_bytes, num_readers)


CALLS = Shape(64, 16 * 1024)
"""From the engine to its workers: a step of 64 requests takes one slot."""
ANSWERS = Shape(64, 4 * 1024)
"""From one worker to the engine."""
