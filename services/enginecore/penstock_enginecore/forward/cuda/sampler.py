"""Sampling on the device, for rows of logits whose sampling needs no work on the host: greedy sampling, and random
sampling with or without filters.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock_enginecore.forward.base import ForwardBatch
from penstock_enginecore.forward.cuda.buffers import (
    DRAW_DTYPES,
    MAX_CAPTURED_TOKENS,
    StepInputs,
    StepShape,
    draw_values,
    to_device,
)
from penstock_enginecore.forward.cuda.kernel_api import Draws
from penstock_enginecore.sample.base import DrawSettings, LaunchedTokens, PlainDraws, Sampler, SamplingInputs, uniforms

if TYPE_CHECKING:  # Triton is imported only if there is a device for its kernels
    from penstock_enginecore.forward.cuda.kernels.sample import TokenSampler

MakeSampling = Callable[[int, int, torch.device], "TokenSampler"]
"""Function that creates sampling kernels. The arguments of the function are the maximum number of rows, the vocabulary
size and the device.
"""


class DeviceLauncher:
    """``TokenLauncher`` for a device.

    ``launch`` returns new tensors. The memory of the kernels that ``launch`` uses grows with the number of rows.
    ``for_steps`` has the kernels for captured steps, whose memory never moves.
    """

    def __init__(self, vocab: int, device: torch.device, make: MakeSampling) -> None:
        self._vocab = vocab
        self._device = device
        self._make = make
        self._max_rows = MAX_CAPTURED_TOKENS
        self._kernels = self.for_steps = make(self._max_rows, vocab, device)

    def launch(self, logits: torch.Tensor, draws: PlainDraws) -> LaunchedTokens:
        """Launch the sampling kernels and return the sampled tokens. Random sampling needs one copy to the device, and
        greedy sampling needs none.
        """
        rows = len(logits)
        if rows > self._max_rows:
            self._max_rows = 1 << (rows - 1).bit_length()
            self._kernels = self._make(self._max_rows, self._vocab, self._device)
        width = aligned_rows(rows)
        results = torch.zeros(2, width, dtype=torch.int32, device=self._device)
        peaks = torch.empty(rows, dtype=torch.float32, device=self._device)
        on_device = None
        if draws.any_drawn:
            on_device = Draws(*to_device(list(zip(draw_values(draws), DRAW_DTYPES, strict=True)), self._device))
        self._kernels.sample(
            logits.contiguous(), on_device, results[0, :rows], peaks, results[1, :rows], filtered=draws.any_filtered
        )
        return LaunchedTokens(results, rows)


def aligned_rows(rows: int) -> int:
    """Return the number of rows after padding, so that results begin at multiples of 16 bytes. The kernels are compiled
    for this alignment.
    """
    return -(-rows // 4) * 4


def difference(launcher: DeviceLauncher, sampler: Sampler, logits: torch.Tensor) -> str:
    """Return text about the number of tokens that ``launcher`` and ``sampler`` sample differently, or an empty text if
    all tokens are equal.

    ``launcher`` and ``sampler`` sample from ``logits`` ``[rows, vocab]`` with all kinds of sampling parameters.
    """
    rows = len(logits)
    number = np.arange(rows)
    settings = DrawSettings.off(rows)._replace(
        temperature=np.where(number % 4 == 0, 0.0, 0.5 + number % 3),
        top_k=np.where(number % 5 == 1, 2, 0),
        top_p=np.where(number % 3 == 1, 0.8, 1.0),
        min_p=np.where(number % 7 == 2, 0.05, 0.0),
    )
    seeds = number.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    expected = sampler.sample(logits.clone(), SamplingInputs(settings, uniforms(seeds, number))).token_ids
    found = launcher.launch(logits, PlainDraws.of(settings, seeds, number)).token_ids.cpu().numpy()
    wrong = int((found != expected).sum())
    return f"{wrong} of {rows} tokens differ" if wrong else ""


# Tokens that stay on the device: the tokens that an earlier step sampled and this step gets as input, and the tokens
# that this step samples.


class TokenFeedback:
    """Reads and writes sampled tokens that stay on the device, in every step of a padded shape. The reads and writes
    are captured as a part of the step.

    The host reads nothing. All rows are sampled, including padding rows, and unused tokens are ignored. ``kernels``
    sample the tokens. The argument is None if the caller samples.
    """

    def __init__(self, device: torch.device, kernels: "TokenSampler | None" = None) -> None:
        self._kernels = kernels
        self._newest = torch.zeros(1, dtype=torch.int32, device=device)
        rows = MAX_CAPTURED_TOKENS if kernels is not None else 0
        self._results = torch.zeros(2 * rows, dtype=torch.int32, device=device)
        self._peaks = torch.zeros(rows, dtype=torch.float32, device=device)

    @property
    def nobody(self) -> int:
        """Index of the row of ``newest`` that receives tokens of padding rows. This row belongs to no request."""
        return len(self._newest) - 1

    def moves(self, batch: ForwardBatch) -> bool:
        """Use the tensor ``newest`` of ``batch`` from now on.

        Returns whether this is another tensor than before. If so, captured graphs are invalid.
        """
        newest = (
            batch.choice.newest if batch.choice is not None else batch.fed.newest if batch.fed is not None else None
        )
        if newest is None or newest is self._newest:
            return False
        self._newest = newest
        return True

    def feed(self, inputs: StepInputs) -> None:
        """Write the tokens that only the device has into the step's input token ids."""
        fed = inputs.fed
        torch.index_select(self._newest, 0, fed.rows, out=fed.ids)
        torch.where(fed.known, fed.ids, inputs.token_ids, out=inputs.token_ids)

    def choose(self, logits: torch.Tensor, inputs: StepInputs, shape: StepShape) -> None:
        """Sample a token from each row of ``logits`` ``[requests, vocab]`` of a step of padded ``shape``, and store the
        tokens.
        """
        if self._kernels is None or shape.is_large:
            return
        token_ids, num_nans = (row[: shape.requests] for row in self._results_of(shape))
        peaks = self._peaks[: shape.requests]
        self._kernels.sample(logits, inputs.draws, token_ids, peaks, num_nans, filtered=True)
        self._newest.index_copy_(0, inputs.kept_rows, token_ids)

    def launched(self, batch: ForwardBatch, shape: StepShape) -> LaunchedTokens | None:
        """Return the tokens sampled for ``batch``, or None if none were requested. The next step overwrites these
        tokens.
        """
        if batch.choice is None or self._kernels is None or shape.is_large:
            return None
        return LaunchedTokens(self._results_of(shape), len(batch.choice.kept_rows))

    def _results_of(self, shape: StepShape) -> torch.Tensor:
        width = aligned_rows(shape.requests)
        return self._results[: 2 * width].view(2, width)
