"""A thousand adapters on one server: ``python -m tests.benchmarks.lora_fairness --model MODEL thousand neighbours
hot``.

The server runs the whole stack over HTTP. It has memory for fifty adapters of rank 8 on all seven projections.

- ``thousand``: 32 streams of requests with adapters from a Zipf distribution. No request may fail. The engine's memory
may grow by at most 1.1 times the adapter budget, compared with its memory after the same number of base model requests.
- ``neighbours``: streams of the base model run together with adapter requests, and in turn together with the same
number of base model requests. The results are the gaps between the streams' tokens.
- ``hot``: an engine with slots for two adapters. One adapter always has waiting requests. Requests of other adapters
may wait for their first token at most ``max_wait`` plus the time of the longest request.

Adapters are sparse files. Each tensor begins with random numbers, so that digests differ and no tensor is kept in
bfloat16. The rest is zeros, which cost an engine as much as other numbers.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from tests.benchmarks.engine_memory import EngineMemory
from tests.benchmarks.lora_serving import MAKE_ADAPTERS
from tests.benchmarks.peers import machine
from tests.benchmarks.speculation import served

ADAPTERS, ROOM, RANK, STREAMS = 1000, 50, 8, 32
PROMPT = 128
MAX_WAIT = 2.0
_RANDOM = 256
"""Numbers at the beginning of each tensor."""


class Adapters:
    """``ADAPTERS`` adapters in ``folder``, each in a directory with its name.

    ``num_bytes`` is the size of one adapter's matrices.
    """

    def __init__(self, model: Path, folder: Path) -> None:
        pattern = folder / "pattern"
        flags = ["--number", "1", "--rank", str(RANK)]
        if not pattern.exists():
            command = [sys.executable, MAKE_ADAPTERS, str(model), str(pattern), *flags]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        self.folder = folder / "adapters"
        self.names = [f"a{number:04d}" for number in range(ADAPTERS)]
        (made,) = pattern.iterdir()
        self._config = (made / "adapter_config.json").read_bytes()
        file = (made / "adapter_model.safetensors").read_bytes()
        self._start = 8 + struct.unpack("<Q", file[:8])[0]
        self._header = file[: self._start]
        entries = msgspec.json.decode(file[8 : self._start])
        self._places = [entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"]
        self.num_bytes = len(file) - self._start
        for number, name in enumerate(self.names):
            self._write(self.folder / name, number)

    def _write(self, folder: Path, number: int) -> None:
        # This file is written last, so its presence means that the adapter is complete.
        whole = folder / "adapter_config.json"
        if whole.exists() and whole.read_bytes() == self._config:
            return
        folder.mkdir(parents=True, exist_ok=True)
        numbers = np.random.default_rng(number).standard_normal((len(self._places), _RANDOM), dtype=np.float32) / 64
        with (folder / "adapter_model.safetensors").open("wb") as file:
            file.write(self._header)
            file.truncate(self._start + self.num_bytes)
            for (first, end), row in zip(self._places, numbers, strict=True):
                file.seek(self._start + first)
                file.write(row.tobytes()[: end - first])
        whole.write_bytes(self._config)


class Zipf:
    """Draws names from a Zipf distribution: the n-th name has 1/n of the first name's frequency."""

    def __init__(self, names: list[str], seed: int) -> None:
        self._names = names
        self._weights = list(itertools.accumulate(1 / rank for rank in range(1, len(names) + 1)))
        self._random = random.Random(seed)

    def draw(self) -> str:
        """Return the next name."""
        return self._random.choices(self._names, cum_weights=self._weights)[0]


