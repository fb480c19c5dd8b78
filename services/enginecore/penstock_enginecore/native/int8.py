"""Weights rounded to 8-bit integers times a number per row: a decode step on a CPU takes as long as its weights take to read.

A rounded weight stays a weight: whoever computes by it, transformers' own modules too, computes what the integers mean. The CPU
kernels find that its rows are integers times a number, and keep those.
"""

from dataclasses import dataclass
from typing import Any

import torch

_LARGEST = 127
_CUT = 0xFF
"""Bits of a scale that are 0, so that it has 16 significant ones: its product with an integer is a float without rounding."""


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """``numbers`` int8 ``[n, k]`` times ``scales`` float32 ``[n]`` are the weight, bit by bit."""

    numbers: torch.Tensor
    scales: torch.Tensor


def round_to_int8(weight: torch.Tensor) -> torch.Tensor:
    """A float32 weight ``[n, k]``, each row rounded to multiples of a 127th of its largest number: off by half of one at most."""
    scales = _up((weight.abs().amax(1, keepdim=True) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny))
    return (weight / scales).round() * scales


def as_int8(weight: torch.Tensor) -> Int8Weight | None:
    """The integers and scales of a float32 weight ``[n, k]`` that was rounded, None for any other."""
    if not weight.numel() or _exactly(weight[:1]) is None:
        return None
    return _exactly(weight)


def round_linears(module: torch.nn.Module, *, but: torch.nn.Module | None = None) -> float:
    """Round the weights of all linear layers, but those of ``but``, to new ones in float32. Returns the largest error of a layer,
    as a share of its weight's length as a vector.
    """
    worst = 0.0
    for layer in module.modules():
        if type(layer) is not torch.nn.Linear or layer is but:
            continue
        weight: Any = layer.weight.detach()
        rounded = round_to_int8(weight)
        worst = max(worst, float((rounded - weight).norm() / weight.norm().clamp(min=torch.finfo(torch.float32).tiny)))
        layer.weight = torch.nn.Parameter(rounded, requires_grad=False)
    return worst


def _up(scales: torch.Tensor) -> torch.Tensor:
    return ((scales.view(torch.int32) + _CUT) & ~_CUT).view(torch.float32)


def _exactly(weight: torch.Tensor) -> Int8Weight | None:
    scales = weight.abs().amax(1, keepdim=True) / _LARGEST
    numbers = (weight / scales).nan_to_num(0.0).round()  # a row of zeros has no scale
    if not torch.equal(numbers * scales, weight):
        return None
    return Int8Weight(numbers.to(torch.int8), scales[:, 0].contiguous())
