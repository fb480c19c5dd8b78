"""Scaling of step time with running and waiting requests, and of the services' memory with served requests.

Both results are also drawn as plots.
"""

import asyncio
import contextlib
import itertools
import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ExecutorConfig, ModelConfig, SchedulerConfig
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.executor.uniproc import UniprocExecutor
from tests.benchmarks import load, scheduler_step
from tests.benchmarks.engine_targets import KV_CACHE_MEMORY
from tests.benchmarks.load import Load
from tests.benchmarks.processes import engine, frontend
from tests.benchmarks.public_target import PublicClient

RUNNING, WAITING = (1, 8, 64, 256), (0, 10_000)
PROMPT_LEN, STEPS, WARM_UP = 16, 60, 10
CONCURRENT, INPUT_LEN, OUTPUT_LEN = 64, 8, 4
SAMPLE_EVERY, SAY_EVERY = 500, 4000


class StepRow(msgspec.Struct, frozen=True):
    """Median milliseconds of a decode step, and of the scheduler alone (measured by ``scheduler_step``)."""

    running: int
    waiting: int
    step_ms: float
    scheduler_ms: float


class MemoryRow(msgspec.Struct, frozen=True):
    """Resident sets after the given numbers of requests."""

    requests: int
    engine_mib: float
    frontend_mib: float


class _Steps:
    """An engine in which at most ``running`` requests run."""

    def __init__(self, model: str, threads: int, running: int) -> None:
        config = EngineCoreConfig(
            model=ModelConfig(path=model),
            cache=CacheConfig(kv_cache_memory=KV_CACHE_MEMORY, enable_prefix_caching=False),
            scheduler=SchedulerConfig(max_num_seqs=running, max_waiting_requests=running + max(WAITING) + 1),
            executor=ExecutorConfig(num_threads=threads),
            iteration_log_interval=0.0,
        )
        self._engine = EngineCore(config, UniprocExecutor(config), progress=lambda line: None)
        self._running = running
        self._numbers = itertools.count()

    def close(self) -> None:
        """Release the engine."""
        self._engine.shutdown()

    def measure(self, waiting: int) -> float:
        """Return the median milliseconds per step with ``waiting`` requests in the queue."""
        params = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
        for number in itertools.islice(self._numbers, self._running + waiting):
            prompt = [5 + (number * 31 + i) % 1000 for i in range(PROMPT_LEN)]
            request = EngineCoreRequest(request_id=str(number), prompt_token_ids=prompt, sampling_params=params)
            self._engine.add(self._engine.preprocess("bench", request))
        while self._engine.scheduler.stats().num_running_reqs < self._running:
            self._engine.step(lambda: None)
        times = []
        for _ in range(WARM_UP + STEPS):
            began = time.perf_counter()
            self._engine.step(lambda: None)
            times.append(time.perf_counter() - began)
        stats = self._engine.scheduler.stats()
        if (stats.num_running_reqs, stats.num_waiting_reqs) != (self._running, waiting):
            raise RuntimeError(f"{stats.num_running_reqs} requests run and {stats.num_waiting_reqs} wait")
        self._engine.scheduler.abort_client("bench")
        while self._engine.has_work:
            self._engine.step(lambda: None)
        return statistics.median(times[WARM_UP:]) * 1e3


