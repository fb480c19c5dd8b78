"""Effect of adapter loads on concurrent steps: ``python -m tests.benchmarks.lora_pauses --model MODEL --rank 16 64``.

An engine in this process computes requests without adapters. In turn, it computes them alone and while unrelated
adapters are loaded from the page cache and removed, one after the other. The results are the longest step, and the
duration of a load, alone and during steps. Loads are measured for an adapter that was never read, and for an unchanged
adapter that was read before.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
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
        self._adapters = adapters
        self._number = 0

    def close(self) -> None:
        """Release the engine."""
        self._engine.shutdown()

    def load(self, number: int, *, new: bool) -> Future[Any]:
        """Load one of the adapters. If ``new`` is set, the adapter was never read before."""
        path = self._adapters[number % len(self._adapters)]
        if new:
            os.utime(path / "adapter_config.json")
        return self._engine.loras.add_lora(path.name, str(path))

    def load_alone(self, loads: int, *, new: bool) -> list[float]:
        """Return the milliseconds of each load while the engine is otherwise idle."""
        taken = []
        for number in range(loads):
            began = time.perf_counter()
            under_way = self.load(number, new=new)
            while not under_way.done():
                assert self._engine.queues.get(block=True, timeout=60)
                self._engine.step(lambda: None)
            taken.append(1000 * (time.perf_counter() - began))
            self._engine.loras.remove_lora(under_way.result().digest)
        return taken

    def run(self, steps: int, *, loading: bool, new: bool = False) -> tuple[list[float], list[float]]:
        """Return the milliseconds of each step, and of each load that ended during these steps."""
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
                under_way = self.load(self._number, new=new)
            self._engine.step(lambda: None)
            ended = time.perf_counter()
            taken.append(1000 * (ended - began))
            began = ended
        self._engine.scheduler.abort_client("bench")
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
    """Write random adapters for all seven projections."""
    out = folder / f"rank-{rank}"
    shutil.rmtree(out, ignore_errors=True)
    flags = ["--number", str(OF_EACH_RANK), "--rank", str(rank)]
    subprocess.run([sys.executable, MAKE_ADAPTERS, str(model), str(out), *flags], check=True, stdout=subprocess.DEVNULL)
    return sorted(out.iterdir())


def spread(values: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the maximum in milliseconds."""
    ordered = sorted(values)
    found = {"median": statistics.median(ordered), "p99": ordered[int(0.99 * len(ordered))], "longest": ordered[-1]}
    return {name: round(value, 2) for name, value in found.items()}


def measure(model: Path, adapters: list[Path], rounds: int, steps: int) -> dict[str, Any]:
    """Measure steps alone, steps during loads, and loads."""
    bench = Bench(model, adapters)
    taken: dict[str, list[float]] = defaultdict(list)
    longest: dict[str, list[float]] = defaultdict(list)
    loads: dict[str, list[float]] = defaultdict(list)
    bench.run(steps, loading=True)
    gc.collect()
    gc.freeze()  # like an engine before it serves
    for _ in range(rounds):
        for kind in ("alone", "beside loads", "beside loads of new ones"):
            loading, new = kind != "alone", kind.endswith("new ones")
            of_steps, of_loads = bench.run(steps, loading=loading, new=new)
            taken[kind] += of_steps
            longest[kind].append(max(of_steps))
            if loading:
                which = "new" if new else "read before"
                loads[f"{which}, beside steps"] += of_loads
                loads[f"{which}, alone"] += bench.load_alone(2 * len(adapters), new=new)
    bench.close()
    return {
        "steps": {
            kind: spread(each) | {"longest_of_a_round": round(statistics.median(longest[kind]), 2)}
            for kind, each in taken.items()
        },
        "loads": {kind: spread(each) | {"count": len(each)} for kind, each in loads.items()},
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
