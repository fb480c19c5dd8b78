"""Closed-loop load: a fixed number of concurrent streams, with prompts of random token ids."""

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

Stream = Callable[[list[int], int], AsyncIterator[int]]
"""Function that sends prompt token ids with a number of output tokens, and yields the size of each received piece."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A load of ``requests`` requests on ``streams`` concurrent streams. Lengths are in tokens."""

    streams: int
    requests: int
    input_len: int
    output_len: int


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of one run.

    ``tokens_per_s`` counts all streams. Time to first token, time between tokens, and mean time per token after the
    first are in milliseconds.
    """

    tokens_per_s: float
    ttft_ms: float
    itl_ms: float
    tpot_ms: float = 0.0


def prompts(load: Load, vocab_size: int, *, seed: int) -> list[list[int]]:
    """Return random prompts without common prefixes. The same seed gives the same prompts."""
    rng = random.Random(seed)
    return [[rng.randrange(10, vocab_size) for _ in range(load.input_len)] for _ in range(load.requests)]


async def run(stream: Stream, load: Load, prompt_token_ids: Sequence[list[int]]) -> Result:
    """Send the load. Raises RuntimeError if an output has too few tokens."""
    gate = asyncio.Semaphore(load.streams)
    first: list[float] = []
    between: list[float] = []
    per_token: list[float] = []

    async def one(prompt: list[int]) -> None:
        async with gate:
            last = time.perf_counter()
            got, early, start = 0, 0, last
            async for size in stream(prompt, load.output_len):
                now = time.perf_counter()
                if got == 0:
                    first.append(now - last)
                    start, early = now, size
                else:
                    between.extend([(now - last) / size] * size)
                got += size
                last = now
            if got > early:
                per_token.append((last - start) / (got - early))
            if got != load.output_len:
                raise RuntimeError(f"a request gave {got} of {load.output_len} tokens")

    start = time.perf_counter()
    await asyncio.gather(*(one(prompt) for prompt in prompt_token_ids))
    seconds = time.perf_counter() - start
    return Result(
        tokens_per_s=load.requests * load.output_len / seconds,
        ttft_ms=statistics.median(first) * 1e3,
        itl_ms=statistics.median(between) * 1e3 if between else 0.0,
        tpot_ms=statistics.median(per_token) * 1e3 if per_token else 0.0,
    )


def median(results: Sequence[Result]) -> Result:
    """Return the median over rounds for each field."""
    return Result(
        tokens_per_s=statistics.median(r.tokens_per_s for r in results),
        ttft_ms=statistics.median(r.ttft_ms for r in results),
        itl_ms=statistics.median(r.itl_ms for r in results),
        tpot_ms=statistics.median(r.tpot_ms for r in results),
    )
