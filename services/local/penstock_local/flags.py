"""Flags of the commands: the parser, which names the nearest known flag, flags that commands share, and vLLM's flags."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from penstock_common.config.settings import Setting, parse_bytes, settings_of
from penstock_common.errors import ConfigError, nearest

if TYPE_CHECKING:
    from penstock_local.media_files import MediaFile


DEFAULT_ADDRESS = "localhost:50051"
DEFAULT_ADMIN_ADDRESS = "localhost:50053"


def add_positional(parser: argparse.ArgumentParser, options: type[msgspec.Struct], name: str) -> None:
    """The argument for the field ``name`` of ``options``, with what the field says of itself."""
    parser.add_argument(name, metavar=name.upper(), help=_setting(options, name).kind.description.replace("%", "%%"))


def add_options(group: argparse._ActionsContainer, options: type[msgspec.Struct], **metavars: str) -> None:
    """A flag for each field of ``options`` that is named, with what it says of itself: meaning, range or choices, default.

    ``metavars``: what stands for the value in the help, by field; empty where there are choices. What is not given stays None,
    and out of the options.
    """
    for name, metavar in metavars.items():
        setting = _setting(options, name)
        kind = setting.kind
        default = "" if setting.default in (None, "", ()) else f"default: {setting.default_text}"
        facts = "; ".join(filter(None, (kind.range, default)))
        text = f"{kind.description} ({facts})" if facts else kind.description
        if kind.type is bool:
            group.add_argument(setting.flag, action="store_true", default=None, help=kind.description)
            continue
        group.add_argument(
            setting.flag,
            action="append" if kind.shape == "list" else "store",
            type=kind.type if kind.type in (int, float) and not kind.is_size else str,
            choices=kind.choices or None,
            metavar=metavar or None,
            help=text.replace("%", "%%"),
        )


def _setting(options: type[msgspec.Struct], name: str) -> Setting:
    return next(setting for setting in settings_of(options) if setting.key == name)


Options = TypeVar("Options", bound=msgspec.Struct)


def options_of(options: type[Options], arguments: argparse.Namespace, **values: Any) -> Options:
    """The options of a command by the arguments of their names; ``values`` come before these. What is None is left out. Raises
    ConfigError for a size that is none.
    """
    given: dict[str, Any] = {}
    for setting in settings_of(options):
        value = getattr(arguments, setting.key, None)
        if value is not None and setting.kind.is_size:
            value = parse_bytes(value, key=setting.flag)
        given[setting.key] = tuple(value) if isinstance(value, list) else value
    return options(**{name: value for name, value in (given | values).items() if value is not None})


def add_admin(parser: argparse.ArgumentParser) -> None:
    """Which operators' API to talk to."""
    parser.add_argument(
        "--admin-address",
        default=DEFAULT_ADMIN_ADDRESS,
        metavar="ADDRESS",
        help="of the operators' API of any of the frontends (default: %(default)s)",
    )


def add_server(parser: argparse.ArgumentParser) -> None:
    """Which server and model to talk to."""
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help="of the server (default: %(default)s)")
    parser.add_argument("--model", metavar="NAME", default="", help="which model (default: the one that is served)")
    parser.add_argument("--lora", metavar="NAME", type=_name, help="which LoRA adapter of the model")


def add_media(parser: argparse.ArgumentParser) -> None:
    """What stands before the prompt; ``media`` reads it."""
    group = parser.add_argument_group("images and sounds")
    for name, what in (("image", "an image"), ("audio", "a sound")):
        group.add_argument(
            f"--{name}",
            action=_Media,
            dest="media",
            metavar="FILE",
            help=f"{what} before the prompt: a file, or a URL that the server may fetch; may be repeated",
        )


class _Media(argparse.Action):
    """Keeps images and sounds in the order in which they are given."""

    def __call__(self, _parser: object, namespace: argparse.Namespace, value: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest) or ()), (option, value)])


def media(arguments: argparse.Namespace) -> "list[MediaFile]":
    """The media that were given, in order. Raises ConfigError when a file cannot be read."""
    from penstock_local.media_files import read_media

    given: list[tuple[str, str]] = arguments.media or []
    return [read_media(name, "image" if flag == "--image" else "audio", of=flag) for flag, name in given]


