"""Benefits and costs of offloading KV blocks to host memory and disk, with an engine in this process.

``python -m tests.benchmarks.kv_tiers MODEL [--tokens 1024] [--threads 2] [--rounds 5]``. Five parts:

- ``loads``: seconds to the first token of a prompt that is computed, loaded from host memory, loaded from disk (from
the page cache), or already in the KV cache. The time of a load is the difference to a prompt in the KV cache.
- ``neighbour``: the gaps between the tokens of a stream during loads, and without loads.
- ``fits``: a working set that fits into the KV cache, with and without host memory.
- ``beyond``: a working set of four times the KV cache. The results are hits and times to the first token without a
tier, with host memory, and with an unlimited KV cache.
- ``restart``: the same working set on disk, used by an engine after a restart.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.app import build_engine
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ExecutorConfig, ModelConfig, SchedulerConfig
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.executor.uniproc import UniprocExecutor
from penstock_enginecore.kv_transfer.core.tiers import TieredConnector

GIB = 1 << 30
BLOCK = 16


class Bench:
    """An engine whose steps run on this thread, like in the busy loop."""

    def __init__(self, arguments: argparse.Namespace, *, num_blocks: int, host: int = 0, disk: str = "") -> None:
        config = EngineCoreConfig(
            model=ModelConfig(path=arguments.model, max_model_len=arguments.tokens + 64),
            cache=CacheConfig(
                num_blocks=num_blocks,
                block_size=BLOCK,
                host_memory=host,
                disk=disk,
                disk_size=GIB if disk else 0,
            ),
            scheduler=SchedulerConfig(max_num_batched_tokens=arguments.tokens + 64),
            executor=ExecutorConfig(num_threads=arguments.threads),
            iteration_log_interval=0.0,
        )
        self.engine: EngineCore = build_engine(config, UniprocExecutor(config), None, lambda line: None)
        self._tiers = self.engine.connector if isinstance(self.engine.connector, TieredConnector) else None
        blocks = None if self._tiers is None else self._tiers.blocks
        if host and blocks is not None and blocks.host is not None:
            blocks.host._reserved.result(60)  # wait until all its memory is reserved
        self._numbers = iter(range(1 << 30))
        self._random = random.Random(0)
        self.tokens = arguments.tokens

    def prompt(self, number: int) -> list[int]:
        """Return a different prompt for each number."""
        return random.Random(number).choices(range(10, 2000), k=self.tokens)

    def add(self, prompt: list[int], max_tokens: int) -> str:
        """Queue a request."""
        name = f"r{next(self._numbers)}"
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = EngineCoreRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params)
        self.engine.add(self.engine.preprocess("bench", request))
        return name

    def steps(self) -> Iterator[tuple[str, float]]:
        """Run steps until no request is left. Yields the name and the time for each token."""
        while self.engine.has_requests:
            for frame in self.engine.step(lambda: None).values():
                now = time.perf_counter()
                for output in frame.outputs:
                    if output.new_token_ids:
                        yield output.request_id, now
            if self.engine.stalled and self.engine.has_requests:
                self.engine.queues.get(block=True, timeout=10)

    def settle(self) -> None:
        """Run steps until no copy is in progress."""
        deadline = time.perf_counter() + 0.3
        while time.perf_counter() < deadline:
            if self.engine.has_work:
                self.engine.step(lambda: None)
            time.sleep(0.005)

    def first_token(self, prompt: list[int]) -> float:
        """Return the seconds to the first token."""
        began = time.perf_counter()
        self.add(prompt, 1)
        (_, then), *_ = self.steps()
        return then - began

    @property
    def hits(self) -> tuple[int, int]:
        """Return the numbers of tokens found in the KV cache and loaded from tiers."""
        cache = self.engine.scheduler.kv_cache
        return cache.prefix_stats.hits, cache.external_stats.hits

    @property
    def media(self) -> dict[str, int]:
        """Return the number of loaded blocks by tier."""
        if self._tiers is None:
            return {}
        return {k.name: v for k, v in self._tiers.stats().num_loaded_blocks.items() if v}


@contextmanager
def engine(arguments: argparse.Namespace, **options: Any) -> Iterator[Bench]:
    bench = Bench(arguments, **options)
    try:
        yield bench
    finally:
        bench.engine.shutdown()


def load(bench: Bench, number: int) -> dict[str, float]:
    """Return three times to the first token of one prompt, in seconds: computed, loaded, and cached.

    Before the load, three other prompts evict the prompt. The KV cache of ``bench`` has space for two prompts.
    """
    found = {"computed": bench.first_token(bench.prompt(number))}
    bench.settle()
    for other in range(3):
        bench.first_token(bench.prompt(1000 + 10 * number + other))
        bench.settle()
    before = sum(bench.media.values())
    found["loaded"] = bench.first_token(bench.prompt(number))
    assert sum(bench.media.values()) - before >= bench.tokens // BLOCK - 1, bench.media
    return {**found, "cached": bench.first_token(bench.prompt(number))}


@contextmanager
def loading(arguments: argparse.Namespace, name: str, directory: str) -> Iterator[Bench]:
    """Return an engine whose KV cache has space for two prompts, with host memory, or with a disk and little host
    memory.
    """
    host = GIB if name == "host" else 8 << 20
    disk = directory if name == "disk" else ""
    with engine(arguments, num_blocks=2 * (arguments.tokens // BLOCK + 2), host=host, disk=disk) as bench:
        bench.first_token(bench.prompt(999))
        yield bench


def loads(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure prompts that are computed, evicted from the KV cache by others, and sent again."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as directory:
        for name in ("host", "disk"):
            with loading(arguments, name, directory) as bench:
                rounds = [load(bench, number) for number in range(arguments.rounds)]
                medians = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
                medians["load"] = medians["loaded"] - medians["cached"]
                medians["of_computing"] = medians["load"] / medians["computed"]
                medians["whole_of_computing"] = medians["loaded"] / medians["computed"]
                found[name] = {"media": bench.media, **{key: round(value, 5) for key, value in medians.items()}}
    return found


def neighbour(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a stream of tokens. At every 20th token, prompts arrive whose blocks are in host memory."""
    per_prompt = arguments.tokens // BLOCK + 2
    found: dict[str, Any] = {}
    with engine(arguments, num_blocks=4 * per_prompt, host=GIB) as bench:
        prompts = [bench.prompt(number) for number in range(8)]
        for prompt in prompts:
            bench.first_token(prompt)
            bench.settle()
        for kind in [*("alone", "cached", "loads")] * arguments.rounds:
            gaps, last, count, chosen = [], 0.0, 0, itertools_cycle(prompts if kind == "loads" else prompts[-1:])
            if kind == "cached":
                bench.first_token(prompts[-1])
            name = bench.add(bench.prompt(7777)[:64], arguments.stream)
            for of, now in bench.steps():
                if of != name:
                    continue
                if last:
                    gaps.append(now - last)
                last, count = now, count + 1
                if kind != "alone" and count % 20 == 10 and count < arguments.stream - 20:
                    bench.add(next(chosen), 1)
            bench.settle()
            found.setdefault(kind, []).extend(gaps)
    result = {
        kind: {"p50": round(statistics.median(gaps), 5), "p99": round(_p99(gaps), 5), "gaps": len(gaps)}
        for kind, gaps in found.items()
    }
    result["media"] = bench.media
    return result


