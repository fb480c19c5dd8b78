"""Time of an all-reduce over workers of one host: ``python -m tests.benchmarks.collectives``.

The benchmark compares shared memory with gloo. Each process has one thread. The two methods alternate over several
rounds, and results are medians.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from penstock_enginecore.parallel import collectives
from penstock_enginecore.parallel.collectives import Collectives, GlooCollectives, SharedMemoryCollectives
from penstock_enginecore.parallel.meeting import Meeting

WIDTH = 768
TOKENS = (1, 16, 256)
_WARM_UP, _CALLS = 50, 500


def _measure(kind: str, rank: int, size: int, store: int, memory: int, tokens: int, told: Any) -> None:
    torch.set_num_threads(1)
    group: Collectives = (
        GlooCollectives(Meeting(store), rank, size) if kind == "gloo" else SharedMemoryCollectives(memory, rank, size)
    )
    states, seconds = torch.ones(tokens, WIDTH), []
    for _ in range(_WARM_UP + _CALLS):
        states.fill_(1.0)
        began = time.perf_counter()
        group.all_reduce(states)
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        told.put(statistics.median(seconds[_WARM_UP:]))


def microseconds(kind: str, size: int, tokens: int) -> float:
    """Return the time of an all-reduce over ``size`` processes, measured by the first process."""
    context = multiprocessing.get_context("fork")
    told, store, memory = context.Queue(), os.memfd_create("store"), collectives.create(size)
    ranks = [
        context.Process(target=_measure, args=(kind, rank, size, store, memory, tokens, told)) for rank in range(size)
    ]
    for process in ranks:
        process.start()
    found: float = told.get() * 1e6
    for process in ranks:
        process.join()
    os.close(store)
    os.close(memory)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.collectives")
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    table = Table(title=f"sum of [tokens, {WIDTH}] float32, microseconds, medians of {rounds} rounds")
    for column in ("workers", "tokens", "gloo", "shm", "gloo / shm"):
        table.add_column(column, justify="right")
    for size in (2, 4):
        for tokens in TOKENS:
            found: dict[str, list[float]] = {"gloo": [], "shm": []}
            for _ in range(rounds):
                for kind, each in found.items():
                    each.append(microseconds(kind, size, tokens))
            gloo, shm = (statistics.median(each) for each in found.values())
            table.add_row(str(size), str(tokens), f"{gloo:.0f}", f"{shm:.0f}", f"{gloo / shm:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
