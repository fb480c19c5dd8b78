"""Streams that move from a draining engine to another engine, with and without KV transfer.

Run ``python -m tests.benchmarks.kv_drains MODEL [--transports auto off] [--streams 24] [--context 1000]``. An engine
computes the context of all streams, a second engine starts, and the first engine gets SIGTERM. The benchmark prints
each stream's longest gap between two tokens after the signal, and the number of prompt tokens that the second engine
computed. The outputs of all transports are compared.

With ``--rolling N``, two engines drain in turn, N times, each time with new streams. Outputs are compared with the
outputs of an undisturbed engine.
"""

import argparse
import asyncio
import json
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.enginecore.v1 import messages_pb2 as engine_pb
from penstock.enginecore.v1 import service_pb2_grpc as engine_rpc
from penstock_common.rpc.channel import make_channel
from tests.benchmarks.token_streams import Stream, follow, prompt, quantile
from tests.fakes.processes import Service
from tests.fakes.systems.cluster import Cluster
from tests.fakes.systems.rank_group import metric


def cluster_of(args: argparse.Namespace, transport: str, engines: int) -> Cluster:
    """Return the cluster, not started."""
    return Cluster(
        args.model,
        engines=engines,
        kv_cache_memory=args.kv_cache_memory,
        lease_seconds=5,
        drain_timeout=args.drain_timeout,
        scheduler__max_num_batched_tokens=512,
        kv_transfer__transport=transport,
        kv_transfer__port=0,
    )


def begin(
    cluster: Cluster, args: argparse.Namespace, first: int = 0
) -> tuple[list[Stream], "asyncio.Task[list[Stream]]"]:
    """Start all streams. Returns the streams, which are updated while they run, and a task for their ends."""
    streams = [Stream() for _ in range(args.streams)]
    calls = [
        follow(cluster.stub, prompt(first + number, args.context), args.tokens, stream)
        for number, stream in enumerate(streams)
    ]
    return streams, asyncio.ensure_future(_all(calls))


async def _all(calls: Sequence[Any]) -> list[Stream]:
    return list(await asyncio.gather(*calls))


async def until_all_run(streams: Sequence[Stream], running: "asyncio.Task[list[Stream]]") -> None:
    """Wait until each stream has a few tokens. Raises RuntimeError if streams end first."""
    while min(len(stream.tokens) for stream in streams) < 3:
        if running.done():
            raise RuntimeError(f"ended before all ran at once: {[s.error for s in streams if not s.done]}")
        await asyncio.sleep(0.02)


def computed(engine: Service) -> float:
    """Return the number of prompt tokens that an engine has computed, including outputs of resumed requests."""
    found = metric(engine, "vllm:prefix_cache_queries_total") - metric(engine, "vllm:prefix_cache_hits_total")
    try:
        return found - metric(engine, "vllm:external_prefix_cache_hits_total")
    except StopIteration:  # the engine has not loaded blocks, so the metric has no series
        return found


async def load_of(engine: Service) -> int:
    """Return the number of an engine's requests."""
    async with make_channel(engine.address) as channel:
        info = await engine_rpc.EngineCoreServiceStub(channel).GetEngineInfo(engine_pb.GetEngineInfoRequest())
    return info.scheduler_stats.num_running_reqs + info.scheduler_stats.num_waiting_reqs


