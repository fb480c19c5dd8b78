"""A step between its forward pass and its tokens."""

from dataclasses import dataclass, field

import torch

from penstock_common.types.logprobs import Logprobs
from penstock_enginecore.executor.generation.step_inputs import StepInputs
from penstock_enginecore.sample.base import LaunchedTokens, PlainDraws


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A forward pass whose tokens are not sampled yet. ``logits`` ``[rows, vocab]``, or of the vocabulary what this
    rank has. ``draws``: of the rows, where none needs more than a device can do. ``launched``: what the pass chose by them.
    ``num_drafts_wanted``: see ``SchedulerOutput``. ``seconds`` that the pass took.
    """

    inputs: StepInputs
    logits: torch.Tensor
    prompt_logprobs: dict[str, Logprobs]
    draws: PlainDraws | None = None
    launched: LaunchedTokens | None = None
    num_drafts_wanted: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
