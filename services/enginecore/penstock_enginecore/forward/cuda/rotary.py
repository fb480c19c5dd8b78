"""Tables of rotary positions, made by the model's own modules."""

from typing import Any

import torch

from penstock_enginecore.forward.cuda.launches import RotaryTable
from penstock_enginecore.forward.proof import UnsuitableError


def rotary_table(module: Any, max_len: int, device: torch.device, *variant: str) -> RotaryTable:
    """Of positions up to ``max_len``, in float32 whatever the model's dtype. ``variant``: what ``module`` is told besides the
    positions, for Gemma 3 the kind of layer. UnsuitableError for one that does not turn halves of a head against one another.
    """
    like = torch.empty(0, dtype=torch.float32, device=device)
    cosines, sines = module(like, torch.arange(max_len, device=device)[None], *variant)
    half = cosines.shape[-1] // 2
    for table in (cosines, sines):
        if table.dtype != torch.float32 or not torch.equal(table[..., :half], table[..., half:]):
            raise UnsuitableError(f"{type(module).__name__} does not turn halves")
    return RotaryTable(cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous())
