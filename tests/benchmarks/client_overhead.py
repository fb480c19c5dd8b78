"""Cost per message of the example clients in each language: ``python -m tests.benchmarks.client_overhead
[LANGUAGE...]``.

Each client makes streaming calls, one after the other, to a public API without a model: once with few messages and once
with many. The cost of a message is the difference of the CPU times (user and system, all threads) divided by the
difference of the message counts. Startup and JIT compilation cancel out. Languages alternate over several rounds, and
results are medians.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import time

from tests.clients.languages import LANGUAGES
from tests.fakes.frontends.fake_inference import FakeInference

ROUNDS = 5
WORDS = 100
FEW, MANY = 20, 220
"""Number of calls in the small run and in the large run."""


async def main(wanted: list[str]) -> None:
    """Print a table."""
    commands = {
        language.name: language.command()
        for language in LANGUAGES
        if not language.missing and (not wanted or language.name in wanted)
    }
    server = FakeInference()
    await server.start()
    costs: dict[str, list[float]] = {name: [] for name in commands}
    starts: dict[str, list[float]] = {name: [] for name in commands}
    try:
        for _ in range(ROUNDS):
            for name, command in commands.items():
                few = await asyncio.to_thread(cpu_seconds, command, server.address, FEW)
                many = await asyncio.to_thread(cpu_seconds, command, server.address, MANY)
                costs[name].append((many - few) / ((MANY - FEW) * WORDS) * 1e6)
                begun = time.monotonic()
                await asyncio.to_thread(cpu_seconds, command, server.address, 1, "hello")
                starts[name].append(time.monotonic() - begun)
                server.requests.clear()
    finally:
        await server.stop()
    print("| language | CPU of a message, µs | lowest to highest | one call of one word, s |\n|---|---|---|---|")
    for name, values in sorted(costs.items(), key=lambda item: statistics.median(item[1])):
        told = f"{statistics.median(values):.0f} | {min(values):.0f} to {max(values):.0f}"
        print(f"| {name} | {told} | {statistics.median(starts[name]):.2f} |")


def cpu_seconds(command: list[str], address: str, calls: int, prompt: str = " ".join(["word"] * WORDS)) -> float:
    """Return the user and system time of a client that makes ``calls`` calls."""
    arguments = ["load", "--address", address, "--calls", str(calls), prompt]
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
