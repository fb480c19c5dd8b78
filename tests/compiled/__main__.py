"""Table of the resources of each tuned kernel configuration: ``make kernels-report``. ``--gate`` checks the common ones
and fails on faults.
"""

import argparse
import sys
from collections.abc import Callable, Iterator

from tests.compiled import adapters, attention, experts, invariant, latent, products
from tests.compiled.kernel import Kernel, Usage, compile_kernel

ROOMS = (attention, latent, products, experts, invariant, adapters)
ALL: tuple[Callable[[], Iterator[Kernel]], ...] = tuple(room.kernels for room in ROOMS)
GATE: tuple[Callable[[], Iterator[Kernel]], ...] = tuple(room.gate for room in ROOMS)
"""Kernels of a file of this folder; another file adds its own to both."""

HEAD = "| kernel | warps | stages | registers | shared memory | spills | fault |\n|---|---|---|---|---|---|---|"


def row(kernel: Kernel, usage: Usage) -> str:
    """A line of the table."""
    cells = (kernel.name, kernel.warps, kernel.stages, usage.registers, usage.shared, usage.stack + usage.local)
    return "| " + " | ".join(map(str, cells)) + f" | {'; '.join(usage.faults) or 'none'} |"


def main() -> int:
    """The number of kernels that have a fault."""
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
