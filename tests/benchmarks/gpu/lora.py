"""Cost of adapters: the shrink and expand kernels of one product, and decode steps with and without adapters."""

from functools import partial
from typing import Any

import numpy as np
import torch

from penstock_enginecore.forward.base import ForwardBatch
from penstock_enginecore.forward.cuda.adapters import DeviceAdapters
from penstock_enginecore.forward.cuda.buffers import padded_shape
from penstock_enginecore.lora.adapter import AdaptedForward, LoraAdapter, LoraSegment, LowRankUpdate
from penstock_enginecore.lora.device_slots import Place, SlotLimits
from tests.benchmarks.gpu import interpreter, machine
from tests.benchmarks.gpu.batches import blocks, decode_batch
from tests.benchmarks.gpu.decoder import Decoder, cache, decoder
from tests.benchmarks.gpu.names import StepCase, UpdateCase, products, step_cases, update_cases
from tests.benchmarks.gpu.passes import BUILD_LIMIT
from tests.benchmarks.gpu.plans import plan_of
from tests.benchmarks.gpu.shapes import ModelShape, Plan
from tests.device.phases import Row, Settings, Stage

ROUNDS = 30
WARM_UP = 3


def stages(settings: Settings) -> list[Stage]:
    """Return two stages.

    Rows of ``model`` have the milliseconds of complete steps with and without adapters, and of the first step, which
    copies adapters into slots. Rows of ``updates`` have the milliseconds of the two kernels of a product. They also
    have the kernels' largest difference from float64, relative to the largest number.
    """
    interpreter.prepare(settings)
    plan, device = plan_of(settings), machine.pick(settings)
    limits = SlotLimits(max(plan.adapters), max(plan.ranks))
    updates = [Row(case.name, partial(_update, plan, case, limits, device)) for case in update_cases(plan)]
    steps = [Row(case.name, partial(_step, case=case)) for case in step_cases(plan)]
    return [
        Stage("model", steps, partial(decoder, plan, device, lora=limits), BUILD_LIMIT),
        Stage("updates", updates),
    ]


def _products(shape: ModelShape) -> dict[str, Place]:
    return {name: Place(layers) for name, layers in products(shape).items()}


def _update(plan: Plan, case: UpdateCase, limits: SlotLimits, device: torch.device, _: None) -> dict[str, Any]:
    from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels

    place, dtype = _products(plan.shape)[case.product], getattr(torch, plan.shape.dtype)
    adapters = DeviceAdapters([place], limits, dtype, device, TritonKernels())
    adapters.allocate()
    made = [_adapter(place.layers, case.rank, number) for number in range(case.adapters)]
    for adapter in made:
        adapters.prepare(adapter)()
    shape = place.shape
    x = torch.randn(case.rows, shape.in_features, dtype=dtype, device=device)
    out = torch.zeros(case.rows, sum(shape.features), dtype=dtype, device=device)
    segments = _segments(case.rows, made)
    with adapters.step(segments, (), padded_shape(case.rows, case.rows)):
        adapters.add_to(0, x, 1.0, out)
        found = out.double()
        rounds = ROUNDS if device.type == "cuda" else 1
        seconds = machine.seconds_in_a_row(
            device, lambda: adapters.add_to(0, x, 1.0, out), rounds=rounds, warm_up=min(WARM_UP, rounds)
        )
    adapters.release()
    return {"ms": seconds * 1e3, "error": _error(found, x, segments, made)}


def _error(found: torch.Tensor, x: torch.Tensor, segments: list[LoraSegment], made: list[LoraAdapter]) -> float:
    """Return the largest difference of ``found`` from the float64 result, relative to the largest number."""
    digests = {adapter.digest: adapter for adapter in made}
    expected = torch.zeros_like(found)
    for segment in segments:
        part = slice(segment.first, segment.end)
        expected[part] = torch.cat(
            [
                x[part].double() @ update.a.to(x.device).double().t() @ update.b.to(x.device).double().t()
                for update in digests[segment.digest].updates.values()
            ],
            dim=1,
        )
    return float((found - expected).abs().max() / expected.abs().max())


def _segments(rows: int, made: list[LoraAdapter]) -> list[LoraSegment]:
    """Distribute ``rows`` evenly over adapters."""
    ends = np.linspace(0, rows, len(made) + 1).astype(int).tolist()
    return [LoraSegment(one.digest, ends[i], ends[i + 1]) for i, one in enumerate(made)]


def _adapter(layers: Any, rank: int, number: int) -> LoraAdapter:
    """Return an adapter of random numbers."""
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
    """Return the numbers of features of all linear layers, by transformers' names."""
    own = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
    own |= {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
    found = {own[name]: size for place in _products(shape).values() for name, size in place.layers.items()}
    return {f"model.layers.{i}.{name}": size for i in range(shape.layers) for name, size in found.items()}


@torch.inference_mode()
def _step(model: Decoder, case: StepCase) -> dict[str, Any]:
    forward = model.forward
    if not isinstance(forward, AdaptedForward):
        raise RuntimeError(f"{type(forward).__name__} takes no adapters")
    made = [_adapter(_of_model(model.plan.shape), case.rank, number) for number in range(case.adapters)]
    batch, rows = decode_batch(model.plan, case.row)
    segments = _segments(len(rows), made)
    plain = model.step(batch, rows)
    adapted = model.step(ForwardBatch(batch.token_ids, batch.positions, batch.attention, segments=segments), rows)
    rounds = ROUNDS if model.device.type == "cuda" else 3
    with cache(model.forward, blocks(case.row)):
        for adapter in made:
            forward.add_adapter(adapter)
        first = machine.median_seconds(model.device, adapted, rounds=1, warm_up=0)
        found = model.timed(adapted, rounds=rounds)
        base = machine.seconds_in_a_row(model.device, plain, rounds=rounds, warm_up=WARM_UP)
        for adapter in made:
            forward.remove_adapter(adapter.digest)
    return {**found, "base_ms": base * 1e3, "first_ms": first * 1e3}
