"""Requests whose answers must be JSON that a schema accepts: schemas that are made, or those of a file."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import msgspec

from penstock_common.errors import ConfigError
from penstock_local.bench.datasets.base import Dataset, Prompt
from penstock_local.bench.datasets.files import decode, numbered_lines
from penstock_local.bench.datasets.made_schemas import made_schema
from penstock_local.bench.json_answers import schema_problem
from penstock_local.bench.options import BenchOptions


class _Line(msgspec.Struct, frozen=True):
    """A line of a file; other keys are not looked at."""

    schema: dict[str, Any]
    prompt: str | None = None
    max_tokens: int | None = None


def json_schema(options: BenchOptions) -> Dataset:
    """``--num-schemas`` schemas in turn, or those of a file. Raises ConfigError naming a line that is wrong.

    Where a prompt is not said, it asks for JSON and has the schema in it.
    """
    rng = random.Random(options.bench_seed)
    if options.dataset_path:
        lines = _read(Path(options.dataset_path))
        about = f"{len(lines)} JSON schemas of {Path(options.dataset_path).name}"
    else:
        lines = [_Line(made_schema(rng)) for _ in range(options.num_schemas)]
        about = f"{len(lines)} JSON schemas"
    lengths = options.output_range
    prompts = [(_prompt_of(line), line.max_tokens, json.dumps(line.schema)) for line in lines]
    return Dataset(
        (
            Prompt(text, rng.randint(lengths.low, lengths.high) if count is None else count, schema)
            for text, count, schema in itertools.cycle(prompts)
        ),
        about,
    )


def _prompt_of(line: _Line) -> str:
    if line.prompt is not None:
        return line.prompt
    return f"Answer with JSON that follows this schema:\n{json.dumps(line.schema)}\n"


def _read(file: Path) -> list[_Line]:
    where = f"--dataset-path {file}"
    numbered = numbered_lines(file, flag="--dataset-path")
    if not numbered:
        raise ConfigError(f"{where}: there is no schema in it")
    return [_parse(line, where=f"{where}, line {number}") for number, line in numbered]


def _parse(text: str, *, where: str) -> _Line:
    line = decode(text, _Line, where=where)
    if problem := schema_problem(line.schema):
        raise ConfigError(f"{where}: schema: {problem}")
    if line.prompt == "":
        raise ConfigError(f"{where}: the prompt is empty")
    if line.max_tokens is not None and line.max_tokens < 1:
        raise ConfigError(f"{where}: max_tokens is {line.max_tokens}; it must be at least 1")
    return line
