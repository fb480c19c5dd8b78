"""Datasets of a benchmark: the prompts that its requests send."""

import asyncio
import io
import itertools
import json
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock_client import Model
from penstock_common.errors import ConfigError
from penstock_local.bench.options import BenchOptions
from penstock_local.bench.report import schema_problem

CountTokens = Callable[[str], Awaitable[int]]
"""Function that returns the number of tokens of a text, by the server's tokenizer. Raises the server's errors."""
FIRST_ID = 10
"""Lowest token id in random prompts. Lower ids are special tokens in many vocabularies."""


class Prompt(msgspec.Struct, frozen=True):
    """Content of one request.

    Attributes:
        text: Text or token ids.
        max_tokens: Number of new tokens to request.
        schema: JSON schema that the answer must match; empty if there is no schema.
    """

    text: str | Sequence[int]
    max_tokens: int
    schema: str = ""
    images: Sequence[bytes] = ()
    """Contents of the image files that come before the text."""


class Dataset(msgspec.Struct, frozen=True):
    """Prompts of a benchmark and their description.

    Attributes:
        prompts: Endless iterator over the prompts. The same seed gives the same prompts.
        about: Description of the prompts in words.
    """

    prompts: Iterator[Prompt]
    about: str


def check_lengths(longest: int, model: Model, *, flags: str) -> None:
    """Raise ConfigError if the model does not accept sequences of ``longest`` tokens. The error names ``flags``."""
    if model.max_model_len and longest > model.max_model_len:
        raise ConfigError(
            f"prompts and outputs have up to {longest} tokens together, but {model.name} accepts at most "
            f"{model.max_model_len}; lower {flags}"
        )


def random_ids(model: Model) -> range:
    """Return the ids for random prompts. Raises ConfigError if the server does not report the vocabulary size."""
    if model.vocab_size <= FIRST_ID:
        raise ConfigError(
            f"the server reports {model.vocab_size} token ids for {model.name}, too few for random prompts; use "
            "--prompts FILE"
        )
    return range(FIRST_ID, model.vocab_size)


T = TypeVar("T")


def read_text(file: Path, *, flag: str) -> str:
    """Read a text file. Raises ConfigError naming ``flag``, the file and the reason."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{flag}: cannot read {str(file)!r}: {getattr(e, 'strerror', None) or e}") from None


def numbered_lines(file: Path, *, flag: str) -> list[tuple[int, str]]:
    """Return the non-empty lines with their numbers, from 1. Raises ConfigError if the file cannot be read."""
    return [(n, line) for n, line in enumerate(read_text(file, flag=flag).splitlines(), start=1) if line.strip()]


def decode(text: str | msgspec.Raw, kind: type[T], *, where: str) -> T:
    """Decode JSON into a type.

    Raises ConfigError if the JSON is invalid. The error begins with ``where``, which names the file and the line or
    entry.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as e:
        raise ConfigError(f"{where}: {e}") from None


def decode_list(text: str, kind: type[T], *, where: str, what: str) -> list[T]:
    """Decode a JSON list with entries of one type.

    Raises ConfigError if the text is not a list of ``what``, or if an entry is wrong; the error then names the entry.
    """
    try:
        entries = msgspec.json.decode(text, type=list[msgspec.Raw])
    except msgspec.ValidationError as e:
        raise ConfigError(f"{where}: not a list of {what}: {e}") from None
    except msgspec.DecodeError as e:
        raise ConfigError(f"{where}{_place(text)}: not a list of {what}: {e}") from None
    return [decode(entry, kind, where=f"{where}, entry {n}") for n, entry in enumerate(entries, start=1)]


def _place(text: str) -> str:
    """Return a text with the number of the line with the syntax error, for messages."""
    try:
        json.loads(text)
    except json.JSONDecodeError as e:
        return f", line {e.lineno}"
    return ""


# Dataset: prompts from the user's own file.


class _PromptLine(msgspec.Struct, frozen=True):
    """A line of a JSONL file: a JSON object. Other keys are ignored."""

    prompt: str | list[int]
    max_tokens: int | None = None


