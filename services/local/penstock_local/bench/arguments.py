"""The flags of ``penstock bench``."""

import argparse
import asyncio
from typing import Any

from penstock_local import flags
from penstock_local.bench.options import BenchOptions


def add_bench(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "bench",
        help="measure a running server under load",
        description="Send requests to a running server and report throughput and latencies. By default prompts are random "
        "token ids and outputs run to their full length. Exit code: 0 when every request ended well, 1 when some failed, "
        "2 for wrong flags, 130 after Ctrl-C (what was measured is reported).",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_bench)
    flags.add_server(parser)
    _add_load(parser)
    _add_dataset(parser)
    flags.add_choice(parser)
    _add_output(parser)


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    pace = load.add_mutually_exclusive_group()
    flags.add_options(pace, BenchOptions, concurrency="N", rate="R")
    flags.add_options(load, BenchOptions, requests="N", duration="SECONDS", warmup="N", timeout="SECONDS", channels="N")


def _add_dataset(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts and outputs")
    flags.add_options(group, BenchOptions, dataset="", dataset_path="FILE", prompts="FILE")
    flags.add_options(group, BenchOptions, input_len="N|LOW:HIGH", output_len="N|LOW:HIGH", shared_prefix_len="N")
    flags.add_options(group, BenchOptions, images="N", image_size="WxH", image_repeat="N")
    flags.add_options(group, BenchOptions, prefix_repetition_prefix_len="N", prefix_repetition_suffix_len="N")
    flags.add_options(group, BenchOptions, prefix_repetition_num_prefixes="N", prefix_repetition_output_len="N")
    flags.add_options(group, BenchOptions, num_schemas="N", end_at_eos="", bench_seed="S")


def _add_output(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("results")
    flags.add_options(output, BenchOptions, json="FILE", plot="FILE.png", report="FILE.html")


def _run_bench(arguments: argparse.Namespace) -> int:
    from penstock_local.bench.bench import bench
    from penstock_local.rpc.client import sampling_fields

    given = {
        name: value
        for name in BenchOptions.__struct_fields__
        if name != "sampling" and (value := getattr(arguments, name)) is not None
    }
    return asyncio.run(bench(BenchOptions(**given, sampling=sampling_fields(vars(arguments)))))
