"""One token per row from weights and a uniform number: the inverse of the cumulative distribution in order of token ids,
where a small error of a logit moves few boundaries and only slightly.
"""

import torch

from penstock_enginecore.sample.blocks import block_columns, block_sums

_BLOCK = 256


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Token ids int64 ``[rows]``. ``weights`` ``[rows, vocab]``, not negative; ``uniforms`` float64 ``[rows, 1]`` in [0, 1).

    Blocks are summed first, so that float64 sums run over a part of the vocabulary only.
    """
    before = block_sums(weights, _BLOCK).cumsum(dim=-1)
    target = _target(before[:, -1:], uniforms)
    block = torch.searchsorted(before, target, right=True).clamp_(max=before.shape[1] - 1)
    columns = block_columns(block, _BLOCK, weights.shape[1])
    inside = weights.gather(1, columns)
    inside[:, 1:].masked_fill_(columns[:, 1:] == columns[:, :-1], 0.0)
    skipped = torch.where(block > 0, before.gather(1, (block - 1).clamp_(min=0)), 0.0)
    chosen = _invert(inside, target - skipped)
    return columns.gather(1, chosen).squeeze(1)


def draw_among(token_ids: torch.Tensor, weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Like ``draw``, where all tokens with any weight are among ``token_ids`` ``[rows, n]``, in any order."""
    token_ids, order = token_ids.sort(dim=-1)
    weights = weights.gather(1, order)
    total = weights.cumsum(dim=-1, dtype=torch.float64)[:, -1:]
    return token_ids.gather(1, _invert(weights, _target(total, uniforms))).squeeze(1)


def _target(total: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """A target that rounds up to the total would point past the last token with any weight."""
    return torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))


def _invert(weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The first column whose cumulative weight exceeds ``target`` ``[rows, 1]``; the last one with any weight if none does,
    which rounding may cause.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(cumulative, target, right=True), last)
