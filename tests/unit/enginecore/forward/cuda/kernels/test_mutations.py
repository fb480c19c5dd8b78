"""Kernels with a fault put into their source: the oracles of each see an index, a bound, a scale or a mask that is
wrong.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_enginecore.forward.cuda.kernel_api import (
    Float8Weight,
    Int4Weight,
    Norm,
    RotaryTable,
    Routing,
    WeightedRows,
)
from penstock_enginecore.forward.cuda.packing import pack_float8
from tests.fakes.models.interpreted_kernels import interpreted
from tests.fakes.models.torch_kernels import TorchKernels

NAN = float("nan")
Run = Callable[[Any], torch.Tensor]
"""Runs a module's kernel. Returns its output and the memory after it, which must stay NaN."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def float8(module: Any) -> torch.Tensor:
    words = pack_float8(random(37, 96).to(torch.float8_e4m3fn), 16)
    weight = Float8Weight(words, random(3, 37).abs(), 32, 16)
    out = torch.full((18, 37), NAN)
    call = module.quantized_product if module else TorchKernels().quantized_product
    call(random(18, 96)[:17], weight, random(37), 0.5, out[:17])
    return out


def float8_of_one_row(module: Any) -> torch.Tensor:
    """Run a product that splits the columns into two slices."""
    words = pack_float8(random(37, 256).to(torch.float8_e4m3fn), 16)
    out = torch.full((2, 37), NAN)
    call = module.quantized_product if module else TorchKernels().quantized_product
    call(random(1, 256), Float8Weight(words, random(1, 37).abs(), 256, 16), random(37), 0.5, out[:1])
    return out