def steps(model: str, threads: int, rounds: int) -> list[StepRow]:
    """Return one row per pair of running and waiting requests. All pairs are measured in turn in every round."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        engines = {running: _Steps(model, threads, running) for running in RUNNING}
        for each in engines.values():
            stack.callback(each.close)
        for number in range(rounds + 1):
            for running, each in engines.items():
                for waiting in WAITING:
                    milliseconds = each.measure(waiting)
                    if number:  # the first round warms up
                        found[running, waiting].append(milliseconds)
    return [
        StepRow(running, waiting, statistics.median(values), scheduler_step.measure(running=running, waiting=waiting))
        for (running, waiting), values in found.items()
    ]


async def memory(
    model: str, threads: int, requests: int = 20_000, *, log: Callable[[str], object] = print
) -> list[MemoryRow]:
    """Return the resident sets of an engine and a frontend that serve ``CONCURRENT`` concurrent short requests."""
    vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    item = Load(streams=CONCURRENT, requests=requests, input_len=INPUT_LEN, output_len=OUTPUT_LEN)
    prompts = enumerate(load.prompts(item, vocab_size, seed=0), start=1)
    rows: list[MemoryRow] = []
    done = 0
    async with contextlib.AsyncExitStack() as stack:
        serving = await stack.enter_async_context(engine(model, threads))
        public = await stack.enter_async_context(frontend(model, serving.address))
        for service in (serving, public):
            await service.serving()
        client = await stack.enter_async_context(PublicClient(public.address))

        def sample() -> None:
            rows.append(MemoryRow(done, resident_mib(serving.pid), resident_mib(public.pid)))
            if done % SAY_EVERY == 0 or done == requests:
                row = rows[-1]
                log(f"{done} requests: engine {row.engine_mib:.1f} MiB, frontend {row.frontend_mib:.1f} MiB")

        async def send() -> None:
            nonlocal done
            for number, prompt in prompts:  # all senders take prompts from the same iterator
                got = sum([size async for size in client.stream(prompt, OUTPUT_LEN)])
                if got != OUTPUT_LEN:
                    raise RuntimeError(f"request {number} gave {got} of {OUTPUT_LEN} tokens")
                done += 1
                if done % SAMPLE_EVERY == 0 or done == requests:
                    sample()

        sample()
        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENT):
                group.create_task(send())
    return rows


def resident_mib(pid: int | str = "self") -> float:
    """Return the resident set of a process. Raises RuntimeError if the process has ended."""
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"process {pid} has ended")
    return int(found[1]) / 1024


def plot(folder: Path, step_rows: Sequence[StepRow], memory_rows: Sequence[MemoryRow]) -> list[Path]:
    """Write ``growth-steps.png`` and ``growth-memory.png``; the folder is created. Returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "growth-steps.png", folder / "growth-memory.png"]
    for path, figure in zip(paths, (_plot_steps(step_rows), _plot_memory(memory_rows)), strict=True):
        FigureCanvasAgg(figure)  # draws without a display
        figure.savefig(path)
    return paths


def _plot_steps(rows: Sequence[StepRow]) -> Figure:
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for waiting, mark, size in zip(
        WAITING, ("o", "x"), (9, 6), strict=True
    ):  # different marks, so that both are visible at the same point
        chosen = [row for row in rows if row.waiting == waiting]
        running = [row.running for row in chosen]
        name = f"{waiting:,} waiting".replace(",", " ") if waiting else "nothing waiting"
        for part, values, line in (
            ("whole step", [row.step_ms for row in chosen], "-"),
            ("scheduler's share", [row.scheduler_ms for row in chosen], "--"),
        ):
            axes.plot(
                running,
                values,
                marker=mark,
                markersize=size,
                fillstyle="none",
                linestyle=line,
                label=f"{part}, {name}",
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(RUNNING, [str(running) for running in RUNNING])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set(
        title="Time of a decode step by requests running",
        xlabel="requests running (logarithmic)",
        ylabel="milliseconds per step (median, logarithmic)",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _plot_memory(rows: Sequence[MemoryRow]) -> Figure:
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    requests = [row.requests for row in rows]
    axes.plot(requests, [row.engine_mib for row in rows], marker=".", label="engine")
    axes.plot(requests, [row.frontend_mib for row in rows], marker=".", label="frontend")
    axes.set_ylim(bottom=0)
    axes.set(
        title=f"Memory by requests served ({INPUT_LEN} tokens in, {OUTPUT_LEN} out, {CONCURRENT} at once)",
        xlabel="requests done",
        ylabel="resident set (MiB)",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="center right")
    return figure
