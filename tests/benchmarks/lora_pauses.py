"""What loading an adapter does to the steps beside it: ``python -m tests.benchmarks.lora_pauses --model MODEL --rank 16 64``.

An engine in this process computes requests without adapters, alone and while adapters that none of them names are loaded and
removed, one after the other, from the page cache. Both are measured in turn. What counts is the longest of the steps, and how
long a load takes under that.
"""

import argparse
import gc
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.config import (
    CacheConfig,
    EngineCoreConfig,
    ExecutorConfig,
    LoraConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.executor.uniproc import UniprocExecutor
from tests.benchmarks.lora_serving import MAKE_ADAPTERS

STREAMS, PROMPT_LEN, WARM_UP = 16, 64, 20
OF_EACH_RANK = 4


class Bench:
    """An engine, and the adapters of one rank."""

    def __init__(self, model: Path, adapters: list[Path]) -> None:
        config = EngineCoreConfig(
            model=ModelConfig(path=str(model)),
            cache=CacheConfig(kv_cache_memory=512 * 1024 * 1024, enable_prefix_caching=False),
            scheduler=SchedulerConfig(),
            executor=ExecutorConfig(),
            lora=LoraConfig(max_loras=16),
            iteration_log_interval=0.0,
        )
        self._engine = EngineCore(config, UniprocExecutor(config), progress=lambda line: None)
        self._woken = threading.Event()
        self._engine.wake = self._woken.set
        self._adapters = adapters
        self._number = 0

    def close(self) -> None:
        """Release the engine."""
        self._engine.shutdown()

    def run(self, steps: int, *, loading: bool) -> tuple[list[float], list[float]]:
        """Milliseconds of each step, and of each load that ended beside them."""
        for _ in range(STREAMS):
            self._add(WARM_UP + steps + 50)
        for _ in range(WARM_UP):
            self._engine.step(lambda: None)
        taken, loads = [], []
        under_way: Future[Any] | None = None
        asked = began = time.perf_counter()
        for _ in range(steps):
            if loading and (under_way is None or under_way.done()):
                if under_way is not None:
                    loads.append(1000 * (time.perf_counter() - asked))
                    self._engine.loras.remove_lora(under_way.result().digest)
                asked, self._number = time.perf_counter(), self._number + 1
                path = self._adapters[self._number % len(self._adapters)]
                under_way = self._engine.loras.add_lora(path.name, str(path))
            self._engine.step(lambda: None)
            ended = time.perf_counter()
            taken.append(1000 * (ended - began))
            began = ended
        self._engine.abort_client("bench")
        while self._engine.has_work or (under_way is not None and not under_way.done()):
            self._engine.step(lambda: None)
            time.sleep(0.001)
        if under_way is not None:
            self._engine.loras.remove_lora(under_way.result().digest)
        return taken, loads

    def _add(self, max_tokens: int) -> None:
        self._number += 1
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        prompt = [5 + (self._number * 31 + i) % 1000 for i in range(PROMPT_LEN)]
        request = EngineCoreRequest(request_id=str(self._number), prompt_token_ids=prompt, sampling_params=params)
        self._engine.add(self._engine.preprocess("bench", request))


def adapters_of(model: Path, rank: int, folder: Path) -> list[Path]:
    """Random ones, on all seven projections."""
    out = folder / f"rank-{rank}"
    shutil.rmtree(out, ignore_errors=True)
    flags = ["--number", str(OF_EACH_RANK), "--rank", str(rank)]
    subprocess.run([sys.executable, MAKE_ADAPTERS, str(model), str(out), *flags], check=True, stdout=subprocess.DEVNULL)
    return sorted(out.iterdir())


def spread(values: list[float]) -> dict[str, float]:
    """Milliseconds: the median, the 99th of 100, and the longest."""
    ordered = sorted(values)
    found = {"median": statistics.median(ordered), "p99": ordered[int(0.99 * len(ordered))], "longest": ordered[-1]}
    return {name: round(value, 2) for name, value in found.items()}


def measure(model: Path, adapters: list[Path], rounds: int, steps: int) -> dict[str, Any]:
    """Steps alone and beside loads, and the loads."""
    bench = Bench(model, adapters)
    taken: dict[bool, list[float]] = defaultdict(list)
    longest: dict[bool, list[float]] = defaultdict(list)
    loads: list[float] = []
    bench.run(steps, loading=True)
    gc.collect()
    gc.freeze()  # as an engine does before it serves
    for _ in range(rounds):
        for loading in (False, True):
            of_steps, of_loads = bench.run(steps, loading=loading)
            taken[loading] += of_steps
            longest[loading].append(max(of_steps))
            loads += of_loads
    bench.close()
    return {
        "steps_alone": spread(taken[False]),
        "steps_beside_loads": spread(taken[True]),
        "longest_of_rounds": {
            "alone": statistics.median(longest[False]),
            "beside_loads": statistics.median(longest[True]),
        },
        "load": spread(loads),
        "loads": len(loads),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the base model")
    parser.add_argument("--rank", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    folder = Path("build/lora_pauses")
    folder.mkdir(parents=True, exist_ok=True)
    for rank in options.rank:
        adapters = adapters_of(options.model, rank, folder)
        found = measure(options.model, adapters, options.rounds, options.steps)
        sys.stdout.write(json.dumps({"rank": rank, **found}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
