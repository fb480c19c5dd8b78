"""Tokens that stay on the device: those that a step is computed on, and those that it ends with."""

import torch

from penstock_enginecore.forward.base import ForwardBatch
from penstock_enginecore.forward.cuda.buffers import MAX_CAPTURED_TOKENS, StepInputs, StepShape
from penstock_enginecore.forward.cuda.kernel_api import SamplingKernels
from penstock_enginecore.forward.cuda.sampler import aligned_rows
from penstock_enginecore.sample.base import LaunchedTokens


class TokenFeedback:
    """Part of the work of every step of padded shape, captured with it: it reads nothing on the host, and all rows are chosen,
    those of padding too, whatever becomes of them. ``kernels``: those that choose, None where tokens are chosen elsewhere.
    """

    def __init__(self, device: torch.device, kernels: SamplingKernels | None = None) -> None:
        self._kernels = kernels
        self._newest = torch.zeros(1, dtype=torch.int32, device=device)
        rows = MAX_CAPTURED_TOKENS if kernels is not None else 0
        self._results = torch.zeros(2 * rows, dtype=torch.int32, device=device)
        self._peaks = torch.zeros(rows, dtype=torch.float32, device=device)

    @property
    def nobody(self) -> int:
        """The row of ``newest`` that nobody reads."""
        return len(self._newest) - 1

    def moves(self, batch: ForwardBatch) -> bool:
        """Take the newest tokens from where ``batch`` has them, and keep them there. Whether that is another place than before:
        what was captured on that one must be forgotten.
        """
        newest = (
            batch.choice.newest if batch.choice is not None else batch.fed.newest if batch.fed is not None else None
        )
        if newest is None or newest is self._newest:
            return False
        self._newest = newest
        return True

    def feed(self, inputs: StepInputs) -> None:
        """Put the tokens that the device alone knows into the step's."""
        fed = inputs.fed
        torch.index_select(self._newest, 0, fed.rows, out=fed.ids)
        torch.where(fed.known, fed.ids, inputs.token_ids, out=inputs.token_ids)

    def choose(self, logits: torch.Tensor, inputs: StepInputs, shape: StepShape) -> None:
        """From ``logits`` ``[requests, vocab]`` of a step of padded ``shape``, and keep what is chosen."""
        if self._kernels is None or shape.is_large:
            return
        token_ids, num_nans = (row[: shape.requests] for row in self._results_of(shape))
        peaks = self._peaks[: shape.requests]
        self._kernels.sample(logits, inputs.draws, token_ids, peaks, num_nans, filtered=True)
        self._newest.index_copy_(0, inputs.kept_rows, token_ids)

    def launched(self, batch: ForwardBatch, shape: StepShape) -> LaunchedTokens | None:
        """What was chosen for ``batch``, in memory that the next step overwrites; None if it was not to be."""
        if batch.choice is None or self._kernels is None or shape.is_large:
            return None
        return LaunchedTokens(self._results_of(shape), len(batch.choice.kept_rows))

    def _results_of(self, shape: StepShape) -> torch.Tensor:
        width = aligned_rows(shape.requests)
        return self._results[: 2 * width].view(2, width)
