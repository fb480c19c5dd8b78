"""Linear layers and experts with quantized weights, and the protocol of quantization schemes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# Description of a quantization scheme.

Shape = tuple[int, ...]

FLOATS = frozenset({"F16", "BF16", "F32"})
"""Names of the dtypes that scales may have, as in safetensors files."""
INT32 = frozenset({"I32"})

_PIECE_NUMBERS = 2**24
"""Number of elements of a weight that are dequantized in float32 at a time."""


@dataclass(frozen=True, slots=True)
class Part:
    """Tensor that is part of a quantized weight.

    Attributes:
        suffix: Suffix of the tensor's name.
        dtypes: Names of the accepted dtypes, as in safetensors files.
        required: Whether the tensor must exist.
    """

    suffix: str
    dtypes: frozenset[str]
    required: bool = True


class Scheme(Protocol):
    """Quantization scheme of a checkpoint's weights: the tensors that represent a weight (its parts), and their
    meaning.

    A weight is quantized if the files have a tensor with the name and dtype of the weight's first part. Other weights
    are stored unquantized. Parts of a weight are keyed by the suffixes of their names.
    """

    @property
    def name(self) -> str:
        """Name of the scheme, for operators."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts that represent a weight. The first part has the quantized elements."""

    @property
    def dense(self) -> str:
        """Suffix that the weight's name has without quantization."""

    def dense_shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """Return the shape of the weight whose parts have ``shapes``. Raises ValueError if the parts' shapes do not
        match.
        """

    def dequantize(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantized weight, computed exactly and rounded once to ``dtype``. Raises ValueError for invalid
        elements.
        """


def pieces(rows: int, width: int, multiple: int = 1) -> Iterator[slice]:
    """Return slices of ``rows``, so that a weight can be dequantized in pieces. Each row has ``width`` elements. The
    length of every slice except the last is a multiple of ``multiple``.
    """
    step = max(1, _PIECE_NUMBERS // max(1, width * multiple)) * multiple
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def expect(name: str, shape: Shape, *allowed: Shape) -> None:
    """Raise ValueError unless the part ``name`` has one of the ``allowed`` shapes."""
    if shape not in allowed:
        served = " or ".join(str(list(one)) for one in dict.fromkeys(allowed))
        raise ValueError(f"{name} has shape {list(shape)}; it must be {served}")


def matrix(name: str, shape: Shape) -> tuple[int, int]:
    """Return the numbers of rows and columns of the part ``name``. Raises ValueError if the part is not a matrix."""
    if len(shape) != 2:
        raise ValueError(f"{name} has shape {list(shape)}; it must have rows and columns")
    return shape[0], shape[1]


class QuantizedLinear(torch.nn.Module):
    """Replacement of ``linear`` that dequantizes its weight in every call, to the dtype of the input. The bias is the
    bias of ``linear``.

    ``tensors`` are the weight's parts in ``scheme``, by suffix.
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
        """Parts of the weight, by suffix."""
        return {suffix: getattr(self, f"part{i}") for i, suffix in enumerate(self._suffixes)}

    def replace(self, suffix: str, tensor: torch.Tensor) -> None:
        """Replace the part with this ``suffix``."""
        setattr(self, f"part{self._suffixes.index(suffix)}", torch.nn.Parameter(tensor, requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output ``[..., out_features]`` for the input ``[..., in_features]``."""
        return torch.nn.functional.linear(x, self.scheme.dequantize(self.tensors, x.dtype), self.bias)

    def dense(self, dtype: torch.dtype) -> torch.nn.Linear:
        """Return a linear layer with the dequantized weight in ``dtype``."""
        linear = torch.nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = torch.nn.Parameter(self.scheme.dequantize(self.tensors, dtype), requires_grad=False)
        linear.register_parameter("bias", self.bias)
        return linear.eval()


Tensors = Mapping[str, torch.Tensor]
GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""Names of the weights in transformers' modules of experts."""


class QuantizedStack(torch.nn.Module):
    """Quantized weight of all experts.

    Args:
        projections: Matrices whose rows are concatenated, each as a mapping from suffix to part. The first dimension of
            each part is the experts.
        merged: Whether there is only one projection, and ``scheme`` dequantizes the matrices of all experts at once.
        transposed: Whether the model's own module has the transposed matrices. Only without ``merged``.
    """

    def __init__(
        self, scheme: Scheme, projections: Sequence[Tensors], *, merged: bool, transposed: bool = False
    ) -> None:
        super().__init__()
        self.scheme = scheme
        self.merged = merged
        self.transposed = transposed
        self._suffixes = tuple(tuple(tensors) for tensors in projections)
        for i, tensors in enumerate(projections):
            for suffix, tensor in tensors.items():
                self.register_parameter(self._name(i, suffix), torch.nn.Parameter(tensor, requires_grad=False))

    @property
    def projections(self) -> list[dict[str, torch.Tensor]]:
        """Parts of each projection, by suffix. Each part has the shape ``[experts, ...]``."""
        return [
            {suffix: getattr(self, self._name(i, suffix)) for suffix in suffixes}
            for i, suffixes in enumerate(self._suffixes)
        ]

    def of_expert(self, expert: int) -> list[dict[str, torch.Tensor]]:
        """Return the parts of one expert's matrices, by suffix. Must not be called if ``merged``."""
        return [{suffix: tensor[expert] for suffix, tensor in each.items()} for each in self.projections]

    def replace(self, projection: int, suffix: str, tensor: torch.Tensor) -> None:
        """Replace the part with this ``suffix`` of the projection with this index."""
        setattr(self, self._name(projection, suffix), torch.nn.Parameter(tensor, requires_grad=False))

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantized weight in ``dtype``, in the layout of the model's own module, ``[experts, ...]``."""
        if self.merged:
            return self.scheme.dequantize(self.projections[0], dtype)
        count = len(next(iter(self.projections[0].values())))
        joined = (
            torch.cat([self.scheme.dequantize(part, dtype) for part in self.of_expert(expert)])
            for expert in range(count)
        )
        found = (weight.t() if self.transposed else weight for weight in joined)
        first = next(found)
        whole = first.new_empty(count, *first.shape)
        whole[0] = first
        for expert, weight in enumerate(found, 1):
            whole[expert] = weight
        return whole

    def _name(self, projection: int, suffix: str) -> str:
        return f"part{projection}_{self._suffixes[projection].index(suffix)}"


class QuantizedExperts(torch.nn.Module):
    """Replacement of ``experts``, a module of transformers, with quantized weights ``gate_up`` and ``down``.

    The weights are dequantized in every call, to the dtype of the input. Other parts of the module are kept.
    """

    def __init__(self, experts: torch.nn.Module, gate_up: QuantizedStack, down: QuantizedStack) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down
        self.experts = experts
        for name in (GATE_UP, DOWN):
            self._set(name, torch.empty(0, dtype=experts.get_parameter(name).dtype))

    def forward(self, hidden: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Return the output of the experts module for these arguments."""
        weights = {GATE_UP: self.gate_up.dequantize(hidden.dtype), DOWN: self.down.dequantize(hidden.dtype)}
        return torch.func.functional_call(self.experts, weights, (hidden, *args), options)

    def dense(self, dtype: torch.dtype) -> torch.nn.Module:
        """Return the experts module with dequantized weights in ``dtype``."""
        for name, stack in ((GATE_UP, self.gate_up), (DOWN, self.down)):
            self._set(name, stack.dequantize(dtype))
        return self.experts

    def _set(self, name: str, tensor: torch.Tensor) -> None:
        setattr(self.experts, name, torch.nn.Parameter(tensor, requires_grad=False))
