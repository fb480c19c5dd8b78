"""The ``penstock`` command: its arguments, and which module does the work.

Nothing is imported before it is needed, so that the command answers at once; torch and transformers never are.
"""

import argparse
import asyncio
import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from penstock_common.errors import ConfigError, PenstockError
from penstock_common.types.cluster import DEFAULT_POOL
from penstock_local import flags
from penstock_local.batch.options import BatchOptions
from penstock_local.bench.options import BenchOptions
from penstock_local.console import fail
from penstock_local.flags import Parser
from penstock_local.serving.serve_options import ServeOptions


def _add_adapter(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--lora",
        action="append",
        dest="lora",
        metavar="NAME=PATH",
        help="serve the LoRA adapter in the directory PATH as NAME; may be repeated",
    )


def _add_lora(commands: Any) -> None:
    parser = commands.add_parser(
        "lora",
        help="load, unload, list and pin LoRA adapters of a running server",
        description="The LoRA adapters that requests to a running server can name. What is changed is changed on all "
        "frontends of its coordinator.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True, title="actions")
    load = _lora_action(actions, "load", "have every engine read an adapter, and give it a name")
    load.add_argument("name", metavar="NAME", help="what requests call it")
    load.add_argument("path", metavar="PATH", help="its directory on the engines' machines, below one of lora.roots")
    load.add_argument("--inplace", action="store_true", help="take the place of an adapter of that name")
    load.add_argument("--pin", action="store_true", help="engines keep it in memory")
    unload = _lora_action(
        actions, "unload", "take the name of an adapter away; requests that run end as if nothing were"
    )
    unload.add_argument("name", metavar="NAME", help="what requests call it")
    listing = _lora_action(actions, "list", "show the adapters and which engines have them in memory")
    listing.add_argument("--json", action="store_true", help="a JSON list instead of a table")
    pin = _lora_action(actions, "pin", "have every engine keep an adapter in memory")
    pin.add_argument("name", metavar="NAME", help="what requests call it")
    pin.add_argument("--unpin", action="store_true", help="let it go when others need the room")


def _lora_action(actions: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
    )
    parser.set_defaults(run=_run_lora, action=name)
    flags.add_admin(parser)
    return parser


def _run_lora(arguments: argparse.Namespace) -> int:
    from penstock_local.commands.lora import LoraOptions, lora, path_of

    path = path_of(arguments.path) if "path" in arguments else None
    return asyncio.run(lora(flags.options_of(LoraOptions, arguments, path=path)))


def _add_models(commands: Any) -> None:
    parser = commands.add_parser(
        "models",
        help="list the models in this machine's cache",
        description="List the models in this machine's cache of the Hugging Face hub: name, size on disk, and whether their "
        "files are all there.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_models)
    parser.add_argument("--json", action="store_true", help="a JSON list instead of a table")
    parser = commands.add_parser(
        "pull",
        help="download a model from the Hugging Face hub",
        description="Download what is needed to serve a model into this machine's cache, and print the directory. What is there "
        "already is not downloaded again. HF_TOKEN opens private models and those that ask for consent.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_pull)
    parser.add_argument("model", metavar="MODEL", help="id on the hub, such as Qwen/Qwen3-0.6B")
    parser.add_argument(
        "--revision", metavar="NAME", default="", help="branch, tag or commit (default: the default branch)"
    )


def _run_models(arguments: argparse.Namespace) -> int:
    from penstock_local.commands.models import models

    return models(as_json=arguments.json)


def _run_pull(arguments: argparse.Namespace) -> int:
    from penstock_local.commands.models import pull

    return pull(arguments.model, revision=arguments.revision)


def _add_bench(commands: Any) -> None:
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

    return asyncio.run(bench(flags.options_of(BenchOptions, arguments, sampling=sampling_fields(vars(arguments)))))


def _add_batch(commands: Any) -> None:
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
    _add_adapter(engine)


def _run_batch(arguments: argparse.Namespace) -> int:
    from penstock_local.batch.batch import batch
    from penstock_local.commands.lora import parse_adapters

    return batch(flags.options_of(BatchOptions, arguments, lora=parse_adapters(arguments.lora or ())))


EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 130, 141

_EXAMPLES = """\
examples:
  penstock serve Qwen/Qwen3-0.6B
  penstock serve ./my-model --engines 2 --grpc-port 50061
  penstock generate "Once upon a time" --max-tokens 60 --temperature 0.8 --seed 7
  echo "2 + 2 =" | penstock generate - --temperature 0 --stop "."
  penstock chat --system "Answer briefly."
  penstock bench --concurrency 16 --requests 200
  penstock batch requests.jsonl answers.jsonl --model Qwen/Qwen3-0.6B
  penstock status
  penstock scale --pool spot 4

'penstock COMMAND --help' explains a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code."""
    parser = build_parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        parser.exit(EXIT_USAGE)
    arguments = parser.parse_args(argv)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # or gRPC logs every connection that a stopping service closes
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except ConfigError as e:
        fail(str(e))
        return EXIT_USAGE
    except PenstockError as e:
        fail(str(e))
        return EXIT_FAILED
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of standard output has gone; writing what is buffered at exit would fail again.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = Parser(
        prog="penstock",
        usage="penstock COMMAND ...",
        description="Serve a language model on this machine over gRPC, and talk to it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, title="commands", prog="penstock")
    _add_serve(commands)
    _add_generate(commands)
    _add_chat(commands)
    _add_status(commands)
    _add_scale(commands)
    _add_bench(commands)
    _add_models(commands)
    _add_lora(commands)
    _add_batch(commands)
    _add_demo(commands)
    return parser


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        sys.stdout.write(f"penstock {importlib.metadata.version('penstock')}\n")
        parser.exit()


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model on this machine",
        description="Serve a model: coordinator, engines and frontend as processes of this machine, until Ctrl-C.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_serve)
    parser.suggest = _serve_flag
    parser.suggest_value = flags.of_vllm_value
    model = parser.add_argument_group("model")
    engines = parser.add_argument_group("engines")
    drafts = parser.add_argument_group("speculation")
    adapters = parser.add_argument_group("LoRA adapters")
    media = parser.add_argument_group("images, sounds and videos")
    network = parser.add_argument_group("network")
    flags.add_positional(parser, ServeOptions, "model")
    flags.add_options(model, ServeOptions, served_model_name="NAME", chat_template="FILE")
    flags.add_options(model, ServeOptions, dtype="", quantization="", max_model_len="N")
    flags.add_options(engines, ServeOptions, engines="N", data_parallel_size="N")
    flags.add_options(engines, ServeOptions, prefill_engines="N", decode_engines="N", kv_transfer="")
    flags.add_options(engines, ServeOptions, tensor_parallel_size="N", pipeline_parallel_size="N")
    flags.add_options(engines, ServeOptions, device="", kv_cache_memory="SIZE", threads_per_engine="N")
    flags.add_options(engines, ServeOptions, host_cache="SIZE", disk_cache="DIR", disk_cache_size="SIZE")
    flags.add_options(drafts, ServeOptions, speculative="METHOD", speculative_model="PATH", speculative_tokens="K")
    flags.add_options(drafts, ServeOptions, speculative_config="JSON")
    _add_adapter(adapters)
    adapters.add_argument(
        "--lora-directory",
        metavar="DIR",
        help="serve each subdirectory of DIR as the LoRA adapter of its name, as they come and go; more may be loaded from there",
    )
    flags.add_options(media, ServeOptions, limit_mm_per_prompt="JSON", allowed_media_domains="HOSTS", media_workers="N")
    flags.add_options(
        network, ServeOptions, frontends="N", host="HOST", grpc_port="PORT", http_port="PORT", admin_port="PORT"
    )
    flags.add_options(parser, ServeOptions, log_level="")
    parser.add_argument(
        "--set",
        action="append",
        dest="settings",
        metavar="SERVICE.KEY=VALUE",
        help="any other setting of a service (coordinator, engine, frontend), e.g. engine.scheduler.policy=priority, "
        "frontend.log.requests=true; may be repeated",
    )


def _serve_flag(flag: str) -> str:
    """What a flag of another server is called here, or the setting of its name."""
    from penstock_local.settings import named

    if flag in flags.VLLM_FLAGS:
        return f"; {flags.VLLM_FLAGS[flag]}"
    keys = named(flag.removeprefix("--").replace("-", "_"))
    return f"; it is a setting: --set {' or '.join(f'{key}=VALUE' for key in keys)}" if keys else ""


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue a prompt on a running server",
        description="Continue a prompt on a running server. The text goes to standard output as it is made, a line about "
        "it to standard error. Settings that are not given are the model's own.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_generate)
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads it from standard input")
    flags.add_server(parser)
    flags.add_media(parser)
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after this long (default: never)")
    flags.add_ending(parser, max_tokens=256)
    flags.add_choice(parser)
    output = parser.add_argument_group("what comes out")
    output.add_argument("--n", type=flags.integer(1, 2**32 - 1), metavar="N", help="outputs of the prompt (default: 1)")
    output.add_argument(
        "--logprobs",
        type=flags.integer(-(2**31), 2**31 - 1),
        metavar="K",
        help="show log-probabilities, and the K likeliest tokens",
    )
    flags.add_constraint(output)


def _add_chat(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk with a model on a running server",
        description="Talk with a model on a running server. /help lists what can be done while talking. Where standard "
        "input is no terminal every line of it is a message. Settings that are not given are the model's own.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_chat)
    flags.add_server(parser)
    parser.add_argument("--system", metavar="TEXT", default="", help="instructions to the model for the conversation")
    parser.add_argument("--verbose", action="store_true", help="a line on tokens and speed after each answer")
    flags.add_ending(parser, max_tokens=None)
    flags.add_choice(parser)
    flags.add_constraint(parser.add_argument_group("what the answers look like"))


def _add_status(commands: Any) -> None:
    parser = commands.add_parser(
        "status",
        help="show the engines of a running cluster",
        description="Show the engines of a running cluster as a frontend sees them, until Ctrl-C; once where standard "
        "output is no terminal. Exit code with --once and --json: 0 when an engine takes requests, else 1.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_status)
    parser.add_argument(
        "--admin-address",
        action="append",
        dest="admin_addresses",
        metavar="ADDRESS",
        help=f"of the operators' API (default: {flags.DEFAULT_ADMIN_ADDRESS}); again for each further frontend",
    )
    parser.add_argument(
        "--address", default="", help="of the public API, for its health (default: the operators' API says how it is)"
    )
    parser.add_argument("--once", action="store_true", help="print the table and leave")
    parser.add_argument("--json", action="store_true", help="print a JSON object and leave")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="between two looks (default: %(default)g)"
    )


def _add_scale(commands: Any) -> None:
    parser = commands.add_parser(
        "scale",
        help="change the number of engines of a cluster in Kubernetes, or of a data-parallel group",
        description="Change the number of engines of a pool, in Kubernetes, where no autoscaler does; or of ranks of a "
        "data-parallel group, which goes on meanwhile. What it was and what is wanted now goes to standard output; "
        "`penstock status` shows the engines come and go.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_scale)
    parser.add_argument(
        "replicas", type=flags.integer(0, 2**32 - 1), metavar="N", help="engines that the pool is to have"
    )
    parser.add_argument("--pool", metavar="NAME", default=DEFAULT_POOL, help="whose (default: %(default)s)")
    parser.add_argument("--wait", action="store_true", help="leave when there are as many")
    flags.add_admin(parser)


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="start two engines, show what they do, stop",
        description="Start coordinator, two engines and a frontend on free ports, send prompts, and stop them again. "
        "The prompts suit the demo model in examples/.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_demo)
    parser.add_argument("model", metavar="MODEL", help="directory of the demo model")


def _run_serve(arguments: argparse.Namespace) -> int:
    from penstock_local.commands.lora import parse_adapters, parse_directory
    from penstock_local.serving.serve import serve
    from penstock_local.settings import parse_settings

    options = flags.options_of(
        ServeOptions,
        arguments,
        lora=parse_adapters(arguments.lora or ()),
        lora_directory=parse_directory(arguments.lora_directory or ""),
        settings=parse_settings(arguments.settings or ()),
    )
    return asyncio.run(serve(options))


def _run_generate(arguments: argparse.Namespace) -> int:
    from penstock_local.commands.generate import GenerateOptions, generate

    prompt = _read_stdin() if arguments.prompt == "-" else arguments.prompt
    media, sampling = flags.media(arguments), flags.sampling(arguments)
    options = flags.options_of(GenerateOptions, arguments, prompt=prompt, media=media, sampling=sampling)
    return asyncio.run(generate(options))


def _run_chat(arguments: argparse.Namespace) -> int:
    from penstock_local.commands.chat import ChatOptions, chat

    return chat(flags.options_of(ChatOptions, arguments, sampling=flags.sampling(arguments)))


def _run_status(arguments: argparse.Namespace) -> int:
    from penstock_local.commands.status import StatusOptions, status

    first, *others = arguments.admin_addresses or [flags.DEFAULT_ADMIN_ADDRESS]
    options = flags.options_of(StatusOptions, arguments, admin_address=first, others=tuple(others))
    return asyncio.run(status(options))


def _run_scale(arguments: argparse.Namespace) -> int:
    from penstock_local.commands.scale import ScaleOptions, scale

    return asyncio.run(scale(flags.options_of(ScaleOptions, arguments)))


def _run_demo(arguments: argparse.Namespace) -> int:
    from penstock_local.commands.demo import demo

    return asyncio.run(demo(arguments.model))


def _read_stdin() -> str:
    """The prompt on standard input, without the newline that ends its last line. Raises ConfigError when it is not text."""
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as e:
        raise ConfigError(f"the prompt on standard input is not UTF-8: {e}") from None
