"""The flags of ``penstock batch``."""

import argparse
from typing import Any

from penstock_local import flags
from penstock_local.batch.options import BatchOptions
from penstock_local.commands.lora_arguments import add_adapter


def add_batch(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "batch",
        help="answer a file of requests",
        description="Answer every line of a file, in OpenAI's batch format, with a model in this process or a running server. A "
        "batch that was interrupted goes on where it was when it is run again. Exit code: 0 when every line was answered, 1 when "
        "some failed, 2 for wrong flags and files, 130 after Ctrl-C.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_batch)
    flags.add_positional(parser, BatchOptions, "input")
    flags.add_positional(parser, BatchOptions, "output")
    who = parser.add_argument_group("who computes")
    flags.add_options(who, BatchOptions, model="MODEL")
    who.add_argument(
        "--server",
        action="append",
        metavar="URL",
        help="HTTP port of a running server instead, as http://localhost:8000; again for each further frontend",
    )
    flags.add_options(who, BatchOptions, concurrency="N")
    files = parser.add_argument_group("files")
    flags.add_options(files, BatchOptions, errors="FILE", unordered="", overwrite="", retry_errors="")
    engine = parser.add_argument_group("engine in this process")
    flags.add_options(
        engine, BatchOptions, served_model_name="NAME", dtype="TYPE", device="DEVICE", task="TASK", max_model_len="N"
    )
    flags.add_options(
        engine, BatchOptions, max_num_seqs="N", kv_cache_memory="SIZE", num_threads="N", tensor_parallel_size="N"
    )
    add_adapter(engine)


def _run_batch(arguments: argparse.Namespace) -> int:
    from penstock_local.batch.batch import batch
    from penstock_local.commands.lora import parse_adapters

    given = {name: value for name in BatchOptions.__struct_fields__ if (value := getattr(arguments, name)) is not None}
    if "server" in given:
        given["server"] = tuple(given["server"])
    if "lora" in given:
        given["lora"] = parse_adapters(given["lora"])
    return batch(BatchOptions(**given))
