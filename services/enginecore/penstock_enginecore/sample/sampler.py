"""From logits to tokens.

Order: min_tokens, temperature, min_p, top_k, top_p. Each filter becomes a threshold on the scaled logits, so tokens
that tie with the last one kept are kept too and the outcome depends neither on how a sort breaks ties nor on the rest
of the batch. The draw inverts the cumulative distribution in order of token ids, where a small error of a logit moves
few boundaries and only slightly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

FloatArray = npt.NDArray[np.float64]

_TEMPERATURE_MIN, _TEMPERATURE_MAX = 1e-30, 1e30
"""Keeps temperatures that are no float32 from dividing by zero or infinity."""
_TOP_P_CANDIDATES = 128
"""How many of the likeliest tokens are sorted to find the top_p boundary, before falling back to sorting the row."""


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Per row of logits, on the host. ``uniforms`` in [0, 1); temperature 0 is greedy; ``top_k`` 0 and ``top_p`` 1 are
    off.

    ``banned`` names rows whose given token ids must not be chosen.
    """

    temperature: FloatArray
    top_k: npt.NDArray[np.int64]
    top_p: FloatArray
    min_p: FloatArray
    uniforms: FloatArray
    banned: Sequence[tuple[int, Sequence[int]]] = ()


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """``token_ids`` int64 ``[rows]``. ``num_nans`` int64 ``[rows]``, or None when no logit is NaN."""

    token_ids: npt.NDArray[np.int64]
    num_nans: npt.NDArray[np.int64] | None


def sample(logits: torch.Tensor, inputs: SamplingInputs) -> SampledTokens:
    """Choose one token per row of ``logits`` ``[rows, vocab]``, any float dtype, any device."""
    logits = _ban(logits, inputs.banned)
    peaks, token_ids = logits.max(dim=-1)
    drawn = np.flatnonzero(inputs.temperature > 0)
    if len(drawn):
        rows = torch.from_numpy(drawn).to(logits.device)
        everything = len(drawn) == len(logits)
        chosen = logits if everything else logits[rows]
        scaled = chosen.float() - peaks[rows, None].float()
        scaled /= _column(inputs.temperature[drawn].clip(_TEMPERATURE_MIN, _TEMPERATURE_MAX), scaled)
        token_ids[rows] = _draw(scaled, _select(inputs, drawn))
    num_nans = logits.isnan().sum(dim=-1).cpu().numpy() if bool(peaks.isnan().any()) else None
    return SampledTokens(token_ids.cpu().numpy(), num_nans)


def _ban(logits: torch.Tensor, banned: Sequence[tuple[int, Sequence[int]]]) -> torch.Tensor:
    if not banned:
        return logits
    rows = [row for row, ids in banned for _ in ids]
    columns = [token for _, ids in banned for token in ids]
    where = torch.tensor([rows, columns], device=logits.device)
    return logits.index_put((where[0], where[1]), logits.new_tensor(float("-inf")))


def _select(inputs: SamplingInputs, rows: npt.NDArray[np.int64]) -> SamplingInputs:
    return SamplingInputs(
        inputs.temperature[rows], inputs.top_k[rows], inputs.top_p[rows], inputs.min_p[rows], inputs.uniforms[rows]
    )


def _draw(scaled: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """Token ids ``[rows]``. ``scaled`` float32 ``[rows, vocab]``: logits over temperature, less the row's maximum."""
    weights = scaled.exp()
    threshold = _threshold(scaled, weights, inputs)
    if threshold is not None:
        weights.masked_fill_(scaled < threshold, 0.0)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = _column(inputs.uniforms, cumulative) * total
    # A target that rounds up to the total would point past the last token with any weight.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    chosen = torch.searchsorted(cumulative, target, right=True)
    return chosen.squeeze(1).clamp_(max=scaled.shape[1] - 1)


def _threshold(scaled: torch.Tensor, weights: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor | None:
    """The least scaled logit that passes the filters, float32 ``[rows, 1]``; None when no row has a filter."""
    threshold = None
    if (inputs.min_p > 0).any():
        with np.errstate(divide="ignore"):
            threshold = _column(np.log(inputs.min_p), scaled)
    vocab = scaled.shape[1]
    top_k = np.where(inputs.top_k > 0, np.minimum(inputs.top_k, vocab), vocab)
    has_top_k, has_top_p = top_k < vocab, inputs.top_p < 1
    if not (has_top_k | has_top_p).any():
        return threshold
    num_candidates = max(int(top_k[has_top_k].max(initial=0)), min(vocab, _TOP_P_CANDIDATES) if has_top_p.any() else 0)
    candidates = scaled.topk(num_candidates, dim=-1).values
    if threshold is None:
        threshold = torch.full_like(candidates[:, :1], float("-inf"))
    if has_top_k.any():
        last = torch.from_numpy(np.where(has_top_k, top_k, 1) - 1).to(scaled.device)[:, None]
        kth = candidates.gather(1, last).masked_fill_(~_bools(has_top_k, scaled), float("-inf"))
        threshold = torch.maximum(threshold, kth)
    if has_top_p.any():
        rows = torch.from_numpy(np.flatnonzero(has_top_p)).to(scaled.device)
        top_p = _column(inputs.top_p[has_top_p], weights.double())
        threshold[rows] = _top_p_threshold(scaled[rows], weights[rows], candidates[rows], threshold[rows], top_p)
    return threshold


def _top_p_threshold(
    scaled: torch.Tensor, weights: torch.Tensor, candidates: torch.Tensor, threshold: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Raise ``threshold`` to the last of the likeliest tokens whose weights reach ``top_p`` of all that is above it.

    ``candidates`` ``[rows, n]`` are the largest of ``scaled``, descending. Rows they do not suffice for are sorted as a
    whole.
    """
    wanted = weights.masked_fill(scaled < threshold, 0.0).sum(dim=-1, keepdim=True, dtype=torch.float64) * top_p
    covered = candidates.exp().cumsum(dim=-1, dtype=torch.float64)
    position = (covered < wanted).sum(dim=-1, keepdim=True)
    last = candidates.shape[1] - 1
    result = torch.maximum(threshold, candidates.gather(1, position.clamp(max=last)))
    short = torch.nonzero((position > last).squeeze(1)).squeeze(1)
    if len(short) and candidates.shape[1] < scaled.shape[1]:
        everything = scaled[short].sort(dim=-1, descending=True).values
        result[short] = _top_p_threshold(scaled[short], weights[short], everything, threshold[short], top_p[short])
    return result


def _column(values: FloatArray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(device=like.device, dtype=like.dtype)[:, None]


def _bools(values: npt.NDArray[np.bool_], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]
