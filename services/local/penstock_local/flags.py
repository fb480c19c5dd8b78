"""Command-line flags: the parser, flags shared by several commands, and hints for vLLM's flags."""

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


def add_positional(
    parser: argparse.ArgumentParser, options: type[msgspec.Struct], name: str, *, repeated: bool = False
) -> None:
    """Add the positional argument for the field ``name`` of ``options``, with the field's description as help. If
    ``repeated`` is true, the argument may be given any number of times.
    """
    text = _setting(options, name).kind.description.replace("%", "%%")
    parser.add_argument(name, metavar=name.upper(), nargs="*" if repeated else None, help=text)


def add_options(group: argparse._ActionsContainer, options: type[msgspec.Struct], **metavars: str) -> None:
    """Add a flag for each named field of ``options``.

    The help shows the description, the range or choices, and the default. ``metavars`` has the placeholder of the value
    in the help, by field name. Fields with choices have no placeholder. A flag that is not given is None, and
    ``options_of`` leaves it out.
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
    """Build the options of a command from its parsed arguments. None values are left out.

    ``values`` override the arguments. Raises ConfigError for an invalid size.
    """
    given: dict[str, Any] = {}
    for setting in settings_of(options):
        value = getattr(arguments, setting.key, None)
        if value is not None and setting.kind.is_size:
            value = parse_bytes(value, key=setting.flag)
        given[setting.key] = tuple(value) if isinstance(value, list) else value
    return options(**{name: value for name, value in (given | values).items() if value is not None})


def add_admin(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the address of the admin API."""
    parser.add_argument(
        "--admin-address",
        default=DEFAULT_ADMIN_ADDRESS,
        metavar="ADDRESS",
        help="Address of any frontend's admin API (default: %(default)s).",
    )


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select the server, the model and the adapter."""
    parser.add_argument(
        "--address", default=DEFAULT_ADDRESS, help=("Address of the server's gRPC API (default: %(default)s).")
    )
    parser.add_argument(
        "--model", metavar="NAME", default="", help="Name of the model (default: the server's only model)."
    )
    parser.add_argument(
        "--lora", metavar="NAME", type=_name, help=("Name of a LoRA adapter of the model (default: none).")
    )


def add_media(parser: argparse.ArgumentParser) -> None:
    """Add the flags for media before the prompt. ``media`` reads their values."""
    group = parser.add_argument_group("images and audio")
    for name, what in (("image", "an image"), ("audio", "audio")):
        group.add_argument(
            f"--{name}",
            action=_Media,
            dest="media",
            metavar="FILE",
            help=f"Put {what} before the prompt: a file, or a URL that the server may fetch. May be repeated.",
        )


class _Media(argparse.Action):
    """Collects images and audio in the order in which the flags are given."""

    def __call__(self, _parser: object, namespace: argparse.Namespace, value: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest) or ()), (option, value)])


def media(arguments: argparse.Namespace) -> "list[MediaFile]":
    """Return the media of the flags, in order. Raises ConfigError if a file cannot be read."""
    from penstock_local.media_files import read_media

    given: list[tuple[str, str]] = arguments.media or []
    return [read_media(name, "image" if flag == "--image" else "audio", of=flag) for flag, name in given]


def _name(text: str) -> str:
    """Return ``text``, but refuse an empty name.

    An empty name would mean no adapter. Often its cause is an unset shell variable.
    """
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return text


def add_ending(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    """Add the flags that limit or end an output. ``max_tokens`` is the default of ``--max-tokens``; None uses the
    server's default.
    """
    count = integer(0, 2**32 - 1)
    ending = parser.add_argument_group("when to stop")
    default = "as many as fit" if max_tokens is None else max_tokens
    ending.add_argument(
        "--max-tokens",
        type=count,
        default=max_tokens,
        metavar="N",
        help=(f"Maximum number of new tokens (default: {default})."),
    )
    ending.add_argument(
        "--min-tokens", type=count, metavar="N", help=("Minimum number of new tokens before the output may end.")
    )
    ending.add_argument("--stop", action="append", metavar="TEXT", help="Stop before this text. May be repeated.")
    ending.add_argument(
        "--ignore-eos",
        action="store_true",
        default=None,
        help=("Continue the output after the model's end-of-sequence token."),
    )


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add the flags for sampling."""
    int32, int64 = integer(-(2**31), 2**31 - 1), integer(-(2**63), 2**63 - 1)
    choice = parser.add_argument_group("sampling")
    choice.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help=("Sampling temperature. 0 always picks the most likely token, and higher values vary more."),
    )
    choice.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help=("Keep only the most likely tokens whose total probability is at least P."),
    )
    choice.add_argument("--top-k", type=int32, metavar="K", help="Keep only the K most likely tokens.")
    choice.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help=("Drop tokens whose probability is below this fraction of the most likely token's probability."),
    )
    choice.add_argument("--seed", type=int64, metavar="S", help="Random seed. The same seed gives the same text.")
    choice.add_argument(
        "--presence-penalty",
        type=float,
        metavar="X",
        help=("Subtract X from the logit of every token in the output so far."),
    )
    choice.add_argument(
        "--frequency-penalty",
        type=float,
        metavar="X",
        help=("Subtract X from a token's logit for each occurrence of the token in the output so far."),
    )
    choice.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help=("Penalize tokens of the prompt and of the output so far. Values above 1 make these tokens less likely."),
    )


