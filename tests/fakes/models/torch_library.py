"""A library for attention of long prompts on a CPU: torch's fused attention in place of cuDNN, and small limits."""

import torch

from penstock_enginecore.forward.cuda.library_attention import Sizes

SMALL = Sizes(fewest_tokens=8, fewest_keys=20, rows=(8, 16, 32), pieces=(8, 32, 64))


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log-sum-exp; see ``library_attention.Attend``."""
    shared = query.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(shared, 1) for part in (keys, values))
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, sums = fused(query, keys, values, 0.0, causal, scale=scaling)
    return out, sums
