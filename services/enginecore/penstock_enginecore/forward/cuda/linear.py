"""Matrix products of the fused decoder, with dense or quantized weights.

``Dense`` and ``QuantizedProduct`` are the two kinds. ``merged`` returns one product for several linear layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from penstock_enginecore.forward.cuda.kernel_api import Float8Weight, Int4Weight, QuantizedWeight
from penstock_enginecore.forward.cuda.packing import (
    MIN_PART,
    PackedFloat8,
    float8_part,
    pack_float8,
    pack_int4,
    part_of_4_bits,
    power_of_two,
)
from penstock_enginecore.models.decoder_plan import Linear as Linear
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.models.quantization.awq_gptq import Awq, Gptq, Packed
from penstock_enginecore.models.quantization.float8 import Float8
from penstock_enginecore.models.quantization.layers import QuantizedLinear, QuantizedStack, Scheme
from penstock_enginecore.models.quantization.mxfp4 import Mxfp4

if TYPE_CHECKING:  # Triton is imported only if there is a device for its kernels
    from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels


class Held(Protocol):
    """Weights that belong to the fused decoder instead of a module of the model."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, in order."""

    @property
    def num_bytes(self) -> int:
        """Size in bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def to(self, device: torch.device) -> None:
        """Move all tensors to ``device``."""


class Product(Held, Protocol):
    """Matrix product of rows with the weight of linear layers, in any format. ``tensors`` are all tensors of the weight
    and the bias.
    """

    @property
    def bias(self) -> torch.Tensor | None:
        """Bias ``[out_features]``, or None."""

    @property
    def out_features(self) -> int:
        """Number of elements of an output row."""

    @property
    def in_features(self) -> int:
        """Number of elements of an input row."""

    def product(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply ``x`` ``[rows, in_features]`` by the weight, and write the result without the bias to ``out``
        ``[rows, out_features]``.
        """

    def affine(self, x: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> None:
        """Multiply ``x`` by the weight, add the bias if there is one, multiply by ``scale``, and write the result to
        ``out``.
        """


# Matrix products whose weights stay quantized in memory.


def keeps(scheme: Scheme) -> bool:
    """Return whether matrix products support weights with the quantization ``scheme``, for linear layers and experts.

    All columns of a tile must share a scale, and the columns that share a scale must be consecutive.
    """
    if isinstance(scheme, Mxfp4):
        return True
    if isinstance(scheme, PackedFloat8):
        return True
    if isinstance(scheme, Float8):
        width = 0 if isinstance(scheme.granularity, str) else scheme.granularity[1]
        return width == 0 or power_of_two(width) == width >= MIN_PART
    if isinstance(scheme, Gptq | Packed) and (scheme.bits != 4 or scheme.act_order):
        return False
    return isinstance(scheme, Awq | Gptq | Packed) and (
        scheme.group_size < 0 or power_of_two(scheme.group_size) >= MIN_PART
    )


MANY_ROWS = 512
"""Number of rows from which a product dequantizes its weight, or rounds its activations. Then each converted element is
used so often that torch's products of dense weights are faster than products that convert the weight in each tile of
rows.
"""


class QuantizedProduct(Held):
    """Matrix product with quantized weights, by the project's kernels. The methods do the same as the methods of
    ``Dense``.

    Products of at least ``MANY_ROWS`` rows with 16-bit elements dequantize the whole weight to temporary memory, and
    multiply by torch. If ``rounds`` is true and ``kernels.rounds_activations`` too, they round activations to 8-bit
    floats instead, and multiply 8-bit floats. Batch-invariant products never do so.
    """

    def __init__(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, kernels: "TritonKernels", *, rounds: bool = False
    ) -> None:
        self.bias = bias
        self._weight = weight
        self._kernels = kernels
        self._rounds = rounds

    @property
    def out_features(self) -> int:
        return self._weight.numbers.shape[0]

    @property
    def in_features(self) -> int:
        return self._weight.in_features

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The quantized elements, and the scales, zero points and bias if they exist."""
        return [*self._weight.tensors, *([] if self.bias is None else [self.bias])]

    def product(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._multiply(x, None, 1.0, out)

    def affine(self, x: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> None:
        self._multiply(x, self.bias, scale, out)

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None, scale: float, out: torch.Tensor) -> None:
        """Compute the product. Each call with many rows allocates the memory of another form of the weight, so that CUDA
        graphs can capture the call.
        """
        kernels, weight = self._kernels, self._weight
        if len(x) < MANY_ROWS or x.dtype == torch.float32 or kernels.batch_invariant:
            kernels.quantized_product(x, weight, bias, scale, out)
        elif self._rounds and kernels.rounds_activations and isinstance(weight, Float8Weight):
            kernels.scaled_product(x, weight, bias, scale, out)
        else:
            dense = x.new_empty(self.out_features, self.in_features)
            kernels.dequantize(weight, dense)
            Dense(dense, bias).affine(x, out, scale)

    def to(self, device: torch.device) -> None:
        self._weight = self._weight.to(device)
        if self.bias is not None:
            self.bias.data = self.bias.data.to(device)


@torch.inference_mode(False)
@torch.no_grad()
def quantized_product(
    linears: Sequence[QuantizedLinear], bias: torch.Tensor | None, kernels: "TritonKernels"
) -> QuantizedProduct:
    """Return one matrix product with the rows of all ``linears``, in order.

    8-bit floats are stored once: they are rearranged in their own memory, and the layers' weights become views of the
    joined weight. 4-bit levels are repacked, so a second copy exists until the layers' own tensors are freed. Raises
    UnsuitableError if the quantizations of the layers differ or are not supported.
    """
    schemes = {linear.scheme for linear in linears}
    scheme = next(iter(schemes))
    if len(schemes) == 1 and keeps(scheme):
        if isinstance(scheme, Float8 | PackedFloat8):
            weight = _float8(linears, scheme)
            # Torch's product of 8-bit floats needs one scale per row, and a multiple of 16 rows.
            fits = weight.width >= weight.in_features and len(weight.numbers) % 16 == 0
            return QuantizedProduct(weight, bias, kernels, rounds=scheme.rounds_activations and fits)
        if isinstance(scheme, Awq | Gptq | Packed):
            return QuantizedProduct(joined([int4_weight(linear.tensors, scheme) for linear in linears]), bias, kernels)
    named = ", ".join(sorted(each.name for each in schemes))
    raise UnsuitableError(f"quantized weights of type {named} are not supported")


def _float8(linears: Sequence[QuantizedLinear], scheme: Float8 | PackedFloat8) -> Float8Weight:
    found = [scheme.by_rows(linear.tensors) for linear in linears]
    width, numbers = found[0][1], linears[0].tensors[""].data
    if len(linears) > 1:
        numbers = torch.cat([linear.tensors[""] for linear in linears])
    numbers, packed = packed_float8(scheme, numbers, width)
    start = 0
    for linear in linears:
        linear.replace("", numbers[start : start + linear.out_features])
        linear.scheme = packed
        start += linear.out_features
    return Float8Weight(numbers, torch.cat([scales for scales, _ in found], dim=1), width, packed.part)


def packed_float8(
    scheme: Float8 | PackedFloat8, numbers: torch.Tensor, width: int
) -> tuple[torch.Tensor, PackedFloat8]:
    """Return the elements ``[..., columns]`` in the kernels' layout and their scheme. The elements are rearranged in
    their own memory. ``width`` is the number of columns that share a scale.

    Raises UnsuitableError if the kernels cannot multiply the weight.
    """
    if isinstance(scheme, PackedFloat8):
        return numbers, scheme
    columns = numbers.shape[-1]
    part = float8_part(columns, width)
    if part < MIN_PART:
        raise UnsuitableError(
            f"{scheme.name} weights with {columns} columns are not supported; the number must be a multiple of "
            f"{2 * MIN_PART}"
        )
    try:
        return pack_float8(numbers, part), PackedFloat8(scheme, part)
    except ValueError as e:
        raise UnsuitableError(f"{scheme.name} weights are not supported: {e}") from e


def int4_weight(tensors: Mapping[str, torch.Tensor], scheme: Awq | Gptq | Packed) -> Int4Weight:
    """Return a 4-bit weight in the kernels' layout. Raises UnsuitableError if the checkpoint reorders columns, or if
    the number of columns is not supported.
    """
    found = scheme.integers(tensors)
    columns = found.levels.shape[1]
    width = columns if scheme.group_size < 0 else scheme.group_size
    part = part_of_4_bits(columns, width)
    in_order = torch.arange(columns, device=found.groups.device) // width
    if part < MIN_PART or not torch.equal(found.groups, in_order):
        raise UnsuitableError(
            f"{scheme.name} weights with {columns} columns, or with reordered columns, are not supported"
        )
    zeros, scales = found.zeros.t().to(torch.uint8).contiguous(), found.scales.t().contiguous()
    return Int4Weight(pack_int4(found.levels, part), zeros, scales, width, part, columns)


def joined(weights: Sequence[Int4Weight]) -> Int4Weight:
    """Return one weight with the rows of all ``weights``."""
    numbers = torch.cat([weight.numbers for weight in weights])
    zeros = torch.cat([weight.zeros for weight in weights], dim=1)
    scales = torch.cat([weight.scales for weight in weights], dim=1)
    first = weights[0]
    return Int4Weight(numbers, zeros, scales, first.width, first.part, first.in_features)


@dataclass(frozen=True, slots=True)
class Dense(Held):
    """Matrix product with unquantized weights, by torch or by batch-invariant ``kernels``.

    On a GPU, torch uses cuBLAS. In cuBLAS, the order of sums depends on the number of rows.

    Attributes:
        weight: ``[out_features, in_features]``, as in the checkpoint.
        bias: ``[out_features]``, or None.
        kernels: Batch-invariant kernels, or None to use torch.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    kernels: "TritonKernels | None" = None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The weight, and the bias if there is one."""
        return [p for p in (self.weight, self.bias) if p is not None]

    def product(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self.kernels is not None:
            self.kernels.product(x, self.weight, None, 1.0, out)
        else:
            torch.mm(x, self.weight.t(), out=out)

    def affine(self, x: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> None:
        if self.kernels is not None:
            self.kernels.product(x, self.weight, self.bias, scale, out)
        elif self.bias is not None:
            torch.addmm(self.bias, x, self.weight.t(), beta=scale, alpha=scale, out=out)
        elif scale != 1.0:
            torch.addmm(out, x, self.weight.t(), beta=0.0, alpha=scale, out=out)
        else:
            self.product(x, out)

    def to(self, device: torch.device) -> None:
        for parameter in self.tensors:
            parameter.data = parameter.data.to(device)


def merged(linears: Sequence[Linear], kernels: "TritonKernels") -> Product:
    """Return one matrix product with the rows of all ``linears``, in order.

    Weights are stored once: the layers' weights become views of the joined weight, so the layers still compute the same
    results. Raises UnsuitableError if only some layers have a bias, or if the layers' quantizations differ or are not
    supported.
    """
    biased = {linear._parameters["bias"] is not None for linear in linears}
    if len(biased) > 1:
        raise UnsuitableError("only some of the linear layers that one matrix product computes have a bias")
    quantized = [linear for linear in linears if isinstance(linear, QuantizedLinear)]
    if 0 < len(quantized) < len(linears):
        raise UnsuitableError("only some of the linear layers that one matrix product computes are quantized")
    bias = _whole(linears, "bias") if biased.pop() else None
    if quantized:
        return quantized_product(quantized, bias, kernels)
    return Dense(_whole(linears, "weight"), bias, kernels if kernels.batch_invariant else None)


def _whole(linears: Sequence[Linear], name: str) -> torch.nn.Parameter:
    """Return the parameter unchanged if there is only one layer, otherwise the joined parameters of all layers."""
    first: torch.nn.Parameter = linears[0].get_parameter(name)
    return first if len(linears) == 1 else _joined(linears, name)


@torch.inference_mode(False)
@torch.no_grad()
def _joined(linears: Sequence[Linear], name: str) -> torch.nn.Parameter:
    """Return the parameters joined along their first dimension. The layers' parameters become views of the result."""
    whole = torch.cat([getattr(linear, name) for linear in linears])
    start = 0
    for linear in linears:
        end = start + linear.out_features
        setattr(linear, name, torch.nn.Parameter(whole[start:end], requires_grad=False))
        start = end
    return torch.nn.Parameter(whole, requires_grad=False)


def empty(module: Linear | QuantizedStack) -> None:
    """Free the weights of a module that a merged product replaces. The module keeps its name and sizes, because LoRA
    adapters need them.
    """
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, torch.nn.Parameter(parameter.new_empty(0), requires_grad=False))