def add_constraint(output: argparse._ArgumentGroup) -> None:
    """Add the flags for structured output. ``sampling`` reads their values."""
    one_of = output.add_mutually_exclusive_group()
    one_of.add_argument("--json", action="store_true", help="Generate a JSON object.")
    one_of.add_argument(
        "--json-schema",
        metavar="SCHEMA",
        help=("Generate JSON that matches this JSON schema, or the schema in this file."),
    )
    one_of.add_argument("--regex", metavar="PATTERN", help="Generate text that matches this regular expression.")
    one_of.add_argument(
        "--choice",
        action="append",
        metavar="TEXT",
        help=("Generate exactly this text. Repeat the flag to give alternatives."),
    )
    one_of.add_argument(
        "--grammar",
        metavar="GRAMMAR",
        help=("Generate text that matches this EBNF grammar, or the grammar in this file."),
    )


def sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the SamplingParams fields that were given. Raises ConfigError if a constraint's file cannot be read."""
    from penstock_local.rpc.client import sampling_fields

    return sampling_fields({**vars(arguments), "structured_output": _constraint(arguments)})


def _constraint(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return the structured-output constraint as a field of the request, or None."""
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
    """Return a parser for integers in a range that the protobuf type can hold.

    The server checks whether the value makes sense.
    """

    def integer(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is out of range; it must be from {low} to {high}")
        return value

    return integer


_MISSING = "the following arguments are required"
Suggest = Callable[[str], str]
SuggestValue = Callable[[str, str], str]


class Parser(argparse.ArgumentParser):
    """Argument parser that refuses unknown flags and suggests the closest known flag.

    Attributes:
        suggest: Returns a hint for an unknown flag, as the end of a sentence, or ``""``.
        suggest_value: Returns a hint for an unknown value of a flag, or ``""``.
    """

    suggest: Suggest | None = None
    suggest_value: SuggestValue | None = None
    _arguments: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse like argparse, but let each command's parser report unknown arguments with its own usage line."""
        self._arguments = list(args or ())
        parsed, left = super().parse_known_args(args, namespace)
        if left:
            self.error(self._unknown(left))
        return parsed, left

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check choices like argparse, with the wording of settings errors."""
        if action.choices is not None and value not in action.choices:
            # An empty choice means the same as a missing flag, so the message does not list it.
            known = [name for name in map(str, action.choices) if name]
            flag = action.option_strings[0] if action.option_strings else ""
            hint = self.suggest_value(flag, str(value)) if self.suggest_value is not None else ""
            raise argparse.ArgumentError(
                action, f"{value!r} is not known; known: {', '.join(known)}{hint or nearest(str(value), known)}"
            )

    def error(self, message: str) -> NoReturn:
        """Report an error like argparse. If an argument is missing, add hints about unknown flags that were given."""
        if message.startswith(_MISSING) and (unknown := self._unknown_flags(self._arguments)):
            message += f"; {self._unknown(unknown)}"
        super().error(message)

    def _unknown_flags(self, arguments: Sequence[str]) -> list[str]:
        flags = (text.partition("=")[0] for text in arguments if text.startswith("-") and text != "-")
        return [flag for flag in flags if flag not in self._option_string_actions]

    def _unknown(self, left: Sequence[str]) -> str:
        flags = list(dict.fromkeys(text.partition("=")[0] for text in left if text.startswith("-")))
        flags_of: dict[str, list[str]] = {}
        for flag in flags:
            if hint := (self.suggest(flag) if self.suggest else "") or nearest(flag, self._option_string_actions):
                flags_of.setdefault(hint.removeprefix("; "), []).append(flag)
        hints = [hint if len(flags) == 1 else f"{', '.join(of)}: {hint}" for hint, of in flags_of.items()]
        return "; ".join([f"unrecognized arguments: {' '.join(left)}", *hints])


# Flags and values of ``vllm serve``, and the equivalents of ``penstock serve``.

_NOT_COMPILED = "Penstock does not use torch.compile; leave it out"
_TOOLS = (
    "tool calls are parsed with --set frontend.model.tool_parser=NAME if the chat template supports tools; leave it out"
)
_LORA = "load adapters with --lora NAME=PATH or --lora-directory DIR"

VLLM_FLAGS: Mapping[str, str] = {
    "--model": "give MODEL without a flag: penstock serve MODEL",
    "--port": "use --http-port for the OpenAI API and --grpc-port for the gRPC API",
    "--api-key": "use --set frontend.auth.api_keys=FILE, and put one of the keys into PENSTOCK_API_KEY",
    "--enable-auto-tool-choice": _TOOLS,
    "--enable-reasoning": "use --set frontend.model.reasoning_parser=NAME instead; leave it out",
    "--enable-lora": _LORA,
    "--lora-modules": _LORA,
    "--max-cpu-loras": "--set engine.lora.cpu_memory=SIZE limits the memory for adapters on the host",
    "--language-model-only": "use --no-media",
    "--enforce-eager": _NOT_COMPILED,
    "--compilation-config": _NOT_COMPILED,
    "--no-enable-prefix-caching": "use --set engine.cache.enable_prefix_caching=false",
    "--swap-space": "use --host-cache SIZE to keep evicted KV blocks in host memory",
    "--cpu-offload-gb": "weights are not offloaded; --host-cache SIZE keeps evicted KV blocks in host memory",
    "--kv-cache-memory-bytes": "use --kv-cache-memory SIZE",
    "--num-gpu-blocks-override": "use --set engine.cache.num_blocks=VALUE",
    "--distributed-executor-backend": "use --set engine.executor.kind=VALUE",
    "--scheduling-policy": "use --set engine.scheduler.policy=VALUE",
    "--api-server-count": "use --frontends N",
    "--uvicorn-log-level": "use --log-level LEVEL",
    "--enable-log-requests": "use --set frontend.log.requests=true",
    "--disable-log-requests": "requests are logged only with --set frontend.log.requests=true; leave it out",
    "--disable-log-stats": "use --set engine.iteration_log_interval=0 to turn off the engines' statistics line",
    "--ssl-certfile": "use --set frontend.http.tls.certificate=FILE",
    "--ssl-keyfile": "use --set frontend.http.tls.key=FILE",
    "--download-dir": "set the environment variable HF_HOME to the directory for models",
    "--hf-token": "set the environment variable HF_TOKEN to the token",
    "--task": "use --set engine.model.task=VALUE",
    "--runner": "use --set engine.model.task=VALUE",
    "--convert": "use --set engine.model.task=VALUE",
    "--generation-config": "the model's own file is used; sampling parameters of a request override it",
    "--override-generation-config": "sampling parameters of a request override the model's own",
    "-tp": "use --tensor-parallel-size N",
    "-pp": "use --pipeline-parallel-size N",
    "-dp": "use --data-parallel-size N",
    "-q": "use --quantization",
}
"""Hint for each vLLM flag, as the end of an error message.

Flags that match a setting's name are found by ``settings.named``.
"""

_CHECKPOINTS_OWN = "a quantized checkpoint is recognized by its files: leave the flag out"
_VLLM_VALUES: Mapping[tuple[str, str], str] = {
    ("--dtype", "fp16"): "fp16 is float16 here",
    ("--dtype", "bf16"): "bf16 is bfloat16 here",
    ("--dtype", "float"): "float is float32 here",
    ("--dtype", "fp32"): "fp32 is float32 here",
    ("--device", "gpu"): "GPUs are cuda here",
}


def of_vllm_value(flag: str, value: str) -> str:
    """Return a hint for a value that ``flag`` does not accept, as the end of an error message. Empty if there is none."""
    if flag == "--quantization":
        return f"; {_CHECKPOINTS_OWN}"
    hint = _VLLM_VALUES.get((flag, value))
    return f"; {hint}" if hint else ""
