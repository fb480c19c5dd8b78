"""Effect of constrained requests and of asynchronous scheduling on the steps of other requests, with an engine in this
process.

A row compares engines that do the same amount of work: ``extra`` requests join the neighbours, constrained or not. All
rows are measured in turn in every round.
"""

import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator

import msgspec

from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams, StructuredOutput
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ExecutorConfig, ModelConfig, SchedulerConfig
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.executor.uniproc import UniprocExecutor
from penstock_enginecore.structured_output.factory import make_grammar_backend

NEIGHBOURS, PROMPT_LEN, STEPS, WARM_UP = 16, 64, 150, 20
_BUSY_SCHEMA = {
    "type": "array",
    "items": {"type": "object", "properties": {"name": {"type": "string"}}},
    "minItems": 900,
}


class Row(msgspec.Struct, frozen=True):
    """Add ``extra`` requests to the neighbours, with a schema or without. ``fresh``: a new schema arrives in every
    tenth step.
    """

    name: str
    extra: int
    constrained: bool = False
    fresh: bool = False


SCHEMA_ROWS = (
    Row("1 unconstrained", 1),
    Row("1 with a schema", 1, constrained=True),
    Row("4 unconstrained", 4),
    Row("4 with a schema", 4, constrained=True),
    Row("1 unconstrained, new ones all the time", 1, fresh=True),
    Row("1 with a schema, new schemas all the time", 1, constrained=True, fresh=True),
)


class Bench:
    """An engine and its requests' numbers."""

    def __init__(self, model: str, threads: int, *, async_scheduling: bool) -> None:
        config = EngineCoreConfig(
            model=ModelConfig(path=model),
            cache=CacheConfig(kv_cache_memory=512 * 1024 * 1024, enable_prefix_caching=False),
            scheduler=SchedulerConfig(async_scheduling=async_scheduling),
            executor=ExecutorConfig(num_threads=threads),
            iteration_log_interval=0.0,
        )
        self._engine = EngineCore(
            config, UniprocExecutor(config), make_grammars=make_grammar_backend, progress=lambda line: None
        )
        self._numbers = itertools.count()

    def close(self) -> None:
        """Release the engine."""
        self._engine.shutdown()

    def step_ms(self, row: Row) -> float:
        """Mean milliseconds per step while the neighbours and the row's requests run."""
        for _ in range(NEIGHBOURS):
            self._add(None)
        for _ in range(row.extra):
            self._add(_BUSY_SCHEMA if row.constrained else None)
        while self._engine.scheduler.stats().num_running_reqs < NEIGHBOURS + row.extra:
            self._step()
        for _ in range(WARM_UP):
            self._step()
        started = time.perf_counter()
        for number in range(STEPS):
            if row.fresh and number % 10 == 0:
                self._add(self._fresh_schema() if row.constrained else None, max_tokens=8)
            self._step()
        milliseconds = (time.perf_counter() - started) / STEPS * 1000
        self._engine.scheduler.abort_client("bench")
        while self._engine.has_work:
            self._step()
        return milliseconds

    def tokens_per_s(self, streams: int, tokens: int = 64) -> float:
        """Return the throughput of ``streams`` concurrent requests, from the first step to the last."""
        for _ in range(streams):
            self._add(None, max_tokens=tokens)
        started = time.perf_counter()
        while self._engine.has_work:
            self._step()
        return streams * tokens / (time.perf_counter() - started)

    def _fresh_schema(self) -> dict[str, object]:
        names = [f"field_{next(self._numbers)}_{i}" for i in range(6)]
        return {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}

    def _add(self, schema: dict[str, object] | None, max_tokens: int = 1800) -> None:
        number = next(self._numbers)
        params = SamplingParams(
            temperature=1.0,
            seed=number,
            max_tokens=max_tokens,
            ignore_eos=schema is None,
            structured_output=StructuredOutput(json_schema=json.dumps(schema)) if schema else None,
        )
        prompt = [5 + (number * 31 + i) % 1000 for i in range(PROMPT_LEN)]
        request = EngineCoreRequest(request_id=str(number), prompt_token_ids=prompt, sampling_params=params)
        self._engine.add(self._engine.preprocess("bench", request))

    def _step(self) -> None:
        self._engine.step(lambda: None)
        if self._engine.stalled and self._engine.has_requests:
            self._engine.queues.get(block=True, timeout=None)


def schemas(model: str, threads: int, rounds: int) -> Iterator[tuple[str, str, float]]:
    """Scheduling, row and median milliseconds per step."""
    for async_scheduling in (False, True):
        bench = Bench(model, threads, async_scheduling=async_scheduling)
        found: dict[str, list[float]] = defaultdict(list)
        for number in range(rounds + 1):
            for row in SCHEMA_ROWS:
                milliseconds = bench.step_ms(row)
                if number:  # the first round compiles and warms up
                    found[row.name].append(milliseconds)
        bench.close()
        for name, values in found.items():
            yield "asynchronous" if async_scheduling else "synchronous", name, statistics.median(values)


def scheduling(model: str, threads: int, rounds: int, streams: tuple[int, ...]) -> Iterator[tuple[int, float, float]]:
    """Streams, and median tokens per second with synchronous and asynchronous scheduling."""
    benches = [Bench(model, threads, async_scheduling=on) for on in (False, True)]
    for count in streams:
        found: list[list[float]] = [[], []]
        for number in range(rounds + 1):
            for kind, bench in enumerate(benches):
                rate = bench.tokens_per_s(count)
                if number:
                    found[kind].append(rate)
        yield count, statistics.median(found[0]), statistics.median(found[1])
    for bench in benches:
        bench.close()
