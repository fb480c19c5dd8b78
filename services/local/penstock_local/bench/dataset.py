"""What the requests of a benchmark ask: the datasets, and what makes them by name."""

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
"""How many tokens a text has, by the server's tokenizer. Raises what the server fails with."""
FIRST_ID = 10
"""Random ids begin here: the first few are special tokens in many vocabularies."""


class Prompt(msgspec.Struct, frozen=True):
    """What one request sends.

    ``text`` is text or token ids, ``max_tokens`` how many new ones it asks for, ``schema`` a JSON schema that the answer must
    follow; empty: none.
    """

    text: str | Sequence[int]
    max_tokens: int
    schema: str = ""
    images: Sequence[bytes] = ()
    """Files of images that stand before the text."""


class Dataset(msgspec.Struct, frozen=True):
    """``prompts`` never end, and are the same for the same seed. ``about`` says in words what they are."""

    prompts: Iterator[Prompt]
    about: str


def check_lengths(longest: int, model: Model, *, flags: str) -> None:
    """Raise ConfigError, naming ``flags``, when the model takes no sequences of ``longest`` tokens."""
    if model.max_model_len and longest > model.max_model_len:
        raise ConfigError(
            f"prompts and outputs have up to {longest} tokens together; {model.name} takes {model.max_model_len}: lower {flags}"
        )


def random_ids(model: Model) -> range:
    """The ids that random prompts are drawn from. Raises ConfigError when the server does not say how many there are."""
    if model.vocab_size <= FIRST_ID:
        raise ConfigError(f"the server says that {model.name} has {model.vocab_size} token ids; use --prompts FILE")
    return range(FIRST_ID, model.vocab_size)


T = TypeVar("T")


def read_text(file: Path, *, flag: str) -> str:
    """The text of a file. Raises ConfigError naming ``flag``, the file and the reason."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{flag}: cannot read {str(file)!r}: {getattr(e, 'strerror', None) or e}") from None


def numbered_lines(file: Path, *, flag: str) -> list[tuple[int, str]]:
    """The lines that are not empty, with their numbers from 1 on. Raises ConfigError."""
    return [(n, line) for n, line in enumerate(read_text(file, flag=flag).splitlines(), start=1) if line.strip()]


def decode(text: str | msgspec.Raw, kind: type[T], *, where: str) -> T:
    """``text`` as JSON of a type. Raises ConfigError that begins with ``where``, which names file and line or entry."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as e:
        raise ConfigError(f"{where}: {e}") from None


def decode_list(text: str, kind: type[T], *, where: str, what: str) -> list[T]:
    """A JSON list whose entries are of one type. Raises ConfigError: the text is no list of ``what``, or which entry is wrong."""
    try:
        entries = msgspec.json.decode(text, type=list[msgspec.Raw])
    except msgspec.ValidationError as e:
        raise ConfigError(f"{where}: it is no list of {what}: {e}") from None
    except msgspec.DecodeError as e:
        raise ConfigError(f"{where}{_place(text)}: it is no list of {what}: {e}") from None
    return [decode(entry, kind, where=f"{where}, entry {n}") for n, entry in enumerate(entries, start=1)]


def _place(text: str) -> str:
    """The line in which a text is no JSON."""
    try:
        json.loads(text)
    except json.JSONDecodeError as e:
        return f", line {e.lineno}"
    return ""


# The prompts of a file of the user's own.


class _PromptLine(msgspec.Struct, frozen=True):
    """An object of a JSONL file; other keys are not looked at."""

    prompt: str | list[int]
    max_tokens: int | None = None


def prompts_file(options: BenchOptions) -> Dataset:
    """The prompts of ``--prompts``, over and over. A file named ``*.jsonl`` holds objects, another one texts.

    Raises ConfigError naming the line.
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
        raise ConfigError(f"--prompts {file}: there is no prompt in it")
    if file.suffix != ".jsonl":
        return [_PromptLine(line) for _, line in numbered]
    return [_parse_prompt(line, where=f"--prompts {file}, line {number}") for number, line in numbered]


def _parse_prompt(line: str, *, where: str) -> _PromptLine:
    parsed = decode(line, _PromptLine, where=where)
    if not parsed.prompt:
        raise ConfigError(f"{where}: the prompt is empty")
    return parsed


# Conversations that people had with a model, from a file of the ShareGPT dataset.
#
# What is taken of them, and which are left out, is as ``vllm bench serve --dataset-name sharegpt`` does it: the first turn is the
# prompt, the second says how long the answer is.

LEAST_TOKENS, MOST_PROMPT_TOKENS, MOST_TOKENS = 4, 1024, 2048
"""Prompts and answers have at least so many tokens, prompts at most so many, both together at most so many."""
MOST_CHARACTERS = 32 * MOST_TOKENS
"""A text with more is taken for too long without asking for its tokens."""
WITHOUT_LIMIT = 2000
"""So many are looked for when it is not known how many requests there will be."""
_AT_ONCE = 32


class _Turn(msgspec.Struct, frozen=True):
    """What one side says; other keys are not looked at."""

    speaker: str = msgspec.field(name="from")
    value: str


class _Conversation(msgspec.Struct, frozen=True):
    conversations: list[_Turn] = []


async def sharegpt(options: BenchOptions, model: Model, count_tokens: CountTokens) -> Dataset:
    """As many conversations as there are requests, in an order that the seed chooses; over and over where too few fit.

    ``--output-len`` stands for the lengths of the answers where it is given. Raises ConfigError for a file that is none, with
    the entry, or in which nothing fits, and what the server fails with.
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
    """The length of an output, None where the answer's own holds."""
    return rng.randint(options.output_range.low, options.output_range.high) if options.output_len else None


