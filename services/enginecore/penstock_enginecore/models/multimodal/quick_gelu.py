"""Hendrycks' quick GELU, ``x * sigmoid(1.702 x)``, as CLIP's towers and Qwen2-VL's have it, in one buffer."""

import torch
from transformers.activations import QuickGELUActivation


class QuickGELU(torch.nn.Module):
    """The numbers of transformers' module, bit for bit, which fills three buffers of the input's size: of a large image on a CPU
    the system's pages for those take seven times as long as the arithmetic.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of each number of ``x``, any shape."""
        return (x * 1.702).sigmoid_().mul_(x)


def use_quick_gelu(tower: torch.nn.Module) -> None:
    """Replace transformers' modules in ``tower``."""
    for parent in list(tower.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is QuickGELUActivation:
                setattr(parent, name, QuickGELU())
