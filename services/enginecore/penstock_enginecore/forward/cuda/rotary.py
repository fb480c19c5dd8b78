"""Tables of rotary positions, made by the model's own modules."""

from typing import Any

import torch

from penstock_enginecore.forward.cuda.kernel_api import RotaryTable
from penstock_enginecore.forward.proof import UnsuitableError


def rotary_table(module: Any, max_len: int, device: torch.device, *variant: str, twice: bool = True) -> RotaryTable:
    """Of positions up to ``max_len``, in float32 whatever the model's dtype. ``variant``: what ``module`` is told besides the
    positions, for Gemma 3 the kind of layer. ``twice``: whether it gives each number twice, for both halves of a head; complex
    numbers stand for a cosine and a sine. UnsuitableError where they are not the same.
    """
    like = torch.empty(0, dtype=torch.float32, device=device)
    tables = []
    made = module(like, torch.arange(max_len, device=device)[None], *variant)
    if isinstance(made, torch.Tensor) and made.is_complex():  # a number for each pair, of both
        made, twice = (made.real, made.imag), False
    for table in made:
        half = table.shape[-1] // 2 if twice else table.shape[-1]
        if table.dtype != torch.float32 or (twice and not torch.equal(table[..., :half], table[..., half:])):
            raise UnsuitableError(f"{type(module).__name__} does not turn halves")
        tables.append(table[0, :, :half].contiguous())
    cosines, sines = tables
    return RotaryTable(cosines, sines)
