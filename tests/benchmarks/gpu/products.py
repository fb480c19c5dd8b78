"""Matrix products of one layer with 16-bit and quantized weights, and the search for their fastest tile sizes."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from penstock_enginecore.forward.cuda.kernel_api import Float8Weight, Int4Weight, QuantizedWeight
from penstock_enginecore.forward.cuda.packing import float8_part, pack_float8, pack_int4, part_of_4_bits
from tests.benchmarks.gpu import interpreter, machine, names
from tests.benchmarks.gpu.plans import plan_of
from tests.benchmarks.gpu.shapes import Plan
from tests.device.phases import Row, Settings, Stage

ROUNDS = 30
CHECKED = 2
"""Number of rows of the output that are compared with float64."""
SCALE = 0.02
_FP8_LIMIT = 448.0
_GROUP = 128
BLOCKS_N, WARPS, STAGES = (64, 128, 256), (4, 8), (3, 4, 5)
"""Tried tile sizes: output features and warps of a program, and tiles that are loaded ahead."""


def stages(settings: Settings) -> list[Stage]:
    """Return a row for each product of a layer, each format of the weights and each number of rows."""
    interpreter.prepare(settings)
    plan, device = plan_of(settings), machine.pick(settings)
    rows = [Row(case.name, partial(_measure, plan, device, case)) for case in names.product_cases(plan)]
    return [Stage("products", rows)]


def tuning(settings: Settings) -> list[Stage]:
    """Return a row for each class of products in the table of tile sizes, which tries all sizes."""
    interpreter.prepare(settings)
    plan, device = plan_of(settings), machine.pick(settings)
    rows = [
        Row(names.tuned(bits, count), partial(_tune, plan, device, bits, count), 150.0)
        for bits in (8, 4)
        for count in plan.tuned
    ]
    return [Stage("tiles", rows)]


@torch.inference_mode()
def _measure(plan: Plan, device: torch.device, case: names.ProductCase, _: None) -> dict[str, Any]:
    """Return milliseconds, bytes of the weight, and the largest error relative to the largest number."""
    out_features, in_features = names.product_shapes(plan.shape)[case.product]
    dtype = getattr(torch, plan.shape.dtype)
    x = torch.randn(case.rows, in_features, dtype=dtype, device=device)
    out = torch.empty(case.rows, out_features, dtype=dtype, device=device)
    run, dense, num_bytes = _product(case.weights, (out_features, in_features), x, out)
    rounds = ROUNDS if device.type == "cuda" else 1
    seconds = machine.seconds_in_a_row(device, run, rounds=rounds, warm_up=min(3, rounds))
    expected = x[:CHECKED].double() @ dense.double().T
    error = (out[:CHECKED].double() - expected).abs().max() / expected.abs().max()
    return {"ms": seconds * 1e3, "bytes": num_bytes, "error": float(error)}


def _product(
    weights: str, shape: tuple[int, int], x: torch.Tensor, out: torch.Tensor
) -> tuple[Callable[[], object], torch.Tensor, int]:
    """Return a function that computes a product, the weight in 16 bits, and the bytes of the weight."""
    from penstock_enginecore.forward.cuda.kernels.quantized import dequantize, quantized_product

    if weights == names.PLAIN:
        dense = torch.randn(shape, dtype=x.dtype, device=x.device) * SCALE
        return lambda: torch.mm(x, dense.T, out=out), dense, dense.nbytes
    weight = random_weight(weights, shape, x.device)
    dense = torch.empty(shape, dtype=x.dtype, device=x.device)
    dequantize(weight, dense)
    num_bytes = sum(part.nbytes for part in weight.tensors)
    return lambda: quantized_product(x, weight, None, 1.0, out), dense, num_bytes


def random_weight(weights: str, shape: tuple[int, int], device: torch.device) -> QuantizedWeight:
    """Return a random weight ``[out_features, in_features]`` in one of the formats of ``names.FORMATS``."""
    out_features, in_features = shape
    if weights == "int4":
        width = min(_GROUP, in_features)
        blocks = -(-in_features // width)
        levels = torch.randint(0, 16, shape, dtype=torch.uint8, device=device)
        zeros = torch.full((blocks, out_features), 8, dtype=torch.uint8, device=device)
        scales = torch.full((blocks, out_features), SCALE / 4, dtype=torch.float16, device=device)
        part = part_of_4_bits(in_features, width)
        return Int4Weight(pack_int4(levels, part), zeros, scales, width, part, in_features)
    width = in_features if weights == "fp8" else min(_GROUP, in_features)
    numbers = torch.randn(shape, device=device).clamp(-_FP8_LIMIT, _FP8_LIMIT).to(torch.float8_e4m3fn)
    part = float8_part(in_features, width)
    scales = torch.full((-(-in_features // width), out_features), SCALE, device=device)
    return Float8Weight(pack_float8(numbers, part), scales, width, part)


@torch.inference_mode()
def _tune(plan: Plan, device: torch.device, bits: int, rows: int, _: None) -> dict[str, Any]:
    """Return the tile sizes with the least time for all products of a layer together, and the times of all sizes.

    ``block_m`` is given by the number of rows, because the kernels choose their instructions by it.
    """
    from penstock_enginecore.forward.cuda.kernels import quantized
    from penstock_enginecore.forward.cuda.kernels.configurations import device_name, product_tiles

    usual = product_tiles(rows, bits, device_name(device))
    weights = "int4" if bits == 4 else "fp8"
    dtype = getattr(torch, plan.shape.dtype)
    layer = []
    for shape in names.product_shapes(plan.shape).values():
        x = torch.randn(rows, shape[1], dtype=dtype, device=device)
        layer.append(
            (x, random_weight(weights, shape, device), torch.empty(rows, shape[0], dtype=dtype, device=device))
        )

    def run() -> None:
        for x, weight, out in layer:
            quantized.quantized_product(x, weight, None, 1.0, out)

    rounds = ROUNDS if device.type == "cuda" else 1
    found: dict[str, float | str] = {}
    sizes = (
        list(itertools.product(BLOCKS_N, WARPS, STAGES)) if device.type == "cuda" else [(usual.block_n, usual.warps, 2)]
    )
    for block_n, warps, ahead in sizes:
        tiles = {"block_n": block_n, "warps": warps, "stages": ahead}
        changed = type(usual)(rows=usual.rows, bits=bits, block_m=usual.block_m, **tiles)
        with patch.object(quantized, "product_tiles", lambda *_, changed=changed, **__: changed):
            try:
                found[names.tiles(**tiles)] = machine.seconds_in_a_row(device, run, rounds=rounds, warm_up=1) * 1e3
            except Exception as e:  # Triton's errors for sizes that do not fit have no common class.
                found[names.tiles(**tiles)] = f"{type(e).__name__}: {e}"[:200]
    times = {name: ms for name, ms in found.items() if isinstance(ms, float)}
    best = min(times, key=lambda name: times[name])
    return {"ms": times[best], "best": best, "block_m": usual.block_m, "up_to_rows": usual.rows, "all": found}
