"""Benchmarks of ``make bench``: the engine in this process, through its session and through the public API, compared
with transformers.

Parts of the engine are also measured alone. Alternatives are measured in turn over several rounds, and medians are
printed, because the speed of a machine drifts by tens of percent.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec
import tokenizers
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tests.benchmarks import growth, hop, load, neighbours, output_processing, sampling, scheduler_step, starts
from tests.benchmarks.engine_targets import InProcessEngine, SessionClient, cpu_engine
from tests.benchmarks.load import Load, Result, Stream
from tests.benchmarks.processes import engine, frontend
from tests.benchmarks.public_target import PublicClient
from tests.benchmarks.transformers_target import TransformersGenerate

SCHEDULER_ROWS = ((1, 0), (64, 0), (256, 0), (256, 10_000))
console = Console()


async def measure(args: argparse.Namespace, loads: list[Load]) -> dict[str, dict[int, list[Result]]]:
    """Results by target and number of streams, one per round."""
    results: dict[str, dict[int, list[Result]]] = defaultdict(lambda: defaultdict(list))
    async with contextlib.AsyncExitStack() as stack:
        reference = TransformersGenerate(args.model, args.threads)
        stack.callback(reference.close)
        in_process = await stack.enter_async_context(InProcessEngine(cpu_engine(args.model, args.threads)))
        private_engine = await stack.enter_async_context(engine(args.model, args.threads))
        public_engine = await stack.enter_async_context(engine(args.model, args.threads))
        public_frontend = await stack.enter_async_context(frontend(args.model, public_engine.address))
        for service in (private_engine, public_engine, public_frontend):
            await service.serving()
        session = await stack.enter_async_context(SessionClient(private_engine.address))
        public = await stack.enter_async_context(PublicClient(public_frontend.address))
        streams: dict[str, Stream] = {
            "in-process engine": in_process.stream,
            "session": session.stream,
            "public API": public.stream,
        }
        for number in range(args.rounds + 1):
            warm_up = number == 0
            for item in loads:
                say = "warming up" if warm_up else f"round {number} of {args.rounds}"
                console.log(f"{say}: {item.streams} streams, {item.requests} requests")
                for name, stream in streams.items():
                    prompts = load.prompts(item, in_process.vocab_size, seed=number * 1000 + item.streams)
                    results[name][item.streams].append(await load.run(stream, item, prompts))
                results["transformers"][item.streams].append(reference.run(item, seed=number))
    return {name: {n: rows[1:] for n, rows in by_streams.items()} for name, by_streams in results.items()}


def table(results: dict[str, dict[int, list[Result]]], loads: list[Load]) -> Table:
    """Medians, one row per number of streams and target."""
    made = Table(title=f"{loads[0].input_len} tokens in, {loads[0].output_len} out; medians")
    for column in ("streams", "target", "tokens/s", "TTFT ms", "ITL ms"):
        made.add_column(column, justify="left" if column == "target" else "right")
    for item in loads:
        for name, by_streams in results.items():
            row = load.median(by_streams[item.streams])
            made.add_row(str(item.streams), name, f"{row.tokens_per_s:.0f}", f"{row.ttft_ms:.1f}", f"{row.itl_ms:.2f}")
        made.add_section()
    return made


def scheduler_table(args: argparse.Namespace) -> tuple[Table, dict[str, float]]:
    """Scheduler and block manager, milliseconds per decode step."""
    made = Table(title="scheduler and block manager per decode step; median")
    for column in ("running", "waiting", "ms"):
        made.add_column(column, justify="right")
    numbers = {}
    for running, waiting in SCHEDULER_ROWS:
        milliseconds = scheduler_step.measure(running=running, waiting=waiting)
        numbers[f"{running}/{waiting}"] = milliseconds
        made.add_row(str(running), str(waiting), f"{milliseconds:.3f}")
    return made, numbers


def outputs_table(args: argparse.Namespace) -> tuple[Table, dict[str, float]]:
    """The frontend's output processing, microseconds per output."""
    made = Table(title="frontend's work per output of one token, 256 in a step; median")
    made.add_column("output")
    made.add_column("us", justify="right")
    tokenizer = tokenizers.Tokenizer.from_file(f"{args.model}/tokenizer.json")
    numbers = {}
    for name, detokenize in (("text", True), ("token ids", False)):
        for form, in_columns in (("columns", True), ("messages", False)):
            row = f"{name}, {form}"
            numbers[row] = output_processing.measure(tokenizer, detokenize=detokenize, in_columns=in_columns)
            made.add_row(row, f"{numbers[row]:.2f}")
    return made, numbers