def int4(module: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(-0x8000, 0x8000, (37, 32), generator=generator, dtype=torch.int16)
    zeros = torch.randint(16, (4, 37), generator=generator, dtype=torch.uint8)
    out = torch.full((18, 37), NAN)
    call = module.quantized_product if module else TorchKernels().quantized_product
    weight = Int4Weight(levels, zeros, random(4, 37).abs(), 32, 16, 112)
    call(random(18, 112)[:17], weight, random(37), 0.5, out[:17])
    return out


def dense(module: Any) -> torch.Tensor:
    out = torch.full((68, 37), NAN)
    call = module.invariant_product if module else TorchKernels().product
    call(random(67, 200), random(37, 200), random(37), 0.5, out[:67])
    return out


def grouped(module: Any) -> torch.Tensor:
    out, ends = torch.full((9, 37), NAN), torch.tensor([3, 3, 7], dtype=torch.int32)
    call = module.grouped_product if module else TorchKernels().grouped_product
    call(random(9, 40), random(3, 37, 40), random(3, 37), ends, out, transposed=False)
    return out


def gathered(module: Any) -> torch.Tensor:
    out, ends = torch.full((6, 20), NAN), torch.tensor([2, 5], dtype=torch.int32)
    order = torch.tensor([4, 0, 1, 5, 2, 3], dtype=torch.int32)
    call = module.grouped_product if module else TorchKernels().grouped_product
    call(random(3, 40), random(2, 40, 40), random(2, 40), ends, out, order=order, top_k=2, activation="silu")
    return out


def scattered(module: Any) -> torch.Tensor:
    out, ends = torch.full((6, 37), NAN), torch.tensor([2, 5], dtype=torch.int32)
    order = torch.tensor([4, 0, 1, 5, 2, 3], dtype=torch.int32)
    call = module.grouped_product if module else TorchKernels().grouped_product
    call(random(6, 40), random(2, 37, 40), None, ends, out, order=order)
    return out


def routed(module: Any) -> torch.Tensor:
    """Choose among 32 experts in four groups, after a correction. The last of 20 tokens is padding."""
    weights, chosen = torch.full((21, 3), NAN), torch.full((21, 3), -1, dtype=torch.int32)
    routing = Routing(3, renormalize=True, scale=2.5, sigmoid=True, groups=4, kept=1, counted=2)
    starts = torch.tensor([0, 1, 19], dtype=torch.int32)
    call = module.route if module else TorchKernels().route
    call(random(20, 32), 0.1 * random(32), starts, routing, weights[:20], chosen[:20])
    return torch.cat([weights, chosen])


def assigned(module: Any) -> torch.Tensor:
    """Choose among 32 experts for 20 tokens in two blocks. The last token is padding."""
    weights, ends, order = torch.full((21, 3), NAN), torch.full((33,), -1).int(), torch.full((61,), -1).int()
    routing, starts = Routing(3, renormalize=True, scale=2.5), torch.tensor([0, 1, 19], dtype=torch.int32)
    inputs = random(20, 200), random(32, 200), random(32), None, starts, routing, weights[:20], ends[:32], order[:60]
    counters = [] if module is None else [torch.zeros(module.COUNTERS, dtype=torch.int32)]
    (module or TorchKernels()).assign(*inputs, *counters)
    return torch.cat([weights.flatten(), ends, order, *counters, *([] if counters else [torch.zeros(5)])])


def aligned(module: Any) -> torch.Tensor:
    chosen = torch.randint(8, (400, 3), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    ends, order = torch.full((7,), -1, dtype=torch.int32), torch.full((1201,), -1, dtype=torch.int32)
    (module.align if module else TorchKernels().align)(chosen, ends, order[:1200])
    return torch.cat([ends, order]).float()


def weighted(module: Any) -> torch.Tensor:
    out = torch.full((3, 40), NAN)
    call = module.weighted_sum if module else TorchKernels().weighted_sum
    call(WeightedRows(random(6, 40), random(2, 3).abs(), random(2, 40)), out[:2])
    return out


def norm(module: Any) -> torch.Tensor:
    out, residual = torch.full((4, 40), NAN), random(3, 40, seed=1)
    call = module.add_rms_norm if module else TorchKernels().add_rms_norm
    call(random(3, 40), residual, Norm(torch.nn.Parameter(random(40)), 1e-2, 1.0), out[:3])
    return torch.cat([out, residual])


def activation(module: Any) -> torch.Tensor:
    out = torch.full((4, 40), NAN)
    gate_up = random(4, 80)[:3]  # a defect's out-of-bounds reads get the numbers after these rows
    (module.gated if module else TorchKernels().gated)(gate_up, "silu", out[:3])
    return out


def written(module: Any) -> torch.Tensor:
    caches = torch.full((2, 4, 2, 16, 24), NAN)
    slots = torch.tensor([7, -1, 50])
    (module.write_cache if module else TorchKernels().write)(random(3, 2, 24), random(3, 2, 24, seed=1), slots, *caches)
    return caches


def before_attention(module: Any) -> torch.Tensor:
    """Run with six heads, so that the kernel's last program is not full. Out-of-bounds accesses hit memory after the
    rows.
    """
    caches, query = torch.full((2, 5, 2, 16, 24), NAN), torch.full((4, 6, 24), NAN)
    norms = tuple(Norm(torch.nn.Parameter(random(24, seed=i)), 1e-2, 0.0) for i in range(2))
    rotary = RotaryTable(random(8, 10), random(8, 10, seed=1))
    inputs = random(4, 240)[:3], random(300)[:240], norms, rotary, torch.tensor([3, 1, 7], dtype=torch.int32)
    call = module.prologue if module else TorchKernels().prologue
    call(*inputs, torch.tensor([7, -1, 50]), *caches, query[:3])
    return torch.cat([caches.flatten(), query.flatten()])


MUTATIONS: dict[str, list[tuple[Run, str, str]]] = {
    "quantized": [
        (float8, "table += block * out_features", "table += 0"),
        (float8_of_one_row, "nth * tiles // SLICES,", "nth * tiles // SLICES + 1,"),
        (float8_of_one_row, "nth * rows + row", "row"),
        (float8_of_one_row, "(total * scale).to(out", "total.to(out"),
        (float8, "x, begin, rows, tl", "x, begin, rows - 1, tl"),
        (float8, "bias, scale, n_read", "bias, 1.0, n_read"),
        (int4, "KIND, part, PACKED, DTYPE)", "KIND, 0, PACKED, DTYPE)"),
        (int4, "column = tile * TILE + part * PART", "column = tile * TILE"),
        (int4, "table += block * out_features", "table += 0"),
        (int4, "(column + k < in_features)", "(column + k < in_features + 1)"),
        (int4, "out, m, rows, n,", "out, m, rows + 1, n,"),
        (int4, "_row(zeros, column,", "_row(zeros, 0,"),
    ],
    "invariant": [
        (dense, "(m[:, None] < end)", "(m[:, None] <= end)"),
        (dense, ".to(tl.int64) * in_features\n\n", ".to(tl.int64) * out_features\n\n"),
        (dense, "tl.load(bias + n_read)", "tl.load(bias + n_read * 0)"),
        (dense, "(total * scale)", "total"),
    ],
    "grouped": [
        (grouped, "expert.to(tl.int64) * in_features", "expert.to(tl.int64) * 0 * in_features"),
        (grouped, "bias += expert * out_features", "bias += 0"),
        (grouped, "(m[:, None] < end)", "(m[:, None] <= end)"),
        (grouped, "tl.load(ends + indices - 1", "tl.load(ends + indices"),
        (grouped, "begin + nth * BLOCK_M", "begin + 1"),
        (gathered, "tl.load(order + source) // TOP_K", "tl.load(order + source) % 3"),
        (gathered, "(n % 2) * (out_features // 2)", "(n % 2)"),
        (scattered, "target = tl.load(order + m, mask=m < end, other=0)", "target = m"),
    ],
    "mixture": [
        (routed, "COUNTED == 2", "COUNTED == 3"),
        (routed, "(token < tl.load(starts", "(token <= tl.load(starts"),
        (routed, "factors * scale", "factors"),
        (routed, "tl.where(index == first, scores, 0.0)", "tl.where(index == first, ranked, 0.0)"),
        (routed, "free = free & (index != first)", "free = free & (index >= 0)"),
        (routed, "tl.where(kept, ranked", "tl.where(kept | (index >= 0), ranked"),
        (aligned, "(ids < expert)", "(ids < expert - 1)"),
        (aligned, "place += tl.sum(own, 0)", "place += 0"),
        (weighted, "(token * TOP_K + i) * width", "(token * TOP_K) * width"),
        (weighted, "total += tl.load(shared", "total += 0 * tl.load(shared"),
    ],
    "router": [
        (assigned, "tl.store(counter, 0)", "tl.store(counter, 1)"),
        (assigned, "tl.load(bias + index,", "tl.load(bias + index * 0,"),
        (assigned, "tl.minimum(part * PART + PART, in_features)", "part * PART + PART // 2"),
        (assigned, "other)[None, :] < key", "other)[None, :] <= key"),
        (assigned, "of_other[None, :] <= index", "of_other[None, :] < index"),
    ],
    "norm": [
        (norm, "/ width + eps", "/ BLOCK + eps"),
        (norm, "+ offset\n", "\n"),
        (norm, "start = token * width", "start = token * 0"),
        (norm, "columns < width", "columns < width - 1"),
    ],
    "activation": [
        (activation, "token * 2 * width", "token * width"),
        (activation, "columns < width", "columns <= width"),
        (activation, "gate * tl.sigmoid(gate)\n", "tl.sigmoid(gate)\n"),
    ],
    "cache": [
        (written, "slot // block_size", "slot // block_size * 0 + 1"),
        (written, "slot % block_size", "slot % (block_size - 1)"),
    ],
    "prologue": [
        (before_attention, "positions + token", "positions + token * 0"),
        (before_attention, "slot % block_size", "slot % (block_size - 1)"),
        (before_attention, "tl.where(is_value, num_kv_heads, 0)", "0"),
        (before_attention, "there & (turned < HALF)", "there & (turned <= HALF)"),
        (before_attention, "there = (heads < ", "there = (heads <= "),
        (before_attention, "squares / SIZE", "squares / HALF"),
        (before_attention, "(turned < HALF) & (not is_value)", "(turned < HALF)"),
    ],
}
CASES = [(name, *mutation) for name, mutations in MUTATIONS.items() for mutation in mutations]


def load(folder: Path, source: str) -> Any:
    """Import ``source`` as a module."""
    path = folder / f"mutated_{folder.name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def differs(run: Run, module: Any) -> bool:
    """Return whether the kernel's output is wrong."""
    with torch.inference_mode():
        return not torch.allclose(run(module), run(None), rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("name", "run", "old", "new"), CASES, ids=[f"{name}: {new}" for name, _, _, new in CASES])
def test_a_fault_is_seen(name: str, run: Run, old: str, new: str, tmp_path: Path) -> None:
    real = interpreted(name)
    source = Path(real.__file__).read_text()
    assert old in source
    assert differs(run, load(tmp_path, source.replace(old, new)))


@pytest.mark.parametrize("run", list(dict.fromkeys(run for _, run, _, _ in CASES)))
def test_nothing_is_seen_where_there_is_no_fault(run: Run, tmp_path: Path) -> None:
    name = next(name for name, each, _, _ in CASES if each is run)
    real = interpreted(name)
    assert not differs(run, load(tmp_path, Path(real.__file__).read_text()))
