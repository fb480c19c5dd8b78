"""Distribution of attention heads and of the outputs and inputs of linear layers among the tensor-parallel ranks of a
model.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.parallel.collectives import Collectives


class Heads(msgspec.Struct, frozen=True):
    """Number of query heads and number of key-value heads of a layer. In recurrent layers, these are the numbers of
    state heads and of key heads or groups.
    """

    query: int
    kv: int

    def check(self, size: int) -> None:
        """Raise ModelLoadError if the heads cannot be distributed to ``size`` ranks. The message has the possible
        numbers of ranks.
        """
        if self.fits(size):
            return
        raise ModelLoadError(
            f"executor.tensor_parallel_size is {size}; the model's {self.query} attention heads and {self.kv} key-value heads "
            f"can be distributed to {self.fitting} workers"
        )

    @property
    def fitting(self) -> str:
        """Numbers of ranks to which the heads can be distributed, as text for error messages."""
        return ", ".join(str(other) for other in range(1, self.query + 1) if self.fits(other))

    def fits(self, size: int) -> bool:
        """Return whether the heads can be distributed to ``size`` ranks."""
        return self.query % size == 0 and (self.kv % size == 0 or size % self.kv == 0)

    def own(self, rank: int, size: int) -> range:
        """Return the indices of the query heads of a rank."""
        return range(rank * self.query // size, (rank + 1) * self.query // size)

    def kv_heads(self, rank: int, size: int) -> range:
        """Return the indices of the key-value heads of a rank. If there are fewer key-value heads than ranks, several
        ranks have the same head.
        """
        if self.kv >= size:
            return range(rank * self.kv // size, (rank + 1) * self.kv // size)
        first = rank * self.kv // size
        return range(first, first + 1)


def even(name: str, what: str, count: int, size: int) -> int:
    """Return ``count / size``. Raises ModelLoadError, with the name of the layer, if the result is not an integer."""
    if count % size:
        raise ModelLoadError(
            f"executor.tensor_parallel_size is {size}; the {count} {what} of {name} are not a multiple of this size"
        )
    return count // size


def parameter(part: torch.Tensor) -> torch.nn.Parameter:
    """Return a copy of ``part``, which is a view of a larger tensor, as a parameter, so that the memory of the larger
    tensor can be freed.
    """
    return torch.nn.Parameter(part.clone(), requires_grad=False)


def rows(whole: torch.Tensor, own: Sequence[range], dim: int = 0) -> torch.Tensor:
    """Return the part of ``whole`` with the indices ``own`` in dimension ``dim``, in this order."""
    parts = [whole.narrow(dim, each.start, len(each)) for each in own]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def keep_outputs(layer: torch.nn.Linear, own: Sequence[range]) -> None:
    """Keep only the outputs ``own`` of a linear layer, in this order."""
    layer.weight = parameter(rows(layer.weight, own))
    if layer.bias is not None:
        layer.bias = parameter(rows(layer.bias, own))
    layer.out_features = sum(map(len, own))


def split_inputs(name: str, layer: Any, collectives: Collectives, *, whole: bool) -> range:
    """Split the inputs of a linear layer among ranks, and return the indices of this rank's inputs. The outputs of all
    ranks are summed.

    If ``whole`` is true, every rank receives all inputs and uses only its own.
    """
    each = even(name, "inputs", layer.in_features, collectives.size)
    first = collectives.rank * each
    layer.weight = parameter(layer.weight[:, first : first + each])
    layer.in_features = each
    layer.register_parameter("whole_bias", layer.bias)  # registered, so that the bias moves with the layer
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
