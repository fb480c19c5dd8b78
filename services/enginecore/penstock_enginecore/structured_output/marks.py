"""What a process that follows grammars works on, for who looks after it has ended."""

import mmap
import struct

FAST, SLOW, BEGIN = LANES = range(3)
OVER = 3


class Marks:
    """Which number each lane works on, and whether a token took too much: readable when the process is gone."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def __getitem__(self, place: int) -> int:
        return int(struct.unpack_from("=q", self._memory, 8 * place)[0])

    def __setitem__(self, place: int, value: int) -> None:
        struct.pack_into("=q", self._memory, 8 * place, value)

    def suspects(self) -> list[int]:
        """The numbers that are worked on."""
        return [number for lane in LANES if (number := self[lane])]

    def clear(self) -> None:
        """Nothing is worked on."""
        for place in (*LANES, OVER):
            self[place] = 0