def sampling_table(args: argparse.Namespace) -> tuple[Table, dict[str, dict[str, float]]]:
    """The sampler, milliseconds per step."""
    made = Table(title=f"sampler per step of {sampling.ROWS} rows, {sampling.VOCAB} tokens; median ms")
    made.add_column("feature")
    columns = [f"{kind}, {threads} thread{'s'[: threads - 1]}" for threads in (1, 2) for kind in sampling.DISTRIBUTIONS]
    for column in columns:
        made.add_column(column, justify="right")
    numbers = {}
    for (name, one), (_, two) in zip(sampling.measure(threads=1), list(sampling.measure(threads=2)), strict=True):
        numbers[name] = dict(zip(columns, (*one.values(), *two.values()), strict=True))
        made.add_row(name, *(f"{milliseconds:.1f}" for milliseconds in numbers[name].values()))
    return made, numbers


def schema_table(args: argparse.Namespace) -> tuple[Table, dict[str, float]]:
    """Return a table of the cost of constrained requests for their neighbours, in milliseconds per step."""
    made = Table(title=f"{neighbours.NEIGHBOURS} unconstrained requests and what runs beside them; median ms per step")
    for column in ("scheduling", "beside them", "ms"):
        made.add_column(column, justify="right" if column == "ms" else "left")
    numbers = {}
    for scheduling, name, milliseconds in neighbours.schemas(args.model, args.threads, args.rounds):
        numbers[f"{scheduling}: {name}"] = milliseconds
        made.add_row(scheduling, name, f"{milliseconds:.2f}")
    return made, numbers


def async_table(args: argparse.Namespace) -> tuple[Table, dict[int, tuple[float, float]]]:
    """Asynchronous against synchronous scheduling, tokens per second."""
    made = Table(title="tokens/s of the engine alone; medians")
    for column in ("streams", "synchronous", "asynchronous"):
        made.add_column(column, justify="right")
    numbers = {}
    streams = tuple(item.streams for item in loads_of(args))
    for count, synchronous, asynchronous in neighbours.scheduling(args.model, args.threads, args.rounds, streams):
        numbers[count] = synchronous, asynchronous
        made.add_row(str(count), f"{synchronous:.0f}", f"{asynchronous:.0f}")
    return made, numbers


def hop_table(args: argparse.Namespace) -> tuple[Table, list[object]]:
    """The way from an engine to a frontend: gRPC, outputs in columns and as messages, and ZeroMQ."""
    made = Table(title="outputs of one token from an engine's process to a frontend's; medians")
    columns = ("outputs per frame", "transport", "frames/s", "outputs/s", "round trip us", "engine us", "reader us")
    for column in columns:
        made.add_column(column, justify="left" if column == "transport" else "right")
    rows = asyncio.run(hop.measure(args.rounds))
    for row in rows:
        made.add_row(
            str(row.outputs_per_frame),
            row.transport,
            f"{row.frames_per_s:.0f}",
            f"{row.outputs_per_s:.0f}",
            f"{row.round_trip_us:.0f}",
            f"{row.engine_us:.2f}",
            f"{row.reader_us:.2f}",
        )
    return made, msgspec.to_builtins(rows)


