"""Linear layers that keep their quantized weights."""

from collections.abc import Mapping

import torch

from penstock_enginecore.models.quantization.scheme import Scheme


class QuantizedLinear(torch.nn.Module):
    """Stands for a ``torch.nn.Linear``, ``linear``, whose weight is ``tensors`` of ``scheme``, by their suffixes, and is
    dequantized each time that it computes, to the dtype of what it gets. Its bias is that of ``linear``.
    """

    bias: torch.nn.Parameter | None

    def __init__(self, linear: torch.nn.Linear, scheme: Scheme, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scheme = scheme
        self.register_parameter("bias", linear.bias)
        self._suffixes = tuple(tensors)
        for i, tensor in enumerate(tensors.values()):
            self.register_parameter(f"part{i}", torch.nn.Parameter(tensor, requires_grad=False))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What the weight is stored as, by suffix."""
        return {suffix: getattr(self, f"part{i}") for i, suffix in enumerate(self._suffixes)}

    def replace(self, suffix: str, tensor: torch.Tensor) -> None:
        """Keep the part of this ``suffix`` as ``tensor``."""
        setattr(self, f"part{self._suffixes.index(suffix)}", torch.nn.Parameter(tensor, requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., out_features]`` for ``[..., in_features]``."""
        return torch.nn.functional.linear(x, self.scheme.dequantize(self.tensors, x.dtype), self.bias)

    def dense(self, dtype: torch.dtype) -> torch.nn.Linear:
        """The same layer with its weight in ``dtype``."""
        linear = torch.nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = torch.nn.Parameter(self.scheme.dequantize(self.tensors, dtype), requires_grad=False)
        linear.register_parameter("bias", self.bias)
        return linear.eval()
