"""Measured limits of the device: the rate of copies in its memory, and of products of random matrices."""

import torch

from tests.benchmarks.gpu import machine
from tests.benchmarks.gpu.plans import plan_of
from tests.device.phases import Row, Settings, Stage

COPY_BYTES = 4 * 2**30
SIDE = 8192
"""Number of rows and columns of the matrices."""


def stages(settings: Settings) -> list[Stage]:
    """Return two rows: bytes per second of a copy, read and written, and operations per second of a product of
    matrices.
    """
    device = machine.pick(settings)
    num_bytes, side = (2**24, 256) if settings.cpu else (COPY_BYTES, SIDE)
    dtype = getattr(torch, plan_of(settings).shape.dtype)
    copy = Row("copy", lambda _: {"rate": _copy_rate(num_bytes, device)})
    product = Row("product", lambda _: {"rate": _product_rate(side, dtype, device)})
    return [Stage("ceilings", [copy, product])]


def _copy_rate(num_bytes: int, device: torch.device) -> float:
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * num_bytes / machine.seconds_in_a_row(device, lambda: target.copy_(source), rounds=20)


def _product_rate(side: int, dtype: torch.dtype, device: torch.device) -> float:
    left, right = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    return 2 * side**3 / machine.seconds_in_a_row(device, lambda: left @ right, rounds=20)