async def _prompt(
    question: str, answer: str, output_len: int | None, limit: int, count_tokens: CountTokens
) -> Prompt | None:
    """None for a conversation that is left out."""
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
        return f"none of its {len(read)} entries is a conversation of two turns"
    return (
        f"none of its {len(pairs)} conversations fits: prompts have {LEAST_TOKENS} to {MOST_PROMPT_TOKENS} tokens, answers at "
        f"least {LEAST_TOKENS}, both together at most {limit}"
    )


# Images that nobody has seen: soft spots of colour, as JPEG files.

_SPOTS = 16
"""Spots of colour on a side: enough that no two images are alike, and that files are about as large as those of photographs."""


def random_images(options: BenchOptions) -> Iterator[tuple[bytes, ...]]:
    """The files of each request's images without end, the same for ``image_repeat`` requests one after the other."""
    rng = random.Random(f"images {options.bench_seed}")
    width, height = options.image_pixels
    while True:
        files = tuple(image_file(rng, width, height) for _ in range(options.images))
        for _ in range(options.image_repeat):
            yield files


def image_file(rng: random.Random, width: int, height: int) -> bytes:
    """A JPEG file of that size in pixels."""
    from PIL import Image  # slow to import, for those who ask for no images

    spots = Image.frombytes("RGB", (_SPOTS, _SPOTS), rng.randbytes(3 * _SPOTS * _SPOTS))
    file = io.BytesIO()
    spots.resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


# Prompts of random token ids.


def random_dataset(options: BenchOptions, model: Model) -> Dataset:
    """Prompts and outputs of the lengths asked for, prompts behind the prefix that all share, if there is to be one.

    Raises ConfigError when the model cannot take them.
    """
    longest = options.shared_prefix_len + options.input_range.high + options.output_range.high
    check_lengths(longest, model, flags="--input-len, --output-len or --shared-prefix-len")
    shared = f" behind {options.shared_prefix_len} that all share" if options.shared_prefix_len else ""
    about = f"{options.input_range} random token ids{shared}"
    if options.images:
        width, height = options.image_pixels
        again = f", the same for {options.image_repeat} requests" if options.image_repeat > 1 else ""
        about += f" behind {options.images} images of {width}x{height}{again}"
    return Dataset(_random_prompts(options, random_ids(model)), about)


def _random_prompts(options: BenchOptions, ids: range) -> Iterator[Prompt]:
    rng = random.Random(options.bench_seed)
    inputs, outputs = options.input_range, options.output_range
    prefix = rng.choices(ids, k=options.shared_prefix_len)
    images = random_images(options)
    while True:
        length = rng.randint(inputs.low, inputs.high)
        yield Prompt(prefix + rng.choices(ids, k=length), rng.randint(outputs.low, outputs.high), images=next(images))


# Prompts that begin alike: a few prefixes of random token ids, each followed by many suffixes, to measure prefix caching.
#
# The idea and the names are those of ``vllm bench serve --dataset-name prefix_repetition``.


def prefix_repetition(options: BenchOptions, model: Model) -> Dataset:
    """Every prefix as often as the others. Raises ConfigError when the model cannot take the lengths."""
    prefix, suffix = options.prefix_repetition_prefix_len, options.prefix_repetition_suffix_len
    longest = prefix + suffix + options.prefix_repetition_output_len
    check_lengths(longest, model, flags="--prefix-repetition-prefix-len, -suffix-len or -output-len")
    about = f"{options.prefix_repetition_num_prefixes} prefixes of {prefix} random token ids, suffixes of {suffix}"
    return Dataset(_prefix_prompts(options, random_ids(model)), about)


def _prefix_prompts(options: BenchOptions, ids: range) -> Iterator[Prompt]:
    """Rounds in which every prefix comes once, each round in an order of its own."""
    rng = random.Random(options.bench_seed)
    length = options.prefix_repetition_prefix_len
    prefixes = [rng.choices(ids, k=length) for _ in range(options.prefix_repetition_num_prefixes)]
    while True:
        rng.shuffle(prefixes)
        for prefix in prefixes:
            suffix = rng.choices(ids, k=options.prefix_repetition_suffix_len)
            yield Prompt(prefix + suffix, options.prefix_repetition_output_len)


# JSON schemas made up from a seed: small objects, of which an answer has a few dozen tokens.

_NAMES = (
    *("name", "city", "country", "street", "title", "author", "language", "category", "status", "color"),
    *("count", "age", "year", "price", "rating", "size", "width", "height", "active", "verified"),
)
_WORDS = ("low", "medium", "high", "new", "open", "closed", "red", "green", "blue", "unknown")
_LONGEST_TEXT, _LARGEST_NUMBER, _MOST_ITEMS = 12, 999, 3
_PROPERTIES = (2, 5)


def made_schema(rng: random.Random) -> dict[str, Any]:
    """A schema of an object, one property of which is an object, too, in one of three."""
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


# Requests whose answers must be JSON that a schema accepts: schemas that are made, or those of a file.


class _SchemaLine(msgspec.Struct, frozen=True):
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
        raise ConfigError(f"{where}: there is no schema in it")
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
    """Raises ConfigError when a file or lengths cannot be right, and what the server fails to count tokens with."""
    if options.prompts:
        return prompts_file(options)
    if options.dataset == "sharegpt":
        return await sharegpt(options, model, count_tokens)
    if options.dataset == "prefix-repetition":
        return prefix_repetition(options, model)
    if options.dataset == "json-schema":
        return json_schema(options)

    return random_dataset(options, model)
