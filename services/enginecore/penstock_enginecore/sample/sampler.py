"""From logits to tokens.

Order: grammar, allowed tokens, bias, bad words, min_tokens, penalties, temperature, min_p, top_k, top_p, draw. Only what a
batch needs is computed: rows that are greedy and without rules cost an argmax. A row's token never depends on the others.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.sample.base import (
    FloatArray,
    SampledTokens,
    SamplingInputs,
)
from penstock_enginecore.sample.blocks import peak
from penstock_enginecore.sample.filters import FilterInputs, draw_filtered
from penstock_enginecore.sample.rules import Entries, GrammarRows, LogitRules, apply_rules, lift_bans


class SamplingKernels(Protocol):
    """What kernels may do in place of torch, for logits that they take."""

    def takes(self, logits: torch.Tensor) -> bool:
        """Whether they read logits like these."""

    def mask(self, logits: torch.Tensor, grammar: GrammarRows) -> None:
        """Leave only the tokens whose bits are set, in place, as ``rules.mask_grammar`` does."""

    def sample(
        self, logits: torch.Tensor, temperature: npt.NDArray[np.float32], uniforms: FloatArray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Largest value ``[rows]`` and a column, int64 ``[rows]``: the first that has it or, where ``temperature`` is not 0
        and the value finite, the one that ``uniforms`` draws from the whole row.
        """


class TorchSampler:
    """A ``Sampler`` of torch's operations, for any device. ``kernels``: those that find peaks and draw from rows without filters,
    for the logits that they take.
    """

    def __init__(self, kernels: SamplingKernels | None = None) -> None:
        self._kernels = kernels

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs) -> SampledTokens:
        """Rules first; then the peak of every row, which is the token of a greedy one; then draws for those that are left."""
        kernels = self._kernels
        if inputs.rules:
            logits = logits.float()
            before = apply_rules(
                logits, inputs.rules, kernels.mask if kernels is not None and kernels.takes(logits) else None
            )
            if before is not None and bool((empty := peak(logits)[0] == float("-inf")).any()):
                lift_bans(logits, inputs.rules, before, empty)
        kinds = inputs.kinds
        if kernels is not None and kernels.takes(logits):
            peaks, token_ids = kernels.sample(logits, kinds.plain_temperature, inputs.uniforms)
            any_left, left = kinds.any_filtered, kinds.filtered
        else:
            peaks, token_ids = peak(logits)
            any_left, left = kinds.any_drawn, kinds.drawn
        finite = np.isfinite(peaks.float().cpu().numpy())
        # Where every token is out, or the peak is no number, there is nothing to draw from: the first peak it is.
        if any_left and len(drawn := np.flatnonzero(left & finite)):
            rows = torch.from_numpy(drawn).to(logits.device)
            everything = len(drawn) == len(logits)
            chosen = draw_filtered(_filter_inputs(logits if everything else logits[rows], peaks[rows], inputs, drawn))
            token_ids[rows] = chosen
        num_nans = None if finite.all() else _num_nans(logits, peaks, inputs.rules)
        return SampledTokens(token_ids.cpu().numpy(), num_nans)


def _num_nans(logits: torch.Tensor, peaks: torch.Tensor, rules: LogitRules) -> npt.NDArray[np.int64] | None:
    """Return ``SampledTokens.num_nans`` of rows of which some have no finite peak."""
    wrong = logits.isnan() | (logits == float("inf"))
    if rules.penalties is not None:  # a repetition penalty near 0 makes infinity of finite logits
        wrong[Entries(rules.penalties.rows, rules.penalties.token_ids).index(logits.device)] = False
    counts: npt.NDArray[np.int64] = wrong.sum(dim=-1).cpu().numpy()
    nothing = (peaks == float("-inf")).cpu().numpy()
    nothing[rules.rows] = False  # rules may leave no token
    counts[nothing] = logits.shape[1]
    return counts if counts.any() else None


def _filter_inputs(
    logits: torch.Tensor, peaks: torch.Tensor, inputs: SamplingInputs, rows: npt.NDArray[np.int64]
) -> FilterInputs:
    """``logits`` and ``peaks`` are those of ``rows`` already."""
    vocab, settings = logits.shape[1], inputs.settings
    top_k = np.where(settings.top_k > 0, np.minimum(settings.top_k, vocab), vocab)

    def column(values: npt.NDArray[np.generic], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(values[rows]).to(device=logits.device, dtype=dtype)[:, None]

    return FilterInputs(
        logits=logits,
        peaks=peaks.float()[:, None],
        temperature=column(settings.clipped_temperature, torch.float32),
        max_distance=column(settings.max_distance, torch.float32),
        top_k=column(top_k, torch.int64),
        top_p=column(settings.top_p, torch.float64),
        uniforms=column(inputs.uniforms, torch.float64),
    )
