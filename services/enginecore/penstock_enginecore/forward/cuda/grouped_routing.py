"""DeepSeek's choice of experts: the best of the best groups, by scores that a correction balances in DeepSeek-V3."""

import torch

from penstock_enginecore.forward.cuda.kernel_api import Kernels
from penstock_enginecore.forward.cuda.plans import ExpertsPlan, GroupedRouting

_COUNTED = 2
"""Scores of a group that are summed up."""


def grouped_route(
    x: torch.Tensor, plan: ExpertsPlan, how: GroupedRouting, scale: float, kernels: Kernels
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, float32, times ``scale``, and experts of each token of ``x``: ``[tokens, top_k]`` each. Weights for
    batch-invariant kernels are neither scaled nor made to sum to 1 yet. Of equal ones the first is taken, however many tokens
    there are.
    """
    logits = _logits(x.float(), plan.router.float(), kernels)
    if how.correction is None:
        scores = logits.softmax(dim=-1)
        groups = scores.view(len(x), how.groups, -1)
        of_groups = groups.amax(dim=-1)
    else:
        scores = logits.sigmoid()
        groups = (scores + how.correction()).view(len(x), how.groups, -1)
        of_groups = groups.topk(_COUNTED, dim=-1)[0].sum(dim=-1)
    order = of_groups.argsort(dim=-1, descending=True, stable=True)
    ranks = order.argsort(dim=-1)
    left = groups.masked_fill((ranks >= how.kept)[:, :, None], float("-inf")).flatten(1)
    chosen = left.argsort(dim=-1, descending=True, stable=True)[:, : plan.top_k].contiguous()
    weights = scores.gather(1, chosen)
    if kernels.batch_invariant:
        return weights, chosen
    if plan.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * (scale * how.scale), chosen


def _logits(x: torch.Tensor, router: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Of all experts, as the model computes them in float32."""
    if not kernels.batch_invariant:
        return torch.nn.functional.linear(x, router)
    logits = x.new_empty(len(x), len(router))
    kernels.product(x, router, None, 1.0, logits)
    return logits
