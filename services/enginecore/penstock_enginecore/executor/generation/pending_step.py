"""A step between its forward pass and its tokens."""

from dataclasses import dataclass

import torch

from penstock_common.types.logprobs import Logprobs
from penstock_enginecore.executor.generation.step_inputs import StepInputs
from penstock_enginecore.sample.base import LaunchedTokens, PlainDraws


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A forward pass whose tokens are not sampled yet. ``logits`` ``[sampling requests, vocab]``, or of the vocabulary what this
    rank has. ``draws``: of the rows, where none needs more than a device can do. ``launched``: what the pass chose by them.
    """

    inputs: StepInputs
    logits: torch.Tensor
    prompt_logprobs: dict[str, Logprobs]
    draws: PlainDraws | None = None
    launched: LaunchedTokens | None = None

    @property
    def sampling_ids(self) -> list[str]:
        """The requests that get a token."""
        return [self.inputs.request_ids[i] for i in self.inputs.sampling_requests]
