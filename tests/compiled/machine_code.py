"""Machine instructions of a kernel, counted in the output of ``cuobjdump``."""

import re
from dataclasses import dataclass

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_TARGET = re.compile(r"0x([0-9a-f]+)")
_MATRIX = ("HGMMA", "HMMA")
"""Instructions of tensor cores."""
_PADDING = ("NOP",)
_WAIT, _ALLOW = "ACQBULK", "PREEXIT"
"""Instructions of dependent launch: wait until the previous kernel has ended, and allow the next kernel to start."""
_LOADS = ("LDG", "LDGSTS", "LD")
_STORES = ("STG", "ST", "RED", "REDG", "ATOM", "ATOMG")


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


@dataclass(frozen=True, slots=True)
class Before:
    """Instructions before the kernel waits for the previous kernel.

    Attributes:
        loads: Number of loads from memory of the device.
        faults: Broken rules of dependent launch, as text.
    """

    loads: int
    faults: tuple[str, ...]


def before_wait(text: str) -> Before:
    """Return the instructions before the wait of a kernel that is launched with PDL; ``text`` is its disassembly.

    A branch or an exit before the wait is a fault, because each program must wait.
    """
    names = [name.split(".")[0] for _, name, _ in _LINE.findall(text)]
    if names.count(_WAIT) != 1 or _ALLOW not in names:
        return Before(0, (f"has {names.count(_WAIT)} {_WAIT} and {names.count(_ALLOW)} {_ALLOW}",))
    first = names[: names.index(_WAIT)]
    wrong = {name for name in first if name in (*_STORES, _ALLOW, "BRA", "EXIT", "RET")}
    return Before(sum(name in _LOADS for name in first), tuple(f"has {name} before {_WAIT}" for name in sorted(wrong)))
