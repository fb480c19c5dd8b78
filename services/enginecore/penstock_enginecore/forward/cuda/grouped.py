"""Products of experts: each one's rows times its part of a weight, into tensors that are allocated for them."""

from typing import Protocol

import torch

from penstock_enginecore.forward.cuda.kernel_api import Kernels
from penstock_enginecore.forward.cuda.linear import Held
from penstock_enginecore.forward.cuda.quantized import int4_weight, joined, keeps
from penstock_enginecore.forward.cuda.weights import Float8Weight, Int4Weight, Mxfp4Weight, StackedWeight
from penstock_enginecore.forward.proof import UnsuitableError
from penstock_enginecore.models.quantization.awq_gptq import Awq, Gptq, Packed
from penstock_enginecore.models.quantization.float8 import Float8
from penstock_enginecore.models.quantization.layers import QuantizedStack
from penstock_enginecore.models.quantization.mxfp4 import Mxfp4

_MXFP4_HALF = 32


class GroupedProduct(Protocol):
    """A product of a weight of all experts."""

    @property
    def held(self) -> tuple[Held, ...]:
        """Its weight, where no module of the model has it."""

    def run(self, rows: torch.Tensor, ends: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        """Each expert's ``rows`` ``[rows, in_features]``, which end where ``ends`` int32 ``[experts]`` says, times its part of
        the weight, with its bias: ``[rows, out_features]``. ``owners`` ``[rows]``: whose the rows are. Rows of nobody are not
        computed.
        """


class DenseGroups:
    """``weight`` ``[experts, out_features, in_features]``, or ``transposed`` the last two the other way round, as the model's
    module has it, and ``bias`` ``[experts, out_features]``: by torch's own product, or by batch-invariant ``kernels``.
    """

    held: tuple[Held, ...] = ()

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kernels: Kernels, *, transposed: bool) -> None:
        self._weight = weight
        self._bias = bias
        self._kernels = kernels
        self._transposed = transposed

    def run(self, rows: torch.Tensor, ends: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        """As of a ``GroupedProduct``."""
        weight, transposed = self._weight, self._transposed
        if self._kernels.batch_invariant:
            product = rows.new_empty(len(rows), weight.shape[2 if transposed else 1])
            self._kernels.grouped_product(rows, weight, self._bias, ends, product, transposed=transposed)
            return product
        product = torch.nn.functional.grouped_mm(rows, weight if transposed else weight.transpose(1, 2), offs=ends)
        if self._bias is not None:
            product.add_(self._bias.index_select(0, owners))
        return product


class QuantizedGroups:
    """A weight that stays quantized, by kernels of our own. ``bias`` as of ``DenseGroups``, kept by the model's module."""

    def __init__(self, weight: StackedWeight, bias: torch.Tensor | None, kernels: Kernels) -> None:
        self._weight = weight
        self._bias = bias
        self._kernels = kernels

    @property
    def held(self) -> tuple[Held, ...]:
        """Itself."""
        return (self,)

    @property
    def num_bytes(self) -> int:
        """Bytes of numbers, zeros and scales."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Numbers, zeros and scales, as far as there are any."""
        return list(self._weight.tensors)

    def to(self, device: torch.device) -> None:
        """Move the weight."""
        self._weight = self._weight.to(device)

    def run(self, rows: torch.Tensor, ends: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """As of a ``GroupedProduct``."""
        product = rows.new_empty(len(rows), self._weight.numbers.shape[1])
        self._kernels.quantized_grouped_product(rows, self._weight, self._bias, ends, product)
        return product


def grouped(
    weight: torch.nn.Parameter | QuantizedStack, bias: torch.Tensor | None, kernels: Kernels, *, transposed: bool
) -> GroupedProduct:
    """The product of ``weight``. UnsuitableError where it is quantized in a way that there is no product for."""
    if isinstance(weight, QuantizedStack):
        return QuantizedGroups(_stacked(weight), bias, kernels)
    return DenseGroups(weight, bias, kernels, transposed=transposed)


@torch.inference_mode(False)
@torch.no_grad()
def _stacked(stack: QuantizedStack) -> StackedWeight:
    """8-bit floats are held once: those of projections become parts of the whole. Numbers of 4 bits are packed in another way,
    beside the stack's own until these are emptied.
    """
    scheme = stack.scheme
    if keeps(scheme) and stack.merged == isinstance(scheme, Mxfp4):
        if isinstance(scheme, Mxfp4):
            return _mxfp4(stack.projections[0])
        if isinstance(scheme, Float8):
            return _float8(stack, scheme)
        if isinstance(scheme, Awq | Gptq | Packed):
            count = len(next(iter(stack.projections[0].values())))
            weights = (joined([int4_weight(each, scheme) for each in stack.of_expert(i)]) for i in range(count))
            return _int4(list(weights))
    raise UnsuitableError(f"there is no product with experts' weights that are {scheme.name}")


def _float8(stack: QuantizedStack, scheme: Float8) -> Float8Weight:
    numbers = stack.projections[0][""].data
    count, width, scales = len(numbers), 0, []
    for expert in range(count):
        found = [scheme.by_rows(each) for each in stack.of_expert(expert)]
        scales.append(torch.cat([each for each, _ in found], dim=1))
        width = found[0][1]
    if len(stack.projections) > 1:
        numbers = torch.cat([each[""] for each in stack.projections], dim=1)
        start = 0
        for i, each in enumerate(stack.projections):
            end = start + each[""].shape[1]
            stack.replace(i, "", numbers[:, start:end])
            start = end
    return Float8Weight(numbers, torch.stack(scales), width)


def _int4(weights: list[Int4Weight]) -> Int4Weight:
    """Those of all experts."""
    numbers, zeros, scales = (torch.stack(parts) for parts in zip(*(each.tensors for each in weights), strict=True))
    return Int4Weight(numbers, zeros, scales, weights[0].width, weights[0].half)


def _mxfp4(tensors: dict[str, torch.Tensor]) -> Mxfp4Weight:
    blocks, scales = tensors["_blocks"], tensors["_scales"]
    experts, out_features, count, _ = blocks.shape
    half = _MXFP4_HALF if count % 2 == 0 else _MXFP4_HALF // 2
    numbers = blocks.new_empty(experts, out_features, count * _MXFP4_HALF // 2)
    for packed, target in zip(blocks, numbers, strict=True):
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).view(out_features, -1, 2, half)
        target.copy_((codes[:, :, 0] | codes[:, :, 1] << 4).view(out_features, -1))
    return Mxfp4Weight(numbers, scales.transpose(1, 2).contiguous(), half)
