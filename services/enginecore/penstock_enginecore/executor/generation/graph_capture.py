"""Dummy steps before the first request: capture of steps as CUDA graphs, with an estimate of the memory for graphs, and
measurement of a step's duration.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Self

import numpy as np
import torch

from penstock_common.memory import in_units
from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.worker_stats import GraphStats
from penstock_enginecore.forward.base import FedTokens, ForwardBatch, ForwardPass, state_memory, to_device
from penstock_enginecore.forward.build import BuiltForward
from penstock_enginecore.forward.cuda.buffers import StepShape, decode_sizes, mixed_steps
from penstock_enginecore.forward.dummy_inputs import Probe, blank_step, block_size_of, throwaway

# Tokens that a device has sampled most recently. The device uses these tokens as inputs before the host receives the
# tokens.

_INITIAL_ROWS = 1024
"""Initial number of rows of ``NewestTokens``. If the batch needs more rows, the tensor is reallocated and steps are
captured again.
"""


class NewestTokens:
    """Most recently sampled token of each row of the batch, on the device. One extra element at the end belongs to no
    row.
    """

    def __init__(self, device: torch.device) -> None:
        self._ids = torch.zeros(_INITIAL_ROWS + 1, dtype=torch.int32, device=device)

    def room_for(self, rows: IntArray) -> torch.Tensor:
        """Return the int32 tensor of newest tokens, which is large enough for the rows with the indices ``rows`` and
        one more element.

        A tensor that is too small is reallocated.
        """
        most = int(rows.max(initial=0))
        if most >= len(self._ids) - 1:
            grown = self._ids.new_zeros((1 << most.bit_length()) + 1)
            grown[: len(self._ids) - 1] = self._ids[:-1]
            self._ids = grown
        return self._ids

    def keep(self, rows: IntArray, token_ids: torch.Tensor) -> None:
        """Store ``token_ids`` int32 ``[n]`` as the newest tokens of ``rows`` int64 ``[n]``.

        The copy runs on the device, after the work that samples the tokens.
        """
        self.room_for(rows).index_copy_(0, to_device(rows, self._ids.device), token_ids)

    def feed(self, places: IntArray, rows: IntArray) -> FedTokens | None:
        """Return the newest tokens of ``rows`` as inputs at the indices ``places`` of a flat batch, or None if
        ``places`` is empty.
        """
        return FedTokens(self._ids, places, rows) if len(places) else None


logger = logging.getLogger(__name__)

_SILENCE = 2.0
"""Minimum number of seconds between two progress lines in the log."""


_MAX_FAILURES = 3
"""Number of captures that may fail before the first capture succeeds. Then ``GraphCapture.run`` ends."""


class GraphCapture:
    """Captures CUDA graphs by running one dummy step of each shape. ``forward`` captures a graph in the first step of a
    shape.

    Args:
        newest: Most recently sampled tokens, which captured steps read.
        stats: Function that returns the statistics of the graphs of ``forward``.
        clock: Function that returns the current time in seconds.
        adapted: Whether steps with LoRA adapters have separate graphs.
    """

    def __init__(
        self,
        forward: ForwardPass,
        newest: NewestTokens,
        stats: Callable[[], GraphStats],
        clock: Callable[[], float] = time.monotonic,
        *,
        adapted: bool = False,
    ) -> None:
        self._forward = forward
        self._newest = newest
        self._stats = stats
        self._clock = clock
        self._variants = (False, True) if adapted else (False,)

    @classmethod
    def of(cls, built: BuiltForward, newest: NewestTokens) -> Self | None:
        """Return a ``GraphCapture`` for the forward pass of ``built``, or None if this forward pass replays no steps."""
        if built.graphs is None:
            return None
        return cls(built.forward, newest, built.graphs, adapted=built.adapted_graphs)

    def shapes(self, config: EngineCoreConfig, max_len: int) -> list[StepShape]:
        """Return the shapes to capture at start, for a model of at most ``max_len`` tokens. See ``shapes_to_capture``.

        Dummy steps have no recurrent states, and steps with prompts have separate graphs if the model has recurrent
        layers. Therefore only decode steps of such a model are captured at start.
        """
        return shapes_to_capture(config, max_len if state_memory(self._forward) is None else 0)

    @torch.inference_mode()
    def run(self, shapes: Sequence[StepShape], num_groups: int, block_size: int, free: Callable[[], int]) -> None:
        """Run a dummy step of each of ``shapes``. The steps use the bound KV cache, but do not write to it.

        If the first steps cannot be captured, no step is captured, and the log contains the reason. ``free`` returns
        the size of the device's free memory in bytes.
        """
        before, begun, earlier = free(), self._clock(), self._stats()
        told = begun
        logger.info("capturing steps as CUDA graphs (one graph for each step shape) count=%d", len(shapes))
        for count, shape in enumerate(shapes, 1):
            for adapted in self._variants:
                self._run(shape, num_groups, block_size, adapted=adapted)
            stats = self._stats()
            if not stats.captured and stats.failures - earlier.failures >= _MAX_FAILURES:
                return
            if (now := self._clock()) - told >= _SILENCE:
                logger.info("captured CUDA graphs for %d of %d step shapes in %.1f s", count, len(shapes), now - begun)
                told = now
        failed = self._stats().failures - earlier.failures
        logger.info(
            "captured CUDA graphs for %s step shapes in %.1f s; the graphs use %s",
            f"all {len(shapes)}" if not failed else f"{len(shapes)}",
            self._clock() - begun,
            in_units(max(before - free(), 0)),
        )

    @torch.inference_mode()
    def run_alone(self, num_groups: int, block_size: int) -> torch.Tensor:
        """Run a dummy step with one token and the bound KV cache, without writing to the KV cache. Captured graphs stay
        valid. Returns the logits ``[1, vocab]``.
        """
        return self._run(StepShape(1, 1), num_groups, block_size)

    @torch.inference_mode()
    def measure(self, shapes: Sequence[StepShape], block_size: int, free: Callable[[], int]) -> int:
        """Estimate the memory in bytes that graphs for ``shapes`` need. The two largest shapes are captured with a
        temporary KV cache.

        The first captured graph also allocates the memory that all graphs share. Afterwards, no graph remains, and
        ``forward`` has no KV cache and no memory for states.
        """
        largest = largest_first(shapes)
        taken = []
        with throwaway(self._forward, block_size, num_blocks=2, num_requests=1):
            for shape in largest[:2]:
                before = free()
                for adapted in self._variants:
                    self._run(shape, 1, block_size, adapted=adapted)
                taken.append(max(before - free(), 0))
        return sum(taken) + sum(taken[1:]) * (len(largest) - 2)

    def _run(self, shape: StepShape, num_groups: int, block_size: int, *, adapted: bool = False) -> torch.Tensor:
        newest = self._newest.room_for(np.zeros(0, dtype=np.int64))
        step = blank_step(shape.tokens, shape.requests, num_groups, block_size, newest, adapted=adapted)
        return self._forward.run(*step).logits


def largest_first(shapes: Iterable[StepShape]) -> list[StepShape]:
    """Return ``shapes`` in the order of capture. Graphs of small steps reuse the memory of the graphs of large steps."""
    return sorted(shapes, key=lambda shape: (shape.tokens, shape.requests), reverse=True)


def shapes_to_capture(config: EngineCoreConfig, max_len: int) -> list[StepShape]:
    """Return the sizes of steps to capture at start, largest first, or an empty list if ``kernels.capture_at_start`` is
    false.

    The list contains the decode steps that ``kernels.graph_sizes`` selects. If ``kernels.graph_sizes`` is empty, the
    list also contains the steps with more tokens than requests, in which no request has more than ``max_len`` tokens.
    """
    if not config.kernels.capture_at_start:
        return []
    limits = config.scheduler
    most = min(limits.max_num_seqs, limits.step_tokens)
    sizes, wanted = decode_sizes(most), config.kernels.graph_sizes
    if wanted:
        sizes = [size for size in sizes if any(decode_sizes(each)[-1] == size for each in wanted)]
    decodes = [StepShape(size, size) for size in sizes]
    mixed = [] if wanted else mixed_steps(limits.step_tokens, most)
    return largest_first([*decodes, *(shape for shape in mixed if -(-shape.tokens // shape.requests) <= max_len)])


# Duration of a step, which adaptive drafting needs.


def fastest_pass(
    forward: ForwardPass,
    num_tokens: int,
    passes: int,
    clock: Callable[[], float] = time.perf_counter,
    *,
    warm_up: bool = False,
) -> float:
    """Return the duration, in seconds, of the fastest of ``passes`` forward passes over the first ``num_tokens`` tokens
    of a request.

    The passes compute the logits of all tokens, with one temporary KV cache. Afterwards no KV cache is bound to
    ``forward``. ``clock`` returns the current time in seconds. If ``warm_up`` is true, an untimed pass first compiles
    kernels and captures the step as a graph, so that the timed passes replay the graph.
    """
    probe = Probe.largest(num_tokens, num_tokens, block_size_of(forward.specs))
    with throwaway(forward, probe.metadata.block_size, probe.num_blocks, probe.metadata.num_requests):
        batch = probe.batch(forward, 0, num_tokens)
        if warm_up:
            _timed(forward, batch, clock)
        return min(_timed(forward, batch, clock) for _ in range(passes))


def _timed(forward: ForwardPass, batch: ForwardBatch, clock: Callable[[], float]) -> float:
    began = clock()
    logits = forward.run(batch, np.arange(len(batch.token_ids))).logits
    if logits.device.type == "cuda":
        torch.cuda.synchronize(logits.device)
    return clock() - began
