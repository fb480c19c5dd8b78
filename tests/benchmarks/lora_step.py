"""Cost of LoRA adapters per step of the CPU kernels: ``python -m tests.benchmarks.lora_step MODEL``.

Streams of one token each, after prompts of 89 tokens, have random adapters on all projections: all the same adapter, or
several in turn. Steps without adapters alternate with each case in the same process. A case is the median of its
rounds, and its relative speed is the median of the rounds' ratios. Prompts are timed as steps of many tokens of two
requests. One thread is timed by its processor time, so that other load on the machine matters less. Several threads
share a step dynamically and are timed by the clock, which needs an idle machine. ``--plot FILE`` draws the relative
speed by rank and number of adapters instead.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from penstock_enginecore.config import KernelsConfig, ModelConfig
from penstock_enginecore.forward.base import ForwardBatch
from penstock_enginecore.forward.build import ForwardConfig, build_forward
from penstock_enginecore.forward.native import NativeForward
from penstock_enginecore.models.loader import load_model
from tests.fakes.models.adapted_steps import (
    BLOCK_SIZE,
    BLOCKS_OF_A_REQUEST,
    Prompt,
    adapted_step,
    linear_layers,
    random_adapter,
)

CPU = torch.device("cpu")
LENGTH = 90
RANKS = (4, 8, 16, 32, 64)
NUMBERS = (1, 2, 4, 8, 16)
"""Numbers of adapters in the plot."""


@dataclass(frozen=True, slots=True)
class Case:
    """A step of ``streams`` requests with ``tokens`` tokens each, with ``adapters`` adapters of ``rank`` and ``dtype``."""

    adapters: int
    rank: int
    dtype: torch.dtype = torch.float32
    streams: int = 16
    tokens: int = 1

    @property
    def name(self) -> str:
        """Return the name of the table's row."""
        what = f"{self.adapters} of rank {self.rank}, {str(self.dtype).removeprefix('torch.')}"
        return f"{self.streams} x {self.tokens}, {what if self.adapters else 'none'}"


def cases(streams: int) -> Iterator[Case]:
    """Return all measured cases."""
    for dtype in (torch.float32, torch.bfloat16):
        for count in sorted({0, 1, streams // 2, streams} if dtype == torch.float32 else {1, streams // 2, streams}):
            yield Case(count, 16, dtype, streams)
        yield Case(1, 64, dtype, streams)
    yield Case(1, 16, streams=1)
    yield Case(1, 16, streams=2, tokens=64)
    yield Case(2, 16, streams=2, tokens=64)


class Steps:
    """The decoder of a model, with the adapters of a case."""

    def __init__(self, model: str, threads: int, isa: Any) -> None:
        loaded = load_model(ModelConfig(path=model), CPU, lambda line: None, widen=True)
        self._layers: Any = [name for name in linear_layers(loaded.module) if name != "lm_head"]
        self._module = loaded.module
        self._vocab_size = loaded.vocab_size
        forward = build_forward(loaded, ForwardConfig(CPU, "auto", KernelsConfig(isa=isa), threads, BLOCK_SIZE)).forward
        if not isinstance(forward, NativeForward):
            raise SystemExit("the kernels' decoder does not compute this model")
        self.forward = forward
        self._clock = time.thread_time if threads == 1 else time.perf_counter
        self._generator = np.random.default_rng(0)

    def add(self, case: Case) -> list[bytes]:
        """Add the adapters of a case, and return their digests."""
        adapters = [
            random_adapter(self._module, case.rank, seed + 1, layers=self._layers, dtype=case.dtype)
            for seed in range(max(case.adapters, 1))
        ]
        for adapter in adapters:
            self.forward.add_adapter(adapter)
        return [adapter.digest for adapter in adapters]

    def batch(self, case: Case, digests: list[bytes | None]) -> ForwardBatch:
        """Return a step of the case with its adapters."""
        ids = [self._generator.integers(1, self._vocab_size, LENGTH) for _ in range(case.streams)]
        prompts = [Prompt(each, digests[i * len(digests) // case.streams]) for i, each in enumerate(ids)]
        return adapted_step(prompts, [LENGTH - case.tokens] * case.streams, [case.tokens] * case.streams)

    def milliseconds(self, batch: ForwardBatch, steps: int) -> float:
        """Return the milliseconds of the fastest step."""
        rows = batch.attention[0].query_start_loc[1:] - 1
        times = []
        for _ in range(steps):
            began = self._clock()
            self.forward.run(batch, rows)
            times.append(self._clock() - began)
        return 1000 * min(times)


def measure(steps: Steps, case: Case, rounds: int, count: int) -> tuple[float, float, float]:
    """Return the milliseconds of a step without adapters and with those of ``case``, and the relative speed."""
    digests = steps.add(case)
    steps.forward.bind(steps.forward.memory.throwaway(BLOCK_SIZE, 1 + case.streams * BLOCKS_OF_A_REQUEST))
    plain = steps.batch(case, [None])
    adapted = steps.batch(case, list(digests)) if case.adapters else steps.batch(case, [None])
    for batch in (plain, adapted):
        steps.milliseconds(batch, 3)
    pairs = [(steps.milliseconds(plain, count), steps.milliseconds(adapted, count)) for _ in range(rounds)]
    for digest in digests:
        steps.forward.remove_adapter(digest)
    without, with_them = (statistics.median(times) for times in zip(*pairs, strict=True))
    return without, with_them, statistics.median(before / after for before, after in pairs)


@torch.inference_mode()
def plot(steps: Steps, path: Path, rounds: int, count: int) -> None:
    """Draw the relative speed by rank, with a line for each number of adapters, for matrices of both dtypes."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, dtype in zip(panels, (torch.float32, torch.bfloat16), strict=True):
        for number in NUMBERS:
            shares = [measure(steps, Case(number, rank, dtype), rounds, count)[2] for rank in RANKS]
            panel.plot(RANKS, shares, marker="o", label=f"{number} adapter{'s' if number > 1 else ''}")
            print(dtype, number, [round(share, 3) for share in shares], flush=True)
        panel.set_xscale("log", base=2)
        panel.set_xticks(RANKS, [str(rank) for rank in RANKS])
        panel.set_ylim(0, 1.02)
        panel.grid(alpha=0.3)
        panel.set_xlabel("rank")
        panel.set_title(f"matrices of {str(dtype).removeprefix('torch.')}")
    panels[0].set_ylabel("speed of a step, share of that without adapters")
    panels[0].legend(loc="lower left")
    figure.suptitle("16 streams, adapters on all seven projections")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Print the table, or draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="of a round, the fastest of which counts")
    parser.add_argument("--plot", type=Path, help="an image file to draw ranks and numbers to")
    options = parser.parse_args()
    steps = Steps(str(options.model), options.threads, options.isa)
    if options.plot:
        plot(steps, options.plot, options.rounds, options.steps)
        return
    table = Table("step", "ms without", "ms with", "share of the speed")
    with torch.inference_mode():
        for case in cases(options.streams):
            without, with_them, share = measure(steps, case, options.rounds, options.steps)
            table.add_row(case.name, f"{without:.2f}", f"{with_them:.2f}", f"{share:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