async def one_drain(args: argparse.Namespace, transport: str) -> tuple[dict[str, Any], list[Stream]]:
    """Drain an engine once. Returns the results and the streams."""
    cluster = cluster_of(args, transport, 2)
    first, second = cluster.engines
    async with cluster:
        await second.stop()
        await cluster.until_engines_are_seen(1)
        streams, running = begin(cluster, args)
        # Wait until all streams run on the first engine, before the second one starts.
        while (await load_of(first)) < len(streams):
            await asyncio.sleep(0.02)
        await second.restart()
        await cluster.until_engines_are_seen(2)
        await until_all_run(streams, running)
        before = sum(len(stream.tokens) for stream in streams)
        at = time.perf_counter()
        first.send_signal(signal.SIGTERM)
        await running
        gaps = [max(stream.gaps(at), default=0.0) for stream in streams]
        undisturbed = [gap for stream in streams for gap in stream.gaps(at - 2.0, at)]
        found = {
            "transport": transport,
            "failed": sum(not stream.done for stream in streams),
            "tokens_before": before,
            "longest_gap_p50": round(statistics.median(gaps), 3),
            "longest_gap_p99": round(quantile(gaps, 0.99), 3),
            "longest_gap_mean": round(statistics.mean(gaps), 3),
            "undisturbed_p50": round(quantile(undisturbed, 0.5), 4),
            "computed_per_stream": round(computed(second) / len(streams), 2),
            "moved": metric(cluster.frontend, "penstock:requests_moved_total"),
            "handed_over": metric(cluster.frontend, "penstock:handover_gap_seconds_count"),
        }
        await first.ended()
    return found, streams


def differing(streams: Sequence[Stream], expected: Sequence[Stream]) -> int:
    """Return the number of outputs that differ from the expected ones."""
    return sum(a.tokens != b.tokens for a, b in zip(streams, expected, strict=True))


async def drains(args: argparse.Namespace) -> bool:
    """Print a line per transport. Returns whether all outputs were complete and equal."""
    rows, outputs = [], []
    for transport in args.transports:
        row, streams = await one_drain(args, transport)
        rows.append(row)
        outputs.append(streams)
        print(json.dumps(row | {"differing": differing(streams, outputs[0])}), flush=True)
    by = {row["transport"]: row for row in rows}
    if "off" in by:
        for transport, row in by.items():
            if transport != "off":
                ratio = row["longest_gap_p99"] / by["off"]["longest_gap_p99"]
                print(f"{transport}: longest gap p99 {ratio:.3f} of that without transfer")
    return not any(row["failed"] for row in rows) and not any(differing(each, outputs[0]) for each in outputs)


async def rolling(args: argparse.Namespace) -> bool:
    """Drain two engines in turn."""
    transport = next(each for each in args.transports if each != "off")
    expected = []
    async with cluster_of(args, "off", 1) as alone:
        for number in range(args.rolling):
            expected.append(await begin(alone, args, 1000 * number)[1])
    failed = different = 0
    handed = 0.0
    async with cluster_of(args, transport, 2) as cluster:
        for number in range(args.rolling):
            engine = cluster.engines[number % 2]
            streams, running = begin(cluster, args, 1000 * number)
            await until_all_run(streams, running)
            engine.send_signal(signal.SIGTERM)
            await running
            failed += sum(not stream.done for stream in streams)
            different += differing(streams, expected[number])
            print(f"drain {number + 1}: {failed} failed, {different} differing so far", flush=True)
            await engine.ended()
            await engine.restart()
            await cluster.until_engines_are_seen(2)
        handed = metric(cluster.frontend, "penstock:handover_gap_seconds_count")
        moved = metric(cluster.frontend, "penstock:requests_moved_total")
    count = args.rolling * args.streams
    row = {"drains": args.rolling, "streams": count, "failed": failed, "differing": different}
    print(json.dumps(row | {"handed_over": handed, "moved": moved}), flush=True)
    return not failed and not different


def main() -> int:
    """Run the benchmark. Returns 1 if a stream failed or had different tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--transports", nargs="+", default=["auto", "off"])
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--context", type=int, default=1000, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=600, help="tokens of each output")
    parser.add_argument("--drain-timeout", type=float, default=10.0)
    parser.add_argument("--kv-cache-memory", default="1500MiB")
    parser.add_argument("--rolling", type=int, default=0, metavar="N")
    args = parser.parse_args()
    well = asyncio.run(rolling(args) if args.rolling else drains(args))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