def _name(text: str) -> str:
    """As it is. An empty one would mean no adapter, and is what an unset variable of a shell leaves."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return text


def add_ending(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    """When an output stops. ``max_tokens``: the default, None leaves it to the server."""
    count = integer(0, 2**32 - 1)
    ending = parser.add_argument_group("when to stop")
    default = "as many as fit" if max_tokens is None else max_tokens
    ending.add_argument(
        "--max-tokens", type=count, default=max_tokens, metavar="N", help=f"new tokens (default: {default})"
    )
    ending.add_argument("--min-tokens", type=count, metavar="N", help="no end before this many new tokens")
    ending.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    ending.add_argument("--ignore-eos", action="store_true", default=None, help="go on after the model's end of text")


def add_choice(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen."""
    int32, int64 = integer(-(2**31), 2**31 - 1), integer(-(2**63), 2**63 - 1)
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


def add_constraint(output: argparse._ArgumentGroup) -> None:
    """What the output must look like; ``sampling`` reads it."""
    one_of = output.add_mutually_exclusive_group()
    one_of.add_argument("--json", action="store_true", help="a JSON object")
    one_of.add_argument("--json-schema", metavar="SCHEMA", help="JSON that this schema, or that of this file, accepts")
    one_of.add_argument("--regex", metavar="PATTERN", help="text that matches")
    one_of.add_argument("--choice", action="append", metavar="TEXT", help="this text; repeat it for each alternative")
    one_of.add_argument("--grammar", metavar="GRAMMAR", help="a sentence of this EBNF grammar, or that of this file")


def sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that were given. Raises ConfigError when a constraint's file cannot be read."""
    from penstock_local.rpc.client import sampling_fields

    return sampling_fields({**vars(arguments), "structured_output": _constraint(arguments)})