def prompts_file(options: BenchOptions) -> Dataset:
    """Return the prompts of ``--prompts``, repeated endlessly.

    Lines of a ``*.jsonl`` file are objects, other lines are texts.

    Raises:
        ConfigError: The file has no prompts, or a line is not valid. The message for a line has the line's number.
    """
    file = Path(options.prompts)
    lines = _read_prompts(file)
    rng, span = random.Random(options.bench_seed), options.output_range
    prompts = (
        Prompt(line.prompt, rng.randint(span.low, span.high) if line.max_tokens is None else line.max_tokens)
        for line in itertools.cycle(lines)
    )
    return Dataset(prompts, f"{len(lines)} prompts of {file.name}")


def _read_prompts(file: Path) -> list[_PromptLine]:
    numbered = numbered_lines(file, flag="--prompts")
    if not numbered:
        raise ConfigError(f"--prompts {file}: the file has no prompts")
    if file.suffix != ".jsonl":
        return [_PromptLine(line) for _, line in numbered]
    return [_parse_prompt(line, where=f"--prompts {file}, line {number}") for number, line in numbered]


def _parse_prompt(line: str, *, where: str) -> _PromptLine:
    parsed = decode(line, _PromptLine, where=where)
    if not parsed.prompt:
        raise ConfigError(f"{where}: the prompt is empty")
    return parsed


# Dataset: conversations of people with a model, from a file of the ShareGPT dataset.
#
# The selection is the same as in ``vllm bench serve --dataset-name sharegpt``: the first turn is the prompt, and the
# length of the second turn is the length of the answer.

LEAST_TOKENS, MOST_PROMPT_TOKENS, MOST_TOKENS = 4, 1024, 2048
"""Limits in tokens: minimum for prompts and for answers, maximum for prompts, and maximum for prompt plus answer."""
MOST_CHARACTERS = 32 * MOST_TOKENS
"""Maximum number of characters of a text. Longer texts are skipped, and their tokens are not counted."""
WITHOUT_LIMIT = 2000
"""Number of conversations that are selected if the number of requests is unknown."""
_AT_ONCE = 32


class _Turn(msgspec.Struct, frozen=True):
    """A turn of one speaker. Other keys are ignored."""

    speaker: str = msgspec.field(name="from")
    value: str


class _Conversation(msgspec.Struct, frozen=True):
    conversations: list[_Turn] = []


async def sharegpt(options: BenchOptions, model: Model, count_tokens: CountTokens) -> Dataset:
    """Select as many conversations as there are requests, in a random order that the seed defines.

    If fewer conversations are suitable, the selected conversations repeat. If ``--output-len`` is given, it replaces
    the lengths of the answers.

    Raises:
        ConfigError: The file or an entry is invalid, or no conversation is suitable. Also raises the server's errors.
    """
    file = Path(options.dataset_path)
    where = f"--dataset-path {file}"
    text = read_text(file, flag="--dataset-path")
    read = decode_list(text, _Conversation, where=where, what="conversations")
    pairs = [(each.conversations[0].value, each.conversations[1].value) for each in read if len(each.conversations) > 1]
    rng = random.Random(options.bench_seed)
    rng.shuffle(pairs)
    limit = min(MOST_TOKENS, model.max_model_len or MOST_TOKENS)
    wanted = WITHOUT_LIMIT if options.limit is None else options.limit + options.warmup
    found: list[Prompt] = []
    looked_at = 0
    while len(found) < wanted and looked_at < len(pairs):
        some = pairs[looked_at : looked_at + _AT_ONCE]
        lengths = [_drawn(options, rng) for _ in some]
        fitting = await asyncio.gather(
            *(_prompt(*pair, n, limit, count_tokens) for pair, n in zip(some, lengths, strict=True))
        )
        found += [prompt for prompt in fitting if prompt is not None]
        looked_at += len(some)
    if not found:
        raise ConfigError(f"{where}: {_nothing_fits(read, pairs, limit)}")
    kept = found[:wanted]
    return Dataset(itertools.cycle(kept), f"{len(kept)} of {len(read)} conversations of {file.name}")


def _drawn(options: BenchOptions, rng: random.Random) -> int | None:
    """Return a random output length, or None if the length of the conversation's answer applies."""
    return rng.randint(options.output_range.low, options.output_range.high) if options.output_len else None


async def _prompt(
    question: str, answer: str, output_len: int | None, limit: int, count_tokens: CountTokens
) -> Prompt | None:
    """Return the prompt, or None if the conversation is skipped."""
    if not question or len(question) > MOST_CHARACTERS:
        return None
    prompt_tokens = await count_tokens(question)
    if not LEAST_TOKENS <= prompt_tokens <= MOST_PROMPT_TOKENS:
        return None
    if output_len is None:
        output_len = await count_tokens(answer) if len(answer) <= MOST_CHARACTERS else limit
        if output_len < LEAST_TOKENS:
            return None
    return Prompt(question, output_len) if prompt_tokens + output_len <= limit else None


