"""The prompts of a benchmark: random token ids, or those of a file."""

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from penstock_common.errors import ConfigError
from penstock_local.bench.options import BenchOptions
from penstock_local.rpc.client import ModelInfo

_FIRST_ID = 10
"""Random ids begin here: the first few are special tokens in many vocabularies."""


_PEOPLE = ("human", "user")
"""What people are called in conversations."""


class Prompt(msgspec.Struct, frozen=True):
    """What one request sends. ``text`` is text or token ids, ``max_tokens`` how many new ones it asks for."""

    text: str | Sequence[int]
    max_tokens: int


class _Line(msgspec.Struct, frozen=True):
    """An object of a JSONL file; other keys are not looked at."""

    prompt: str | list[int]
    max_tokens: int | None = None


class _Turn(msgspec.Struct, frozen=True):
    """What one side says in a conversation; other keys are not looked at."""

    speaker: str = msgspec.field(name="from")
    value: str


class _Conversation(msgspec.Struct, frozen=True):
    """A conversation as ShareGPT has them."""

    conversations: list[_Turn] = []


def prompts(options: BenchOptions, model: ModelInfo) -> Iterator[Prompt]:
    """Endless, the same for the same seed. Raises ConfigError when the file or the lengths cannot be right."""
    if options.prompts:
        return _from_file(options)
    return _random(options, model)


def _random(options: BenchOptions, model: ModelInfo) -> Iterator[Prompt]:
    longest = options.shared_prefix_len + options.input_range.high + options.output_range.high
    if model.max_model_len and longest > model.max_model_len:
        raise ConfigError(
            f"prompts and outputs have up to {longest} tokens together; {model.name} takes {model.max_model_len}: "
            "lower --input-len, --output-len or --shared-prefix-len"
        )
    if model.vocab_size <= _FIRST_ID:
        raise ConfigError(f"the server says that {model.name} has {model.vocab_size} token ids; use --prompts FILE")
    return _random_prompts(options, model.vocab_size)


def _random_prompts(options: BenchOptions, vocab_size: int) -> Iterator[Prompt]:
    rng = random.Random(options.bench_seed)
    inputs, outputs = options.input_range, options.output_range
    ids = range(_FIRST_ID, vocab_size)
    prefix = rng.choices(ids, k=options.shared_prefix_len)
    while True:
        yield Prompt(
            prefix + rng.choices(ids, k=rng.randint(inputs.low, inputs.high)), rng.randint(outputs.low, outputs.high)
        )


def _from_file(options: BenchOptions) -> Iterator[Prompt]:
    lines = read_prompts(Path(options.prompts))
    rng, span = random.Random(options.bench_seed), options.output_range
    return (
        Prompt(line.prompt, rng.randint(span.low, span.high) if line.max_tokens is None else line.max_tokens)
        for line in itertools.cycle(lines)
    )


def read_prompts(file: Path) -> list[_Line]:
    """The prompts of a file, empty lines left out. A file named ``*.jsonl`` holds objects, one named ``*.json`` a list of
    conversations, another one texts.

    Raises ConfigError naming the line.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--prompts: cannot read {str(file)!r}: {getattr(e, 'strerror', None) or e}") from None
    if file.suffix == ".json":
        return _first_turns(text, where=f"--prompts {file}")
    numbered = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"--prompts {file}: there is no prompt in it")
    if file.suffix != ".jsonl":
        return [_Line(line) for _, line in numbered]
    return [_parse(line, where=f"--prompts {file}, line {number}") for number, line in numbered]


def _first_turns(text: str, *, where: str) -> list[_Line]:
    """What people say first in conversations; those that begin with somebody else, or with nothing, are left out."""
    try:
        conversations = msgspec.json.decode(text, type=list[_Conversation])
    except msgspec.DecodeError as e:
        raise ConfigError(f"{where}: it is no list of conversations: {e}") from None
    turns = [each.conversations[0] for each in conversations if each.conversations]
    found = [_Line(turn.value) for turn in turns if turn.speaker in _PEOPLE and turn.value.strip()]
    if not found:
        raise ConfigError(f"{where}: no conversation begins with what a person says")
    return found


def _parse(line: str, *, where: str) -> _Line:
    try:
        parsed = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as e:
        raise ConfigError(f"{where}: {e}") from None
    if not parsed.prompt:
        raise ConfigError(f"{where}: the prompt is empty")
    return parsed
