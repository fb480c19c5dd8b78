"""From logits to tokens.

Order: grammar, allowed tokens, bias, bad words, min_tokens, penalties, temperature, min_p, top_k, top_p, draw. Only what a
batch needs is computed: rows that are greedy and without rules cost an argmax. A row's token never depends on the others.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.sample.blocks import peak
from penstock_enginecore.sample.filters import FilterInputs, draw_filtered
from penstock_enginecore.sample.rules import GrammarRows, LogitRules, apply_rules, lift_bans

FloatArray = npt.NDArray[np.float64]

_TEMPERATURE_MIN, _TEMPERATURE_MAX = 1e-30, 1e30
"""Keeps temperatures that are no float32 from dividing by zero or infinity."""


@dataclass(frozen=True, slots=True)
class RowKinds:
    """What the rows of a batch ask for, which stays the same from step to step. Bool ``[rows]``: ``drawn`` at random, and
    ``filtered``: drawn from what filters leave. ``plain_temperature`` float32: of rows that are drawn without filters, else 0.
    """

    drawn: npt.NDArray[np.bool_]
    filtered: npt.NDArray[np.bool_]
    plain_temperature: npt.NDArray[np.float32]
    any_drawn: bool
    any_filtered: bool

    @classmethod
    def of(
        cls, temperature: FloatArray, top_k: npt.NDArray[np.int64], top_p: FloatArray, min_p: FloatArray
    ) -> "RowKinds":
        """See ``SamplingInputs``."""
        drawn = temperature > 0
        filtered = drawn & ((top_k > 0) | (top_p < 1) | (min_p > 0))
        plain = temperature.clip(_TEMPERATURE_MIN, _TEMPERATURE_MAX).astype(np.float32)
        plain[filtered | ~drawn] = 0.0
        return cls(drawn, filtered, plain, bool(drawn.any()), bool(filtered.any()))


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Per row of logits, on the host. ``uniforms`` in [0, 1); temperature 0 is greedy; ``top_k`` 0 and ``top_p`` 1 are
    off. ``kinds`` follows from the others.
    """

    temperature: FloatArray
    top_k: npt.NDArray[np.int64]
    top_p: FloatArray
    min_p: FloatArray
    uniforms: FloatArray
    rules: LogitRules = field(default_factory=LogitRules)
    kinds: RowKinds | None = None


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """``token_ids`` int64 ``[rows]``. ``num_nans`` int64 ``[rows]``, or None when no logit is NaN that might be chosen."""

    token_ids: npt.NDArray[np.int64]
    num_nans: npt.NDArray[np.int64] | None


class SamplingKernels(Protocol):
    """What kernels may do in place of torch, for logits that they take."""

    def takes(self, logits: torch.Tensor) -> bool:
        """Whether they read logits like these."""

    def mask(self, logits: torch.Tensor, grammar: GrammarRows) -> None:
        """Leave only the tokens whose bits are set, in place: see ``rules.mask_grammar``."""

    def sample(
        self, logits: torch.Tensor, temperature: npt.NDArray[np.float32], uniforms: FloatArray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Largest value ``[rows]`` and a column, int64 ``[rows]``: the first that has it or, where ``temperature`` is not 0
        and the value finite, the one that ``uniforms`` draws from the whole row.
        """


def sample(logits: torch.Tensor, inputs: SamplingInputs, kernels: SamplingKernels | None = None) -> SampledTokens:
    """Choose one token per row of ``logits`` ``[rows, vocab]``, any float dtype, any device. Rules overwrite logits that are
    float32: what is to be known of them must be copied before. ``kernels``: those that find peaks and draw from rows
    without filters.
    """
    if inputs.rules:
        logits = logits.float()
        before = apply_rules(
            logits, inputs.rules, kernels.mask if kernels is not None and kernels.takes(logits) else None
        )
        if before is not None and bool((empty := peak(logits)[0] == float("-inf")).any()):
            lift_bans(logits, inputs.rules, before, empty)
    kinds = inputs.kinds or RowKinds.of(inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p)
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
    num_nans = logits.isnan().sum(dim=-1).cpu().numpy() if not finite.all() and bool(peaks.isnan().any()) else None
    return SampledTokens(token_ids.cpu().numpy(), num_nans)


def _filter_inputs(
    logits: torch.Tensor, peaks: torch.Tensor, inputs: SamplingInputs, rows: npt.NDArray[np.int64]
) -> FilterInputs:
    """``logits`` and ``peaks`` are those of ``rows`` already."""
    vocab = logits.shape[1]
    top_k = np.where(inputs.top_k > 0, np.minimum(inputs.top_k, vocab), vocab)
    with np.errstate(divide="ignore"):
        max_distance = -np.log(inputs.min_p)

    def column(values: npt.NDArray[np.generic], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(values[rows]).to(device=logits.device, dtype=dtype)[:, None]

    return FilterInputs(
        logits=logits,
        peaks=peaks.float()[:, None],
        temperature=column(inputs.temperature.clip(_TEMPERATURE_MIN, _TEMPERATURE_MAX), torch.float32),
        max_distance=column(max_distance.clip(min=0.0), torch.float32),
        top_k=column(top_k, torch.int64),
        top_p=column(inputs.top_p, torch.float64),
        uniforms=column(inputs.uniforms, torch.float64),
    )
