"""Argument parser of the ``penstock`` command, and the dispatch of each subcommand to its module.

Subcommands are imported only when they run, so that the command starts fast. The command itself never imports torch or
transformers.
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
from penstock_local.serving.serve_options import MAX_LORAS, MODELS_FLAG, ServeOptions
from penstock_local.transcribe_flags import add_transcribe


def _add_adapter(group: argparse._ArgumentGroup, more: str = "") -> None:
    group.add_argument(
        "--lora",
        action="append",
        dest="lora",
        metavar="NAME=PATH",
        help=f"Serve the LoRA adapter in the local directory PATH under the name NAME. May be repeated.{more}",
    )


def _add_lora(commands: Any) -> None:
    parser = commands.add_parser(
        "lora",
        help="load, unload, list and pin LoRA adapters of a running server",
        description=(
            "Manage the LoRA adapters that requests to a running server can name. A change applies to all frontends "
            "of the same coordinator."
        ),
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True, title="actions")
    load = _lora_action(actions, "load", "load an adapter into every engine and give it a name")
    load.add_argument("name", metavar="NAME", help="Name of the adapter in requests.")
    load.add_argument(
        "path",
        metavar="PATH",
        help=(
            "Directory of the adapter on the engines' machines, below one of lora.roots. If a relative path exists on "
            "this machine, the command makes it absolute."
        ),
    )
    load.add_argument("--inplace", action="store_true", help="Replace a loaded adapter of the same name.")
    load.add_argument("--pin", action="store_true", help="Keep the adapter in memory: engines do not evict it.")
    unload = _lora_action(actions, "unload", "remove an adapter; running requests that use it finish normally")
    unload.add_argument("name", metavar="NAME", help="Name of the adapter in requests.")
    listing = _lora_action(actions, "list", "show the adapters and the engines that have them in memory")
    listing.add_argument("--json", action="store_true", help="Print a JSON list instead of a table.")
    pin = _lora_action(actions, "pin", "keep an adapter in the memory of every engine")
    pin.add_argument("name", metavar="NAME", help="Name of the adapter in requests.")
    pin.add_argument(
        "--unpin", action="store_true", help=("Let engines evict the adapter again when they need the memory.")
    )


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
        description=(
            "List the models in this machine's Hugging Face cache: the name, the size on disk, and whether all files "
            "are present."
        ),
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_models)
    parser.add_argument("--json", action="store_true", help="Print a JSON list instead of a table.")
    parser = commands.add_parser(
        "pull",
        help="download a model from the Hugging Face hub",
        description=(
            "Download the files needed to serve a model into this machine's Hugging Face cache, and print their "
            "directory. Files that are already in the cache are not downloaded again. Private and gated models need "
            "the environment variable HF_TOKEN."
        ),
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_pull)
    parser.add_argument("model", metavar="MODEL", help="Id of the model on the hub, such as Qwen/Qwen3-0.6B.")
    parser.add_argument(
        "--revision", metavar="NAME", default="", help="Branch, tag or commit (default: the default branch)."
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
        description=(
            "Send requests to a running server, and report throughput and latencies. By default, prompts are random "
            "token ids and every output runs to its full length. Exit code: 0 if all requests succeed, 1 if some "
            "fail, 2 for wrong flags, 130 after Ctrl-C (the report then covers the requests so far)."
        ),
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
        description=(
            "Answer every line of a file in OpenAI's batch format, with a model in this process or with a running "
            "server. If a batch is interrupted, run the same command again to continue it. Exit code: 0 if all lines "
            "are answered, 1 if some fail, 2 for wrong flags or files, 130 after Ctrl-C."
        ),
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_batch)
    flags.add_positional(parser, BatchOptions, "input")
    flags.add_positional(parser, BatchOptions, "output")
    who = parser.add_argument_group("where to compute")
    flags.add_options(who, BatchOptions, model="MODEL")
    who.add_argument(
        "--server",
        action="append",
        metavar="URL",
        help=(
            "Use the running server at this HTTP address, such as http://localhost:8000, instead of --model. Repeat "
            "the flag for more frontends."
        ),
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
    flags.add_options(engine, BatchOptions, no_media="")
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
  penstock transcribe speech.mp3 --format srt
  penstock chat --system "Answer briefly."
  penstock bench --concurrency 16 --requests 200
  penstock batch requests.jsonl answers.jsonl --model Qwen/Qwen3-0.6B
  penstock status
  penstock scale --pool spot 4

'penstock COMMAND --help' explains a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = build_parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        parser.exit(EXIT_USAGE)
    arguments = parser.parse_args(argv)
    os.environ.setdefault(
        "GRPC_VERBOSITY", "ERROR"
    )  # Without this, gRPC logs every connection that a stopping service closes.
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
        # The reader of standard output has exited, so flushing buffered output at exit would fail again.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def build_parser() -> argparse.ArgumentParser:
    """Return the argument parser of the whole command."""
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
    add_transcribe(commands)
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
    """Prints the version. The version is looked up only if the flag is given."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        sys.stdout.write(f"penstock {importlib.metadata.version('penstock')}\n")
        parser.exit()


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model on this machine",
        description=(
            "Serve a model on this machine. Starts a coordinator, the engines and a frontend as processes, and runs "
            "until Ctrl-C."
        ),
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_serve)
    parser.suggest = _serve_flag
    parser.suggest_value = flags.of_vllm_value
    model = parser.add_argument_group("model")
    engines = parser.add_argument_group("engines")
    drafts = parser.add_argument_group("speculation")
    adapters = parser.add_argument_group("LoRA adapters")
    media = parser.add_argument_group("images, audio and videos")
    network = parser.add_argument_group("network")
    flags.add_positional(parser, ServeOptions, "model", repeated=True)
    model.add_argument(
        MODELS_FLAG,
        dest="models_file",
        metavar="FILE",
        help=(
            "YAML file with the models to serve, instead of MODEL: a list of mappings with the key model, and with the "
            "flags of this group, of engines, speculation and adapters as further keys."
        ),
    )
    flags.add_options(model, ServeOptions, served_model_name="NAME", chat_template="FILE")
    flags.add_options(model, ServeOptions, dtype="", quantization="", max_model_len="N")
    flags.add_options(engines, ServeOptions, engines="N", data_parallel_size="N")
    flags.add_options(engines, ServeOptions, prefill_engines="N", decode_engines="N", kv_transfer="")
    flags.add_options(engines, ServeOptions, tensor_parallel_size="N", pipeline_parallel_size="N")
    flags.add_options(engines, ServeOptions, device="", kv_cache_memory="SIZE", threads_per_engine="N")
    flags.add_options(engines, ServeOptions, host_cache="SIZE", disk_cache="DIR", disk_cache_size="SIZE")
    flags.add_options(drafts, ServeOptions, speculative="METHOD", speculative_model="PATH", speculative_tokens="K")
    flags.add_options(drafts, ServeOptions, speculative_config="JSON")
    at_once = f"Sets engine.lora.max_loras, the maximum number of different adapters in one batch, to {MAX_LORAS}."
    _add_adapter(adapters, f" {at_once} --set engine.lora.max_loras=N sets another number.")
    adapters.add_argument(
        "--lora-directory",
        metavar="DIR",
        help=(
            "Serve each subdirectory of DIR as a LoRA adapter of that name, and follow later changes to DIR. "
            f"Adapters inside DIR can also be loaded by request. {at_once}"
        ),
    )
    flags.add_options(media, ServeOptions, no_media="", limit_mm_per_prompt="JSON")
    flags.add_options(media, ServeOptions, allowed_media_domains="HOSTS", media_workers="N")
    flags.add_options(
        network, ServeOptions, frontends="N", host="HOST", grpc_port="PORT", http_port="PORT", admin_port="PORT"
    )
    flags.add_options(parser, ServeOptions, log_level="")
    parser.add_argument(
        "--set",
        action="append",
        dest="settings",
        metavar="SERVICE.KEY=VALUE",
        help=(
            "Set any other setting of a service (coordinator, engine or frontend), such as "
            "engine.scheduler.policy=priority or frontend.log.requests=true. May be repeated."
        ),
    )


