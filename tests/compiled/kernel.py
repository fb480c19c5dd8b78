"""A Triton kernel compiled for a GPU that need not be present, and the resources of its machine code."""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.compiled.machine_code import Loop, before_wait, inner_loop

SM_80 = 80
"""Compute capability 8.0: A100."""
SM_90 = 90
"""Compute capability 9.0: H100 and H200."""
MAX_SHARED = 227 * 1024
"""Maximum bytes of shared memory of a program."""
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s", re.MULTILINE)
_PADDING = re.compile(r"\*/\s+NOP\b")
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel to compile.

    Attributes:
        arguments: Types of arguments by name (``*bf16``, ``*i32``, ``i32``, ``fp32``), or None for an omitted argument.
            Names that the kernel does not have are ignored.
        aligned: Arguments whose value or address is a multiple of 16, as the launcher guarantees.
        must_have: PTX instructions that the compiled kernel must contain.
        numbers: How many numbers a program reads, if the kernel has no loop, otherwise 0.
        capability: Compute capability, without the dot.
        elements: Elements of the weight that one thread converts in an iteration of the inner loop, or 0 if the kernel
            converts no weight.
        matrix: Instructions of tensor cores that multiply these elements.
        most: Largest number of instructions of the inner loop per element, or 0 for no limit.
        early: Largest number of load instructions before the kernel waits for the previous kernel. These loads read
            weights, positions and rotary tables.
    """

    name: str
    function: Any
    arguments: dict[str, str | None]
    constants: dict[str, Any]
    aligned: frozenset[str] = frozenset()
    warps: int = 4
    stages: int = 3
    must_have: tuple[str, ...] = ()
    numbers: int = 0
    capability: int = SM_90
    elements: int = 0
    matrix: int = 0
    most: float = 0.0
    early: int = 0

    def per_number(self, instructions: int) -> float | None:
        """Return how often a thread executes an instruction for each number that a program reads, or None for kernels
        with loops.

        Args:
            instructions: Instructions of the kernel. All branches count, so the result is an upper bound.
        """
        return instructions * 32 * self.warps / self.numbers if self.numbers else None


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of a compiled kernel.

    Attributes:
        registers: Registers per thread.
        shared: Bytes of shared memory per program.
        stack: Bytes of stack per thread, which spilled registers use.
        local: Bytes of local memory per thread.
        missing: Required instructions that the kernel lacks.
        instructions: Machine instructions (SASS) of the kernel, without padding.
        per_element: Instructions of the inner loop per element of the weight, or None if the kernel converts no weight.
        most: Largest number of these instructions, or 0 for no limit.
        rules: Broken rules of dependent launch, as text.
    """

    registers: int
    shared: int
    stack: int
    local: int
    missing: tuple[str, ...]
    instructions: int = 0
    per_element: float | None = None
    most: float = 0.0
    rules: tuple[str, ...] = ()

    @property
    def faults(self) -> list[str]:
        """Faults of the machine code, as text."""
        found = [f"has no {instruction}" for instruction in self.missing]
        found += self.rules
        if self.stack or self.local:
            found.append(f"spills: {self.stack} bytes of stack, {self.local} of local memory")
        if self.shared > MAX_SHARED:
            found.append(f"takes {self.shared} bytes of shared memory, more than {MAX_SHARED}")
        if self.most and (self.per_element is None or self.per_element > self.most):
            found.append(f"has {self.per_element} instructions per element, more than {self.most}")
        return found


def compile_kernel(kernel: Kernel) -> Usage:
    """Return the resources of ``kernel`` on its compute capability. If kernel and capability support dependent launch,
    the kernel is compiled for dependent launch. Raises RuntimeError if this process interprets kernels.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("kernels are interpreted in this process (TRITON_INTERPRET=1), and cannot be compiled")
    names = kernel.function.arg_names
    absent = {name: None for name, kind in kernel.arguments.items() if kind is None and name in names}
    constants = {**kernel.constants, **absent}
    pdl = "PDL" in names and kernel.capability >= SM_90
    if "PDL" in names:
        constants["PDL"] = pdl
    signature = {name: "constexpr" if name in constants else kernel.arguments[name] for name in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name in kernel.aligned and name not in constants
    }
    source = ASTSource(kernel.function, signature, constants, attributes)
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages, "launch_pdl": pdl}
    compiled = triton.compile(source, target=GPUTarget("cuda", kernel.capability, 32), options=options)
    text = compiled.asm["ptx"]
    missing = tuple(instruction for instruction in kernel.must_have if instruction not in text)
    told = _dumped(compiled.asm["cubin"])
    numbers = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", told)}
    instructions = len(_INSTRUCTION.findall(told)) - len(_PADDING.findall(told))
    return Usage(
        numbers["REG"],
        compiled.metadata.shared,
        numbers["STACK"],
        numbers["LOCAL"],
        missing,
        instructions,
        _per_element(kernel, inner_loop(told)) if kernel.elements else None,
        kernel.most,
        _broken_rules(kernel, text, told, pdl=pdl),
    )


def _broken_rules(kernel: Kernel, ptx: str, told: str, *, pdl: bool) -> tuple[str, ...]:
    """Return broken rules of dependent launch. A kernel without dependent launch must not have its instructions."""
    if not pdl:
        return ("has griddepcontrol",) if "griddepcontrol" in ptx else ()
    found = before_wait(told)
    more = (f"has {found.loads} loads before the wait, more than {kernel.early}",) if found.loads > kernel.early else ()
    return (*found.faults, *more)


def _per_element(kernel: Kernel, loop: Loop | None) -> float | None:
    """Return the instructions per element. The compiler may have unrolled the loop, which the number of instructions of
    tensor cores shows.
    """
    if loop is None:
        return None
    return round(loop.instructions * kernel.matrix / loop.matrix / kernel.elements, 2)


def _dumped(cubin: bytes) -> str:
    """Return the resources and the machine instructions of ``cubin``, as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return "".join(
            subprocess.run([_TOOLS / "cuobjdump", option, file.name], check=True, capture_output=True, text=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
