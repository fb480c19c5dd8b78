"""What the device gives at most: a copy in its memory, and a product of random matrices."""

from typing import Any

import torch

from tests.benchmarks.gpu import machine
from tests.benchmarks.gpu.shapes import Ceilings, Plan

COPY_BYTES = 4 * 2**30
SIDE = 8192
"""Of the matrices."""


def measure(plan: Plan, device: torch.device) -> dict[str, Any]:
    """Bytes per second of a copy, read and written, and operations per second of a product in the shape's dtype."""
    cuda = device.type == "cuda"
    return {
        "copy_rate": _copy_rate(COPY_BYTES if cuda else 2**24, device),
        "product_rate": _product_rate(SIDE if cuda else 256, getattr(torch, plan.shape.dtype), device),
    }


def _copy_rate(num_bytes: int, device: torch.device) -> float:
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * num_bytes / machine.seconds_in_a_row(device, lambda: target.copy_(source), rounds=20)


def _product_rate(side: int, dtype: torch.dtype, device: torch.device) -> float:
    left, right = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    return 2 * side**3 / machine.seconds_in_a_row(device, lambda: left @ right, rounds=20)


def read(result: dict[str, Any]) -> Ceilings:
    """What ``measure`` found."""
    return Ceilings(result["copy_rate"], result["product_rate"])
