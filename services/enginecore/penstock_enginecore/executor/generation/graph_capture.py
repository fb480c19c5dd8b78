"""Capture of decode steps as CUDA graphs before the first request: choice of the step sizes, and estimate of the memory
for graphs.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
import torch

from penstock_common.memory import in_units
from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.worker_stats import GraphStats
from penstock_enginecore.forward.base import FedTokens, ForwardPass, to_device
from penstock_enginecore.forward.build import BuiltForward
from penstock_enginecore.forward.cuda.buffers import decode_sizes
from penstock_enginecore.forward.dummy_inputs import blank_decodes, throwaway

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


class GraphCapture:
    """Captures CUDA graphs by running one dummy decode step of each size. ``forward`` captures a graph in the first
    step of a size.

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

    @torch.inference_mode()
    def run(self, sizes: Sequence[int], num_groups: int, block_size: int, free: Callable[[], int]) -> None:
        """Run a dummy decode step for each number of tokens in ``sizes``. The steps use the bound KV cache, but do not
        write to it.

        If a step cannot be captured, no step is captured, and the log contains the reason. ``free`` returns the size of
        the device's free memory in bytes.
        """
        before, begun = free(), self._clock()
        told = begun
        logger.info("capturing decode steps as CUDA graphs (one graph for each step size) count=%d", len(sizes))
        for count, size in enumerate(sizes, 1):
            for adapted in self._variants:
                self._forward.run(*blank_decodes(size, num_groups, block_size, self._room(), adapted=adapted))
            if not self._stats().captured:
                return
            if (now := self._clock()) - told >= _SILENCE:
                logger.info("captured CUDA graphs for %d of %d step sizes in %.1f s", count, len(sizes), now - begun)
                told = now
        took = in_units(max(before - free(), 0))
        logger.info(
            "captured CUDA graphs for all %d step sizes in %.1f s; the graphs use %s",
            len(sizes),
            self._clock() - begun,
            took,
        )

    @torch.inference_mode()
    def measure(self, sizes: Sequence[int], block_size: int, free: Callable[[], int]) -> int:
        """Estimate the memory in bytes that graphs for the step sizes ``sizes`` need. The two largest sizes are
        captured with a temporary KV cache.

        The first captured graph also allocates the memory that all graphs share. Afterwards, no graph remains, and
        ``forward`` has no KV cache and no memory for states.
        """
        largest = sorted(sizes, reverse=True)
        taken = []
        with throwaway(self._forward, block_size, num_blocks=2, num_requests=1):
            for size in largest[:2]:
                before = free()
                for adapted in self._variants:
                    self._forward.run(*blank_decodes(size, 1, block_size, self._room(), adapted=adapted))
                taken.append(max(before - free(), 0))
        return sum(taken) + sum(taken[1:]) * (len(largest) - 2)

    def _room(self) -> torch.Tensor:
        return self._newest.room_for(np.zeros(0, dtype=np.int64))


def sizes_to_capture(config: EngineCoreConfig) -> list[int]:
    """Return the sizes of decode steps to capture, in tokens, or an empty list if ``kernels.capture_at_start`` is
    false.

    The largest size is first, so that the graphs of smaller steps reuse the memory of larger graphs.
    """
    if not config.kernels.capture_at_start:
        return []
    limits = config.scheduler
    sizes = decode_sizes(min(limits.max_num_seqs, limits.step_tokens))
    wanted = config.kernels.graph_sizes
    if wanted:
        sizes = [size for size in sizes if any(decode_sizes(each)[-1] == size for each in wanted)]
    return sorted(sizes, reverse=True)
