"""Outages of services under load: ``python -m tests.benchmarks.outages [coordinator|frontend|frozen|rolling]``, one of
them or all.

The processes are a coordinator, three engines and two frontends. The coordinator is killed for 30 seconds; a frontend
is killed; one is frozen; every service is restarted in turn (SIGTERM). Every output is compared with that of the same
request without faults.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from tests.benchmarks.kills import DEMO_MODEL, KV_CACHE_MEMORY
from tests.chaos import outages
from tests.chaos.outages import Known
from tests.chaos.summary import Summary, table
from tests.fakes.systems.cluster import Cluster

LEASE_SECONDS = 5
FROZEN_SECONDS = 15
"""Seconds for which a frontend is frozen. Its engines send it gRPC pings and wait."""
console = Console()


def say(name: str, summary: Summary) -> None:
    """Print the table and the problems of a summary."""
    console.print(table(name, {"Penstock": summary}))
    for line in (*(f"{count} x {error}" for error, count in summary.errors.items()), *summary.examples):
        console.print(line, markup=False)


async def coordinator(cluster: Cluster, known: Known, args: argparse.Namespace) -> tuple[int, object]:
    """Kill the coordinator for ``--seconds``."""
    summary, during = await outages.coordinator_away(
        cluster, known, streams=args.streams, seconds=args.seconds, log=console.log
    )
    say(f"coordinator killed for {args.seconds:.0f} s; {during} requests began meanwhile", summary)
    return summary.harmed, {"summary": msgspec.to_builtins(summary), "begun_meanwhile": during}


async def frontend(cluster: Cluster, known: Known, args: argparse.Namespace) -> tuple[int, object]:
    """Kill one of two frontends."""
    return await _without_frontend(cluster, known, args, freeze=False)


async def frozen(cluster: Cluster, known: Known, args: argparse.Namespace) -> tuple[int, object]:
    """Freeze one of two frontends."""
    return await _without_frontend(cluster, known, args, freeze=True)


async def _without_frontend(
    cluster: Cluster, known: Known, args: argparse.Namespace, *, freeze: bool
) -> tuple[int, object]:
    result = await outages.frontend_killed(cluster, known, streams=args.streams, log=console.log, freeze=freeze)
    what = "frozen" if freeze else "killed"
    say(
        f"a frontend {what}: the other one's streams; engines rid of its requests after {result.freed:.2f} s",
        result.others,
    )
    for error, count in result.broken.items():
        console.print(f"the {what} one's: {count} x {error}", markup=False)
    late = result.freed > (FROZEN_SECONDS if freeze else LEASE_SECONDS)
    return result.others.harmed + late, msgspec.to_builtins(result)


async def rolling(cluster: Cluster, known: Known, args: argparse.Namespace) -> tuple[int, object]:
    """Restart every service in turn."""
    summary, steps = await outages.rolling_restart(cluster, known, streams=args.streams, log=console.log)
    made = Table(title="rolling restart")
    for column in ("service", "stopped after s", "serves again after s", "requests ended meanwhile"):
        made.add_column(column, justify="left" if column == "service" else "right")
    for step in steps:
        made.add_row(step.service, f"{step.stopped:.1f}", f"{step.serves:.1f}", str(step.requests))
    console.print(made)
    say("all services restarted in turn", summary)
    return summary.harmed, {"summary": msgspec.to_builtins(summary), "steps": msgspec.to_builtins(steps)}


Part = Callable[[Cluster, Known, argparse.Namespace], Awaitable[tuple[int, object]]]
PARTS: dict[str, Part] = {"coordinator": coordinator, "frontend": frontend, "frozen": frozen, "rolling": rolling}


async def run(args: argparse.Namespace) -> tuple[int, dict[str, object]]:
    """Return the number of harmed requests, and the results by part."""
    results: dict[str, object] = {}
    harmed = 0
    async with Cluster(
        args.model,
        engines=args.engines,
        frontends=2,
        lease_seconds=LEASE_SECONDS,
        kv_cache_memory=KV_CACHE_MEMORY,
        drain_timeout=args.drain_timeout,
        frontend_flags={"server__max_connection_age": 5, "http__max_connection_age": 5},
    ) as cluster:
        known = await outages.prepare(cluster, streams=args.streams, tokens=args.tokens)
        for name in [args.part] if args.part else PARTS:
            console.log(f"{name}: {args.streams} streams")
            wrong, results[name] = await PARTS[name](cluster, known, args)
            harmed += wrong
        if args.logs:
            for service in cluster.services:
                console.print(service.module, service.log(), markup=False)
    return harmed, results


def main() -> int:
    """Print the tables. Returns 1 when a request was harmed."""
    parser = argparse.ArgumentParser(prog="outages", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", nargs="?", choices=PARTS, help="just this one")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="checkpoint to serve")
    parser.add_argument("--streams", type=int, default=32, help="requests at once")
    parser.add_argument("--tokens", type=int, default=400, help="output length, give or take a quarter")
    parser.add_argument("--engines", type=int, default=3, help="engines")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long the coordinator is away")
    parser.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        help="drain timeout of the engines in seconds; unfinished requests move to other engines",
    )
    parser.add_argument("--logs", action="store_true", help="print the services' logs at the end")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    harmed, results = asyncio.run(run(args))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))
    return 1 if harmed else 0


if __name__ == "__main__":
    sys.exit(main())
