"""Engines killed under load: ``python -m tests.benchmarks.kills``.

The processes are a coordinator, three engines and a frontend. 64 streams of all shapes, each a row of requests, use
gRPC and HTTP. The first run has no faults. In the second run, one engine after the other is killed (SIGKILL) and
restarted. Every output of the second run is compared with that of the first: token ids, text, log-probabilities, finish
reason, usage. With ``--speculative METHOD`` the engines of the second run draft tokens, and those of the first run do
not.

``--peer DIR`` also kills the engine process of vLLM's gRPC server under 64 streams of the same model (``DIR/venv``: see
``tests.benchmarks.peers``).
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from tests.benchmarks import kills_peer
from tests.chaos.killing import Run, undisturbed, with_kills
from tests.chaos.requests import Request, long_ones
from tests.chaos.summary import Summary, paired, quantile, summarize, table
from tests.fakes.systems.cluster import Cluster

DEMO_MODEL = Path("examples/demo_model/penstock-tiny")
KV_CACHE_MEMORY = "512MiB"
console = Console()


def rows_of_requests(streams: int, rounds: int, tokens: int) -> list[list[Request]]:
    """Return ``rounds`` requests for each stream. All requests differ."""
    requests = long_ones(streams * rounds, tokens)
    return [requests[stream::streams] for stream in range(streams)]


async def measure(args: argparse.Namespace) -> tuple[Summary, Run, Run]:
    """Run the load without faults and then with kills. With speculation, the second run uses other engines."""
    load = rows_of_requests(args.streams, args.rounds, args.tokens)
    async with Cluster(args.model, engines=args.engines, kv_cache_memory=KV_CACHE_MEMORY) as cluster:
        await undisturbed(cluster, rows_of_requests(args.streams, 1, 40))  # warm up constraints and connections
        console.log(f"{args.streams} streams of {args.rounds} requests, undisturbed")
        calm = await undisturbed(cluster, load)
        if not args.speculative:
            killed = await _killed(cluster, load, calm, args)
    if args.speculative:
        flags = {"speculative__method": args.speculative}
        if args.speculative_model:
            flags["speculative__model"] = str(args.speculative_model)
        async with Cluster(args.model, engines=args.engines, kv_cache_memory=KV_CACHE_MEMORY, **flags) as cluster:
            await undisturbed(cluster, rows_of_requests(args.streams, 1, 40))
            killed = await _killed(cluster, load, calm, args)
    pairs = paired(load, calm.outcomes, killed.outcomes)
    return summarize(pairs, streams=len(load), finished=killed.finished), calm, killed


async def _killed(cluster: Cluster, load: list[list[Request]], calm: Run, args: argparse.Namespace) -> Run:
    console.log(f"{calm.num_tokens} tokens in {calm.seconds:.1f} s; now with {args.kills} kills")
    killed = await with_kills(cluster, load, calm, kills=args.kills, order=args.order, log=console.log)
    console.log(f"{killed.num_tokens} tokens in {killed.seconds:.1f} s")
    if args.logs:
        for service in cluster.services:
            console.print(service.module, service.log(), markup=False)
    return killed


def kills_table(killed: Run) -> Table:
    """Return a table of kills: time, running sequences, and their waits."""
    made = Table(title="kills")
    for column in ("engine", "at s", "sequences running", "back after s", "their wait s: p50", "most"):
        made.add_column(column, justify="left" if column == "engine" else "right")
    outcomes = [outcome for stream in killed.outcomes for outcome in stream]
    for kill in killed.kills:
        waits = kill.waits(outcomes)
        cells = (f"{kill.seconds_away:.1f}", f"{quantile(waits, 0.5):.2f}", f"{max(waits, default=0.0):.2f}")
        made.add_row(kill.engine, f"{kill.at:.1f}", str(kill.running), *cells)
    return made


def main() -> int:
    """Print the tables. Returns 1 when a request was harmed."""
    parser = argparse.ArgumentParser(prog="kills", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="checkpoint to serve")
    parser.add_argument("--streams", type=int, default=64, help="requests at once")
    parser.add_argument("--rounds", type=int, default=3, help="requests per stream, one after the other")
    parser.add_argument("--tokens", type=int, default=900, help="output length, give or take a quarter")
    parser.add_argument("--engines", type=int, default=3, help="number of engines; one at a time is killed")
    parser.add_argument("--kills", type=int, default=5, help="how often")
    parser.add_argument("--order", choices=("in turn", "random"), default="in turn", help="which engine is next")
    parser.add_argument("--speculative", default="", help="method by which the engines that are killed draft tokens")
    parser.add_argument("--speculative-model", type=Path, help="the draft model, or the head")
    parser.add_argument("--logs", action="store_true", help="print the services' logs at the end")
    parser.add_argument("--peer", type=Path, help="folder whose venv/ holds vLLM's CPU build")
    parser.add_argument("--only-peer", action="store_true", help="measure just that")
    parser.add_argument("--work", type=Path, default=Path("build/kills"), help="for the peer's log")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    results: dict[str, object] = {}
    harmed = 0
    if not args.only_peer:
        summary, calm, killed = asyncio.run(measure(args))
        console.print(kills_table(killed))
        console.print(table(f"{args.kills} kills under {args.streams} streams", {"Penstock": summary}))
        console.print(f"undisturbed {calm.seconds:.1f} s, with kills {killed.seconds:.1f} s")
        for line in (*(f"{count} x {error}" for error, count in summary.errors.items()), *summary.examples):
            console.print(line, markup=False)
        results |= {"penstock": msgspec.to_builtins(summary), "kills": msgspec.to_builtins(killed.kills)}
        harmed = summary.harmed
    if args.peer:
        peer = kills_peer.measure(
            args.peer.resolve(), args.model.resolve(), args.work, args.streams, args.tokens, console.log
        )
        console.print(kills_peer.table(peer))
        results["vllm"] = msgspec.to_builtins(peer)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))
    return 1 if harmed else 0


if __name__ == "__main__":
    sys.exit(main())
