"""Cuts of heads and of linear layers, for ranks that share a model."""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.parallel.collectives import Collectives


class Heads(msgspec.Struct, frozen=True):
    """Numbers of a layer's heads: query heads, and key-value heads. In recurrent layers, these are state heads and key
    heads or groups.
    """

    query: int
    kv: int

    def check(self, size: int) -> None:
        """Raise ModelLoadError, with the possible sizes, if the heads cannot be distributed to ``size`` ranks."""
        if self.fits(size):
            return
        raise ModelLoadError(
            f"executor.tensor_parallel_size is {size}; the model's {self.query} attention heads and {self.kv} key-value heads "
            f"can be distributed to {self.fitting} workers"
        )

    @property
    def fitting(self) -> str:
        """The possible numbers of ranks, for error messages."""
        return ", ".join(str(other) for other in range(1, self.query + 1) if self.fits(other))

    def fits(self, size: int) -> bool:
        """Return whether the heads can be distributed to ``size`` ranks."""
        return self.query % size == 0 and (self.kv % size == 0 or size % self.kv == 0)

    def own(self, rank: int, size: int) -> range:
        """Return the query heads of a rank."""
        return range(rank * self.query // size, (rank + 1) * self.query // size)

    def kv_heads(self, rank: int, size: int) -> range:
        """Return the key-value heads of a rank. If there are fewer heads than ranks, several ranks have the same head."""
        if self.kv >= size:
            return range(rank * self.kv // size, (rank + 1) * self.kv // size)
        first = rank * self.kv // size
        return range(first, first + 1)


def even(name: str, what: str, count: int, size: int) -> int:
    """Return ``count / size``. Raises ModelLoadError, with the name of the layer, if it is no integer."""
    if count % size:
        raise ModelLoadError(
            f"executor.tensor_parallel_size is {size}; the {count} {what} of {name} are not a multiple of this size"
        )
    return count // size


def parameter(part: torch.Tensor) -> torch.nn.Parameter:
    """Return a copy of the part as a parameter, so that the memory of the complete tensor can be freed."""
    return torch.nn.Parameter(part.clone(), requires_grad=False)


def rows(whole: torch.Tensor, own: Sequence[range], dim: int = 0) -> torch.Tensor:
    """Return the indices ``own`` of dimension ``dim``, in this order."""
    parts = [whole.narrow(dim, each.start, len(each)) for each in own]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def keep_outputs(layer: torch.nn.Linear, own: Sequence[range]) -> None:
    """Keep the outputs ``own`` of a layer, in this order."""
    layer.weight = parameter(rows(layer.weight, own))
    if layer.bias is not None:
        layer.bias = parameter(rows(layer.bias, own))
    layer.out_features = sum(map(len, own))


def split_inputs(name: str, layer: Any, collectives: Collectives, *, whole: bool) -> range:
    """Split the inputs of a layer, and return the inputs of this rank. The outputs of all ranks are summed.

    ``whole`` means that every rank receives all inputs.
    """
    each = even(name, "inputs", layer.in_features, collectives.size)
    first = collectives.rank * each
    layer.weight = parameter(layer.weight[:, first : first + each])
    layer.in_features = each
    layer.register_parameter("whole_bias", layer.bias)  # Registered, so that it moves with the layer.
    layer.bias = None

    def take_own(module: torch.nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:  # noqa: ARG001 - torch's signature
        return args[0][..., first : first + each]

    def add_up(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - torch's signature
        total = collectives.all_reduce(output.contiguous())
        return total if layer.whole_bias is None else total + layer.whole_bias

    if whole:
        layer.register_forward_pre_hook(take_own)
    layer.register_forward_hook(add_up)
    return range(first, first + each)
