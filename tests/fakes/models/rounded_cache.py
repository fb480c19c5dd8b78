"""transformers' KV cache rounded to 8 bits, as the reference for fp8 caches."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

Scales = Sequence[tuple[float, float]]
"""Scale of the keys and scale of the values, by layer."""


class RoundedCache(DynamicCache):
    """Keys and values are divided by the ``scales`` of their layer, rounded to e4m3, and multiplied again."""

    def __init__(self, scales: Scales) -> None:
        super().__init__()
        self._scales = scales

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key_scale, value_scale = self._scales[layer_idx]
        keys, values = rounded(key_states, key_scale), rounded(value_states, value_scale)
        return super().update(keys, values, layer_idx, *args, **kwargs)


def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale
