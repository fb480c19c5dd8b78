"""Activations of Gemma 3n's first MLPs, which are zero except for the largest.

An MLP subtracts a cutoff from the outputs of its gate, and replaces negative results by zero. The cutoff is the mean of a
token's outputs plus a multiple of their standard deviation. transformers computes the factor in each call, on the device;
here it is computed once, so that steps need no copy to the device and can be captured as CUDA graphs.
"""

from collections.abc import Callable
from typing import Any

import torch

Statistics = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Function that returns mean and standard deviation ``[..., 1]`` of the outputs ``[..., outputs]`` of a gate, in the
dtype of the outputs.
"""
_METHOD = "_gaussian_topk"


def has_cutoff(module: Any) -> bool:
    """Return whether ``module`` is an MLP with such activations."""
    return hasattr(module, _METHOD) and module.activation_sparsity > 0


def install(model: torch.nn.Module) -> None:
    """Make all such MLPs of ``model`` use a factor that is computed once. MLPs with ``set_statistics`` stay unchanged."""
    for module in model.modules():
        if has_cutoff(module) and _METHOD not in vars(module):
            set_statistics(module, _own_statistics)


def set_statistics(mlp: Any, statistics: Statistics) -> None:
    """Make ``mlp`` compute its cutoff from the result of ``statistics``."""
    normal: Any = torch.distributions.normal.Normal(0, 1)
    factor = normal.icdf(torch.tensor(mlp.activation_sparsity, dtype=torch.float32))
    factors = {dtype: float(factor.to(dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float16)}

    def largest(gates: torch.Tensor) -> torch.Tensor:
        """Return ``gates`` ``[..., outputs]`` minus the cutoff, or zero."""
        mean, deviation = statistics(gates)
        return torch.nn.functional.relu(gates - (mean + deviation * factors[gates.dtype]))

    setattr(mlp, _METHOD, largest)


def _own_statistics(gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return gates.mean(dim=-1, keepdim=True), gates.std(dim=-1, keepdim=True, unbiased=False)
