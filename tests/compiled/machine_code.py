"""Machine instructions of a kernel's inner loop, counted in the output of ``cuobjdump``."""

import re
from dataclasses import dataclass

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_TARGET = re.compile(r"0x([0-9a-f]+)")
_MATRIX = ("HGMMA", "HMMA")
"""Instructions of tensor cores."""
_PADDING = ("NOP",)


@dataclass(frozen=True, slots=True)
class Loop:
    """Inner loop of a matrix product.

    Attributes:
        instructions: Number of instructions of one thread.
        matrix: Number of these that are instructions of tensor cores.
    """

    instructions: int
    matrix: int


def inner_loop(text: str) -> Loop | None:
    """Return the smallest loop in the disassembly ``text`` that has instructions of tensor cores, or None."""
    lines = [(int(at, 16), name, rest) for at, name, rest in _LINE.findall(text)]
    found = []
    for at, name, rest in lines:
        if name.split(".")[0] != "BRA" or not (target := _TARGET.search(rest)) or int(target[1], 16) > at:
            continue
        body = [op.split(".")[0] for place, op, _ in lines if int(target[1], 16) <= place <= at]
        loop = Loop(sum(op not in _PADDING for op in body), sum(op in _MATRIX for op in body))
        found += [loop] if loop.matrix else []
    return min(found, key=lambda loop: loop.instructions, default=None)
