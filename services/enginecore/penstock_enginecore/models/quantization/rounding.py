"""Rounding of the weights of a loaded model to 8-bit floats (the setting ``model.quantization`` "fp8")."""

from typing import Any

import torch

from penstock_enginecore.models.quantization.float8 import Float8
from penstock_enginecore.models.quantization.layers import QuantizedLinear, pieces
from penstock_enginecore.models.quantization.loading import replace_module
from penstock_enginecore.models.state_hook import weights_read_directly

_SCALE = "_scale"
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


@torch.inference_mode(False)
@torch.no_grad()
def round_to_float8(module: Any) -> float:
    """Replace the linear layers of ``module``, except the output head, by layers with 8-bit floats and a scale per row.

    A row's largest absolute weight becomes the largest 8-bit float. Layers are replaced one after the other, so that
    only one layer is in memory twice. Returns the largest error of a layer, relative to the norm of its weight.
    """
    dense = [module.get_output_embeddings(), *weights_read_directly(module).values()]
    names = [
        name
        for name, layer in module.named_modules()
        if type(layer) is torch.nn.Linear and all(layer is not each for each in dense)
    ]
    worst = 0.0
    for name in names:
        linear: Any = module.get_submodule(name)
        tensors, error = rounded(linear.weight.detach())
        replace_module(module, name, QuantizedLinear(linear, Float8("row", _SCALE), tensors).eval())
        worst = max(worst, error)
    return worst


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