class Answer(msgspec.Struct):
    """Result of a request. ``times``: seconds from its start to each token."""

    model: str
    times: list[float]
    error: str = ""

    @property
    def gaps(self) -> list[float]:
        """Return the seconds between tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.times)]


class Client:
    """Sends requests to a server, each with a new prompt."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._random = random.Random(0)

    def ask(self, streams: list[tuple[Iterator[str], int]]) -> list[list[Answer]]:
        """Return the answers by stream. Each stream sends requests to its models one after the other."""
        return asyncio.run(self._ask(streams))

    async def _ask(self, streams: list[tuple[Iterator[str], int]]) -> list[list[Answer]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=300, limits=limits) as client:

            async def stream(models: Iterator[str], tokens: int) -> list[Answer]:
                return [await self._one(client, model, tokens) for model in models]

            return await asyncio.gather(*(stream(*each) for each in streams))

    async def _one(self, client: httpx.AsyncClient, model: str, tokens: int) -> Answer:
        prompt = [self._random.randrange(300, 2000) for _ in range(PROMPT)]
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer, sent, whole = Answer(model, []), time.perf_counter(), False
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            if response.status_code != 200:
                answer.error = f"{response.status_code} {(await response.aread()).decode()[:300]}"
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    if '"error"' in line:
                        answer.error = line[:300]
                    answer.times.append(time.perf_counter() - sent)
                    whole = whole or '"length"' in line
        if not (whole or answer.error):
            answer.error = f"it ended after {len(answer.times)} pieces"
        return answer

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples."""
        text = httpx.get(f"{self._url}/metrics", timeout=30).text
        lines = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] in (name, f"{name}_total")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def loads(self) -> "Loads":
        """Return the counters so far."""
        names = ("lora_loads", "lora_load_seconds", "lora_evictions", "lora_cached_bytes", "lora_cached")
        return Loads(*(self.metric(f"penstock:{name}") for name in names))


class Loads(msgspec.Struct):
    """The engine's counters."""

    loads: float
    seconds: float
    evictions: float
    cached_bytes: float
    cached: float

    def since(self, before: "Loads") -> dict[str, float]:
        """Return the increase over the counters ``before``."""
        loads = self.loads - before.loads
        mean = 1000 * (self.seconds - before.seconds) / loads if loads else 0.0
        return {"loads": loads, "mean_load_ms": round(mean, 1), "evictions": self.evictions - before.evictions}


def _failures(answers: list[list[Answer]]) -> list[str]:
    return [f"{each.model}: {each.error}" for of_stream in answers for each in of_stream if each.error]


def _split(models: list[str], streams: int, tokens: int) -> list[tuple[Iterator[str], int]]:
    """Return iterators for streams that take models from one common iterator."""
    shared = iter(models)
    return [(shared, tokens) for _ in range(streams)]


def _roomy(adapters: Adapters) -> tuple[int, list[str]]:
    """Return the bytes for ROOM adapters, and the flags of an engine with this memory and a slot for each stream."""
    budget = ROOM * adapters.num_bytes
    settings = [f"engine.lora.cpu_memory={budget}", f"engine.lora.max_loras={STREAMS}"]
    return budget, [*_flags(adapters), *(word for setting in settings for word in ("--set", setting))]


def thousand(model: Path, adapters: Adapters, folder: Path, requests: int) -> dict[str, Any]:
    """Send requests of the base model, and then the same number of adapter requests."""
    budget, flags = _roomy(adapters)
    with served("lora-thousand", model, flags, folder) as url:
        client, memory = Client(url), EngineMemory()
        zipf = Zipf(adapters.names, seed=1)
        began = time.perf_counter()
        with memory.peak() as plain:
            client.ask(_split(["m"] * requests, STREAMS, 32))
        plain_seconds = time.perf_counter() - began
        before = client.loads()
        began = time.perf_counter()
        with memory.peak() as adapted:
            drawn = [zipf.draw() for _ in range(requests)]
            answers = client.ask(_split(drawn, STREAMS, 32))
        seconds, after = time.perf_counter() - began, client.loads()
    grown = adapted[0] - plain[0]
    return {
        "requests": requests,
        "adapters": len(set(drawn)),
        "failed": len(_failures(answers)),
        "failures": _failures(answers)[:5],
        "tokens_per_s": round(32 * requests / seconds, 1),
        "base_tokens_per_s": round(32 * requests / plain_seconds, 1),
        "budget_mb": round(budget / 1e6, 1),
        "cached_mb": round(after.cached_bytes / 1e6, 1),
        "grown_mb": round(grown / 1e6, 1),
        "of_budget": round(grown / budget, 3),
        "target": 1.1,
        **after.since(before),
    }