def growth_tables(args: argparse.Namespace) -> tuple[Group, dict[str, object]]:
    """Steps by requests running and waiting, memory by requests served; writes the plots."""
    by_requests = Table(title="decode step, and the scheduler and block manager by themselves; median ms")
    for column in ("running", "waiting", "step", "scheduler"):
        by_requests.add_column(column, justify="right")
    steps = growth.steps(args.model, args.threads, args.rounds)
    for row in steps:
        by_requests.add_row(str(row.running), str(row.waiting), f"{row.step_ms:.2f}", f"{row.scheduler_ms:.3f}")
    served = Table(title="resident sets by requests served; MiB")
    for column in ("requests", "engine", "frontend"):
        served.add_column(column, justify="right")
    memory = asyncio.run(growth.memory(args.model, args.threads, args.requests, log=console.log))
    shown = memory[:: max(1, len(memory) // 10)]
    for sample in [*shown, *([] if shown[-1] is memory[-1] else memory[-1:])]:
        served.add_row(str(sample.requests), f"{sample.engine_mib:.1f}", f"{sample.frontend_mib:.1f}")
    paths = growth.plot(args.plots, steps, memory)
    written = Text("\n".join(f"plot: {path}" for path in paths), no_wrap=True, overflow="ignore")
    return Group(by_requests, served, written), {
        "steps": msgspec.to_builtins(steps),
        "memory": msgspec.to_builtins(memory),
        "plots": [str(path) for path in paths],
    }


def load_table(args: argparse.Namespace) -> tuple[Table, dict[str, object]]:
    """The targets under the load."""
    loads = loads_of(args)
    results = asyncio.run(measure(args, loads))
    medians = {name: {n: load.median(rows) for n, rows in by.items()} for name, by in results.items()}
    return table(results, loads), msgspec.to_builtins(medians)


def loads_of(args: argparse.Namespace) -> list[Load]:
    """One load per number of streams."""
    return [
        Load(streams=n, requests=max(4, n * 2), input_len=args.input_len, output_len=args.output_len)
        for n in map(int, args.streams.split(","))
    ]


def start_table(args: argparse.Namespace) -> tuple[Table, dict[str, float]]:
    """Seconds from ``penstock serve`` to the first token."""
    first, others = starts.first_tokens(args.model, args.rounds)
    numbers = {"first": first, "second": statistics.median(others)}
    made = Table(title="penstock serve to the first token; medians")
    made.add_column("start")
    made.add_column("s", justify="right")
    made.add_row("the first after an installation", f"{first:.1f}")
    made.add_row("again", f"{numbers['second']:.1f}")
    return made, numbers


def prefix_table(args: argparse.Namespace) -> tuple[Table, dict[str, float]]:
    """Time to first token with and without a cached prefix."""
    cold, cached = starts.prefix_hits(args.model, args.threads, args.rounds)
    made = Table(title=f"{starts.PREFIX_LEN + starts.SUFFIX_LEN} tokens in, through the public API; medians")
    for column in ("prompt", "TTFT ms", "share"):
        made.add_column(column, justify="left" if column == "prompt" else "right")
    made.add_row("new", f"{cold:.1f}", "")
    made.add_row(f"the first {starts.PREFIX_LEN} cached", f"{cached:.1f}", f"{cached / cold:.1%}")
    return made, {"cold_ms": cold, "cached_ms": cached}


PARTS: dict[str, tuple[str, Callable[[argparse.Namespace], tuple[RenderableType, object]]]] = {
    "scheduler": ("scheduler_ms", scheduler_table),
    "outputs": ("outputs_us", outputs_table),
    "hop": ("hop", hop_table),
    "sampling": ("sampling_ms", sampling_table),
    "schemas": ("schemas_ms", schema_table),
    "async": ("async_tokens_per_s", async_table),
    "growth": ("growth", growth_tables),
    "start": ("start_s", start_table),
    "prefix": ("prefix_ms", prefix_table),
    "load": ("load", load_table),
}
"""Measurements by their name for ``--only``: the key of the numbers in JSON, and the function that measures."""


def main() -> int:
    """Print the tables, and write them as JSON where ``--json`` says."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--model", default="examples/demo_model/penstock-tiny", help="checkpoint to measure with")
    parser.add_argument("--streams", default="1,16,64", help="numbers of concurrent streams")
    parser.add_argument("--input-len", type=int, default=64, help="prompt length in tokens")
    parser.add_argument("--output-len", type=int, default=64, help="output length in tokens")
    parser.add_argument("--rounds", type=int, default=3, help="rounds after the warm-up; medians are taken over them")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads that compute")
    parser.add_argument("--requests", type=int, default=20_000, help="requests while the services' memory is watched")
    parser.add_argument("--only", choices=list(PARTS), help="measure just this part")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--plots", type=Path, default=Path("build/bench"), help="folder for the plots")
    args = parser.parse_args()
    numbers: dict[str, object] = {}
    for name, (key, part) in PARTS.items():
        if args.only in (None, name):
            shown, numbers[key] = part(args)
            console.print(shown)
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