def _constraint(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The constraint on the output as a field of the request."""
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


def integer(low: int, high: int) -> Callable[[str], int]:
    """A parser of integers that the wire's type can hold; whether they make sense the server says."""

    def integer(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not from {low} to {high}")
        return value

    return integer


_MISSING = "the following arguments are required"
Suggest = Callable[[str], str]
SuggestValue = Callable[[str, str], str]


class Parser(argparse.ArgumentParser):
    """Refuses unknown flags with the nearest known one. ``suggest``: what else a flag may mean here, as a sentence or ``""``;
    ``suggest_value``: likewise a value that a flag does not have.
    """

    suggest: Suggest | None = None
    suggest_value: SuggestValue | None = None
    _arguments: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's; a command's own parser refuses what is left over, with its own usage."""
        self._arguments = list(args or ())
        parsed, left = super().parse_known_args(args, namespace)
        if left:
            self.error(self._unknown(left))
        return parsed, left

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse's, in the words of settings."""
        if action.choices is not None and value not in action.choices:
            known = [name for name in map(str, action.choices) if name]  # empty: as if it were not given
            flag = action.option_strings[0] if action.option_strings else ""
            hint = self.suggest_value(flag, str(value)) if self.suggest_value is not None else ""
            raise argparse.ArgumentError(
                action, f"{value!r} is not known; known: {', '.join(known)}{hint or nearest(str(value), known)}"
            )

    def error(self, message: str) -> NoReturn:
        """As argparse's. Of a missing argument, say what the unknown flags mean, which may stand for it."""
        if message.startswith(_MISSING) and (unknown := self._unknown_flags(self._arguments)):
            message += f"; {self._unknown(unknown)}"
        super().error(message)

    def _unknown_flags(self, arguments: Sequence[str]) -> list[str]:
        flags = (text.partition("=")[0] for text in arguments if text.startswith("-") and text != "-")
        return [flag for flag in flags if flag not in self._option_string_actions]

    def _unknown(self, left: Sequence[str]) -> str:
        flags = [text.partition("=")[0] for text in left if text.startswith("-")]
        hints = (self.suggest(flags[0]) if self.suggest else "") if flags else ""
        if flags and not hints:
            hints = nearest(flags[0], self._option_string_actions)
        return f"unrecognized arguments: {' '.join(left)}{hints}"


# Flags of ``vllm serve`` and their values, and what ``penstock serve`` has for them.

_NOT_COMPILED = "no model is compiled by torch; leave it out"
_TOOLS = "tools are read wherever the model's chat template shows them, by --set frontend.model.tool_parser=NAME; leave it out"
_LORA = "adapters are served by --lora NAME=PATH or --lora-directory DIR"

VLLM_FLAGS: Mapping[str, str] = {
    "--model": "MODEL stands behind the command, without a flag: penstock serve MODEL",
    "--port": "--http-port is the OpenAI API's, --grpc-port the gRPC API's",
    "--api-key": "keys are in a file: --set frontend.auth.api_keys=FILE, with one of them in PENSTOCK_API_KEY",
    "--enable-auto-tool-choice": _TOOLS,
    "--enable-reasoning": "reasoning is read by --set frontend.model.reasoning_parser=NAME; leave it out",
    "--enable-lora": _LORA,
    "--lora-modules": _LORA,
    "--max-cpu-loras": "--set engine.lora.cpu_memory=SIZE bounds the adapters in host memory",
    "--enforce-eager": _NOT_COMPILED,
    "--compilation-config": _NOT_COMPILED,
    "--no-enable-prefix-caching": "use --set engine.cache.enable_prefix_caching=false",
    "--swap-space": "--host-cache SIZE is host memory for KV blocks",
    "--cpu-offload-gb": "weights stay where they are; --host-cache SIZE is host memory for KV blocks",
    "--kv-cache-memory-bytes": "use --kv-cache-memory SIZE",
    "--num-gpu-blocks-override": "use --set engine.cache.num_blocks=VALUE",
    "--distributed-executor-backend": "use --set engine.executor.kind=VALUE",
    "--scheduling-policy": "use --set engine.scheduler.policy=VALUE",
    "--api-server-count": "use --frontends N",
    "--uvicorn-log-level": "use --log-level LEVEL",
    "--enable-log-requests": "use --set frontend.log.requests=true",
    "--disable-log-requests": "requests are logged only with --set frontend.log.requests=true; leave it out",
    "--disable-log-stats": "--set engine.iteration_log_interval=0 turns the engines' line off",
    "--ssl-certfile": "use --set frontend.http.tls.certificate=FILE",
    "--ssl-keyfile": "use --set frontend.http.tls.key=FILE",
    "--download-dir": "the environment variable HF_HOME says where models are kept",
    "--hf-token": "the environment variable HF_TOKEN has the token",
    "--task": "use --set engine.model.task=VALUE",
    "--runner": "use --set engine.model.task=VALUE",
    "--convert": "use --set engine.model.task=VALUE",
    "--generation-config": "the model's own is used; sampling parameters of a request override it",
    "--override-generation-config": "sampling parameters of a request override the model's own",
    "-tp": "use --tensor-parallel-size N",
    "-pp": "use --pipeline-parallel-size N",
    "-dp": "use --data-parallel-size N",
    "-q": "use --quantization",
}
"""What the end of an error says of a flag. Flags that settings have the name of are found by ``settings.named``."""

_CHECKPOINTS_OWN = "a quantized checkpoint is recognized by its files: leave the flag out"
_VLLM_VALUES: Mapping[tuple[str, str], str] = {
    ("--dtype", "fp16"): "fp16 is float16 here",
    ("--dtype", "bf16"): "bf16 is bfloat16 here",
    ("--dtype", "float"): "float is float32 here",
    ("--dtype", "fp32"): "fp32 is float32 here",
    ("--device", "gpu"): "GPUs are cuda here",
}


def of_vllm_value(flag: str, value: str) -> str:
    """Return the end of an error about a value that a flag does not have: what to write in its place, or nothing."""
    if flag == "--quantization":
        return f"; {_CHECKPOINTS_OWN}"
    hint = _VLLM_VALUES.get((flag, value))
    return f"; {hint}" if hint else ""