def _nothing_fits(read: Sequence[_Conversation], pairs: Sequence[tuple[str, str]], limit: int) -> str:
    if not pairs:
        return f"none of the file's {len(read)} entries has two turns"
    return (
        f"none of the file's {len(pairs)} conversations fits: prompts have {LEAST_TOKENS} to {MOST_PROMPT_TOKENS} "
        "tokens, answers at "
        f"least {LEAST_TOKENS}, both together at most {limit}"
    )


# Random images as JPEG files: soft spots of color. All images differ, so no server has cached them.

_SPOTS = 16
"""Number of color spots per side. With this number, all images differ, and files are as large as those of photographs.
"""


def random_images(options: BenchOptions) -> Iterator[tuple[bytes, ...]]:
    """Yield the image files of each request, endlessly. ``image_repeat`` consecutive requests have the same images."""
    rng = random.Random(f"images {options.bench_seed}")
    width, height = options.image_pixels
    while True:
        files = tuple(image_file(rng, width, height) for _ in range(options.images))
        for _ in range(options.image_repeat):
            yield files


def image_file(rng: random.Random, width: int, height: int) -> bytes:
    """Return a JPEG file of this size in pixels."""
    from PIL import Image  # Imported here because it is slow and only needed for images.

    spots = Image.frombytes("RGB", (_SPOTS, _SPOTS), rng.randbytes(3 * _SPOTS * _SPOTS))
    file = io.BytesIO()
    spots.resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


# Dataset: prompts of random token ids.


def random_dataset(options: BenchOptions, model: Model) -> Dataset:
    """Return random prompts of the requested lengths, after an optional shared prefix.

    Raises ConfigError if the model does not accept the lengths.
    """
    longest = options.shared_prefix_len + options.input_range.high + options.output_range.high
    check_lengths(longest, model, flags="--input-len, --output-len or --shared-prefix-len")
    shared = f" after {options.shared_prefix_len} shared ones" if options.shared_prefix_len else ""
    about = f"{options.input_range} random token ids{shared}"
    if options.images:
        width, height = options.image_pixels
        again = f", the same for {options.image_repeat} requests" if options.image_repeat > 1 else ""
        about += f" after {options.images} images of {width}x{height}{again}"
    return Dataset(_random_prompts(options, random_ids(model)), about)


def _random_prompts(options: BenchOptions, ids: range) -> Iterator[Prompt]:
    rng = random.Random(options.bench_seed)
    inputs, outputs = options.input_range, options.output_range
    prefix = rng.choices(ids, k=options.shared_prefix_len)
    images = random_images(options)
    while True:
        length = rng.randint(inputs.low, inputs.high)
        yield Prompt(prefix + rng.choices(ids, k=length), rng.randint(outputs.low, outputs.high), images=next(images))


# Dataset: prompts with shared prefixes, to measure prefix caching. Each of a few random prefixes occurs with many
# suffixes.
#
# The idea and the names come from ``vllm bench serve --dataset-name prefix_repetition``.


def prefix_repetition(options: BenchOptions, model: Model) -> Dataset:
    """Return prompts in which all prefixes are equally frequent.

    Raises ConfigError if the model does not accept the lengths.
    """
    prefix, suffix = options.prefix_repetition_prefix_len, options.prefix_repetition_suffix_len
    longest = prefix + suffix + options.prefix_repetition_output_len
    check_lengths(longest, model, flags="--prefix-repetition-prefix-len, -suffix-len or -output-len")
    about = f"{options.prefix_repetition_num_prefixes} prefixes of {prefix} random token ids, suffixes of {suffix}"
    return Dataset(_prefix_prompts(options, random_ids(model)), about)


def _prefix_prompts(options: BenchOptions, ids: range) -> Iterator[Prompt]:
    """Yield prompts in rounds. In each round, every prefix occurs once, in a new random order."""
    rng = random.Random(options.bench_seed)
    length = options.prefix_repetition_prefix_len
    prefixes = [rng.choices(ids, k=length) for _ in range(options.prefix_repetition_num_prefixes)]
    while True:
        rng.shuffle(prefixes)
        for prefix in prefixes:
            suffix = rng.choices(ids, k=options.prefix_repetition_suffix_len)
            yield Prompt(prefix + suffix, options.prefix_repetition_output_len)


