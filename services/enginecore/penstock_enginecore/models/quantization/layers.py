"""Linear layers and experts that keep their quantized weights."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# What every way of quantizing weights is described by.

Shape = tuple[int, ...]

FLOATS = frozenset({"F16", "BF16", "F32"})
"""Types of scales, as safetensors calls them."""
INT32 = frozenset({"I32"})

_PIECE_NUMBERS = 2**24
"""Numbers of a weight that are computed in float32 at a time."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of the tensors that stand for a weight. ``suffix`` of its name; ``dtypes`` by their names in safetensors."""

    suffix: str
    dtypes: frozenset[str]
    required: bool = True


class Scheme(Protocol):
    """How the weights of a checkpoint are quantized: which tensors stand for one, and which numbers they mean.

    A weight is quantized if its first part is there, by name and type: what a checkpoint leaves as it was, is plain in its files.
    Tensors of one weight go by the suffixes of their names.
    """

    @property
    def name(self) -> str:
        """For operators."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """What a weight is stored as, the quantized numbers first."""

    @property
    def dense(self) -> str:
        """Suffix of the name that the weight has where it is not quantized."""

    def dense_shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """Of the weight whose parts have ``shapes``. ValueError where these do not fit each other."""

    def dequantize(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The weight in ``dtype``: what it means exactly, rounded once. ValueError for numbers that mean nothing."""


def pieces(rows: int, width: int, multiple: int = 1) -> Iterator[slice]:
    """Of ``rows`` of ``width`` numbers, as many at a time as shall be computed at once; all but the last a ``multiple``."""
    step = max(1, _PIECE_NUMBERS // max(1, width * multiple)) * multiple
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def expect(name: str, shape: Shape, *allowed: Shape) -> None:
    """ValueError unless the part ``name`` has one of the ``allowed`` shapes."""
    if shape not in allowed:
        served = " or ".join(str(list(one)) for one in dict.fromkeys(allowed))
        raise ValueError(f"{name} is {list(shape)}; it must be {served}")


def matrix(name: str, shape: Shape) -> tuple[int, int]:
    """Rows and columns of the part ``name``. ValueError where it has others than these."""
    if len(shape) != 2:
        raise ValueError(f"{name} is {list(shape)}; it must have rows and columns")
    return shape[0], shape[1]


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
