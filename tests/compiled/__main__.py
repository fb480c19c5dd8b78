"""Prints the resources of each tuned kernel configuration: ``make kernels-report``. ``--gate`` checks only common
kernels, and fails if a kernel has faults.
"""

import argparse
import sys
from collections.abc import Callable, Iterator

from tests.compiled import (
    adapters,
    attention,
    experts,
    invariant,
    latent,
    layers,
    logprobs,
    mixture,
    products,
    sampling,
    scaled,
    states,
)
from tests.compiled.kernel import Kernel, Usage, compile_kernel

ROOMS = (layers, attention, latent, products, experts, mixture, invariant, adapters, states, sampling, logprobs, scaled)
ALL: tuple[Callable[[], Iterator[Kernel]], ...] = tuple(room.kernels for room in ROOMS)
GATE: tuple[Callable[[], Iterator[Kernel]], ...] = tuple(room.gate for room in ROOMS)
"""Functions that yield kernels, one for each module of this folder. A new module must be added here."""

HEAD = """\
| kernel | warps | stages | registers | shared memory | spills | instructions | per number | fault |
|---|---|---|---|---|---|---|---|---|"""


def row(kernel: Kernel, usage: Usage) -> str:
    """Return a row of the table."""
    spills = usage.stack + usage.local
    cells: list[object] = [kernel.name, kernel.warps, kernel.stages, usage.registers, usage.shared, spills]
    per_number = kernel.per_number(usage.instructions)
    per_element = "" if usage.per_element is None else f"{usage.per_element:.2f}"
    cells += [usage.instructions, per_element if per_number is None else f"{per_number:.0f}"]
    return "| " + " | ".join(map(str, cells)) + f" | {'; '.join(usage.faults) or 'none'} |"


def main() -> int:
    """Print the table and return the number of kernels with faults."""
    parser = argparse.ArgumentParser(prog="python -m tests.compiled")
    parser.add_argument("--gate", action="store_true", help="a few configurations rather than all")
    faulty = 0
    print(HEAD)
    for kernels in GATE if parser.parse_args().gate else ALL:
        for kernel in kernels():
            usage = compile_kernel(kernel)
            faulty += bool(usage.faults)
            print(row(kernel, usage), flush=True)
    return faulty


if __name__ == "__main__":
    sys.exit(main())
