"""Effect of long prompts on running streams: a prefill engine and a decode engine compared with two engines without
roles.

``python -m tests.benchmarks.interference MODEL`` keeps streams decoding while prompts arrive at random times. The times
are the same for all layouts. The arrival rate is a fraction of the rate at which one engine computes prompts. Each
engine has one thread. The layouts:

- ``split``: a prefill engine and a decode engine with KV transfer; the frontend chooses the engine of each prompt;
- ``two legs``: the same, but all prompts go to the prefill engine, even if many prompts are queued there;
- ``whole``: two engines that compute a prompt in one step;
- ``chunk N``: two engines with at most N prompt tokens in a step that also decodes.

All layouts are measured in turn at every load. ``--json FILE`` appends rows to a file. ``--report FILE`` only reads the
file and prints a table with the ratios to the better of the other layouts. ``--plot`` also draws the table.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tests.benchmarks.token_streams import Stream, follow, prompt, quantile
from tests.fakes.systems.cluster import Cluster
from tests.fakes.systems.rank_group import metric

SPLIT, TWO_LEGS = "split", "two legs"
ITL, TTFT, RATE = 0.35, 1.2, 0.85
"""Targets of ``split`` relative to the better of the other layouts: maximum ITL, maximum TTFT, minimum rate."""
PLANNED = 0.95
"""Minimum tokens per second of ``split``, including prompts, relative to the best other layout (also ``two legs``)."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one layout at one load. Times are in seconds.

    ``gaps`` are the times between tokens of the streams. ``itl_time_p99`` is the 99th percentile of the gap that
    contains a random moment.
    """

    layout: str
    load: float
    prompts: int
    rate: float
    """Mean number of arriving prompts per second."""
    itl_p50: float
    itl_p99: float
    itl_p999: float
    itl_max: float
    itl_time_p99: float
    ttft_p50: float
    ttft_p90: float
    tokens_per_s: float
    total_per_s: float = 0.0
    """Tokens per second including tokens of prompts whose first output token came in the interval; 0.0 if not measured.
    """
    two_legs: float = 0.0
    """Fraction of prompts that were computed on the prefill engine and continued on the decode engine."""


def cluster_of(layout: str, args: argparse.Namespace) -> Cluster:
    """Return the services of a layout, not started."""
    scheduler: dict[str, Any] = {}
    if layout == "whole":
        scheduler = {
            "scheduler__max_num_batched_tokens": 2 * args.tokens,
            "scheduler__max_prompt_batch_tokens": 0,
        }
    elif layout.startswith("chunk"):
        scheduler = {"scheduler__max_prompt_batch_tokens": 2 * int(layout.split()[1])}
    has_roles = layout in (SPLIT, TWO_LEGS)
    transfer = {"kv_transfer__transport": args.transport, "kv_transfer__port": 0} if has_roles else {}
    cluster = Cluster(
        args.model,
        engines=2,
        kv_cache_memory="1GiB",
        lease_seconds=5,
        frontend_flags={"disaggregation__overflow": "false"} if layout == TWO_LEGS else None,
        **scheduler,
        **transfer,
    )
    if has_roles:
        for engine, role in zip(cluster.engines, ("prefill", "decode"), strict=True):
            engine.add_flag("role", role)
    return cluster


class Load:
    """Streams with very short prompts that restart when they end, and long prompts that arrive meanwhile."""

    def __init__(self, cluster: Cluster, args: argparse.Namespace) -> None:
        self._stub = cluster.stub
        self._args = args
        self._number = 0
        self.streams: list[Stream] = []
        self.prompts: list[Stream] = []

    async def _stream(self) -> None:
        while True:
            stream = Stream()
            self.streams.append(stream)
            self._number += 1
            await follow(self._stub, prompt(1_000_000 + self._number, 2), self._args.stream_tokens, stream)
            if not stream.done:
                raise RuntimeError(f"a stream has failed: {stream.error}")

    async def one(self, number: int, max_tokens: int) -> Stream:
        """Send a prompt and read its output."""
        stream = await follow(self._stub, prompt(number, self._args.tokens), max_tokens, Stream())
        if not stream.done:
            raise RuntimeError(f"a prompt has failed: {stream.error}")
        return stream

    async def run(self, arrivals: list[float], first: int) -> tuple[float, float]:
        """Send prompts at these times in seconds. Returns the interval of ``--seconds`` in which they arrived."""
        streams = [asyncio.create_task(self._stream()) for _ in range(self._args.streams)]
        while sum(len(stream.tokens) > 10 for stream in self.streams) < self._args.streams:
            await asyncio.sleep(0.05)
            for task in streams:
                if task.done():
                    task.result()
        begin = time.perf_counter()
        asked = []
        for number, at in enumerate(arrivals):
            await asyncio.sleep(max(begin + at - time.perf_counter(), 0.0))
            asked.append(asyncio.create_task(self.one(first + number, self._args.output)))
        await asyncio.sleep(max(begin + self._args.seconds - time.perf_counter(), 0.0))
        end = time.perf_counter()
        self.prompts = list(await asyncio.gather(*asked))
        for task in streams:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        return begin, end


def arrivals_of(rate: float, seconds: float, seed: int) -> list[float]:
    """Return random arrival times of prompts in seconds, with independent gaps.

    The number of prompts follows the rate.
    """
    random_ = random.Random(seed)
    count = max(round(rate * seconds), 1)
    return sorted(random_.uniform(0.0, 0.97 * seconds) for _ in range(count))


def row_of(
    layout: str,
    load: float,
    rate: float,
    loaded: Load,
    begin: float,
    end: float,
    two_legs: float,
    tokens_of_prompt: int,
) -> Row:
    """Return the results of the interval."""
    gaps = [gap for stream in loaded.streams for gap in stream.gaps(begin, end)]
    tokens = sum(begin <= at < end for s in [*loaded.streams, *loaded.prompts] for at in s.times)
    first = [stream.ttft for stream in loaded.prompts]
    computed = tokens_of_prompt * sum(begin <= stream.times[0] < end for stream in loaded.prompts)
    return Row(
        layout=layout,
        load=load,
        prompts=len(first),
        rate=rate,
        itl_p50=quantile(gaps, 0.5),
        itl_p99=quantile(gaps, 0.99),
        itl_p999=quantile(gaps, 0.999),
        itl_max=max(gaps),
        itl_time_p99=over_time(gaps, 0.99),
        ttft_p50=statistics.median(first),
        ttft_p90=quantile(first, 0.9),
        tokens_per_s=tokens / (end - begin),
        total_per_s=(tokens + computed) / (end - begin),
        two_legs=two_legs / len(first),
    )


def over_time(gaps: Iterable[float], share: float) -> float:
    """Return the quantile ``share`` of the gap length at a random moment."""
    ordered = sorted(gaps)
    left = share * sum(ordered)
    for gap in ordered:
        left -= gap
        if left <= 0.0:
            return gap
    return 0.0


async def seconds_alone(args: argparse.Namespace) -> float:
    """Return the median of five TTFTs of a prompt on the idle prefill engine, in seconds."""
    async with cluster_of(SPLIT, args) as cluster:
        load = Load(cluster, args)
        found = [(await load.one(10_000_000 + number, 2)).ttft for number in range(6)][1:]
    return statistics.median(found)


async def measure(layout: str, load: float, alone: float, seed: int, args: argparse.Namespace) -> Row:
    """Measure one layout at one load, with newly started engines."""
    rate = load / alone
    async with cluster_of(layout, args) as cluster:
        loaded = Load(cluster, args)
        await asyncio.gather(*(loaded.one(20_000_000 + number, 4) for number in range(2)))
        planned = _two_legs(cluster) if layout in (SPLIT, TWO_LEGS) else 0.0
        begin, end = await loaded.run(arrivals_of(rate, args.seconds, seed), first=1000 * seed)
        legs = _two_legs(cluster) - planned if layout in (SPLIT, TWO_LEGS) else 0.0
    return row_of(layout, load, rate, loaded, begin, end, legs, args.tokens)


def _two_legs(cluster: Cluster) -> float:
    """Return the number of handed over requests."""
    return metric(cluster.frontend, "penstock:handover_gap_seconds_count")


def medians(rows: Iterable[Row]) -> dict[tuple[float, str], Row]:
    """Return the medians over the rounds of each layout at each load."""
    by: dict[tuple[float, str], list[Row]] = {}
    for row in rows:
        by.setdefault((row.load, row.layout), []).append(row)
    found = {}
    for key, same in sorted(by.items()):
        numbers = {
            name: statistics.median(getattr(row, name) for row in same)
            for name in Row.__struct_fields__
            if name not in ("layout", "prompts")
        }
        found[key] = Row(layout=key[1], prompts=sum(row.prompts for row in same), **numbers)
    return found


def report(rows: dict[tuple[float, str], Row]) -> None:
    """Print the table, with ratios to the best other layout."""
    waits_of = ("ITL p50", "p99", "p99.9", "most", "of time, p99", "TTFT p50", "p90")
    columns = ("load", "layout", "prompts", *waits_of, "tokens/s", "with prompts", "two legs")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for row in rows.values():
        waits = (row.itl_p50, row.itl_p99, row.itl_p999, row.itl_max, row.itl_time_p99, row.ttft_p50, row.ttft_p90)
        cells = " | ".join(f"{1000 * seconds:.0f} ms" for seconds in waits)
        legs = f"{row.two_legs:.0%}" if row.layout in (SPLIT, TWO_LEGS) else "-"
        rates = f"{row.tokens_per_s:.0f} | {row.total_per_s:.0f}"
        print(f"| {row.load:g} | {row.layout} | {row.prompts} | {cells} | {rates} | {legs} |")
    for load in sorted({load for load, _ in rows}):
        others = [row for (at, layout), row in rows.items() if at == load and layout not in (SPLIT, TWO_LEGS)]
        split = rows.get((load, SPLIT))
        if split is None or not others:
            continue
        ratios = {
            f"ITL p99 (at most {ITL})": split.itl_p99 / min(row.itl_p99 for row in others),
            "ITL p99 of time": split.itl_time_p99 / min(row.itl_time_p99 for row in others),
            f"TTFT p50 (at most {TTFT})": split.ttft_p50 / min(row.ttft_p50 for row in others),
            f"tokens/s (at least {RATE})": split.tokens_per_s / max(row.tokens_per_s for row in others),
            f"with prompts, of the best of all (at least {PLANNED})": split.total_per_s
            / max((row.total_per_s for (at, _), row in rows.items() if at == load and row.total_per_s), default=1.0),
        }
        print(f"load {load:g}: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))


def plot(path: Path, rows: dict[tuple[float, str], Row]) -> None:
    """Draw the layouts over the load."""
    figure = Figure(figsize=(11, 3.4), dpi=120, layout="constrained")
    places = figure.subplots(1, 4)
    for axes, title, name, scale in zip(
        places,
        ("ITL p99 (ms)", "ITL p99 over time (ms)", "TTFT p50 of prompts (s)", "tokens/s"),
        ("itl_p99", "itl_time_p99", "ttft_p50", "tokens_per_s"),
        (1000, 1000, 1, 1),
        strict=True,
    ):
        for layout in sorted({layout for _, layout in rows}, key=lambda each: (each != SPLIT, each)):
            loads = sorted(load for load, of in rows if of == layout)
            values = [scale * getattr(rows[load, layout], name) for load in loads]
            axes.plot(loads, values, marker="o", label=layout, linewidth=2.4 if layout == SPLIT else 1.2)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("prompts, of what an engine computes", fontsize=8)
        if scale == 1:
            axes.set_ylim(bottom=0)
        else:  # a logarithmic axis, from the time of a step to the time of a prompt
            axes.set_yscale("log")
    places[0].legend(fontsize=8)
    FigureCanvasAgg(figure)  # draws without a display
    figure.savefig(path)


async def run(args: argparse.Namespace) -> list[Row]:
    """Measure all layouts in turn at each load."""
    alone = args.alone or await seconds_alone(args)
    print(f"a prompt of {args.tokens} tokens alone: {alone:.2f} s", flush=True)
    rows = []
    for number in range(args.rounds):
        for load in args.loads:
            for layout in args.layouts:
                row = await measure(layout, load, alone, args.seed + number, args)
                print(json.dumps(msgspec.to_builtins(row)), flush=True)
                rows.append(row)
                if args.json:
                    with args.json.open("a") as file:
                        file.write(json.dumps(msgspec.to_builtins(row)) + "\n")
    return rows


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--stream-tokens", type=int, default=400, help="tokens of each output of a stream")
    parser.add_argument("--tokens", type=int, default=1024, help="of a prompt")
    parser.add_argument("--output", type=int, default=32, help="tokens that a prompt is answered with")
    parser.add_argument("--seconds", type=float, default=45.0, help="of a layout at a load")
    parser.add_argument(
        "--loads", type=float, nargs="+", default=[0.5], help="loads, as fractions of the rate of one prefill engine"
    )
    parser.add_argument("--layouts", nargs="+", default=[SPLIT, "whole", "chunk 64", "chunk 128", "chunk 256"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--alone", type=float, default=0.0, help="seconds of a prompt alone; 0 to measure it")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--json", type=Path, help="file that rows are added to")
    parser.add_argument("--report", type=Path, help="print the table of such a file, and measure nothing")
    parser.add_argument("--plot", type=Path, help="an image file to draw the layouts to")
    args = parser.parse_args()
    if args.report:
        rows = [msgspec.json.decode(line, type=Row) for line in args.report.read_text().splitlines()]
    elif args.model is None:
        parser.error("MODEL is needed where something is to be measured")
    else:
        rows = asyncio.run(run(args))
    found = medians(rows)
    report(found)
    if args.plot:
        plot(args.plot, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
