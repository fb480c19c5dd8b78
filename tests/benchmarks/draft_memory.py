"""Memory growth of an engine with drafts over many requests: ``python -m tests.benchmarks.draft_memory --requests
20000``.

Each method runs in a separate engine process: no drafts (for comparison), ngram and suffix. The load is short requests
of many tenants. Some requests are preempted, and some are aborted. The resident set is sampled while no request runs. A
method passes if its resident set grows by at most a few MiB between the warm-up and the end. suffix may also grow by
the size of its cache.
"""

import argparse
import json
import multiprocessing
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from penstock_common.types.request import EngineCoreRequest, RequestContext
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.engine_core import EngineCore
from tests.benchmarks.growth import resident_mib
from tests.fakes.engines.in_process import CLIENT, build_engine

MODEL = Path("examples/demo_model/penstock-tiny")
METHODS = ("", "ngram", "suffix")
CONCURRENT, TENANTS, ABORTED = 64, 40, 23
"""Number of concurrent requests, number of cache salts, and the interval of aborted requests.

One of ``ABORTED`` requests is aborted while it runs.
"""
NUM_BLOCKS, BLOCK_SIZE = 160, 16
"""Size of the block pool. It is too small for all running requests, so some are preempted."""
TOLERANCE = 8.0
"""Tolerance in MiB, because allocators do not return their peak memory."""


class Row(msgspec.Struct, frozen=True):
    """A sample.

    Attributes:
        resident: Resident set in MiB after this number of requests.
        kept: MiB of past outputs in the suffix cache, according to the drafter.
    """

    requests: int
    resident: float
    kept: float


class Found(msgspec.Struct, frozen=True):
    """Result of a method. ``allowed`` is the allowed growth in MiB."""

    method: str
    rows: list[Row]
    allowed: float
    accepted: int
    drafted: int
    preemptions: int

    def grown(self, warm_up: int) -> float:
        """Return the growth in MiB from the first sample after the warm-up to the largest sample."""
        behind = [row.resident for row in self.rows if row.requests >= warm_up]
        return max(behind) - behind[0]


def requests(count: int, vocab_size: int) -> Iterator[EngineCoreRequest]:
    """Yield requests with prompts of 8 to 40 tokens and outputs of 24 tokens.

    Every second prompt is one of 200 repeated prompts.
    """
    rng = random.Random(0)
    common = [[rng.randrange(6, vocab_size) for _ in range(rng.randint(8, 40))] for _ in range(200)]
    for number in range(count):
        fresh = [rng.randrange(6, vocab_size) for _ in range(rng.randint(8, 40))]
        yield EngineCoreRequest(
            request_id=f"r{number}",
            prompt_token_ids=fresh if number % 2 else rng.choice(common),
            sampling_params=SamplingParams(
                temperature=0.0 if number % 3 else 0.8, seed=number, max_tokens=24, ignore_eos=True
            ),
            context=RequestContext(cache_salt=f"tenant {rng.randrange(TENANTS)}"),
        )


def serve(engine: EngineCore, batch: list[EngineCoreRequest]) -> tuple[int, Any]:
    """Run all requests of ``batch``, ``CONCURRENT`` at a time. Returns preemptions since the start, and counts of
    drafts.
    """
    waiting, live = batch[::-1], set[str]()
    stats: Any = None
    while waiting or live:
        while waiting and len(live) < CONCURRENT:
            request = waiting.pop()
            engine.add(engine.preprocess(CLIENT, request))
            live.add(request.request_id)
        for outputs in engine.step(lambda: None).values():
            stats = outputs.scheduler_stats or stats
            for output in outputs.outputs:
                if output.finish_reason is not None:
                    live.discard(output.request_id)
                elif output.offset > 8 and int(output.request_id[1:]) % ABORTED == 0:
                    engine.scheduler.abort_requests(CLIENT, [output.request_id])
                    live.discard(output.request_id)
    while engine.has_work:
        engine.step(lambda: None)
    return stats.num_preemptions, stats.spec_decoding_stats


def measure(method: str, count: int, every: int, cache_bytes: int) -> Found:
    """Measure a method in this new process."""
    torch.set_num_threads(1)
    # Draft the maximum number of tokens. With so small a model, adaptive drafting would find no benefit.
    kept = {"suffix_decoding_cache_bytes": cache_bytes}
    speculative = {"method": method, "adaptive": False, **kept} if method else {}
    engine = build_engine(MODEL, cache={"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS}, speculative=speculative)
    vocab_size = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    rows: list[Row] = []
    preemptions, counts = 0, None
    coming = list(requests(count, vocab_size))
    for first in range(0, count, every):
        preemptions, counts = serve(engine, coming[first : first + every])
        rows.append(Row(first + every, round(resident_mib(), 1), round(_kept(engine) / 2**20, 1)))
        print(f"{method or 'none'}: {msgspec.json.encode(rows[-1]).decode()}", flush=True)
    accepted, drafted = (counts.num_accepted_tokens, counts.num_draft_tokens) if counts else (0, 0)
    engine.shutdown()
    allowed = TOLERANCE + (cache_bytes / 2**20 if method == "suffix" else 0)
    return Found(method or "none", rows, allowed, accepted, drafted, preemptions)


def _kept(engine: EngineCore) -> int:
    """Return the bytes of past outputs in the drafter's cache."""
    executor: Any = engine.executor
    drafting = executor._worker.runner._drafting
    inner = getattr(getattr(drafting, "drafter", None), "_inner", None)
    return int(getattr(inner, "num_bytes", 0))


def main() -> int:
    """Print a line per sample and a result per method. Returns 1 if a method's memory has grown too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=500, help="requests between two samples")
    parser.add_argument("--warm-up", type=int, default=2000, help="requests before growth counts")
    parser.add_argument(
        "--cache-bytes", type=int, default=64 * 2**20, help=("maximum size of the suffix cache in bytes")
    )
    parser.add_argument("--only", action="append", choices=[*METHODS[1:], "none"], help="may be given again")
    parser.add_argument("--json", type=Path, help="also write the samples to this file")
    args = parser.parse_args()
    found, grew = [], False
    context = multiprocessing.get_context("spawn")
    for method in METHODS:
        if args.only and (method or "none") not in args.only:
            continue
        with context.Pool(1) as pool:
            one = pool.apply(measure, (method, args.requests, args.every, args.cache_bytes))
        found.append(one)
        grown = one.grown(args.warm_up)
        grew = grew or grown > one.allowed
        print(
            f"{one.method}: grew by {grown:.1f} MiB of {one.allowed:.0f} allowed; {one.accepted} of {one.drafted} drafts held, "
            f"{one.preemptions} preemptions"
        )
    if args.json:
        args.json.write_text(json.dumps(msgspec.to_builtins(found), indent=1))
    return int(grew)


if __name__ == "__main__":
    sys.exit(main())
