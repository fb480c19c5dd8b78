"""Activations of Gemma 3n's first MLPs, which are zero except for the largest, computed by several ranks.

An MLP subtracts a cutoff from the outputs of its gate, and replaces negative results by zero. The cutoff depends on mean
and standard deviation of all outputs of a token, and each rank has only some of the outputs.
"""

from typing import Any

import torch

from penstock_enginecore.parallel.collectives import Collectives

_METHOD = "_gaussian_topk"


def is_sparse(module: Any) -> bool:
    """Return whether ``module`` is an MLP with such activations."""
    return hasattr(module, _METHOD) and module.activation_sparsity > 0


def split_cutoff(mlp: Any, collectives: Collectives) -> None:
    """Make ``mlp``, whose gate computes an equal part of the outputs on each rank, use the cutoff of all outputs."""
    normal: Any = torch.distributions.normal.Normal(0, 1)
    factor = float(normal.icdf(torch.tensor(mlp.activation_sparsity, dtype=torch.float32)))

    def largest(gates: torch.Tensor) -> torch.Tensor:
        """Return ``gates`` ``[..., outputs]`` minus the cutoff, or zero."""
        numbers, total = gates.float(), gates.shape[-1] * collectives.size
        mean = collectives.all_reduce(numbers.sum(dim=-1, keepdim=True)) / total
        spread = collectives.all_reduce((numbers - mean).square().sum(dim=-1, keepdim=True)) / total
        cutoff = mean.to(gates.dtype) + spread.sqrt().to(gates.dtype) * factor
        return torch.nn.functional.relu(gates - cutoff)

    setattr(mlp, _METHOD, largest)
