"""A model of the shape with random weights, and its steps as an engine runs them."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.config import KernelsConfig, ModelConfig
from penstock_enginecore.executor.generation.graph_capture import NewestTokens
from penstock_enginecore.forward.base import Choice, ForwardBatch, ForwardPass
from penstock_enginecore.forward.build import BuiltForward, ForwardConfig, build_forward
from penstock_enginecore.lora.device_slots import SlotLimits
from penstock_enginecore.models.loader import load_model
from penstock_enginecore.sample.base import DrawSettings, PlainDraws
from tests.benchmarks.gpu import machine
from tests.benchmarks.gpu.shapes import BLOCK_SIZE, Plan

ROUNDS = 30
Step = Callable[[], object]


class Decoder:
    """The forward pass of a model shape, as in an engine. All rows of a stage use the same forward pass."""

    def __init__(self, plan: Plan, device: torch.device, built: BuiltForward) -> None:
        self.plan = plan
        self.device = device
        self.forward: Any = built.forward
        self._launcher = built.launcher
        self._computing = built.computing
        self._graphs = built.graphs
        self._newest = NewestTokens(device)
        self._host: torch.Tensor | None = None

    def told(self) -> dict[str, Any]:
        """Return the names of the kernels, for the record of the build."""
        return {"computing": self._computing}

    def step(
        self, batch: ForwardBatch, rows: IntArray, *, per_stream: int | None = 1, settings: DrawSettings | None = None
    ) -> Step:
        """Return a function that runs the step.

        On a GPU that chooses tokens, the step works as in an engine. The first of ``per_stream`` tokens of each stream
        comes from the device. The next tokens are chosen there and copied to page-locked memory. ``per_stream`` is None
        for a prompt. ``settings`` are the sampling parameters; the default is greedy sampling.
        """
        launcher = self._launcher
        if launcher is None:
            return lambda: self.forward.run(batch, rows)
        count = len(rows)
        none: IntArray = np.zeros(count, dtype=np.int64)
        draws = PlainDraws.of(settings or DrawSettings.off(count), none.astype(np.uint64), none)
        kept: IntArray = np.arange(count)
        newest = self._newest.room_for(kept)
        firsts: IntArray = np.arange(0, len(batch.token_ids), per_stream or 1)
        fed = None if per_stream is None else self._newest.feed(firsts, np.arange(len(firsts)))
        chosen = ForwardBatch(
            batch.token_ids, batch.positions, batch.attention, None, fed, Choice(draws, newest, kept), batch.segments
        )
        host = torch.empty(2 * (count + 4), dtype=torch.int32, pin_memory=self.device.type == "cuda")

        def run() -> None:
            output = self.forward.run(chosen, rows)
            launched = output.launched
            if launched is None:
                launched = launcher.launch(output.logits, draws)
                self._newest.keep(kept, launched.token_ids)
            results = launched.results.flatten()
            host[: len(results)].copy_(results, non_blocking=True)

        return run

    def timed(self, step: Step, *, rounds: int = ROUNDS, alone: bool = False, replays: bool = True) -> dict[str, Any]:
        """Return the milliseconds of one step in a sequence of steps, or of a single awaited step if ``alone`` is set.

        Also returns the kernels that computed the step.

        ``replays``: whether steps of this shape should be replayed from a CUDA graph.
        """
        seconds = machine.seconds_in_a_row(self.device, step, rounds=rounds)
        before = None if self._graphs is None else self._graphs()
        found: dict[str, Any] = {"ms": seconds * 1e3, "computing": self._computing}
        waited = machine.median_seconds(self.device, step, rounds=rounds if alone else 3, warm_up=0)
        if alone:
            found["alone_ms"] = waited * 1e3
        if replays and self.device.type == "cuda":
            found["not_replayed"] = "steps are not captured"
            if before is not None and self._graphs is not None:
                launched = self._graphs().launched - before.launched
                found["not_replayed"] = f"{launched} steps were launched piece by piece" if launched else ""
        return found

    @contextmanager
    def launched(self) -> Iterator[None]:
        """Launch the kernels of a step one by one in the ``with`` block, as with ``kernels.graphs: false``."""
        graphs, self.forward._graphs = self.forward._graphs, None
        try:
            yield
        finally:
            self.forward._graphs = graphs

    @contextmanager
    def serial(self) -> Iterator[None]:
        """Launch kernels without PDL in the ``with`` block, as with ``kernels.dependent_launch: false``. No graph may
        have been captured: enter this block before the KV cache is bound.
        """
        kernels = self.forward._kernels
        held = dict(vars(kernels))
        without = vars(type(kernels)(batch_invariant=kernels.batch_invariant))
        vars(kernels).update({name: value for name, value in without.items() if name == "_pdl" or callable(value)})
        try:
            yield
        finally:
            vars(kernels).update(held)


@contextmanager
def decoder(
    plan: Plan, device: torch.device, kernels: KernelsConfig | None = None, lora: SlotLimits | None = None
) -> Iterator[Decoder]:
    """Load random weights and build the forward pass as an engine does."""
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path = plan.shape.write(Path(folder))
        checkpoint = ModelConfig(path=str(path), load_format="dummy", dtype=plan.shape.dtype)
        model = load_model(checkpoint, device, lambda line: None)
        threads = torch.get_num_threads()
        config = ForwardConfig(device, "auto", kernels or KernelsConfig(), threads, BLOCK_SIZE, lora=lora)
        yield Decoder(plan, device, build_forward(model, config))


@contextmanager
def cache(forward: ForwardPass, num_blocks: int) -> Iterator[None]:
    """Return a KV cache of random numbers, including the null block."""
    caches = forward.memory.throwaway(BLOCK_SIZE, num_blocks)
    for layer in caches.values():
        for part in (layer.cache.keys, layer.cache.values):
            part.normal_()
    forward.bind(caches)
    try:
        yield
    finally:
        forward.bind({})