def _serve_flag(flag: str) -> str:
    """Return a hint for a flag of another server: the equivalent flag, or the setting with that name."""
    from penstock_local.settings import named

    if flag in flags.VLLM_FLAGS:
        return f"; {flags.VLLM_FLAGS[flag]}"
    keys = named(flag.removeprefix("--").replace("-", "_"))
    return f"; it is a setting: --set {' or '.join(f'{key}=VALUE' for key in keys)}" if keys else ""


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue a prompt on a running server",
        description=(
            "Continue a prompt on a running server. The text goes to standard output while it is generated. A "
            "summary line goes to standard error. Sampling parameters that are not given use the model's defaults."
        ),
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_generate)
    parser.add_argument("prompt", metavar="PROMPT", help="Text to continue. - reads the text from standard input.")
    flags.add_server(parser)
    flags.add_media(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help=("Abort the request after this many seconds (default: no limit)."),
    )
    flags.add_ending(parser, max_tokens=256)
    flags.add_choice(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--n", type=flags.integer(1, 2**32 - 1), metavar="N", help=("Number of outputs for the prompt (default: 1).")
    )
    output.add_argument(
        "--logprobs",
        type=flags.integer(-(2**31), 2**31 - 1),
        metavar="K",
        help="Show the log-probability of each token, and the K most likely tokens.",
    )
    flags.add_constraint(output)


