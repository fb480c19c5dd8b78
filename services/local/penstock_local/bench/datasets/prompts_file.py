"""The prompts of a file of the user's own."""

import itertools
import random
from pathlib import Path

import msgspec

from penstock_common.errors import ConfigError
from penstock_local.bench.datasets.base import Dataset, Prompt
from penstock_local.bench.datasets.files import decode, numbered_lines
from penstock_local.bench.options import BenchOptions


class _Line(msgspec.Struct, frozen=True):
    """An object of a JSONL file; other keys are not looked at."""

    prompt: str | list[int]
    max_tokens: int | None = None


def prompts_file(options: BenchOptions) -> Dataset:
    """The prompts of ``--prompts``, over and over. A file named ``*.jsonl`` holds objects, another one texts.

    Raises ConfigError naming the line.
    """
    file = Path(options.prompts)
    lines = _read(file)
    rng, span = random.Random(options.bench_seed), options.output_range
    prompts = (
        Prompt(line.prompt, rng.randint(span.low, span.high) if line.max_tokens is None else line.max_tokens)
        for line in itertools.cycle(lines)
    )
    return Dataset(prompts, f"{len(lines)} prompts of {file.name}")


def _read(file: Path) -> list[_Line]:
    numbered = numbered_lines(file, flag="--prompts")
    if not numbered:
        raise ConfigError(f"--prompts {file}: there is no prompt in it")
    if file.suffix != ".jsonl":
        return [_Line(line) for _, line in numbered]
    return [_parse(line, where=f"--prompts {file}, line {number}") for number, line in numbered]


def _parse(line: str, *, where: str) -> _Line:
    parsed = decode(line, _Line, where=where)
    if not parsed.prompt:
        raise ConfigError(f"{where}: the prompt is empty")
    return parsed
