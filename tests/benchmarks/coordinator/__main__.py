"""Benchmarks of the coordinator with many engines and frontends, and of a frontend's choice among many engines.

    python -m tests.benchmarks.coordinator                # in simulation, then as streams on the loopback interface
    python -m tests.benchmarks.coordinator --only streams --engines 200 --frontends 20

Simulations have a simulated clock, and measure the processor time of only the coordinator's state and encoders. Streams
are real: the coordinator's core usage is that of its process, including gRPC.
"""

import argparse
import asyncio
import os

from penstock_common.config.sections import LogConfig
from penstock_common.observability.logging import configure
from tests.benchmarks.coordinator import streams
from tests.benchmarks.coordinator.pick import seconds_per_pick
from tests.benchmarks.coordinator.simulation import Simulation


def show(title: str, measured: dict[str, float]) -> None:
    """Print one line for each number."""
    print(title)
    for name, value in measured.items():
        print(f"  {name:24} {value:12.4g}", flush=True)


def main() -> None:
    """Print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["simulation", "streams", "pick"])
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--frontends", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds of each measurement")
    arguments = parser.parse_args()
    configure(LogConfig(level="warning"), service="benchmark")
    engines, frontends, seconds = arguments.engines, arguments.frontends, arguments.seconds
    print(f"{engines} engines, {frontends} frontends, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    if arguments.only in (None, "simulation"):
        show("simulation", Simulation(engines, frontends).run(seconds).as_dict())
        show("simulation, whole views", Simulation(engines, frontends, deltas=False).run(seconds).as_dict())
        show(
            "simulation, 4 times as many in 4 pools of one coordinator",
            Simulation(4 * engines, 4 * frontends, pools=4).run(seconds).as_dict(),
        )
    if arguments.only in (None, "pick"):
        show("pick, microseconds", {f"{n} engines": seconds_per_pick(n) * 1e6 for n in (64, engines, 4 * engines)})
    if arguments.only in (None, "streams"):
        show("streams", asyncio.run(streams.measure(engines, frontends, seconds)))


if __name__ == "__main__":
    main()
