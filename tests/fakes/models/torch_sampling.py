"""Sampling kernels in plain torch, with the same weights and limits, but with simple sorting and summing."""

import numpy as np
import torch

from penstock_enginecore.forward.cuda.kernel_api import Draws
from penstock_enginecore.sample.base import uniforms


class TorchSampling:
    """The calls of ``TokenSampler``. Reads on the host, as no real one may."""

    def __init__(self, max_rows: int, vocab: int, device: torch.device) -> None:
        self.max_rows = max_rows

    def sample(
        self,
        logits: torch.Tensor,
        draws: Draws | None,
        token_ids: torch.Tensor,
        peaks: torch.Tensor,
        num_nans: torch.Tensor,
        *,
        filtered: bool,
    ) -> None:
        assert len(logits) <= self.max_rows
        value = logits.float()
        peaks.copy_(value.amax(dim=1))
        num_nans.copy_((value.isnan() | (value == torch.inf)).sum(dim=1) + (peaks == -torch.inf))
        is_peak = torch.where(peaks.isnan()[:, None], value.isnan(), value == peaks[:, None])
        columns = torch.arange(value.shape[1])
        token_ids.copy_(torch.where(is_peak, columns, value.shape[1]).amin(dim=1))
        if draws is None:
            return
        drawn = (draws.temperature > 0) & peaks.isfinite()
        distance = (peaks[:, None] - value) / draws.temperature[:, None]
        weight = torch.exp(-distance.double()).float().double()
        if filtered:
            weight[distance > limits_of(distance, weight, draws)[:, None]] = 0.0
        cumulative = weight.cumsum(dim=1)
        total = cumulative[:, -1]
        number = uniforms(draws.seeds.numpy().view(np.uint64), draws.output_indices.numpy())
        target = torch.minimum(torch.from_numpy(number) * total, torch.nextafter(total, torch.zeros_like(total)))
        beyond = (cumulative > target[:, None]) & (weight > 0)
        chosen = torch.where(beyond, columns, value.shape[1]).amin(dim=1)
        token_ids.copy_(torch.where(drawn, chosen, token_ids))


def limits_of(distance: torch.Tensor, weight: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Return, for each row, the distance up to which its filters keep tokens."""
    limits = draws.max_distance.clone()
    for row, (top_k, top_p) in enumerate(zip(draws.top_k.tolist(), draws.top_p.tolist(), strict=True)):
        ordered, order = distance[row].sort()
        if 0 < top_k < len(ordered):
            limits[row] = torch.minimum(limits[row], ordered[top_k - 1])
        if top_p < 1:
            mass = torch.where(ordered <= limits[row], weight[row][order], 0.0).cumsum(dim=0)
            enough = int(torch.searchsorted(mass, top_p * mass[-1]))
            limits[row] = torch.minimum(limits[row], ordered[min(enough, len(ordered) - 1)])
    return limits