# Random JSON schemas: small objects, for answers of a few dozen tokens.

_NAMES = (
    *("name", "city", "country", "street", "title", "author", "language", "category", "status", "color"),
    *("count", "age", "year", "price", "rating", "size", "width", "height", "active", "verified"),
)
_WORDS = ("low", "medium", "high", "new", "open", "closed", "red", "green", "blue", "unknown")
_LONGEST_TEXT, _LARGEST_NUMBER, _MOST_ITEMS = 12, 999, 3
_PROPERTIES = (2, 5)


def made_schema(rng: random.Random) -> dict[str, Any]:
    """Return the schema of an object. In a third of the schemas, one property is also an object."""
    schema = _object(rng)
    if rng.random() < 1 / 3:
        name = rng.choice(list(schema["properties"]))
        schema["properties"][name] = _object(rng)
    return schema


def _object(rng: random.Random) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(*_PROPERTIES))
    properties = {name: rng.choice(_VALUES)(rng) for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def _text(_: random.Random) -> dict[str, Any]:
    return {"type": "string", "maxLength": _LONGEST_TEXT}


def _number(_: random.Random) -> dict[str, Any]:
    return {"type": "integer", "minimum": 0, "maximum": _LARGEST_NUMBER}


def _truth(_: random.Random) -> dict[str, Any]:
    return {"type": "boolean"}


def _word(rng: random.Random) -> dict[str, Any]:
    return {"enum": rng.sample(_WORDS, 3)}


def _list(rng: random.Random) -> dict[str, Any]:
    return {"type": "array", "items": rng.choice((_number, _word))(rng), "minItems": 1, "maxItems": _MOST_ITEMS}


_VALUES: tuple[Callable[[random.Random], dict[str, Any]], ...] = (_text, _number, _truth, _word, _list)


# Dataset: requests for JSON that follows a schema. Schemas are generated or read from a file.


class _SchemaLine(msgspec.Struct, frozen=True):
    """A line of a file. Other keys are ignored."""

    schema: dict[str, Any]
    prompt: str | None = None
    max_tokens: int | None = None


def json_schema(options: BenchOptions) -> Dataset:
    """Return requests with ``--num-schemas`` generated schemas, or with the schemas in a file, used in turn.

    If a line has no prompt, a prompt with the schema is generated. Raises ConfigError that names a wrong line.
    """
    rng = random.Random(options.bench_seed)
    if options.dataset_path:
        lines = _read_schemas(Path(options.dataset_path))
        about = f"{len(lines)} JSON schemas of {Path(options.dataset_path).name}"
    else:
        lines = [_SchemaLine(made_schema(rng)) for _ in range(options.num_schemas)]
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


def _prompt_of(line: _SchemaLine) -> str:
    if line.prompt is not None:
        return line.prompt
    return f"Answer with JSON that follows this schema:\n{json.dumps(line.schema)}\n"


def _read_schemas(file: Path) -> list[_SchemaLine]:
    where = f"--dataset-path {file}"
    numbered = numbered_lines(file, flag="--dataset-path")
    if not numbered:
        raise ConfigError(f"{where}: the file has no schemas")
    return [_parse_schema(line, where=f"{where}, line {number}") for number, line in numbered]


def _parse_schema(text: str, *, where: str) -> _SchemaLine:
    line = decode(text, _SchemaLine, where=where)
    if problem := schema_problem(line.schema):
        raise ConfigError(f"{where}: schema: {problem}")
    if line.prompt == "":
        raise ConfigError(f"{where}: the prompt is empty")
    if line.max_tokens is not None and line.max_tokens < 1:
        raise ConfigError(f"{where}: max_tokens is {line.max_tokens}; it must be at least 1")
    return line


async def make_dataset(options: BenchOptions, model: Model, count_tokens: CountTokens) -> Dataset:
    """Create the dataset of the options. Raises ConfigError for wrong files or lengths, and the server's errors."""
    if options.prompts:
        return prompts_file(options)
    if options.dataset == "sharegpt":
        return await sharegpt(options, model, count_tokens)
    if options.dataset == "prefix-repetition":
        return prefix_repetition(options, model)
    if options.dataset == "json-schema":
        return json_schema(options)

    return random_dataset(options, model)
