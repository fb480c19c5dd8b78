"""What ranks of one host exchange in a step."""

from typing import Any, Protocol

import torch

from penstock_enginecore.parallel.gloo import gloo_group
from penstock_enginecore.parallel.meeting import Meeting


class Collectives(Protocol):
    """All ranks call the same methods in the same order."""

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place; every rank gets the same bits."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, which are of one shape and dtype, by rank."""


class GlooCollectives:
    """Over sockets."""

    def __init__(self, meeting: Meeting, rank: int, size: int, name: str = "tensor") -> None:
        """Waits for all ranks. See ``gloo_group``."""
        self.rank, self.size = rank, size
        self._group: Any = gloo_group(meeting, name, rank, size)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._group.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self._group.allgather([gathered], [tensor]).wait()
        return gathered
