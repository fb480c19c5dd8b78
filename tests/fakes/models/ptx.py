"""Interpreter of the few PTX instructions that convert quantized weights, on numpy arrays of registers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Registers = dict[str, np.ndarray]


def run(text: str, **inputs: np.ndarray) -> np.ndarray:
    """Run the instructions in ``text`` and return register ``$0`` as uint32.

    Args:
        text: Instructions that are separated by semicolons, in braces.
        inputs: Values of the other registers, as uint32. The argument ``r1`` is register ``$1``.

    Raises:
        KeyError: An instruction or a register is unknown.
    """
    registers = {name.replace("r", "$"): value.astype(np.uint32) for name, value in inputs.items()}
    for line in text.strip().removeprefix("{").removesuffix("}").split(";"):
        name, _, operands = line.strip().partition(" ")
        if name and name != ".reg":
            target, *sources = (operand.strip() for operand in operands.split(","))
            registers[target] = INSTRUCTIONS[name](*(_value(registers, source) for source in sources))
    return registers["$0"]


def _value(registers: Registers, operand: str) -> Any:
    return np.uint32(int(operand, 0)) if operand[0].isdigit() else registers[operand]


def _lop3(a: Any, b: Any, c: Any, table: Any) -> Any:
    result = np.zeros_like(np.broadcast_arrays(a, b, c)[0])
    for i in range(8):
        if int(table) >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result


def _lanes(compute: Callable[..., torch.Tensor], dtype: torch.dtype) -> Callable[..., Any]:
    """Return an instruction that computes both 16-bit lanes in float64, and rounds once."""

    def instruction(*sources: Any) -> Any:
        lanes = []
        for shift in (0, 16):
            values = [
                torch.from_numpy(np.atleast_1d(np.asarray(source, np.uint32) >> shift & 0xFFFF).astype(np.int32))
                .to(torch.int16).view(dtype).double()
                for source in sources
            ]  # fmt: skip
            bits = compute(*values).to(dtype).view(torch.int16).numpy().view(np.uint16)
            lanes.append(bits.astype(np.uint32))
        return lanes[0] | lanes[1] << 16

    return instruction


INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "lop3.b32": _lop3,
    "fma.rn.bf16x2": _lanes(lambda a, b, c: a * b + c, torch.bfloat16),
    "mul.rn.f16x2": _lanes(lambda a, b: a * b, torch.float16),
    "sub.rn.f16x2": _lanes(lambda a, b: a - b, torch.float16),
}
