"""Speed of the kernels' matrix products relative to the processor's limits: ``python -m tests.benchmarks.roofline``.

A program with the same vectors and threads (``ceilings.cpp``) measures the machine's limits between the products: the
rates of reading and copying memory, and of products in registers. Time is the thread's processor time, and the fastest
round counts. Other load on the machine can only make a round slower, through caches and memory. Several threads share a
product dynamically and are timed by the clock, which needs an idle machine.
"""

import argparse
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from penstock_enginecore.native.library import NativeLibrary, open_library
from penstock_enginecore.native.weights import PackedWeight
from tests.sanitizers.__main__ import ENGINE, HOOK

SHAPES = ((4096, 768), (8192, 2048), (2048, 8192))
"""Numbers of outputs and inputs of the products."""
ROWS = (1, 4, 8, 16, 64, 1024)
DTYPES = (torch.float32, torch.bfloat16)
_SWEPT = 128 * 1024 * 1024
"""Bytes of weights per shape. Weights are used in turn, so that none is in a cache."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes and floating-point operations per second, in 1e9; a copied byte counts twice, as read and as written.
    ``pairs``: with pairs of bfloat16; 0 where there are no instructions for them.
    """

    read: float
    copy: float
    flops: float
    pairs: float

    @property
    def memory(self) -> float:
        """Return the higher one of the two memory rates."""
        return max(self.read, self.copy)

    def best(self, other: "Ceilings") -> "Ceilings":
        """Return the maximum of each rate over both measurements."""
        return Ceilings(*map(max, astuple(self), astuple(other)))


class Machine:
    """Compiles ``ceilings.cpp`` for an instruction set and measures."""

    def __init__(self, isa: str, threads: int, directory: Path) -> None:
        self._command = [str(directory / "ceilings"), str(threads)]
        flags = [flag for flag in HOOK._FLAGS if flag not in ("-fPIC", "-shared")]
        kinds = HOOK._X86 if isa in HOOK._X86 else HOOK._OTHER
        source = str(Path(__file__).with_name("ceilings.cpp"))
        subprocess.run(
            [HOOK._compiler(), *flags, *kinds[isa], f"-I{ENGINE / 'csrc'}", source, "-o", self._command[0]], check=True
        )

    def measure(self) -> Ceilings:
        """Run a new measurement and return the limits."""
        words = subprocess.run(self._command, check=True, capture_output=True, text=True).stdout.split()
        return Ceilings(*map(float, words))


@dataclass(frozen=True, slots=True)
class Case:
    """A product of ``[rows, k]`` by ``[n, k]``, and the dtype of its weight."""

    dtype: torch.dtype
    n: int
    k: int
    rows: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight."""
        return self.n * self.k * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Floating-point operations of one product."""
        return 2 * self.rows * self.n * self.k


def products(library: NativeLibrary) -> Iterator[tuple[Case, float]]:
    """Yield each case with the seconds of its fastest product. If the kernels may round inputs, only cases with
    rounding are measured.
    """
    clock = time.thread_time if library.num_threads == 1 else time.perf_counter
    for n, k in SHAPES:
        weight = torch.randn(n, k).bfloat16().float()
        for dtype in DTYPES if not library.parts else DTYPES[1:]:
            copies = -(-_SWEPT // (n * k * dtype.itemsize))
            half = dtype == torch.bfloat16
            packed = [PackedWeight(library, weight, half=half) for _ in range(copies)]
            for rows in ROWS:
                x, out = torch.randn(rows, k), torch.empty(rows, n)
                fastest = float("inf")
                for each in packed[: max(2, 64 // rows)]:
                    began = clock()
                    library.call("linear", each.pointer, x.data_ptr(), rows, k, out.data_ptr(), n)
                    fastest = min(fastest, clock() - began)
                yield Case(dtype, n, k, rows), fastest


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.roofline")
    parser.add_argument("--isa", default="auto", help="one of kernels.isa's; auto: the processor's best")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--rounded", action="store_true", help="inputs may be rounded to bfloat16, as by model.dtype's name"
    )
    options = parser.parse_args()
    library = open_library(options.isa, options.threads, rounded=options.rounded)
    taken: dict[Case, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        machine = Machine(library.isa, options.threads, Path(directory))
        ceilings = machine.measure()
        for _ in range(options.rounds):
            for case, seconds in products(library):
                taken[case] = min(seconds, taken.get(case, seconds))
            ceilings = ceilings.best(machine.measure())
    console = Console()
    console.print(
        f"{library.isa}, threads: {options.threads}; {ceilings.read:.1f} GB/s read, {ceilings.copy:.1f} GB/s copied, "
        f"{ceilings.flops:.0f} GFLOP/s" + (f", {ceilings.pairs:.0f} in pairs of bfloat16" if ceilings.pairs else "")
    )
    table = Table("weights", "outputs x inputs", "rows", "ms", "GB/s", "of memory", "GFLOP/s", "of products")
    most = ceilings.pairs if library.parts and ceilings.pairs else ceilings.flops
    for case, seconds in taken.items():
        read, flops = case.weight_bytes / seconds / 1e9, case.flops / seconds / 1e9
        table.add_row(
            str(case.dtype).removeprefix("torch."),
            f"{case.n} x {case.k}",
            str(case.rows),
            f"{1000 * seconds:.2f}",
            f"{read:.1f}",
            f"{read / ceilings.memory:.0%}",
            f"{flops:.0f}",
            f"{flops / most:.0%}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