def neighbours(model: Path, adapters: Adapters, folder: Path, rounds: int) -> dict[str, Any]:
    """Return the gaps between tokens of eight base model streams, with 24 other streams of adapters or of the base
    model.
    """
    _, flags = _roomy(adapters)
    found: list[tuple[float, float]] = []
    medians: list[tuple[float, float]] = []
    with served("lora-neighbours", model, flags, folder) as url:
        client, zipf = Client(url), Zipf(adapters.names, seed=2)

        def one(draw: Any) -> tuple[float, float]:
            others = _split([draw() for _ in range(48)], 24, 32)
            answers = client.ask([*((iter(["m"] * 2), 32) for _ in range(8)), *others])
            if failures := _failures(answers):
                raise RuntimeError(f"{len(failures)} requests failed: {failures[0]}")
            gaps = sorted(gap for stream in answers[:8] for answer in stream for gap in answer.gaps)
            return 1000 * gaps[int(0.99 * len(gaps))], 1000 * statistics.median(gaps)

        one(zipf.draw)
        before = client.loads()
        for _ in range(rounds):
            base, adapted = one(lambda: "m"), one(zipf.draw)
            found.append((base[0], adapted[0]))
            medians.append((base[1], adapted[1]))
            print(json.dumps({"base_ms": base, "adapters_ms": adapted}), flush=True)
        after = client.loads()
    ratios = [adapted / base for base, adapted in found]
    return {
        "p99_ms": [[round(each, 1) for each in pair] for pair in found],
        "median_ms": [[round(each, 1) for each in pair] for pair in medians],
        "ratio": round(statistics.median(ratios), 3),
        "target": 1.25,
        **after.since(before),
    }


def hot(model: Path, adapters: Adapters, folder: Path, requests: int) -> dict[str, Any]:
    """Run eight streams with one adapter, and two streams with a different adapter for every request."""
    flags = [*_flags(adapters), "--set", "engine.lora.max_loras=2", "--set", f"engine.lora.max_wait={MAX_WAIT}"]
    with served("lora-hot", model, flags, folder) as url:
        client = Client(url)
        client.ask(_split(adapters.names[:17], 4, 4))  # loads the adapters
        others = [iter(adapters.names[1 + 8 * i : 9 + 8 * i] * (requests // 8)) for i in range(2)]
        done = [0]

        def counted(models: Iterator[str]) -> Iterator[str]:
            yield from models
            done[0] += 1

        def until_done() -> Iterator[str]:
            while done[0] < len(others):
                yield adapters.names[0]

        queue = [(until_done(), 48) for _ in range(8)]
        answers = client.ask([*((counted(models), 16) for models in others), *queue])
        queued, count = (client.metric(f"vllm:request_queue_time_seconds_{kind}") for kind in ("sum", "count"))
    every = [answer for of_stream in answers for answer in of_stream]
    if failures := _failures(answers):
        raise RuntimeError(f"{len(failures)} requests failed: {failures[0]}")
    waits = [answer.times[0] for of_stream in answers[:2] for answer in of_stream]
    longest = max(answer.times[-1] - answer.times[0] for answer in every)
    return {
        "others": len(waits),
        "hot": len(every) - len(waits),
        "longest_wait_s": round(max(waits), 2),
        "median_wait_s": round(statistics.median(waits), 2),
        "longest_running_s": round(longest, 2),
        "target_s": round(MAX_WAIT + longest, 2),
        "mean_queue_s": round(queued / count, 3),
    }


def _flags(adapters: Adapters) -> list[str]:
    flags = ["--served-model-name", "m", "--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory", "1GiB"]
    flags += ["--lora-directory", str(adapters.folder), "--set", "frontend.lora.scan_interval=600"]
    return flags


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("thousand", "neighbours", "hot"))
    parser.add_argument("--model", type=Path, required=True, help="the checkpoint that is served")
    parser.add_argument("--requests", type=int, default=320, help="of thousand")
    parser.add_argument("--rounds", type=int, default=3, help="of neighbours")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    folder = Path("build/lora_fairness").resolve() / options.model.name
    folder.mkdir(parents=True, exist_ok=True)
    adapters = Adapters(options.model, folder)
    parts = {
        "thousand": lambda: thousand(options.model, adapters, folder, options.requests),
        "neighbours": lambda: neighbours(options.model, adapters, folder, options.rounds),
        "hot": lambda: hot(options.model, adapters, folder, 32),
    }
    found = {}
    for part in options.parts:
        found[part] = parts[part]()
        print(json.dumps({"part": part, **found[part]}), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    print(machine())
    return 0


if __name__ == "__main__":
    sys.exit(main())