def itertools_cycle(prompts: list[list[int]]) -> Iterator[list[int]]:
    """Yield the prompts in an endless cycle."""
    while True:
        yield from prompts


def _p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]


def fits(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure prompts that fit into the KV cache, in turn and with new ends.

    Both engines run in turn in every round.
    """
    per_prompt = arguments.tokens // BLOCK + 6
    count = 6
    found: dict[str, list[float]] = {"without": [], "with": []}
    with (
        engine(arguments, num_blocks=(count + 2) * per_prompt) as without,
        engine(arguments, num_blocks=(count + 2) * per_prompt, host=GIB) as having,
    ):
        for each in (without, having):
            for number in range(count):
                each.first_token(each.prompt(number))
        for round_number in range(arguments.rounds * 3):
            for name, bench in (("without", without), ("with", having)):
                began = time.perf_counter()
                for number in range(count):
                    tail = [10 + round_number, 20 + number] * 16
                    bench.add([*bench.prompt(number)[: arguments.tokens - 32], *tail], 24)
                for _ in bench.steps():
                    pass
                found[name].append(time.perf_counter() - began)
        ratios = [b / a for a, b in zip(found["without"], found["with"], strict=True)]
    return {
        "without": round(statistics.median(found["without"]), 4),
        "with": round(statistics.median(found["with"]), 4),
        "ratio": round(statistics.median(ratios), 4),
    }


def beyond(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure prompts of four times the KV cache's size, in random order."""
    per_prompt = arguments.tokens // BLOCK + 2
    fit, count = 3, 12
    chance = random.Random(5)
    order = [chance.randrange(count) for _ in range(arguments.rounds * count)]
    found = {}
    for name, num_blocks, host in (
        ("none", fit * per_prompt, 0),
        ("host", fit * per_prompt, GIB),
        ("endless", (count + 2) * per_prompt, 0),
    ):
        with engine(arguments, num_blocks=num_blocks, host=host) as bench:
            for number in range(count):
                bench.first_token(bench.prompt(number))
                bench.settle()
            before = sum(bench.hits)
            seconds = []
            for number in order:
                seconds.append(bench.first_token(bench.prompt(number)))
                bench.settle()
            found[name] = {"p50": round(statistics.median(seconds), 5), "hits": sum(bench.hits) - before}
    return found


def restart(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure prompts of four times the KV cache's size, before and after a restart of an engine with a disk."""
    per_prompt = arguments.tokens // BLOCK + 2
    fit, count = 3, 12
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as directory:
        for name in ("computed", "restarted"):
            with engine(arguments, num_blocks=fit * per_prompt, host=8 << 20, disk=directory) as bench:
                seconds = []
                for number in range(count):
                    seconds.append(bench.first_token(bench.prompt(number)))
                    bench.settle()
                numbers = {"p50": round(statistics.median(seconds), 5), "hits": sum(bench.hits), "media": bench.media}
                found[name] = numbers | {"tokens": count * arguments.tokens}
    return found


PARTS = {"loads": loads, "neighbour": neighbour, "fits": fits, "beyond": beyond, "restart": restart}


def main() -> None:
    """Print a JSON line for each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stream", type=int, default=200)
    parser.add_argument("--scratch", default=None, help="directory for the disk's file")
    arguments = parser.parse_args()
    if arguments.scratch:
        Path(arguments.scratch).mkdir(parents=True, exist_ok=True)
    for part in arguments.parts:
        print(json.dumps({part: PARTS[part](arguments)}), flush=True)


if __name__ == "__main__":
    main()
