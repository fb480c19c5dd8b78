"""Choice of products that round activations to 8-bit floats, for checkpoints that were quantized for such products."""

import logging
from typing import TYPE_CHECKING

import torch

from penstock_enginecore.config import KernelsConfig
from penstock_enginecore.forward.cuda.kernel_api import Float8Weight
from penstock_enginecore.forward.cuda.packing import PackedFloat8, float8_part, pack_float8, unpack_float8
from penstock_enginecore.models.quantization.float8 import Float8
from penstock_enginecore.models.quantization.layers import QuantizedLinear

if TYPE_CHECKING:  # Triton is imported only if there is a device for its kernels
    from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels

logger = logging.getLogger(__name__)

_FROM = (8, 9)
"""Compute capability from which tensor cores multiply 8-bit floats (Ada)."""
_SIZE = 64
_TOLERANCE = 0.02
"""Largest norm of the differences in the check, relative to the norm of the results. bfloat16 results differ by up to
0.004.
"""


def rounds_activations(
    kernels: "TritonKernels", uses: KernelsConfig, module: torch.nn.Module, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether products of many rows may round activations to 8-bit floats.

    This needs a checkpoint that says so, a device with such products, and a small product with the right result. If only
    the device or the product is at fault, the log has the reason.
    """
    schemes = [layer.scheme for layer in module.modules() if isinstance(layer, QuantizedLinear)]
    said = any(isinstance(scheme, Float8 | PackedFloat8) and scheme.rounds_activations for scheme in schemes)
    if not said or uses.fp8_activations == "off" or uses.batch_invariant or dtype == torch.float32:
        return False
    if reason := _why_not(kernels, dtype, device):
        logger.warning("activations stay in %s, although the checkpoint has 8-bit activations reason=%s", dtype, reason)
        return False
    logger.info("rounding activations of linear layers to 8-bit floats in large steps, as the checkpoint says")
    return True


def _why_not(kernels: "TritonKernels", dtype: torch.dtype, device: torch.device) -> str:
    """Return the reason why ``device`` cannot round activations, or an empty string."""
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < _FROM:
        have, need = (".".join(map(str, capability)) for capability in (found, _FROM))
        return f"the GPU has compute capability {have}, and {need} is required"
    try:
        difference = _difference(kernels, dtype, device)
    except Exception as e:  # for example an error of a compiler or driver
        return f"{type(e).__name__}: {e}"
    return "" if difference < _TOLERANCE else f"a product differs by {difference:.1%}"


def _difference(kernels: "TritonKernels", dtype: torch.dtype, device: torch.device) -> float:
    """Return the norm of the differences of a small product's results, relative to the norm of the right results."""
    generator = torch.Generator().manual_seed(0)
    values, x = torch.randn(2, _SIZE, _SIZE, generator=generator)
    bias, scales = torch.randn(2, _SIZE, generator=generator)
    part = float8_part(_SIZE, _SIZE)
    words = pack_float8(values.to(torch.float8_e4m3fn), part)
    weight = Float8Weight(words, scales.abs()[None] + 0.1, _SIZE, part)
    dense = unpack_float8(words, part).float() * weight.scales.t()
    of_rows = x.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    # These rows are exact in 8-bit floats, so that the check is independent of their rounding.
    rows = ((x / of_rows).to(torch.float8_e4m3fn).float() * 2.0**-7).to(dtype)
    expected = 0.5 * (rows.float() @ dense.t() + bias.to(dtype).float())
    out = torch.empty(_SIZE, _SIZE, dtype=dtype, device=device)
    kernels.scaled_product(rows.to(device), weight.to(device), bias.to(device, dtype), 0.5, out)
    return float((out.cpu().float() - expected).norm() / expected.norm())