def _add_chat(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk with a model on a running server",
        description=(
            "Chat with a model on a running server. Type /help for the commands of the chat. If standard input is "
            "not a terminal, each line is one message. Sampling parameters that are not given use the model's "
            "defaults."
        ),
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_chat)
    flags.add_server(parser)
    parser.add_argument(
        "--system", metavar="TEXT", default="", help=("System message of the conversation (default: none).")
    )
    parser.add_argument("--verbose", action="store_true", help="Show the token count and speed after each answer.")
    flags.add_ending(parser, max_tokens=None)
    flags.add_choice(parser)
    flags.add_constraint(parser.add_argument_group("output"))


def _add_status(commands: Any) -> None:
    parser = commands.add_parser(
        "status",
        help="show the engines of a running cluster",
        description=(
            "Show the engines of a running cluster as a frontend sees them, and refresh the table until Ctrl-C. If "
            "standard output is not a terminal, the table is printed once. Exit code with --once or --json: 0 if an "
            "engine accepts requests, else 1."
        ),
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_status)
    parser.add_argument(
        "--admin-address",
        action="append",
        dest="admin_addresses",
        metavar="ADDRESS",
        help=(
            f"Address of a frontend's admin API (default: {flags.DEFAULT_ADMIN_ADDRESS}). Repeat the flag for more "
            "frontends."
        ),
    )
    parser.add_argument(
        "--address",
        default="",
        help=(
            "Address of the public API whose health the first line shows (default: the admin API reports it). The table "
            "still comes from --admin-address."
        ),
    )
    parser.add_argument("--once", action="store_true", help="Print the table once and exit.")
    parser.add_argument("--json", action="store_true", help="Print a JSON object once and exit.")
    parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help=("Seconds between refreshes (default: %(default)g)."),
    )


def _add_scale(commands: Any) -> None:
    parser = commands.add_parser(
        "scale",
        help="change the number of engines of a cluster in Kubernetes, or of a data-parallel group",
        description=(
            "Change the number of engines in a Kubernetes pool that has no autoscaler, or the number of ranks in a "
            "data-parallel group. The group keeps serving meanwhile. The command prints the previous and the new "
            "number. `penstock status` shows the engines as they start and stop."
        ),
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_scale)
    parser.add_argument(
        "replicas", type=flags.integer(0, 2**32 - 1), metavar="N", help="Target number of engines in the pool."
    )
    parser.add_argument(
        "--pool",
        metavar="NAME",
        default=DEFAULT_POOL,
        help=("Name of the engine pool to scale (default: %(default)s)."),
    )
    parser.add_argument("--wait", action="store_true", help="Wait until the pool has N engines, then exit.")
    flags.add_admin(parser)


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="start two engines, show their features, and stop",
        description=(
            "Start a coordinator, two engines and a frontend on free ports, send prompts, and stop all services. The "
            "prompts are made for the demo model in examples/."
        ),
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_demo)
    parser.add_argument("model", metavar="MODEL", help="Directory of the demo model.")


def _run_serve(arguments: argparse.Namespace) -> int:
    from penstock_local.commands.serve_models import options_of_models
    from penstock_local.serving.serve import serve

    return asyncio.run(serve(options_of_models(arguments)))


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
    """Read the prompt from standard input, without its final newline. Raises ConfigError if the prompt is not UTF-8."""
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as e:
        raise ConfigError(f"the prompt on standard input is not UTF-8: {e}") from None
