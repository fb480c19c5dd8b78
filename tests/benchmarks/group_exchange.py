"""Time of a data-parallel group's exchange and all-to-all: ``python -m tests.benchmarks.group_exchange``.

Ranks are processes of this machine. An exchange has a row of 64 bytes, and an all-to-all has the table's number of
bytes for each rank. Times are from rank 0's call to its return, including the wait for other ranks.
"""

import argparse
import multiprocessing
import time

import torch
from rich.console import Console
from rich.table import Table

from penstock_enginecore.parallel.group_collectives import SocketCollectives
from penstock_enginecore.parallel.meeting import Meeting
from penstock_enginecore.parallel.meeting_server import MeetingServer

_TIMEOUT_S = 60.0
_NUM_EXCHANGES, _NUM_ALL_TO_ALLS = 5000, 200


def _rank(address: str, rank: int, size: int, num_bytes: int, results: "multiprocessing.Queue[list[float]]") -> None:
    torch.set_num_threads(1)
    group = SocketCollectives("benchmark", rank, size)
    group.connect(Meeting(address), _TIMEOUT_S)
    row, tensor, counts = bytes(64), torch.zeros(num_bytes * size, dtype=torch.uint8), [num_bytes] * size
    seconds = []
    for _ in range(_NUM_ALL_TO_ALLS if num_bytes else _NUM_EXCHANGES):
        began = time.perf_counter()
        if num_bytes:
            group.all_to_all_rows(tensor, counts, counts)
        else:
            group.exchange(row)
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        results.put(sorted(seconds))
    group.exchange(row)
    group.close()


def measure(size: int, num_bytes: int) -> list[float]:
    """Return the seconds of each collective in ascending order. ``num_bytes`` 0 measures an exchange."""
    server = MeetingServer("127.0.0.1")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(server.address, rank, size, num_bytes, results)) for rank in range(size)
    ]
    for each in ranks:
        each.start()
    seconds: list[float] = results.get(timeout=_TIMEOUT_S)
    for each in ranks:
        each.join()
    server.close()
    return seconds


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.group_exchange")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    table = Table(title="microseconds")
    for column in ("ranks", "collective", "p50", "p99"):
        table.add_column(column, justify="right")
    for size in parser.parse_args().ranks:
        for num_bytes in (0, 64 * 1024, 2 * 1024 * 1024):
            seconds = measure(size, num_bytes)
            p50, p99 = (f"{seconds[int(len(seconds) * share)] * 1e6:,.0f}" for share in (0.5, 0.99))
            table.add_row(str(size), f"{num_bytes:,} bytes to each" if num_bytes else "exchange", p50, p99)
    Console().print(table)


if __name__ == "__main__":
    main()
