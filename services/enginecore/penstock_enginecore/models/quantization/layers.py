"""Linear layers and experts that keep their quantized weights."""

from collections.abc import Mapping, Sequence
from typing import Any

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


Tensors = Mapping[str, torch.Tensor]
GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""What transformers' modules of experts call their weights."""


class QuantizedStack(torch.nn.Module):
    """A weight of all experts. ``projections``: matrices whose rows follow one another in it, each as its tensors of ``scheme``,
    by their suffixes, with the experts' along a first dimension. ``merged``: there is one, of which ``scheme`` makes all experts.
    """

    def __init__(self, scheme: Scheme, projections: Sequence[Tensors], *, merged: bool) -> None:
        super().__init__()
        self.scheme = scheme
        self.merged = merged
        self._suffixes = tuple(tuple(tensors) for tensors in projections)
        for i, tensors in enumerate(projections):
            for suffix, tensor in tensors.items():
                self.register_parameter(self._name(i, suffix), torch.nn.Parameter(tensor, requires_grad=False))

    @property
    def projections(self) -> list[dict[str, torch.Tensor]]:
        """What each is stored as, by suffix: ``[experts, ...]``."""
        return [
            {suffix: getattr(self, self._name(i, suffix)) for suffix in suffixes}
            for i, suffixes in enumerate(self._suffixes)
        ]

    def of_expert(self, expert: int) -> list[dict[str, torch.Tensor]]:
        """What the matrices of one are stored as, where they are not ``merged``."""
        return [{suffix: tensor[expert] for suffix, tensor in each.items()} for each in self.projections]

    def replace(self, projection: int, suffix: str, tensor: torch.Tensor) -> None:
        """Keep this part as ``tensor``."""
        setattr(self, self._name(projection, suffix), torch.nn.Parameter(tensor, requires_grad=False))

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in ``dtype`` as the model's own module has it, ``[experts, ...]``."""
        if self.merged:
            return self.scheme.dequantize(self.projections[0], dtype)
        count = len(next(iter(self.projections[0].values())))
        found = (
            torch.cat([self.scheme.dequantize(part, dtype) for part in self.of_expert(expert)])
            for expert in range(count)
        )
        first = next(found)
        whole = first.new_empty(count, *first.shape)
        whole[0] = first
        for expert, weight in enumerate(found, 1):
            whole[expert] = weight
        return whole

    def _name(self, projection: int, suffix: str) -> str:
        return f"part{projection}_{self._suffixes[projection].index(suffix)}"


class QuantizedExperts(torch.nn.Module):
    """Stands for ``experts``, a module of transformers, of which it keeps all but the two weights: these are ``gate_up`` and
    ``down``, and dequantized each time that it computes, to the dtype of what it gets.
    """

    def __init__(self, experts: torch.nn.Module, gate_up: QuantizedStack, down: QuantizedStack) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down
        self.experts = experts
        for name in (GATE_UP, DOWN):
            self._set(name, torch.empty(0, dtype=experts.get_parameter(name).dtype))

    def forward(self, hidden: torch.Tensor, *args: Any, **options: Any) -> Any:
        """What the module makes of these."""
        weights = {GATE_UP: self.gate_up.dequantize(hidden.dtype), DOWN: self.down.dequantize(hidden.dtype)}
        return torch.func.functional_call(self.experts, weights, (hidden, *args), options)

    def dense(self, dtype: torch.dtype) -> torch.nn.Module:
        """The module with its weights in ``dtype``."""
        for name, stack in ((GATE_UP, self.gate_up), (DOWN, self.down)):
            self._set(name, stack.dequantize(dtype))
        return self.experts

    def _set(self, name: str, tensor: torch.Tensor) -> None:
        setattr(self.experts, name, torch.nn.Parameter(tensor, requires_grad=False))
