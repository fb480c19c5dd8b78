"""Conversations that people had with a model, from a file of the ShareGPT dataset.

What is taken of them, and which are left out, is as ``vllm bench serve --dataset-name sharegpt`` does it: the first turn is the
prompt, the second says how long the answer is.
"""

import asyncio
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock_common.errors import ConfigError
from penstock_local.bench.datasets.base import CountTokens, Dataset, Prompt
from penstock_local.bench.datasets.files import decode_list, read_text
from penstock_local.bench.options import BenchOptions
from penstock_local.rpc.client import ModelInfo

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


async def sharegpt(options: BenchOptions, model: ModelInfo, count_tokens: CountTokens) -> Dataset:
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
