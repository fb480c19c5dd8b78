"""What adapters cost: shrink and expand of one product alone, and decode steps in which streams have some or none."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock_enginecore.forward.base import AdaptedForward, ForwardPass
from penstock_enginecore.forward.cuda.adapters import DeviceAdapters
from penstock_enginecore.forward.cuda.buffers import padded_shape
from penstock_enginecore.lora.adapter import LoraAdapter, LoraSegment, LowRankUpdate
from penstock_enginecore.lora.device_slots import SlotLimits
from penstock_enginecore.lora.slot_memory import Place
from tests.benchmarks.gpu import machine, passes
from tests.benchmarks.gpu.shapes import ModelShape, Plan, Row

ROUNDS = 30
WARM_UP = 3


def measure(plan: Plan, device: torch.device) -> dict[str, Any]:
    """``updates``: milliseconds of the two kernels of each product and their largest difference from float64, as a share of the
    largest number; ``steps``: of whole steps, beside those of the same engine without an adapter, and of copies to a slot.
    """
    limits = SlotLimits(max(plan.adapters), max(plan.ranks))
    updates = [one for product in _products(plan.shape) for one in _updates(plan, product, limits, device)]
    with passes.forward_pass(plan, device, lora=limits) as (forward, computing):
        steps = passes.fitting(list(_cases(plan)), lambda case: _step(forward, plan, case, device))
    return {"computing": computing, "updates": updates, "steps": steps}


@dataclass(frozen=True)
class _Case:
    row: Row
    adapters: int
    rank: int


def _cases(plan: Plan) -> Iterator[_Case]:
    for row in plan.adapted:
        for rank in plan.ranks:
            for adapters in plan.adapters:
                if adapters <= row.streams:
                    yield _Case(row, adapters, rank)


def _products(shape: ModelShape) -> dict[str, Place]:
    """Those of a layer, by name."""
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    hidden, inner = shape.hidden, shape.intermediate
    return {
        "qkv": Place({"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden)}),
        "output": Place({"o": (hidden, queries)}),
        "gate_up": Place({"gate": (inner, hidden), "up": (inner, hidden)}),
        "down": Place({"down": (hidden, inner)}),
    }


def _updates(plan: Plan, name: str, limits: SlotLimits, device: torch.device) -> Iterator[dict[str, Any]]:
    from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels

    place, dtype = _products(plan.shape)[name], getattr(torch, plan.shape.dtype)
    for rank in plan.ranks:
        for count in plan.adapters:
            adapters = DeviceAdapters([place], limits, dtype, device, TritonKernels())
            adapters.allocate()
            made = [_adapter(place.layers, rank, number) for number in range(count)]
            for adapter in made:
                adapters.prepare(adapter)()
            for rows in sorted({row.streams for row in plan.adapted} | {each.tokens for each in plan.prefill[:1]}):
                if rows >= count:
                    yield {"product": name} | _update(adapters, place, made, rows, dtype, device) | {"rank": rank}


def _update(
    adapters: DeviceAdapters,
    place: Place,
    made: list[LoraAdapter],
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    shape = place.shape
    x = torch.randn(rows, shape.in_features, dtype=dtype, device=device)
    out = torch.zeros(rows, sum(shape.features), dtype=dtype, device=device)
    segments = _segments(rows, made)
    with adapters.step(segments, (), padded_shape(rows, rows)):
        adapters.add_to(0, x, 1.0, out)
        found = out.double()
        rounds = ROUNDS if device.type == "cuda" else 1
        seconds = machine.seconds_in_a_row(
            device, lambda: adapters.add_to(0, x, 1.0, out), rounds=rounds, warm_up=min(WARM_UP, rounds)
        )
    digests = {adapter.digest: adapter for adapter in made}
    expected = torch.zeros_like(found)
    for segment in segments:
        part = slice(segment.first, segment.end)
        expected[part] = torch.cat(
            [
                x[part].double() @ update.a.to(device).double().t() @ update.b.to(device).double().t()
                for update in digests[segment.digest].updates.values()
            ],
            dim=1,
        )
    error = float((found - expected).abs().max() / expected.abs().max())
    return {"rows": rows, "adapters": len(made), "ms": seconds * 1e3, "error": error}


def _segments(rows: int, made: list[LoraAdapter]) -> list[LoraSegment]:
    """``rows`` among adapters, about as many each."""
    ends = np.linspace(0, rows, len(made) + 1).astype(int).tolist()
    return [LoraSegment(one.digest, ends[i], ends[i + 1]) for i, one in enumerate(made)]


def _adapter(layers: Any, rank: int, number: int) -> LoraAdapter:
    """Of random numbers."""
    generator = torch.Generator().manual_seed(number)
    updates = {
        name: LowRankUpdate(
            torch.randn(rank, width, generator=generator) / width**0.5,
            torch.randn(out, rank, generator=generator) / rank**0.5,
        )
        for name, (out, width) in layers.items()
    }
    return LoraAdapter(number.to_bytes(8, "big") + rank.to_bytes(8, "big"), updates)


def _of_model(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Features of the linear layers of all layers, by the names that transformers has for them."""
    own = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
    own |= {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
    found = {own[name]: size for place in _products(shape).values() for name, size in place.layers.items()}
    return {f"model.layers.{i}.{name}": size for i in range(shape.layers) for name, size in found.items()}


@torch.inference_mode()
def _step(forward: ForwardPass, plan: Plan, case: _Case, device: torch.device) -> dict[str, Any]:
    if not isinstance(forward, AdaptedForward):
        raise RuntimeError(f"{type(forward).__name__} takes no adapters")
    made = [_adapter(_of_model(plan.shape), case.rank, number) for number in range(case.adapters)]
    batch, rows = passes.decode_batch(plan, case.row)
    adapted = type(batch)(batch.token_ids, batch.positions, batch.attention, segments=_segments(len(rows), made))
    rounds = ROUNDS if device.type == "cuda" else 3
    with passes.cache(forward, passes.blocks(case.row)):
        for adapter in made:
            forward.add_adapter(adapter)
        first = machine.median_seconds(device, lambda: forward.run(adapted, rows), rounds=1, warm_up=0)
        seconds = machine.seconds_in_a_row(device, lambda: forward.run(adapted, rows), rounds=rounds, warm_up=WARM_UP)
        base = machine.seconds_in_a_row(device, lambda: forward.run(batch, rows), rounds=rounds, warm_up=WARM_UP)
        for adapter in made:
            forward.remove_adapter(adapter.digest)
    return {
        "streams": case.row.streams,
        "adapters": case.adapters,
        "rank": case.rank,
        "ms": seconds * 1e3,
        "base_ms": base * 1e3,
        "first_ms": first * 1e3,
    }
