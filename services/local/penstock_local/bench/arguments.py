"""The flags of ``penstock bench``."""

import argparse
import asyncio
from typing import Any

from penstock_local import flags


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
    _add_prompts(parser)
    flags.add_choice(parser)
    _add_output(parser)


def _add_load(parser: argparse.ArgumentParser) -> None:
    count = flags.integer(1, 2**31)
    load = parser.add_argument_group("load")
    pace = load.add_mutually_exclusive_group()
    pace.add_argument("--concurrency", type=count, metavar="N", help="requests at once, each followed by the next (8)")
    pace.add_argument(
        "--rate", type=float, metavar="R", help="requests per second on average, at random (Poisson) times"
    )
    load.add_argument("--requests", type=count, metavar="N", help="how many (100, or as many as --duration allows)")
    load.add_argument("--duration", type=float, metavar="SECONDS", help="send none after this time; those sent may end")
    load.add_argument(
        "--warmup", type=flags.integer(0, 2**31), metavar="N", default=2, help="requests before, not counted (2)"
    )
    load.add_argument("--timeout", type=float, metavar="SECONDS", help="of a request (default: never)")
    load.add_argument("--channels", type=count, default=1, metavar="N", help="connections to the server (1)")


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument(
        "--prompts",
        metavar="FILE",
        help="use these, over and over: a text per line, or JSON objects with prompt (text or token ids) and, if wanted, "
        "max_tokens",
    )
    prompts.add_argument("--input-len", metavar="N|LOW:HIGH", help="tokens of random prompts (128)")
    prompts.add_argument("--output-len", default="128", metavar="N|LOW:HIGH", help="new tokens of a request (128)")
    prompts.add_argument(
        "--shared-prefix-len",
        type=flags.integer(0, 2**31),
        default=0,
        metavar="N",
        help="tokens that random prompts begin with, the same for all, on top of --input-len (0)",
    )
    prompts.add_argument("--end-at-eos", action="store_true", help="outputs may end before their length")
    prompts.add_argument(
        "--bench-seed", type=int, default=0, metavar="S", help="of random prompts, lengths and times (0)"
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("results")
    output.add_argument(
        "--json", metavar="FILE", help="also write them, request by request, as JSON; - for standard output"
    )
    output.add_argument("--plot", metavar="FILE.png", help="also draw them (needs matplotlib: penstock[plot])")


def _run_bench(arguments: argparse.Namespace) -> int:
    from penstock_local.bench.bench import bench
    from penstock_local.bench.options import BenchOptions
    from penstock_local.rpc.client import sampling_fields

    given = {
        name: value
        for name in BenchOptions.__struct_fields__
        if name != "sampling" and (value := getattr(arguments, name)) is not None
    }
    return asyncio.run(bench(BenchOptions(**given, sampling=sampling_fields(vars(arguments)))))
