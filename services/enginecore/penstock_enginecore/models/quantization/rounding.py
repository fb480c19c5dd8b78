"""Rounding of the linear layers and experts of a loaded model to 8-bit floats (the setting ``model.quantization`` "fp8")."""

from typing import Any

import torch

from penstock_enginecore.models.quantization.float8 import Float8
from penstock_enginecore.models.quantization.layers import (
    DOWN,
    GATE_UP,
    QuantizedExperts,
    QuantizedLinear,
    QuantizedStack,
    pieces,
)
from penstock_enginecore.models.quantization.loading import replace_module
from penstock_enginecore.models.state_hook import weights_read_directly

_SCALE = "_scale"
_BY_ROW = Float8("row", _SCALE)
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


@torch.inference_mode(False)
@torch.no_grad()
def round_to_float8(module: Any) -> float:
    """Replace the linear layers of ``module``, except the output head, and the experts of its mixtures by layers with
    8-bit floats and a scale per row. Each row of each expert has its own scale.

    A row's largest absolute weight becomes the largest 8-bit float. Weights are replaced one after the other, so that
    only one weight of a layer is in memory twice. Returns the largest error of a weight, relative to its norm.
    """
    dense = [module.get_output_embeddings(), *weights_read_directly(module).values()]
    worst = 0.0
    for name, layer in list(module.named_modules()):
        if type(layer) is torch.nn.Linear and all(layer is not each for each in dense):
            tensors, error = rounded(layer.weight.detach())
            replace_module(module, name, QuantizedLinear(layer, _BY_ROW, tensors).eval())
        elif {GATE_UP, DOWN} <= layer._parameters.keys():
            (gate_up, first), (down, second) = (_rounded_stack(layer, each) for each in (GATE_UP, DOWN))
            replace_module(module, name, QuantizedExperts(layer, gate_up, down).eval())
            error = max(first, second)
        else:
            continue
        worst = max(worst, error)
    return worst


def _rounded_stack(experts: torch.nn.Module, name: str) -> tuple[QuantizedStack, float]:
    """Return the rounded weight ``name`` of all experts and its relative error, and free the dense weight."""
    weight = experts.get_parameter(name).detach()
    transposed = bool(getattr(experts, "is_transposed", False))
    weight = weight.mT if transposed else weight
    tensors, error = rounded(weight.reshape(-1, weight.shape[-1]))
    parts = {suffix: tensor.view(*weight.shape[:2], -1) for suffix, tensor in tensors.items()}
    setattr(experts, name, torch.nn.Parameter(weight.new_empty(0), requires_grad=False))
    return QuantizedStack(_BY_ROW, [parts], merged=False, transposed=transposed), error


def rounded(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], float]:
    """Return the parts of ``weight`` ``[rows, columns]`` in the scheme ``Float8("row", "_scale")``, and the norm of the
    rounding errors, relative to the norm of the weight.
    """
    rows, columns = weight.shape
    numbers = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=weight.device)
    squares = torch.zeros(2, dtype=torch.float64, device=weight.device)
    for piece in pieces(rows, columns):
        values = weight[piece].float()
        own = values.abs().amax(1, keepdim=True) / _LARGEST
        own = torch.where(own > 0, own, 1.0)  # a row of zeros
        numbers[piece] = (values / own).clamp(-_LARGEST, _LARGEST).to(numbers.dtype)
        scales[piece] = own
        squares[0] += (numbers[piece].float() * own - values).square().sum(dtype=torch.float64)
        squares[1] += values.square().sum(dtype=torch.float64)
    error, norm = squares.sqrt().tolist()
    return {"": numbers, _SCALE: scales}, error / norm if norm else 0.0
