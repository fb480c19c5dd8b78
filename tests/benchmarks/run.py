"""``make bench``: the engine in this process, through its session, through the public API, and transformers beside them.

All are measured in turn, several rounds, and the medians are printed: machines drift by tens of percent.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections import defaultdict
from pathlib import Path

import msgspec
import tokenizers
from rich.console import Console
from rich.table import Table

from tests.benchmarks import load, neighbours, output_processing, sampling, scheduler_step
from tests.benchmarks.engine_targets import InProcessEngine, SessionClient
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
        in_process = await stack.enter_async_context(InProcessEngine(args.model, args.threads))
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


def scheduler_table() -> tuple[Table, dict[str, float]]:
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


def outputs_table(model: str) -> tuple[Table, dict[str, float]]:
    """The frontend's output processing, microseconds per output."""
    made = Table(title="frontend's work per output of one token, 256 in a step; median")
    made.add_column("output")
    made.add_column("us", justify="right")
    tokenizer = tokenizers.Tokenizer.from_file(f"{model}/tokenizer.json")
    numbers = {}
    for name, detokenize in (("text", True), ("token ids", False)):
        numbers[name] = output_processing.measure(tokenizer, detokenize=detokenize)
        made.add_row(name, f"{numbers[name]:.2f}")
    return made, numbers


def sampling_table() -> tuple[Table, dict[str, dict[str, float]]]:
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
    """What constrained requests cost their neighbours, milliseconds per step."""
    made = Table(title=f"{neighbours.NEIGHBOURS} unconstrained requests and what runs beside them; median ms per step")
    for column in ("scheduling", "beside them", "ms"):
        made.add_column(column, justify="right" if column == "ms" else "left")
    numbers = {}
    for scheduling, name, milliseconds in neighbours.schemas(args.model, args.threads, args.rounds):
        numbers[f"{scheduling}: {name}"] = milliseconds
        made.add_row(scheduling, name, f"{milliseconds:.2f}")
    return made, numbers


def async_table(args: argparse.Namespace, streams: tuple[int, ...]) -> tuple[Table, dict[int, tuple[float, float]]]:
    """Asynchronous against synchronous scheduling, tokens per second."""
    made = Table(title="tokens/s of the engine alone; medians")
    for column in ("streams", "synchronous", "asynchronous"):
        made.add_column(column, justify="right")
    numbers = {}
    for count, synchronous, asynchronous in neighbours.scheduling(args.model, args.threads, args.rounds, streams):
        numbers[count] = synchronous, asynchronous
        made.add_row(str(count), f"{synchronous:.0f}", f"{asynchronous:.0f}")
    return made, numbers


def main() -> int:
    """Print the tables, and write them as JSON where ``--json`` says."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--model", default="examples/demo_model/penstock-tiny", help="checkpoint to measure with")
    parser.add_argument("--streams", default="1,16,64", help="numbers of concurrent streams")
    parser.add_argument("--input-len", type=int, default=64, help="prompt length in tokens")
    parser.add_argument("--output-len", type=int, default=64, help="output length in tokens")
    parser.add_argument("--rounds", type=int, default=3, help="rounds after the warm-up; medians are taken over them")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="torch threads")
    parser.add_argument(
        "--only",
        choices=["scheduler", "outputs", "sampling", "schemas", "async", "load"],
        help="measure just this part",
    )
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    args = parser.parse_args()
    loads = [
        Load(streams=n, requests=max(4, n * 2), input_len=args.input_len, output_len=args.output_len)
        for n in map(int, args.streams.split(","))
    ]
    numbers: dict[str, object] = {}
    if args.only in (None, "scheduler"):
        schedule, numbers["scheduler_ms"] = scheduler_table()
        console.print(schedule)
    if args.only in (None, "outputs"):
        outputs, numbers["outputs_us"] = outputs_table(args.model)
        console.print(outputs)
    if args.only in (None, "sampling"):
        samples, numbers["sampling_ms"] = sampling_table()
        console.print(samples)
    if args.only in (None, "schemas"):
        beside, numbers["schemas_ms"] = schema_table(args)
        console.print(beside)
    if args.only in (None, "async"):
        both, numbers["async_tokens_per_s"] = async_table(args, tuple(item.streams for item in loads))
        console.print(both)
    if args.only in (None, "load"):
        results = asyncio.run(measure(args, loads))
        console.print(table(results, loads))
        medians = {name: {n: load.median(rows) for n, rows in by.items()} for name, by in results.items()}
        numbers["load"] = msgspec.to_builtins(medians)
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
