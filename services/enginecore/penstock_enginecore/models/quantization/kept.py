"""Which modules of a model keep quantized weights, and how they come to do so or cease to."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock_enginecore.models.quantization.layers import (
    DOWN,
    GATE_UP,
    QuantizedExperts,
    QuantizedLinear,
    QuantizedStack,
)
from penstock_enginecore.models.quantization.mxfp4 import Mxfp4
from penstock_enginecore.models.quantization.weights import DenseWeights, DequantizedTensor

_WEIGHT = ".weight"
_MIXTRAL = (".mlp.", ".block_sparse_moe.")
_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""What the matrices of one expert are called in files."""
Named = Mapping[str, DequantizedTensor]


@dataclass(frozen=True, slots=True)
class KeptLinear:
    """The weight of the linear layer called ``name``."""

    name: str
    tensor: DequantizedTensor

    @property
    def sources(self) -> Named:
        """Its weight in the files."""
        return {f"{self.name}{_WEIGHT}": self.tensor}

    @property
    def placeholders(self) -> dict[str, torch.Tensor]:
        """In place of the weight, of one number's memory."""
        return {f"{self.name}{_WEIGHT}": self.tensor.placeholder()}

    def make(self, linear: Any) -> torch.nn.Module:
        """What keeps the weight in place of ``linear``. Reads it."""
        return QuantizedLinear(linear, self.tensor.scheme, self.tensor.read())


@dataclass(frozen=True, slots=True)
class KeptExperts:
    """Weights of the experts called ``name``, as their matrices in the files: for ``gate_up`` and ``down`` those of the
    projections, for each of these one per expert, or one of all that is ``merged``.
    """

    name: str
    gate_up: Sequence[Named]
    down: Sequence[Named]
    merged: bool

    @property
    def sources(self) -> Named:
        """Its weights in the files."""
        return {name: tensor for each in (*self.gate_up, *self.down) for name, tensor in each.items()}

    @property
    def placeholders(self) -> dict[str, torch.Tensor]:
        """In place of the weights, of one number's memory each."""
        return {
            f"{self.name}.{GATE_UP}": self._placeholder(self.gate_up),
            f"{self.name}.{DOWN}": self._placeholder(self.down),
        }

    def make(self, experts: Any) -> torch.nn.Module:
        """What keeps the weights in place of ``experts``. Reads them."""
        return QuantizedExperts(experts, self._stack(self.gate_up), self._stack(self.down))

    def _placeholder(self, projections: Sequence[Named]) -> torch.Tensor:
        firsts = [next(iter(each.values())).placeholder() for each in projections]
        if self.merged:
            return firsts[0]
        rows = sum(len(first) for first in firsts)
        return firsts[0][0, 0].expand(len(projections[0]), rows, firsts[0].shape[1])

    def _stack(self, projections: Sequence[Named]) -> QuantizedStack:
        scheme = next(iter(projections[0].values())).scheme
        return QuantizedStack(scheme, [self._read(each) for each in projections], merged=self.merged)

    def _read(self, projection: Named) -> dict[str, torch.Tensor]:
        read = [tensor.read() for tensor in projection.values()]
        if self.merged:
            return read[0]
        common = [suffix for suffix in read[0] if all(suffix in each for each in read)]
        return {suffix: torch.stack([each[suffix] for each in read]) for suffix in common}


Kept = KeptLinear | KeptExperts


def kept_modules(skeleton: Any, weights: DenseWeights) -> list[Kept]:
    """What of the quantized ``weights`` the modules of ``skeleton`` can keep: linear layers, its head aside, and experts all of
    whose matrices are quantized.
    """
    quantized = {name: tensor for name, tensor in weights.tensors.items() if isinstance(tensor, DequantizedTensor)}
    head = skeleton.get_output_embeddings()
    found: list[Kept] = []
    for name, module in skeleton.named_modules():
        if type(module) is torch.nn.Linear and module is not head and f"{name}{_WEIGHT}" in quantized:
            found.append(KeptLinear(name, quantized[f"{name}{_WEIGHT}"]))
        elif {GATE_UP, DOWN} <= module._parameters.keys():
            found += _experts(name, len(module.get_parameter(DOWN)), quantized)
    return found


def _experts(name: str, count: int, quantized: Named) -> Iterator[KeptExperts]:
    """One, or none."""
    whole = [f"{name}.{GATE_UP}", f"{name}.{DOWN}"]
    if all(each in quantized and isinstance(quantized[each].scheme, Mxfp4) for each in whole):
        first, second = ({each: quantized[each]} for each in whole)
        yield KeptExperts(name, [first], [second], merged=True)
        return
    for base in (name, name.replace(*_MIXTRAL)):
        for projections in _PROJECTIONS:
            names = [[f"{base}.{i}.{each}{_WEIGHT}" for i in range(count)] for each in projections]
            if all(each in quantized for of_all in names for each in of_all):
                *gate_up, down = ({each: quantized[each] for each in of_all} for of_all in names)
                yield KeptExperts(name, gate_up, [down], merged=False)
                return


def replace_module(whole: Any, name: str, by: torch.nn.Module) -> None:
    """Put ``by`` in place of the module of this ``name`` in ``whole``."""
    parent, _, leaf = name.rpartition(".")
    setattr(whole.get_submodule(parent), leaf, by)


@torch.inference_mode(False)
@torch.no_grad()
def dequantize_kept(whole: torch.nn.Module, dtype: torch.dtype) -> int:
    """Put modules with dense weights in place of all that keep quantized ones, one at a time. Returns how many bytes these
    weights take.
    """
    found = [
        (name, module)
        for name, module in whole.named_modules()
        if isinstance(module, QuantizedLinear | QuantizedExperts)
    ]
    num_bytes = 0
    while found:
        name, module = found.pop()
        dense: Any = module.dense(dtype)
        replace_module(whole, name, dense)
        weights = (
            [dense.weight]
            if isinstance(module, QuantizedLinear)
            else [getattr(dense, each) for each in (GATE_UP, DOWN)]
        )
        num_bytes += sum(weight.numel() * weight.element_size() for weight in weights)
    return num_bytes
