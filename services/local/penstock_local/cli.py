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
from pathlib import Path
from typing import Any

from penstock_common.config import parse_bytes
from penstock_common.errors import ConfigError, PenstockError
from penstock_local.console import fail

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 130, 141

_EXAMPLES = """\
examples:
  penstock serve Qwen/Qwen3-0.6B
  penstock serve ./my-model --engines 2 --grpc-port 50061
  penstock generate "Once upon a time" --max-tokens 60 --temperature 0.8 --seed 7
  echo "2 + 2 =" | penstock generate - --temperature 0 --stop "."

'penstock COMMAND --help' explains a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code."""
    arguments = build_parser().parse_args(argv)
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
    parser = argparse.ArgumentParser(
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
    parser.add_argument("model", metavar="MODEL", help="directory of a Hugging Face checkpoint, or its id on the hub")
    model = parser.add_argument_group("model")
    model.add_argument("--served-model-name", metavar="NAME", help="what clients call it (default: end of MODEL)")
    model.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), help="of weights (default: auto)")
    model.add_argument("--max-model-len", type=int, metavar="N", help="longest sequence (default: what fits)")
    engines = parser.add_argument_group("engines")
    engines.add_argument("--engines", type=int, metavar="N", help="engine processes, each with the model (default: 1)")
    engines.add_argument("--device", choices=("auto", "cpu", "cuda"), help="where they compute (default: auto)")
    engines.add_argument("--kv-cache-memory", metavar="SIZE", help="of each engine, e.g. 512MiB, 4GiB (default: auto)")
    engines.add_argument("--threads-per-engine", type=int, metavar="N", help="CPU threads (default: cores / engines)")
    network = parser.add_argument_group("network")
    network.add_argument("--host", help="interface to listen on (default: 127.0.0.1, this machine only)")
    network.add_argument("--grpc-port", type=int, metavar="PORT", help="of the public gRPC API (default: 50051)")
    network.add_argument("--http-port", type=int, metavar="PORT", help="of health and metrics (default: 8000)")
    network.add_argument("--admin-port", type=int, metavar="PORT", help="of the operators' gRPC API (default: 50053)")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), help="of the services (default: info)"
    )


def _add_generate(commands: Any) -> None:
    count, int32, int64 = _integer(0, 2**32 - 1), _integer(-(2**31), 2**31 - 1), _integer(-(2**63), 2**63 - 1)
    parser = commands.add_parser(
        "generate",
        help="continue a prompt on a running server",
        description="Continue a prompt on a running server. The text goes to standard output as it is made, a line about "
        "it to standard error. Settings that are not given are the model's own.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run_generate)
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads it from standard input")
    parser.add_argument("--address", default="localhost:50051", help="of the server (default: %(default)s)")
    parser.add_argument("--model", metavar="NAME", default="", help="which model (default: the one that is served)")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after this long (default: never)")
    ending = parser.add_argument_group("when to stop")
    ending.add_argument("--max-tokens", type=count, default=256, metavar="N", help="new tokens (default: %(default)s)")
    ending.add_argument("--min-tokens", type=count, metavar="N", help="no end before this many new tokens")
    ending.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    ending.add_argument("--ignore-eos", action="store_true", default=None, help="go on after the model's end of text")
    choice = parser.add_argument_group("how to choose tokens")
    choice.add_argument(
        "--temperature", type=float, metavar="T", help="0 takes the likeliest token, higher varies more"
    )
    choice.add_argument("--top-p", type=float, metavar="P", help="only the likeliest tokens of this total probability")
    choice.add_argument("--top-k", type=int32, metavar="K", help="only the K likeliest tokens")
    choice.add_argument("--min-p", type=float, metavar="P", help="no token below this fraction of the likeliest")
    choice.add_argument("--seed", type=int64, metavar="S", help="the same seed gives the same text")
    choice.add_argument("--presence-penalty", type=float, metavar="X", help="off the logit of every token used before")
    choice.add_argument("--frequency-penalty", type=float, metavar="X", help="off its logit each time it was used")
    choice.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1 avoids tokens that were there")
    output = parser.add_argument_group("what comes out")
    output.add_argument("--n", type=_integer(1, 2**32 - 1), metavar="N", help="outputs of the prompt (default: 1)")
    output.add_argument(
        "--logprobs", type=int32, metavar="K", help="show log-probabilities, and the K likeliest tokens"
    )
    constraint = output.add_mutually_exclusive_group()
    constraint.add_argument("--json", action="store_true", help="a JSON object")
    constraint.add_argument(
        "--json-schema", metavar="SCHEMA", help="JSON that this schema, or that of this file, accepts"
    )
    constraint.add_argument("--regex", metavar="PATTERN", help="text that matches")
    constraint.add_argument(
        "--choice", action="append", metavar="TEXT", help="this text; repeat it for each alternative"
    )
    constraint.add_argument(
        "--grammar", metavar="GRAMMAR", help="a sentence of this EBNF grammar, or that of this file"
    )


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
    from penstock_local.plan import ServeOptions
    from penstock_local.serve import serve

    given = {name: value for name, value in vars(arguments).items() if value is not None and name != "run"}
    if "kv_cache_memory" in given:
        given["kv_cache_memory"] = parse_bytes(given["kv_cache_memory"], key="--kv-cache-memory")
    return asyncio.run(serve(ServeOptions(**given)))


def _run_generate(arguments: argparse.Namespace) -> int:
    from penstock_local.generate import GenerateOptions, generate
    from penstock_local.rpc.client import sampling_fields

    options = GenerateOptions(
        prompt=_read_stdin() if arguments.prompt == "-" else arguments.prompt,
        address=arguments.address,
        model=arguments.model,
        timeout=arguments.timeout,
        sampling=sampling_fields({**vars(arguments), "structured_output": _constraint(arguments)}),
    )
    return asyncio.run(generate(options))


def _run_demo(arguments: argparse.Namespace) -> int:
    from penstock_local.demo import demo

    return asyncio.run(demo(arguments.model))


def _read_stdin() -> str:
    """The prompt on standard input, without the newline that ends its last line. Raises ConfigError when it is not text."""
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as e:
        raise ConfigError(f"the prompt on standard input is not UTF-8: {e}") from None


def _constraint(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The constraint on the output as a field of the request. Raises ConfigError when its file cannot be read."""
    if arguments.json:
        return {"json_object": True}
    if arguments.json_schema is not None:
        schema = arguments.json_schema
        return {"json_schema": schema if schema.lstrip().startswith("{") else _read_text(schema, flag="--json-schema")}
    if arguments.regex is not None:
        return {"regex": arguments.regex}
    if arguments.choice is not None:
        return {"choice": {"options": arguments.choice}}
    if arguments.grammar is not None:
        grammar = arguments.grammar
        return {"grammar": _read_text(grammar, flag="--grammar") if Path(grammar).is_file() else grammar}
    return None


def _read_text(path: str, *, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{flag}: cannot read {path!r}: {getattr(e, 'strerror', None) or e}") from None


def _integer(low: int, high: int) -> Callable[[str], int]:
    """A parser of integers that the wire's type can hold; whether they make sense the server says."""

    def integer(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not from {low} to {high}")
        return value

    return integer
