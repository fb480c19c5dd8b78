"""The kernels of adapters: proved on their device before they serve, and on a model's modules where they do."""

import logging

import torch
from transformers import PreTrainedModel

from penstock_enginecore.forward.cuda.adapted_modules import SlotModules
from penstock_enginecore.forward.cuda.adapters import DeviceAdapters
from penstock_enginecore.forward.cuda.buffers import StepShape
from penstock_enginecore.forward.cuda.kernel_api import LowRankKernels
from penstock_enginecore.forward.proof import TOLERANCES, distance
from penstock_enginecore.lora.adapter import LoraAdapter, LoraSegment, LowRankUpdate
from penstock_enginecore.lora.device_slots import SlotLimits
from penstock_enginecore.lora.reference import PlainAddition, head_of, pooling_layer
from penstock_enginecore.lora.slot_memory import Place
from penstock_enginecore.lora.target import AdapterTarget
from penstock_enginecore.models.quantization.layers import QuantizedLinear

logger = logging.getLogger(__name__)

_PROVED = Place({"one": (160, 1152), "other": (48, 1152)})
_LIMITS = SlotLimits(max_loras=2, max_rank=24)
_ROWS = 21


def why_not(kernels: LowRankKernels, dtype: torch.dtype, device: torch.device) -> str:
    """Why ``kernels`` do not add for adapters of a model in ``dtype`` on ``device``; empty where they are proved: they add to
    some rows what plain torch does, and leave others as they were.
    """
    try:
        difference, untouched = _prove(kernels, dtype, device)
    except Exception as e:  # of a compiler, or of a driver
        return f"its kernels for adapters fail: {type(e).__name__}: {e}"
    if not untouched:
        return "its kernels for adapters change rows without one"
    if difference <= TOLERANCES[dtype]:
        return ""
    return f"what its kernels add for adapters differs by {difference:.3g}"


@torch.inference_mode()
def _prove(kernels: LowRankKernels, dtype: torch.dtype, device: torch.device) -> tuple[float, bool]:
    """How far what two adapters add is from plain torch, and whether rows between theirs are what they were."""
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).div_(size[-1] ** 0.5)

    updates = [
        {name: LowRankUpdate(random(rank, width), random(out, rank)) for name, (out, width) in _PROVED.layers.items()}
        for rank in (8, 24)
    ]
    adapters = DeviceAdapters([_PROVED], _LIMITS, dtype, device, kernels)
    adapters.allocate()
    for number, own in enumerate(updates):
        adapters.prepare(LoraAdapter(bytes([number]), own))()
    x = (30 * random(_ROWS, 1152)).to(device=device, dtype=dtype)
    found = random(_ROWS, 208).to(device=device, dtype=dtype)
    before, expected = found.clone(), found.clone()
    segments = [LoraSegment(b"\0", 1, 18), LoraSegment(b"\1", 19, 20)]
    with adapters.step(segments, (), StepShape(_ROWS, 1)):
        adapters.add_to(0, x, 1.0, found)
    for segment, own in zip(segments, updates, strict=True):
        rows = slice(segment.first, segment.end)
        for update, out in zip(own.values(), torch.split(expected, [160, 48], dim=1), strict=True):
            PlainAddition(update.a.to(device), update.b.to(device))(x[rows], out[rows])
    untouched = all(torch.equal(found[row], before[row]) for row in (0, 18, 20))
    return distance(found - before, expected - before), untouched


def slot_modules(
    module: PreTrainedModel, dtype: torch.dtype, device: torch.device, limits: SlotLimits | None
) -> SlotModules | None:
    """Slots for adapters of the linear layers of a model in ``dtype`` that runs by its own modules. None where there are no
    ``limits`` or the device is no GPU, and where kernels cannot be had or fail their proof: plain torch adds for adapters
    there, which is slow.
    """
    if device.type != "cuda" or limits is None:
        return None
    try:
        kernels = _kernels()
    except ModuleNotFoundError as e:
        reason = f"kernels cannot be compiled: {e}"
    else:
        if not (reason := why_not(kernels, dtype, device)):
            return adapted_modules(module, dtype, device, limits, kernels)
    logger.warning("adapters are added by plain torch, which is slower: %s", reason)
    return None


def adapted_modules(
    module: PreTrainedModel, dtype: torch.dtype, device: torch.device, limits: SlotLimits, kernels: LowRankKernels
) -> SlotModules:
    """Slots for adapters of all layers that ``AdapterTarget`` names and that compute in the model's dtype, as quantized ones will
    once they are dequantized.
    """
    named = dict(module.named_modules())
    last = head_of(module) or pooling_layer(module)
    head = next((name for name, part in named.items() if part is last), "")

    def computes(name: str) -> bool:
        layer = named[name]
        return isinstance(layer, QuantizedLinear) or layer.get_parameter("weight").dtype == dtype

    layers = {name: size for name, size in AdapterTarget.of(module).linears.items() if computes(name)}
    return SlotModules(module, layers, head, limits, dtype, device, kernels)


def _kernels() -> LowRankKernels:
    # Triton is imported where there is a device for its kernels.
    from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels

    return TritonKernels()
